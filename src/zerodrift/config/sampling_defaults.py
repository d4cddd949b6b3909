"""How are rollouts sampled where a request does not say?

A subset of `SamplingParams`, with the same names, defaults and checks. What belongs to one request (seed, number
of samples, logit bias, prompt logprobs) has no default worth sharing.
"""

import msgspec

from zerodrift.core.request import SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sent explicitly with every request, so that no engine fills in its own."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches this; a full softmax reproduces only 1."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen before; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtract this for every time a token was seen in the output."""
    max_tokens: int = 16
    """Longest output."""
    min_tokens: int = 0
    """No stop token before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    logprobs: int = 0
    """Alternatives to report beside the sampled token."""

    def __post_init__(self) -> None:
        """The rules are those of the request itself."""
        self.params()

    def params(self) -> SamplingParams:
        """The parameters of a request that says nothing else."""
        return SamplingParams(**{name: getattr(self, name) for name in self.__struct_fields__})
