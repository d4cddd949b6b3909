import pytest

from zerodrift.config.engine import EngineConfig
from zerodrift.config.model import ModelConfig
from zerodrift.config.run import RunConfig
from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.errors import InvalidValue


def test_the_engine_must_hold_what_training_needs() -> None:
    RunConfig(model=ModelConfig(max_model_len=100), engine=EngineConfig(max_model_len=100))
    RunConfig(model=ModelConfig(max_model_len=100), engine=EngineConfig(max_model_len=200))
    with pytest.raises(InvalidValue, match=r"engine.max_model_len is 99, below model.max_model_len=100"):
        RunConfig(model=ModelConfig(max_model_len=100), engine=EngineConfig(max_model_len=99))


@pytest.mark.parametrize("side", ["model", "engine"])
def test_outputs_must_leave_room_for_a_prompt(side: str) -> None:
    limit = {"model": ModelConfig, "engine": EngineConfig}[side](max_model_len=33)
    RunConfig(**{side: limit})  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"validation.max_tokens is 33"):
        RunConfig(**{side: limit}, validation=ValidationConfig(max_tokens=33))  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"sampling_defaults.max_tokens is 33"):
        RunConfig(**{side: limit}, sampling_defaults=SamplingDefaults(max_tokens=33))  # type: ignore[arg-type]
