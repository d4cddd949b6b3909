"""The attention backend may stand inside a JSON, and that may be the shell's to know."""

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures

JSON = '{"backend": "FLASHINFER"}'


@pytest.mark.parametrize(
    "words",
    [
        '--attention-config.backend "$B"',
        '--attention-config.backend="$B"',
        '--attention-config "$CFG"',
        '--attention-config="$CFG"',
        '--attention-config "{\\"backend\\": \\"$B\\"}"',
        f"""--attention-config '{JSON}' --attention-config "$CFG" """,
        f"""--attention-config '{JSON}' --attention-config.backend $B""",
    ],
)
def test_what_the_shell_knows_is_unknown(words: str) -> None:
    target = CommandLine(f"VLLM_BATCH_INVARIANT=1 vllm serve Q {words}")
    reading = target.read()
    assert not reading.settings["attention_backend"].known
    assert any("--attention-config $" in each for each in reading.not_judged)
    _, judgements = diagnose(target, {})
    assert words.strip() in target.changed(cures(judgements))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"--attention-config '{JSON}'", "FLASHINFER"),
        ("--attention-config.backend FLASHINFER", "FLASHINFER"),
        ('--attention-backend FLASHINFER --attention-config "$CFG"', "FLASHINFER"),
        ("", None),
    ],
)
def test_what_is_written_is_known(words: str, expected: str | None) -> None:
    setting = CommandLine(f"vllm serve Q {words}").read().settings["attention_backend"]
    assert setting.known
    assert setting.value == expected


def test_a_flag_beside_a_hidden_json_can_be_changed() -> None:
    target = CommandLine('vllm serve Q --attention-backend FLASHINFER --attention-config "$CFG"')
    change = {"attention_backend": "TRITON_ATTN"}
    assert target.typed("attention_backend", "TRITON_ATTN") == "--attention-backend TRITON_ATTN"
    expected = 'vllm serve Q --attention-backend TRITON_ATTN --attention-config "$CFG"'
    assert target.changed(change) == expected
