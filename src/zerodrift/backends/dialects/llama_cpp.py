"""llama.cpp's own server, and those that are built on it."""

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect, Facts, Numbers, SeedProbe, Tokenizer
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason, LogprobKind

_NO_WEIGHTS = "llama.cpp serves the file that it was started with; start it again for other weights"
_DEFAULTS = {
    name: f"default_generation_settings/params/{name}"
    for name in ("samplers", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "mirostat", "lora")
}

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
    seed_probe=SeedProbe.NONSENSE,
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
    output_tokens="tokens_predicted",
    prompt_tokens="tokens_evaluated",
    cached_tokens="timings/cache_n",
    text="content",
    finish="stop_type",
    finish_words={"limit": FinishReason.LENGTH, "eos": FinishReason.STOP, "word": FinishReason.STOP},
    streaming=Streaming(
        ask={"stream": True},
        index="index",
        lists={"tokens": "tokens", "completion_probabilities": "completion_probabilities"},
        text="content",
        finish="stop_type",
        # Only the OpenAI routes end so.
        done=False,
    ),
    tokenizer=Tokenizer(
        route="/tokenize",
        text="content",
        ask={"add_special": True, "parse_special": True},
        token_ids="tokens",
        chat_route="/apply-template",
        chat_text="prompt",
    ),
    facts=Facts(
        routes=("/props",),
        max_model_len={"default_generation_settings/n_ctx": 0},
        longer="is it the kind of server that --engine names?",
        most_samples="total_slots",
        more_samples="start the server with --parallel of at least that",
        effective=tuple(_DEFAULTS.values()),
        semantic=_DEFAULTS,
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
        Capability.STREAM: "the server must stream tokens (return_tokens); a newer release does",
    },
)
