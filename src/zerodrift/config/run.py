"""All that a run is configured by, in one value. What is discovered at run time never comes back here."""

import msgspec

from zerodrift.config.engine import EngineConfig
from zerodrift.config.model import ModelConfig
from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.config.training import TrainConfig
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.errors import InvalidValue

EXACT = EngineConfig(enable_prefix_caching=True)
"""The engine under audit unless another is named. Its cache knows which weights wrote a block, so that it is never stale;
left off, the audit could say nothing about it."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sections of a configuration file, checked against each other."""

    model: ModelConfig = ModelConfig()
    """The policy."""
    engine: EngineConfig = EXACT
    """The engine under audit."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """How rollouts are sampled."""
    monitoring: MonitoringConfig = MonitoringConfig()
    """When a running job stops trusting its engine."""
    validation: ValidationConfig = ValidationConfig()
    """What an audit compares."""
    train: TrainConfig = TrainConfig()
    """How `zerodrift train` learns."""

    def __post_init__(self) -> None:
        """Sections that contradict each other are refused."""
        trained, served = self.model.max_model_len, self.engine.max_model_len
        if trained is not None and served is not None and served < trained:
            raise InvalidValue(
                f"engine.max_model_len is {served}, below model.max_model_len={trained}; the engine would cut "
                "or refuse sequences that training needs: raise the former or lower the latter"
            )
        limits = [length for length in (trained, served) if length is not None]
        for section, tokens in (
            ("sampling_defaults", self.sampling_defaults.max_tokens),
            ("validation", self.validation.max_tokens),
        ):
            if limits and tokens >= min(limits):
                raise InvalidValue(
                    f"{section}.max_tokens is {tokens}, which leaves no room for a prompt in a max_model_len "
                    f"of {min(limits)}; lower the former or raise the latter"
                )
