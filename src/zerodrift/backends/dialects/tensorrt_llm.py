"""trtllm-serve of TensorRT-LLM, with its PyTorch backend.

Read in its documentation and source of 2026, and never run here against the engine itself.
"""

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect, Facts, Numbers, SeedProbe
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason, LogprobKind

_UNDOCUMENTED = "whether the reported logprobs come before or after it is not documented"
_TRIMMED = "the server takes the tokens that stopped it off the output"
_NO_WEIGHTS = "trtllm-serve takes no checkpoint while it runs; start it again for other weights"

TENSORRT_LLM = Dialect(
    name="tensorrt-llm",
    completions="/v1/completions",
    # Ids and text exclude each other.
    always={"detokenize": False},
    names={},
    cannot={
        "repetition_penalty": _UNDOCUMENTED,
        "presence_penalty": "it counts tokens of the prompt as well",
        "frequency_penalty": "it counts tokens of the prompt as well",
        "logit_bias": _UNDOCUMENTED,
        "min_tokens": _UNDOCUMENTED,
        "stop": _TRIMMED,
        "stop_token_ids": _TRIMMED,
        "prompt_logprobs": "the server has no such field",
    },
    # Nothing says with which seeds the samples of one call are drawn.
    samples_apart=True,
    least_logprobs=1,
    largest_seed=2**63 - 1,
    # Releases before August 2026 read seeds and do not use them.
    seed_probe=SeedProbe.REPETITION,
    numbers={
        # The alternatives are strings, which several tokens may share.
        LogprobKind.RAW: Numbers(owners=None, values="logprobs/token_logprobs"),
    },
    samples="choices",
    token_ids="token_ids",
    lost="TensorRT-LLM documents no reason for that",
    prompt_tokens="/usage/prompt_tokens",
    cached_tokens="/usage/prompt_tokens_details/cached_tokens",
    text=None,
    finish="finish_reason",
    finish_words={"length": FinishReason.LENGTH, "stop": FinishReason.STOP},
    streaming=Streaming(
        # Without usage, nothing would say how long the prompt was.
        ask={"stream": True, "stream_options": {"include_usage": True}},
        samples="choices",
        index="index",
        lists={name: name for name in ("token_ids", "logprobs/token_logprobs")},
        finish="finish_reason",
    ),
    tokenizer=None,
    facts=Facts(
        routes=("/version",),
        max_model_len={},
        longer="say what it was started with (--max_seq_len): --set engine.max_model_len=TOKENS",
        numeric={"build": "version"},
    ),
    hints={
        Capability.TOP_LOGPROBS: "trtllm-serve names alternatives by their text, and several tokens may share one",
        Capability.SCORE: "trtllm-serve scores no prompts",
        Capability.SEED: "releases before August 2026 ignore seeds; a newer one does not",
        Capability.TOKENIZE: "trtllm-serve shows no ids of rendered chat",
        Capability.CACHE_SALT: "trtllm-serve knows no salts; start it with kv_cache_config.enable_block_reuse: false",
        Capability.CACHED_TOKENS: "the server must report usage/prompt_tokens_details; a newer release does",
        Capability.RESET_CACHE: "trtllm-serve forgets no prefixes on demand; start it with kv_cache_config.enable_block_reuse: false",
        Capability.LOAD_WEIGHTS: _NO_WEIGHTS,
        Capability.WEIGHT_VERSION: _NO_WEIGHTS,
        Capability.EFFECTIVE_CONFIG: "trtllm-serve shows no settings",
        Capability.STREAM: "its streams must carry token_ids (detokenize: false); those of a newer release do",
    },
)
