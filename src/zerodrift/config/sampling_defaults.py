"""How are rollouts sampled where a request does not say?

What belongs to one request (seed, number of samples, logit bias, prompt logprobs) has no default worth sharing.
"""

from zerodrift.core.request import CommonSampling, SamplingParams


class SamplingDefaults(CommonSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sent explicitly with every request, so that no engine fills in its own."""

    logprobs: int = 0
    """Alternatives to report beside the sampled token."""

    def __post_init__(self) -> None:
        """The rules are those of the request itself."""
        self.params()

    def params(self) -> SamplingParams:
        """The parameters of a request that says nothing else."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})
