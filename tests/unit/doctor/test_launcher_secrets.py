"""What launches vLLM takes secrets too: none of them comes back, and all else stays as it was written."""

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures

ONE, TWO = "hunter2", "swordfish"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'srun --export=ALL,HF_TOKEN="{ONE}"', "srun --export=ALL,HF_TOKEN=$HF_TOKEN"),
        (f"srun --export=ALL,HF_TOKEN='{ONE} {TWO}',B=1", "srun --export=ALL,HF_TOKEN=$HF_TOKEN,B=1"),
        (f"srun --export=HF_TOKEN={ONE}'{TWO}',B=1", "srun --export=HF_TOKEN=$HF_TOKEN,B=1"),
        (f'srun --export=HF_TOKEN="{ONE},{TWO}",B=1', "srun --export=HF_TOKEN=$HF_TOKEN,B=1"),
        (f'srun --export="ALL,HF_TOKEN={ONE} {TWO},B=1"', 'srun --export="ALL,HF_TOKEN=$HF_TOKEN,B=1"'),
        (f"srun '--export=ALL,HF_TOKEN={ONE},B=$C'", "srun '--export=ALL,HF_TOKEN='$HF_TOKEN',B=$C'"),
        (f"srun --export='HF_TOKEN=\"{ONE},{TWO}\",B=1'", "srun --export='HF_TOKEN='$HF_TOKEN',B=1'"),
        (f"srun --export=HF_TOKEN={ONE}\\ {TWO},B=1", "srun --export=HF_TOKEN=$HF_TOKEN,B=1"),
        (f"srun --export=HF_TOKEN=$A'{ONE}',B=1", "srun --export=HF_TOKEN=$HF_TOKEN,B=1"),
        (f"srun --export=HF_TOKEN=${{A:-{ONE},{TWO}}},B=1", "srun --export=HF_TOKEN=$HF_TOKEN,B=1"),
        (f"srun --export=A_KEY={ONE},B_KEY='{TWO}'", "srun --export=A_KEY=$A_KEY,B_KEY=$B_KEY"),
        (f"kubectl exec --token {ONE} pod --", 'kubectl exec --token "$TOKEN" pod --'),
        (f"kubectl exec --token '{ONE} {TWO}' pod --", 'kubectl exec --token "$TOKEN" pod --'),
        (f"kubectl exec --token -{ONE} pod --", 'kubectl exec --token "$TOKEN" pod --'),
        (f"kubectl exec --token='{ONE} {TWO}' pod --", "kubectl exec --token=$TOKEN pod --"),
        (f"run --api-key {ONE} -n 2", 'run --api-key "$API_KEY" -n 2'),
        (f"OPTIONS='--token={ONE}' run", "OPTIONS='--token='$TOKEN run"),
    ],
)
@pytest.mark.parametrize("program", ["vllm serve m", "python -mvllm.entrypoints.openai.api_server --model m"])
def test_a_secret_of_the_launcher_is_hidden(before: str, after: str, program: str) -> None:
    target = CommandLine(f"{before} {program}")
    diagnosis, judgements = diagnose(target, {})
    fixed = target.changed({})
    assert fixed == f"{after} {program}"
    said = fixed + repr(diagnosis) + target.changed(cures(judgements))
    assert ONE not in said
    assert TWO not in said
    assert CommandLine(fixed).changed({}) == fixed


@pytest.mark.parametrize(
    "before",
    [
        "srun --export=ALL,HF_TOKEN=$MY,B='1 2'",
        'srun --export="ALL,HF_TOKEN=${MY},B=1"',
        "srun --export='ALL,KEYBOARD=\"a,b\"' --key-file='a b'",
        'kubectl exec --token "$MY" pod --',
        "kubectl exec --with-token --verbose -- ",
        "kubectl exec --with-token -n 2 --",
        "run --with-token",
        "run --token-file path",
    ],
)
def test_what_is_no_secret_stays(before: str) -> None:
    command = f"{before} vllm serve m"
    assert CommandLine(command).changed({}) == command


def test_an_image_is_no_secret() -> None:
    command = "docker run --with-key vllm/vllm-openai --model m"
    assert CommandLine(command).changed({}) == command
