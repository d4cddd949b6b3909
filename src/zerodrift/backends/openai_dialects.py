"""What do servers that look alike do differently? Facts as data: a server is an entry here, and no code of its own.

Names of fields that go out and paths of values that come back (see json_path). What a server cannot do stands in
`cannot` with the reason, and is refused before it is sent: servers ignore fields that they do not know.
"""

from collections.abc import Mapping

import msgspec

from zerodrift.backends.base import Capability
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.frozen import freeze


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of logprob: how it is asked for, and where it comes back in a sample."""

    ask: Mapping[str, object]
    owners: str
    """Ids of the tokens that the values belong to."""
    values: str
    alternative_ids: str
    """Of each token, likeliest first."""
    alternative_values: str
    probabilities: bool = False
    """The values are probabilities, and their logarithms are wanted."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, "ask")


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """How the server shows what it makes of text."""

    route: str
    text: str
    ask: Mapping[str, object]
    token_ids: str
    chat_route: str
    chat_text: str
    """Where the rendered messages come back; they are then tokenised as text."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, "ask")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the server shows of itself, by the names under which engines are compared."""

    route: str
    max_model_len: str
    most_samples: str
    """How many samples one call may ask for."""
    more_samples: str
    """What to do for more."""
    semantic: Mapping[str, str]
    numeric: Mapping[str, str]
    deployment: Mapping[str, str]
    known: Mapping[str, str]
    """Numeric facts that hold for every such server, and that none shows."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, "semantic", "numeric", "deployment", "known")


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is particular to one kind of server."""

    name: str
    completions: str
    always: Mapping[str, object]
    """Fields of every call."""
    names: Mapping[str, str]
    """Sampling parameter to the path of its field; what is in neither this nor `cannot` is called alike."""
    cannot: Mapping[str, str]
    """Sampling parameter to the reason why it is not sent when it differs from its default."""
    least_logprobs: int
    """Alternatives to ask for so that the sampled token's own logprob comes back."""
    largest_seed: int
    numbers: Mapping[LogprobKind, Numbers]
    samples: str
    """A list of samples; one that is asked for alone may come without it."""
    index: str
    token_ids: str
    lost: str
    """Why there may be fewer logprobs than tokens."""
    prompt_tokens: str
    """How many tokens the server saw in the prompt: all that it tells of them."""
    cached_tokens: str
    text: str
    finish: str
    finish_words: Mapping[str, FinishReason]
    tokenizer: Tokenizer
    facts: Facts
    hints: Mapping[Capability, str]
    """What to do where a capability is missing."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, "always", "names", "cannot", "numbers", "finish_words", "hints")


_NO_WEIGHTS = "llama.cpp serves the file that it was started with; start it again for other weights"

LLAMA_CPP = Dialect(
    name="llama-cpp",
    # Not /v1/completions: only the native call returns the sampled ids.
    completions="/completion",
    always={"return_tokens": True},
    names={"max_tokens": "n_predict", "logprobs": "n_probs"},
    cannot={
        "repetition_penalty": "it looks back over the last 64 tokens, not over all",
        "presence_penalty": "it counts tokens of the prompt as well",
        "frequency_penalty": "it counts tokens of the prompt as well",
        "min_tokens": "the server has no such field",
        "stop_token_ids": "the server has no such field",
        "stop": "the server drops the logprobs of the tokens that spell a stop string, and keeps the tokens",
        "ignore_eos": "the server bans end tokens, which changes the distribution, instead of going on after them",
        "prompt_logprobs": "the server has no such field",
    },
    least_logprobs=1,
    # One more stands for "draw a seed", and beyond it the number is cut to 32 bits in silence.
    largest_seed=2**32 - 2,
    numbers={
        # After the whole chain of samplers.
        LogprobKind.PROCESSED: Numbers(
            ask={"post_sampling_probs": True},
            owners="completion_probabilities/*/id",
            values="completion_probabilities/*/prob",
            alternative_ids="completion_probabilities/*/top_probs/*/id",
            alternative_values="completion_probabilities/*/top_probs/*/prob",
            probabilities=True,
        ),
        # The default: a softmax of the logits at temperature 1, whatever the samplers do, logit_bias included.
        LogprobKind.RAW: Numbers(
            ask={},
            owners="completion_probabilities/*/id",
            values="completion_probabilities/*/logprob",
            alternative_ids="completion_probabilities/*/top_logprobs/*/id",
            alternative_values="completion_probabilities/*/top_logprobs/*/logprob",
        ),
    },
    samples="",
    index="index",
    token_ids="tokens",
    lost="llama.cpp reports none for a token that ends inside a character, such as the first half of an emoji",
    prompt_tokens="tokens_evaluated",
    cached_tokens="timings/cache_n",
    text="content",
    finish="stop_type",
    finish_words={"limit": FinishReason.LENGTH, "eos": FinishReason.STOP, "word": FinishReason.STOP},
    tokenizer=Tokenizer(
        route="/tokenize",
        text="content",
        ask={"add_special": True, "parse_special": True},
        token_ids="tokens",
        chat_route="/apply-template",
        chat_text="prompt",
    ),
    facts=Facts(
        route="/props",
        max_model_len="default_generation_settings/n_ctx",
        most_samples="total_slots",
        more_samples="start the server with --parallel of at least that",
        semantic={
            **{
                name: f"default_generation_settings/params/{name}"
                for name in ("samplers", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "mirostat")
            },
            "lora": "default_generation_settings/params/lora",
        },
        numeric={
            "quantization": "model_ftype",
            "speculative": "default_generation_settings/params/speculative.types",
            "build": "build_info",
        },
        deployment={"max_num_seqs": "total_slots"},
        # Between its operations llama.cpp keeps fp32, whatever the weights; KV is fp16 unless told otherwise.
        known={"dtype": "float32"},
    ),
    hints={
        Capability.TOP_LOGPROBS: "the server must read n_probs; a newer release does",
        Capability.SCORE: "llama.cpp's server scores no prompts",
        Capability.SEED: "the server must read seed; a newer release does",
        Capability.TOKENIZE: "the server must have /tokenize and /apply-template; a newer release does",
        Capability.CACHE_SALT: "llama.cpp knows no salts; start the server with --no-cache-prompt",
        Capability.CACHED_TOKENS: "the server must report timings/cache_n; a newer release does",
        Capability.RESET_CACHE: "llama.cpp forgets slots, but not what it keeps beside them; use --no-cache-prompt",
        Capability.LOAD_WEIGHTS: _NO_WEIGHTS,
        Capability.WEIGHT_VERSION: _NO_WEIGHTS,
        Capability.EFFECTIVE_CONFIG: "the server must show /props; a newer release does",
    },
)
