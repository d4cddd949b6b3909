"""What is asked of an engine: a prompt in token ids, and every number that changes the distribution."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidPrompt, InvalidSampling
from zerodrift.core.frozen import freeze

MAX_SEED = 2**63 - 1
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SCALARS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
SHAPING = (*SCALARS, "logit_bias", "min_tokens")
"""Parameters that change what a processed logprob is; stop token ids do as well, where `min_tokens` forbids them."""
_NOTHING_CUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt as the model sees it. Text is kept for people; the ids are what counts.

    Example: `Prompt((1, 345, 99))`, or with `text=` where the ids came from a tokenizer.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None
    """Engines share cached prefixes only between equal salts; the audit uses it to force a cold cache."""

    def __post_init__(self) -> None:
        """Ids may arrive as any sequence of ints; they are kept as a tuple."""
        if isinstance(self.token_ids, Sequence) and not isinstance(self.token_ids, str | bytes | bytearray):
            msgspec.structs.force_setattr(self, "token_ids", tuple(self.token_ids))
        require.token_ids(InvalidPrompt, "prompt", self.token_ids)
        if not self.token_ids:
            raise InvalidPrompt("the prompt is empty; a model needs at least one token, for example its BOS")
        require.instance(InvalidPrompt, "text", self.text, str | None)
        require.instance(InvalidPrompt, "cache_salt", self.cache_salt, str | None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Every id exists in a model of `vocab_size` tokens."""
        for position, token in enumerate(self.token_ids):
            if token >= vocab_size:
                raise InvalidPrompt(
                    f"prompt[{position}] is {token}, but the model has {vocab_size} tokens; "
                    "the prompt was made with another tokenizer"
                )


class CommonSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that requests share: what a configuration may give defaults for."""

    temperature: float = 1.0
    """0 is greedy; the reported distribution is then that of temperature 1."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches this; a full softmax reproduces only 1."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output; 1 is off."""
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


class SamplingParams(CommonSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that shapes the distribution a token is drawn from. Defaults sample the model's own.

    Applied in this order, the one that vLLM documents: logit bias, penalties, temperature, min-p, top-k, top-p.
    """

    logit_bias: Mapping[int, float] = {}
    """Added to logits before anything else."""
    seed: int | None = None
    """Noise is a function of (seed, sample index, position) alone; None draws a seed and reports it."""
    n: int = 1
    """Samples per prompt."""
    logprobs: int | None = 0
    """Alternatives to report beside the sampled token; None needs no logprobs, and an engine may leave them out."""
    prompt_logprobs: int | None = None
    """Alternatives to report for prompt tokens; None scores no prompt."""

    def __post_init__(self) -> None:
        """Out of range is refused, never clamped."""
        for name in ("stop", "stop_token_ids"):
            if isinstance(values := getattr(self, name), str) or not isinstance(values, Iterable):
                raise InvalidSampling(f"{name} is {values!r}; give a tuple, with one entry for each stop")
            msgspec.structs.force_setattr(self, name, tuple(values))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidSampling(f"logit_bias is {self.logit_bias!r}; give a mapping from token id to bias")
        freeze(self, "logit_bias")
        _check_shape_of_distribution(self)
        _check_penalties(self)
        _check_lengths(self)

    @property
    def greedy(self) -> bool:
        """Nothing is drawn: the likeliest token is taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Some tokens get probability zero, so a full-vocabulary softmax cannot reproduce the numbers."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """The distribution depends on which tokens came before, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def shape(self) -> Mapping[str, object]:
        """Every parameter that changes what a processed logprob is, by name."""
        shape = {name: getattr(self, name) for name in SHAPING}
        return shape | ({"stop_token_ids": tuple(sorted({*self.stop_token_ids}))} if self.min_tokens else {})

    @property
    def own_distribution(self) -> bool:
        """What is reported as processed is the model's own distribution, as it is for greedy sampling."""
        changed = self.truncates or self.penalises or self.logit_bias or self.min_tokens
        return self.temperature in (0, 1) and not changed

    def with_in_force(self, **changes: Any) -> "SamplingParams":
        """These with `changes` in force, as an engine takes them: a greedy one has nothing to cut off."""
        if changes.get("temperature", self.temperature) == 0:
            changes |= _NOTHING_CUT
        return msgspec.structs.replace(self, **changes)

    def check_vocabulary(self, vocab_size: int) -> None:
        """A model of `vocab_size` tokens has every token that is named."""
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name) or 0) > vocab_size:
                raise InvalidSampling(
                    f"{name} asks for {count} alternatives, but the model has {vocab_size} tokens"
                )
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise InvalidSampling(
                        f"{name} names token {token}, but the model has {vocab_size} tokens; "
                        "the ids belong to another tokenizer"
                    )


def _check_shape_of_distribution(params: SamplingParams) -> None:
    require.real(
        InvalidSampling, "temperature", params.temperature, "use 0 for greedy or a positive number", 0
    )
    if 0 < params.temperature < 1e-2:
        raise InvalidSampling(
            f"temperature is {params.temperature!r}; below 0.01 logits overflow: use 0 for greedy decoding"
        )
    require.real(InvalidSampling, "top_p", params.top_p, "it is a mass in (0, 1]; 1 keeps every token", 0, 1)
    if params.top_p == 0:
        raise InvalidSampling("top_p is 0, which keeps no token; use temperature=0 for greedy decoding")
    require.whole(InvalidSampling, "top_k", params.top_k, "it is a count; 0 keeps every token", 0)
    require.real(InvalidSampling, "min_p", params.min_p, "it is a fraction in [0, 1)", 0, 1)
    if params.min_p == 1:
        raise InvalidSampling("min_p is 1, which keeps only ties of the likeliest token; use temperature=0")
    for name, neutral in _NOTHING_CUT.items():
        if params.greedy and (value := getattr(params, name)) != neutral:
            raise InvalidSampling(
                f"{name} is {value!r} at temperature 0, where the likeliest token is taken and there is nothing to "
                f"cut off: leave it at {neutral}, or raise the temperature"
            )


def _check_penalties(params: SamplingParams) -> None:
    rule = "it divides logits, so it is at least 0.001; 1 is off"
    require.real(InvalidSampling, "repetition_penalty", params.repetition_penalty, rule, 1e-3)
    for name in ("presence_penalty", "frequency_penalty"):
        require.real(InvalidSampling, name, getattr(params, name), "it lies in [-2, 2]; 0 is off", -2, 2)
    for token, bias in params.logit_bias.items():
        require.whole(InvalidSampling, "logit_bias key", token, "it is a token id", 0)
        require.real(InvalidSampling, f"logit_bias[{token}]", bias, "it lies in [-100, 100]", -100, 100)


def _check_lengths(params: SamplingParams) -> None:
    require.whole(InvalidSampling, "n", params.n, "ask for at least one sample", 1)
    if params.greedy and params.n > 1:
        raise InvalidSampling(f"temperature 0 with n={params.n} gives {params.n} equal samples; use n=1")
    require.whole(InvalidSampling, "max_tokens", params.max_tokens, "generate at least one token", 1)
    rule = f"it counts tokens and cannot exceed max_tokens={params.max_tokens}"
    require.whole(InvalidSampling, "min_tokens", params.min_tokens, rule, 0, params.max_tokens)
    require.token_ids(InvalidSampling, "stop_token_ids", params.stop_token_ids)
    if any(not isinstance(text, str) or not text for text in params.stop):
        raise InvalidSampling(f"stop is {params.stop!r}; every stop string must be a non-empty string")
    if not isinstance(params.ignore_eos, bool):
        raise InvalidSampling(f"ignore_eos is {params.ignore_eos!r}; it is true or false")
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None:
            require.whole(InvalidSampling, name, count, "it counts alternatives; None reports nothing", 0)
    if params.seed is not None:
        require.whole(InvalidSampling, "seed", params.seed, "it is a 63-bit count", 0, MAX_SEED)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt with its parameters: the unit that backends take."""

    prompt: Prompt
    sampling: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        """Ids and options by themselves are no request."""
        require.instance(InvalidPrompt, "prompt", self.prompt, Prompt)
        require.instance(InvalidSampling, "sampling", self.sampling, SamplingParams)
