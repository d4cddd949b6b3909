"""Causes of layer `path`: the number means the right thing and was computed another way."""

from zerodrift.core.causes.entry import OF_ITS_PLACE, OF_THE_MODEL, cause

DETERMINISTIC_VLLM = (
    "VLLM_BATCH_INVARIANT=1 --attention-backend TRITON_ATTN on a GPU; VLLM_CPU_ATTN_SPLIT_KV=0 on CPU"
)
DETERMINISTIC = {
    "vllm": {"VLLM_BATCH_INVARIANT": "true"},
    "sglang": {"enable_deterministic_inference": "true"},
}

PATH = (
    cause(
        "path/head-precision",
        "The output head is computed in less precision than the trainer's.",
        "compute the head in fp32",
        gating=False,
        vllm='--hf-overrides \'{"head_dtype":"float32"}\'',
        approximate=True,
        in_trainer="trainer/precision",
        in_force={"vllm": {"head_dtype": "float32"}},
    ),
    cause(
        "path/body-precision",
        "The body of the model is computed in less precision than the profile allows.",
        "run the engine in the trainer's dtype",
        vllm="--dtype float32 (or the trainer's dtype), and TRITON_F32_DEFAULT=ieee against TF32 on a GPU",
        sglang="--dtype float32 (or the dtype that the trainer uses)",
        llama_cpp="serve a file in F32 (convert_hf_to_gguf.py --outtype f32), because for quantised weights activations are "
        "rounded to 8 bits, with --flash-attn off --cache-type-k f32 --cache-type-v f32",
        approximate=True,
        in_trainer="trainer/precision",
        predicts=OF_THE_MODEL,
        in_force={"vllm": {"dtype": "float32"}, "sglang": {"dtype": "float32"}},
    ),
    cause(
        "path/weight-quantisation",
        "The engine runs quantised weights.",
        "serve the unquantised checkpoint, or train with the same quantisation",
        llama_cpp="serve a file in F32 (convert_hf_to_gguf.py --outtype f32), or train with the same quantisation",
        approximate=True,
        trainer="load the unquantised checkpoint in the trainer, or serve the same quantisation",
        predicts=OF_THE_MODEL,
    ),
    cause(
        "path/kv-precision",
        "Keys and values are stored in less precision than they were computed in.",
        "store the KV cache in the model's dtype",
        vllm="--kv-cache-dtype auto",
        llama_cpp="--cache-type-k f32 --cache-type-v f32",
        approximate=True,
        in_trainer="trainer/precision",
        in_force={"vllm": {"kv_cache_dtype": "auto"}},
    ),
    cause(
        "path/routing",
        "A mixture of experts sends tokens to other experts in the engine than in the trainer.",
        "replay the engine's expert choices in the trainer, or compute the router in fp32 on both sides",
    ),
    cause(
        "path/parallelism",
        "The model is spread over devices in another way, so that sums are taken in another order.",
        "use the same parallel sizes on both sides, or one device",
        gating=False,
        vllm="--tensor-parallel-size as in the trainer, or 1",
    ),
    cause(
        "path/spec-decode",
        "Speculative decoding reports, or accepts, what the model alone would not have.",
        "turn speculative decoding off",
        vllm="remove --speculative-config",
        in_force={"vllm": {"speculative": "null"}},
    ),
    cause(
        "path/batch-variance",
        "A sequence's numbers depend on which others are in the batch.",
        "use batch-invariant kernels",
        gating=False,
        vllm=DETERMINISTIC_VLLM,
        sglang="--enable-deterministic-inference",
        in_force=DETERMINISTIC,
    ),
    cause(
        "path/prefill-decode",
        "A token's logprob differs between decode and prefill beyond rounding.",
        "use one attention kernel for prefill and decode",
        gating=False,
        vllm=DETERMINISTIC_VLLM,
        sglang="--enable-deterministic-inference",
        in_force=DETERMINISTIC,
    ),
    cause(
        "path/chunked-prefill",
        "Numbers depend on where a prefill was cut into chunks.",
        "raise the chunk size above the longest prompt",
        vllm="--no-enable-chunked-prefill, or --max-num-batched-tokens above the longest prompt",
        sglang="--chunked-prefill-size -1",
        llama_cpp="--batch-size and --ubatch-size above the longest prompt",
        trainer="score prompts in one piece, or mend the place where chunks of the trainer's forward begin",
        in_force={"vllm": {"enable_chunked_prefill": "false"}},
    ),
    cause(
        "path/kv-heads",
        "Query heads read the keys and values of other KV heads than the checkpoint groups them with.",
        "give each KV head its block of query heads: query head h reads KV head h // (query heads / KV heads)",
        vllm="--tensor-parallel-size 1, or one that divides the number of KV heads; no num_key_value_heads in --hf-overrides",
        sglang="--tp-size 1, or one that divides the number of KV heads",
        llama_cpp="convert the checkpoint again (convert_hf_to_gguf.py), and compare attention.head_count_kv with its config",
        trainer="repeat every KV head for its block of query heads (repeat_interleave, not repeat)",
        predicts=OF_THE_MODEL,
    ),
    cause(
        "path/mask",
        "Tokens see others that they must not see: later ones of their prompt, or those of another sequence.",
        "let prefill mask what comes later and what belongs to another sequence; another attention kernel shows whose fault it is",
        vllm="another --attention-backend; no is_causal in --hf-overrides",
        sglang="another --attention-backend",
        llama_cpp="--flash-attn off; serve a file whose attention.causal is true",
        trainer="pass a causal mask, block-diagonal where sequences are packed",
        predicts=OF_THE_MODEL,
    ),
    cause(
        "path/prefix-cache",
        "A cached prefix gives other numbers than a cold one.",
        "turn prefix caching off",
        vllm="--no-enable-prefix-caching",
        sglang="--disable-radix-cache",
        llama_cpp="--no-cache-prompt",
        # The probe of caches asks for equal prompts: two that are taken for equal and are not show nothing there.
        in_force={"vllm": {"enable_prefix_caching": "false"}, "sglang": {"disable_radix_cache": "true"}},
    ),
    cause(
        "path/preemption",
        "A preempted and resumed sequence gives other numbers.",
        "give the engine enough KV memory",
        vllm="--gpu-memory-utilization up, or --max-num-seqs down",
    ),
    cause(
        "path/rope",
        "Rotary positions are computed with another base, scaling or offset.",
        "use the checkpoint's own rope parameters on both sides; where config.json states no rope_theta each side takes a "
        "default of its own: write the trained one into it",
        vllm="remove rope overrides from --hf-overrides; where config.json states no rope_theta, write the trained one into it",
        in_trainer="trainer/positions",
    ),
    cause(
        "path/window",
        "The sliding window is ignored, has another width, or is there where the checkpoint has none.",
        "use the checkpoint's own sliding_window on both sides, and none where it has none",
        vllm="remove --disable-sliding-window, and sliding_window from --hf-overrides",
        trainer="use an attention in the trainer that keeps to the checkpoint's sliding_window",
        in_force={"vllm": {"disable_sliding_window": "false", "hf_overrides": "{}"}},
    ),
    cause(
        "path/context-boundary",
        "Numbers go wrong from a certain position on.",
        "find what the engine does at the position that the evidence names: a page or a chunk of its KV cache that begins "
        "there, or a context extension; until then keep prompt and output below it",
        in_trainer="trainer/positions",
        predicts=OF_ITS_PLACE,
    ),
    cause(
        "path/nondeterminism",
        "The same request gives different numbers when it is repeated.",
        "find what depends on timing or order (the evidence says what it goes with): disable autotuning and asynchronous scheduling",
        gating=False,
        vllm="--no-async-scheduling",
        in_force={"vllm": {"async_scheduling": "false"}},
    ),
)
