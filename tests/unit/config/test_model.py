import pytest

from zerodrift.config.model import ModelConfig
from zerodrift.core.errors import InvalidValue


def test_defaults_and_good_values_are_taken() -> None:
    assert ModelConfig().path is None
    assert ModelConfig(path="checkpoint", max_model_len=2).max_model_len == 2


@pytest.mark.parametrize("bad", [{"path": ""}, {"max_model_len": 1}, {"max_model_len": True}])
def test_bad_values_are_refused_by_name(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(InvalidValue, match=name):
        ModelConfig(**bad)  # type: ignore[arg-type]


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ModelConfig().path = "other"  # type: ignore[misc]
