"""Text Generation Inference, by its own `/generate`; `/v1/completions` returns neither ids nor logprobs.

It takes text and no ids, so a prompt is sent only where its `/tokenize` makes the very ids of the text that are meant.
Read in its documentation and source of January 2026, and never run here against the engine itself.
"""

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect, Facts, Numbers, SeedProbe, Tokenizer
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason, LogprobKind

_NO_FIELD = "the server has no such field"
_NO_WEIGHTS = "TGI serves the model that it was started with; start it again for other weights"
_NAMES = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")

TGI = Dialect(
    name="tgi",
    completions="/generate",
    prompt="inputs",
    takes_text=True,
    model=None,
    # Without do_sample, temperature 1 alone would be greedy.
    always={"parameters/details": True, "parameters/do_sample": True},
    greedy={"parameters/do_sample": False},
    names={
        **{name: f"parameters/{name}" for name in _NAMES},
        "max_tokens": "parameters/max_new_tokens",
        "logprobs": "parameters/top_n_tokens",
    },
    cannot={
        "min_p": _NO_FIELD,
        "presence_penalty": _NO_FIELD,
        "frequency_penalty": "it counts tokens of the prompt as well, and divides by the length",
        "logit_bias": _NO_FIELD,
        "min_tokens": _NO_FIELD,
        "stop_token_ids": _NO_FIELD,
        "ignore_eos": _NO_FIELD,
        "prompt_logprobs": "whether they are whole with a prefix cache is not documented",
    },
    samples_apart=True,
    largest_seed=2**63 - 1,
    seed_probe=SeedProbe.REPETITION,
    numbers={
        LogprobKind.PROCESSED: Numbers(
            owners="details/tokens/*/id",
            values="details/tokens/*/logprob",
            alternative_ids="details/top_tokens/*/*/id",
            alternative_values="details/top_tokens/*/*/logprob",
        ),
    },
    samples="",
    token_ids="details/tokens/*/id",
    lost="TGI documents no reason for that",
    # Nothing says what it saw; /tokenize said what it would see.
    prompt_tokens=None,
    cached_tokens=None,
    text="generated_text",
    finish="details/finish_reason",
    finish_words={
        "length": FinishReason.LENGTH,
        "eos_token": FinishReason.STOP,
        "stop_sequence": FinishReason.STOP,
    },
    streaming=Streaming(
        route="/generate_stream",
        entries={"token": "details/tokens", "top_tokens": "details/top_tokens"},
        finish="details/finish_reason",
        done=False,
    ),
    tokenizer=Tokenizer(route="/tokenize", text="inputs", token_ids="*/id"),
    facts=Facts(
        routes=("/info",),
        max_model_len={"max_total_tokens": 0},
        longer="is it the kind of server that --engine names?",
        semantic={"model_sha": "model_sha"},
        numeric={"build": "version", "commit": "sha"},
        deployment={"max_num_seqs": "max_concurrent_requests"},
    ),
    hints={
        Capability.TOP_LOGPROBS: "start the server with --max-top-n-tokens of at least 2",
        Capability.SCORE: "TGI scores text alone, and only where the launcher has --enable-prefill-logprobs",
        Capability.SEED: "the server must honour seed; a newer release does",
        Capability.TOKENIZE: "TGI shows no ids of rendered chat by this route",
        Capability.CACHE_SALT: "TGI knows no salts; start it with PREFIX_CACHING=0",
        Capability.CACHED_TOKENS: "TGI does not say what it took from its cache",
        Capability.RESET_CACHE: "TGI forgets no prefixes on demand; start it with PREFIX_CACHING=0",
        Capability.LOAD_WEIGHTS: _NO_WEIGHTS,
        Capability.WEIGHT_VERSION: _NO_WEIGHTS,
        Capability.EFFECTIVE_CONFIG: "TGI shows neither dtype nor sampling defaults",
        Capability.STREAM: "the server must have /generate_stream; a newer release does",
    },
)
