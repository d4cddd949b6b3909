"""Before the first flag: what starts vLLM, and which variables get there."""

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.setting import Value

SECRET = "hunter2"
IMAGE = "vllm/vllm-openai:v0.32.0"


def dev_mode(command: str) -> Value:
    setting = CommandLine(command).read().settings["dev_mode"]
    return setting.value if setting.known else "unknown"


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_SERVER_DEV_MODE=1 vllm serve m",
        "nice -n 5 env VLLM_SERVER_DEV_MODE=1 vllm serve m",
        "A=1 nohup /usr/bin/env -C /tmp VLLM_SERVER_DEV_MODE=1 vllm serve m",
        "env -u FOO VLLM_SERVER_DEV_MODE=1 vllm serve m",
        "export VLLM_SERVER_DEV_MODE=1\nvllm serve m",
        "export A=2 VLLM_SERVER_DEV_MODE=1\n\nvllm serve m\n",
        "VLLM_SERVER_DEV_MODE=1\nexport VLLM_SERVER_DEV_MODE\nvllm serve m",
        "docker run -e VLLM_SERVER_DEV_MODE=1 img vllm serve m",
        "docker run --env VLLM_SERVER_DEV_MODE=1 img vllm serve m",
        "docker run --env=VLLM_SERVER_DEV_MODE=1 img vllm serve m",
        "podman run -eVLLM_SERVER_DEV_MODE=1 img vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 docker run -e VLLM_SERVER_DEV_MODE img vllm serve m",
        f"docker run --gpus all -p 8000:8000 -e VLLM_SERVER_DEV_MODE=1 {IMAGE} --model m",
    ],
)
def test_a_variable_counts_wherever_it_is_set(command: str) -> None:
    assert dev_mode(command) is True


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_SERVER_DEV_MODE=1 docker run img vllm serve m",
        "docker run --label VLLM_SERVER_DEV_MODE=1 img vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env -u VLLM_SERVER_DEV_MODE vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env --unset=VLLM_SERVER_DEV_MODE vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env -uVLLM_SERVER_DEV_MODE vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env --unset VLLM_SERVER_DEV_MODE vllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env -i vllm serve m",
        "VLLM_SERVER_DEV_MODE=1\nvllm serve m",
        "VLLM_SERVER_DEV_MODE=1 env VLLM_SERVER_DEV_MODE=0 vllm serve m",
    ],
)
def test_a_variable_that_does_not_get_there_does_not_count(command: str) -> None:
    assert dev_mode(command) is False


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_SERVER_DEV_MODE=$MODE vllm serve m",
        'export VLLM_SERVER_DEV_MODE="${MODE:-1}"\nvllm serve m',
        "docker run -e VLLM_SERVER_DEV_MODE img vllm serve m",
        "docker run -eVLLM_SERVER_DEV_MODE img vllm serve m",
    ],
)
def test_a_variable_that_the_shell_fills_in_is_unknown(command: str) -> None:
    assert dev_mode(command) == "unknown"


def test_what_sets_variables_out_of_sight_is_listed() -> None:
    in_a_file = CommandLine("docker run --env-file .env img vllm serve m").read().not_judged
    assert "--env-file before the program" in in_a_file
    in_a_list = CommandLine("srun --export=ALL,A=1 vllm serve m").read().not_judged
    assert "--export before the program" in in_a_list
    assert "A, which is set and not exported" in CommandLine("A=1\nvllm serve m").read().not_judged


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"nice -n 5 env VLLM_API_KEY={SECRET} vllm serve m", 'env VLLM_API_KEY="$VLLM_API_KEY" vllm'),
        (f"export VLLM_API_KEY={SECRET}\nvllm serve m", 'export VLLM_API_KEY="$VLLM_API_KEY"\nvllm'),
        (f"VLLM_API_KEY={SECRET}\nvllm serve m", 'VLLM_API_KEY="$VLLM_API_KEY"\nvllm'),
        (f"env -u FOO HF_TOKEN={SECRET} vllm serve m", 'HF_TOKEN="$HF_TOKEN" vllm'),
        (f"docker run -e HF_TOKEN={SECRET} img vllm serve m", '-e HF_TOKEN="$HF_TOKEN" img'),
        (f"docker run -eHF_TOKEN='{SECRET}' img vllm serve m", '-eHF_TOKEN="$HF_TOKEN" img'),
        (f"docker run --env=HF_TOKEN={SECRET} {IMAGE} --model m", '--env=HF_TOKEN="$HF_TOKEN" vllm/'),
        (f"HF_TOKEN={SECRET} docker run -e HF_TOKEN img vllm serve m", 'HF_TOKEN="$HF_TOKEN" docker'),
        (f"HF_TOKEN={SECRET} HF_TOKEN=b{SECRET} vllm serve m", 'HF_TOKEN="$HF_TOKEN" HF_TOKEN="$HF_TOKEN" v'),
        (f"docker run --label TOKEN={SECRET} img vllm serve m", '--label TOKEN="$TOKEN" img'),
        (f"srun --export=ALL,HF_TOKEN={SECRET},B=1 vllm serve m", "--export=ALL,HF_TOKEN=$HF_TOKEN,B=1 vllm"),
        (f"HF_TOKEN='${SECRET}' vllm serve m", 'HF_TOKEN="$HF_TOKEN" vllm'),
        ('docker run --env "HF_TOKEN=$MY" img vllm serve m', '--env "HF_TOKEN=$MY" img'),
    ],
)
def test_secrets_are_hidden_wherever_they_stand(before: str, after: str) -> None:
    target = CommandLine(before)
    fixed = target.changed({})
    assert SECRET not in fixed + repr(diagnose(target, {})[0])
    assert after in fixed
    assert CommandLine(fixed).changed({}) == fixed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nice -n 5 vllm serve m", "VLLM_SERVER_DEV_MODE=0 nice -n 5 vllm serve m"),
        ("env -u FOO A=1 vllm serve m", "env -u FOO VLLM_SERVER_DEV_MODE=0 A=1 vllm serve m"),
        ("env -i vllm serve m", "env -i VLLM_SERVER_DEV_MODE=0 vllm serve m"),
        ("export VLLM_SERVER_DEV_MODE=1\nvllm serve m", "export VLLM_SERVER_DEV_MODE=0\nvllm serve m"),
        (f"docker run -it {IMAGE} --model m", f"docker run -e VLLM_SERVER_DEV_MODE=0 -it {IMAGE} --model m"),
        (
            "docker run -eVLLM_SERVER_DEV_MODE=1 i vllm serve m",
            "docker run -eVLLM_SERVER_DEV_MODE=0 i vllm serve m",
        ),
        (
            "docker run -e VLLM_SERVER_DEV_MODE i vllm serve m",
            "docker run -e VLLM_SERVER_DEV_MODE=0 i vllm serve m",
        ),
    ],
)
def test_a_variable_is_written_where_it_counts(before: str, after: str) -> None:
    assert CommandLine(before).changed({"dev_mode": False}) == after
    assert dev_mode(after) is False


@pytest.mark.parametrize(
    "command",
    [
        f"docker run --gpus all {IMAGE} --model m",
        "docker run ghcr.io/vllm/vllm-openai --model m",
        "podman run docker.io/vllm/vllm-openai-rocm:latest --model=m",
        "docker run vllm/vllm-openai@sha256:ab12 m",
        "python3 -mvllm.entrypoints.openai.api_server --model m",
    ],
)
def test_programs_that_are_vllm(command: str) -> None:
    assert CommandLine(command).model == "m"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("docker run --entrypoint bash vllm/vllm-openai -c x", "--entrypoint"),
        ("docker run other/image --model m", "no vLLM server command"),
        ("vllm/vllm-openai --model m", "no vLLM server command"),
        ('bash -c "vllm serve m"', "no vLLM server command"),
        ("cd /models\nvllm serve m", "'cd', a command of its own"),
        ("vllm serve m\n--dtype half", "line break"),
        ("# vllm serve m", "only comments"),
    ],
)
def test_what_is_not_understood_is_refused(command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CommandLine(command)
