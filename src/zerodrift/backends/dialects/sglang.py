"""SGLang's own `/generate`, which takes ids and returns them; its OpenAI routes return none.

Read in its documentation and source of August 2026, and never run here against the engine itself.
"""

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect, Facts, Numbers, Scoring, SeedProbe, Updating
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason, LogprobKind

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_NAMES = {
    name: f"sampling_params/{_RENAMED.get(name, name)}"
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    )
}

SGLANG = Dialect(
    name="sglang",
    completions="/generate",
    prompt="input_ids",
    model=None,
    salt="cache_salt",
    always={},
    names={**_NAMES, "logprobs": "top_logprobs_num"},
    cannot={
        "min_p": "a server that honours seeds fails on it (an assertion in its sampler)",
        "repetition_penalty": "it looks at the output alone, not at the prompt",
        "prompt_logprobs": "score the tokens in a call of their own",
    },
    undone_by={"stop_token_ids": "ignore_eos"},
    # All samples of one call are drawn with its one seed, and come out equal.
    samples_apart=True,
    largest_seed=2**63 - 1,
    # Without --enable-deterministic-inference a seed is read and dropped; nonsense in its place reaches the sampler.
    seed_probe=SeedProbe.REPETITION,
    numbers={
        # After bias, penalties and temperature. SGLANG_RETURN_ORIGINAL_LOGPROB makes them raw, and nothing tells.
        LogprobKind.PROCESSED: Numbers(
            ask={"return_logprob": True},
            owners="meta_info/output_token_logprobs/*/1",
            values="meta_info/output_token_logprobs/*/0",
            alternative_ids="meta_info/output_top_logprobs/*/*/1",
            alternative_values="meta_info/output_top_logprobs/*/*/0",
        ),
    },
    before_truncation=True,
    samples="",
    token_ids="output_ids",
    lost="SGLang documents no reason for that",
    output_tokens="meta_info/completion_tokens",
    prompt_tokens="meta_info/prompt_tokens",
    cached_tokens="meta_info/cached_tokens",
    text="text",
    finish="meta_info/finish_reason/type",
    finish_words={
        "length": FinishReason.LENGTH,
        "stop": FinishReason.STOP,
        "abort": FinishReason.ABORT,
    },
    scoring=Scoring(
        ask={"return_logprob": True, "logprob_start_len": 0, "sampling_params/max_new_tokens": 0},
        owners="meta_info/input_token_logprobs/*/1",
        values="meta_info/input_token_logprobs/*/0",
        # So it writes the last id of the vocabulary.
        nameless=0,
    ),
    updating=Updating(
        route="/update_weights_from_disk",
        directory="model_path",
        label="weight_version",
        ask={"flush_cache": False},
        done="success",
        shown_by="/model_info",
        shown="weight_version",
        sampled="meta_info/weight_version",
    ),
    reset_cache="/flush_cache",
    streaming=Streaming(
        ask={"stream": True},
        lists={
            name: name
            for name in ("output_ids", "meta_info/output_token_logprobs", "meta_info/output_top_logprobs")
        },
        text="text",
        finish="meta_info/finish_reason",
        cumulative=True,
        differences="incremental_streaming_output",
    ),
    tokenizer=None,
    facts=Facts(
        routes=("/v1/models", "/server_info", "/model_info"),
        # Outputs that would pass the end of the context are cut down in silence; this much is always whole.
        max_model_len={"max_req_input_len": 0, "data/0/max_model_len": 6},
        longer="is it the kind of server that --engine names?",
        effective=("dtype", "preferred_sampling_params"),
        semantic={
            name: name
            for name in (
                "tokenizer_path",
                "preferred_sampling_params",
                "sampling_defaults",
                "enable_custom_logit_processor",
                "json_model_override_args",
                "lora_paths",
            )
        },
        numeric={
            name: name
            for name in (
                "dtype",
                "quantization",
                "kv_cache_dtype",
                "attention_backend",
                "prefill_attention_backend",
                "decode_attention_backend",
                "sampling_backend",
                "enable_deterministic_inference",
                "rl_on_policy_target",
                "enable_fp32_lm_head",
                "chunked_prefill_size",
                "disable_radix_cache",
                "disable_cuda_graph",
                "page_size",
                "pp_size",
                "ep_size",
                "device",
            )
        }
        | {"tensor_parallel_size": "tp_size", "speculative": "speculative_algorithm", "build": "version"},
        deployment={"max_num_seqs": "max_running_requests", "data_parallel_size": "dp_size"},
    ),
    hints={
        Capability.TOP_LOGPROBS: "the server must read top_logprobs_num; a newer release does",
        Capability.SCORE: "the server must read logprob_start_len; a newer release does",
        Capability.SEED: "start the server with --enable-deterministic-inference",
        Capability.TOKENIZE: "SGLang shows no ids of rendered chat",
        Capability.CACHE_SALT: "the server must read cache_salt; a newer release does",
        Capability.CACHED_TOKENS: "the server must report meta_info/cached_tokens; a newer release does",
        Capability.RESET_CACHE: "the server must have /flush_cache; a newer release does",
        Capability.LOAD_WEIGHTS: "the server must have /update_weights_from_disk; a newer release does",
        Capability.WEIGHT_VERSION: "the server must report meta_info/weight_version; a newer release does",
        Capability.EFFECTIVE_CONFIG: "the server must show /server_info; a newer release does",
        Capability.STREAM: "the server must stream output_ids; a newer release does",
    },
)
