"""What a server fills into requests that leave sampling out: as vLLM puts it together, file by file."""

from pathlib import Path

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.setting import Setting


def defaults(command: str) -> Setting:
    return CommandLine(command).read().settings["generation_defaults"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"presence_penalty": 1.5}', "presence_penalty 1.5"),
        ('{"frequency_penalty": 0.5}', "frequency_penalty 0.5"),
        ('{"repetition_penalty": 1.1, "min_p": 0.05}', "min_p 0.05, repetition_penalty 1.1"),
        ('{"top_k": -1, "temperature": 1, "presence_penalty": 0}', None),
        ('{"top_p": null, "max_new_tokens": 4096, "typical_p": 0.5}', None),
    ],
)
def test_every_key_that_vllm_takes_is_looked_at(tmp_path: Path, content: str, expected: str | None) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    setting = defaults(f"vllm serve {tmp_path}")
    assert (setting.known, setting.value) == (True, expected)
