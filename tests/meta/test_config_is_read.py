"""A setting that nothing reads is a promise that nobody keeps."""

import re
from pathlib import Path

import pytest

from zerodrift.config.keys import fields
from zerodrift.config.run import RunConfig

SOURCE = Path(__file__).parents[2] / "src" / "zerodrift"
CODE = "\n".join(
    path.read_text() for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "config"
)
# ValidationConfig.gate_for and TrainConfig.capacity read them themselves.
BY_ITSELF = {"validation.tolerance", "train.buffer_groups"}


@pytest.mark.parametrize(
    "path",
    [field.path for field in fields(RunConfig) if field.path not in BY_ITSELF],
)
def test_every_setting_is_read_outside_the_configuration(path: str) -> None:
    name = path.rsplit(".", maxsplit=1)[-1]
    assert re.search(rf"\.{name}\b|\"{name}\"", CODE), f"{path} is read nowhere"
