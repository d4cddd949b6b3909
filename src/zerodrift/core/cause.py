"""The closed vocabulary of causes, each with what it means and the fix as a user would type it.

The first word of a cause's name is the layer it lives in. A verdict may name these and nothing else; what fits
none of them is `unexplained`, with the shape of the difference.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.frozen import FrozenDict, freeze

ANY_ENGINE = "*"


class Layer(StrEnum):
    """Where a fault lives, from the cheapest to check to the dearest."""

    SEMANTIC = "semantic"
    """The number means something else."""
    PATH = "path"
    """The number means the right thing and was computed another way."""
    WEIGHTS = "weights"
    """The number belongs to other weights."""
    TRAINER = "trainer"
    """The engine is right; the trainer's forward is not."""
    OBJECTIVE = "objective"
    """The numbers are right and used wrongly."""
    NONE = "unexplained"


class Cause(msgspec.Struct, frozen=True):
    """One way for an engine and a trainer to disagree."""

    name: str
    says: str
    """One sentence for the report: what is going on."""
    fixes: Mapping[str, str]
    """Engine name to what to type there; ANY_ENGINE where the fix is the same everywhere."""
    gating: bool = True
    """Whether it fails an audit by itself; a listed rounding effect below the gate does not."""

    def __post_init__(self) -> None:
        """Fixes stay as they were written."""
        freeze(self, "fixes")

    @property
    def layer(self) -> Layer:
        """The first word of the name."""
        return Layer(self.name.split("/")[0])

    def fix(self, engine: str) -> str:
        """What to type for `engine`."""
        return self.fixes.get(engine, self.fixes[ANY_ENGINE])


def _cause(name: str, says: str, fix: str, *, gating: bool = True, **engines: str) -> Cause:
    named = {engine.replace("_", "-"): fix_there for engine, fix_there in engines.items()}
    return Cause(name, says, {ANY_ENGINE: fix, **named}, gating)


_SEMANTIC = (
    _cause(
        "semantic/raw-logprobs",
        "The engine reports logprobs of the model's own distribution, not of the one it sampled from.",
        "report logprobs after temperature and truncation",
        vllm="--logprobs-mode processed_logprobs",
        sglang="unset SGLANG_RETURN_ORIGINAL_LOGPROB, and sample with top_p=1 and top_k=-1",
        tensorrt_llm="sample at temperature 1 without truncation: the server reports raw logprobs alone",
        llama_cpp='"post_sampling_probs": true in every request',
    ),
    _cause(
        "semantic/temperature",
        "The engine samples or reports at another temperature than requested.",
        "set temperature explicitly in every request, and the same in the trainer",
        vllm="--generation-config vllm",
    ),
    _cause(
        "semantic/truncation-mass",
        "Logprobs are renormalised over the tokens that top-p, top-k or min-p kept.",
        "sample with top_p=1, top_k=0, min_p=0, or replay the kept set in the trainer",
        vllm='set "top_p": 1, "top_k": 0, "min_p": 0 in every request, or --generation-config vllm',
        llama_cpp="--top-k 0 --top-p 1 --min-p 0, or the same in every request",
    ),
    _cause(
        "semantic/penalty",
        "A repetition, presence or frequency penalty that nobody asked for shapes the distribution.",
        "set repetition_penalty=1, presence_penalty=0, frequency_penalty=0 explicitly",
        vllm="--generation-config vllm",
    ),
    _cause(
        "semantic/logit-bias",
        "Some tokens carry a constant bias in the engine.",
        "remove logit_bias, banned words and grammar masks from the engine, or replay them in the trainer",
    ),
    _cause(
        "semantic/generation-config",
        "The engine fills in sampling defaults from the model's generation_config.json.",
        "send every sampling parameter explicitly, or delete generation_config.json",
        vllm="--generation-config vllm",
    ),
    _cause(
        "semantic/off-by-one",
        "The logprob reported for a token belongs to its neighbour.",
        "align logprobs[i] with token_ids[i]: the logits at position i-1 predict token i",
    ),
    _cause(
        "semantic/wrong-token",
        "The logprob reported is that of another token than the sampled one.",
        "read the entry of the sampled token id, not the first of the top-k",
    ),
    _cause(
        "semantic/nonfinite",
        "The engine reports NaN, infinities or a placeholder in place of logprobs.",
        "find the corrupt row: check weights and KV for NaN, and never replace the value",
    ),
    _cause(
        "semantic/bos",
        "The engine sees one BOS token more or fewer than the trainer.",
        "send token ids, or add_special_tokens=false on one of the two sides",
        vllm='send "prompt" as token ids',
    ),
    _cause(
        "semantic/template",
        "The engine renders the chat template differently from the trainer.",
        "render the template once, in the trainer, and send token ids",
        vllm='send "prompt" as token ids to /v1/completions',
    ),
    _cause(
        "semantic/tokenizer",
        "The engine makes other token ids of the same text than the trainer.",
        "give the engine the trainer's tokenizer, or send token ids",
        vllm='--tokenizer MODEL, or send "prompt" as token ids',
    ),
    _cause(
        "semantic/retokenised",
        "Tokens were decoded to text and encoded again; the ids are no longer those that were sampled.",
        "carry token ids from turn to turn; never decode and encode a history",
    ),
    _cause(
        "semantic/eos",
        "The end-of-sequence token is missing, added, or carries no logprob of its own.",
        "keep the stop token in the output with its own logprob, and use one set of EOS ids on both sides",
    ),
    _cause(
        "semantic/seed",
        "Samples that should be independent share their noise.",
        "give every sample its own seed, or none",
    ),
    _cause(
        "semantic/misbound-output",
        "Outputs are bound to the wrong requests.",
        "match outputs to requests by id, never by order of arrival",
    ),
    _cause(
        "semantic/streaming",
        "What is streamed is not what is answered whole: pieces lose, repeat or misplace tokens or logprobs.",
        '"stream": false in every request, or the route that answers whole (of TGI: /generate)',
        sglang='"stream": false in every request, or start the server without --incremental-streaming-output',
    ),
    _cause(
        "semantic/sampling-bias",
        "Sampled tokens do not follow the distribution whose logprobs are reported.",
        "look for truncation, penalties or a biased random generator between logits and token",
        llama_cpp="--top-k 0 --top-p 1 --min-p 0, or the same in every request: by default it cuts off",
    ),
)

_PATH = (
    _cause(
        "path/head-precision",
        "The output head is computed in less precision than the trainer's.",
        "compute the head in fp32",
        gating=False,
        vllm='--hf-overrides \'{"head_dtype":"float32"}\'',
    ),
    _cause(
        "path/body-precision",
        "The body of the model is computed in less precision than the profile allows.",
        "run the engine in the trainer's dtype",
        vllm="--dtype float32 (or the trainer's dtype), and TRITON_F32_DEFAULT=ieee against TF32 on a GPU",
        sglang="--dtype float32 (or the dtype that the trainer uses)",
        llama_cpp="serve a file in F32 (convert_hf_to_gguf.py --outtype f32), because for quantised weights activations are "
        "rounded to 8 bits, with --flash-attn off --cache-type-k f32 --cache-type-v f32",
    ),
    _cause(
        "path/weight-quantisation",
        "The engine runs quantised weights.",
        "serve the unquantised checkpoint, or train with the same quantisation",
        llama_cpp="serve a file in F32 (convert_hf_to_gguf.py --outtype f32), or train with the same quantisation",
    ),
    _cause(
        "path/kv-precision",
        "Keys and values are stored in less precision than they were computed in.",
        "store the KV cache in the model's dtype",
        vllm="--kv-cache-dtype auto",
        llama_cpp="--cache-type-k f32 --cache-type-v f32",
    ),
    _cause(
        "path/routing",
        "A mixture of experts sends tokens to other experts in the engine than in the trainer.",
        "replay the engine's expert choices in the trainer, or compute the router in fp32 on both sides",
    ),
    _cause(
        "path/parallelism",
        "The model is spread over devices in another way, so that sums are taken in another order.",
        "use the same parallel sizes on both sides, or one device",
        gating=False,
        vllm="--tensor-parallel-size as in the trainer, or 1",
    ),
    _cause(
        "path/spec-decode",
        "Speculative decoding reports, or accepts, what the model alone would not have.",
        "turn speculative decoding off",
        vllm="remove --speculative-config",
    ),
    _cause(
        "path/batch-variance",
        "A sequence's numbers depend on which others are in the batch.",
        "use batch-invariant kernels",
        gating=False,
        vllm="VLLM_BATCH_INVARIANT=1 --attention-backend TRITON_ATTN on a GPU; VLLM_CPU_ATTN_SPLIT_KV=0 on CPU",
        sglang="--enable-deterministic-inference",
    ),
    _cause(
        "path/prefill-decode",
        "A token's logprob differs between decode and prefill beyond rounding.",
        "use one attention kernel for prefill and decode",
        gating=False,
        vllm="VLLM_BATCH_INVARIANT=1 --attention-backend TRITON_ATTN on a GPU; VLLM_CPU_ATTN_SPLIT_KV=0 on CPU",
        sglang="--enable-deterministic-inference",
    ),
    _cause(
        "path/chunked-prefill",
        "Numbers depend on where a prefill was cut into chunks.",
        "raise the chunk size above the longest prompt",
        gating=False,
        vllm="--max-num-batched-tokens above the longest prompt",
    ),
    _cause(
        "path/prefix-cache",
        "A cached prefix gives other numbers than a cold one.",
        "turn prefix caching off",
        vllm="--no-enable-prefix-caching",
        sglang="--disable-radix-cache",
        llama_cpp="--no-cache-prompt",
    ),
    _cause(
        "path/preemption",
        "A preempted and resumed sequence gives other numbers.",
        "give the engine enough KV memory",
        vllm="--gpu-memory-utilization up, or --max-num-seqs down",
    ),
    _cause(
        "path/rope",
        "Rotary positions are computed with another base, scaling or offset.",
        "use the checkpoint's own rope parameters on both sides",
        vllm="remove rope overrides from --hf-overrides",
    ),
    _cause(
        "path/window",
        "The sliding window is ignored or has another width.",
        "use the checkpoint's own sliding_window on both sides",
        vllm="remove --disable-sliding-window",
    ),
    _cause(
        "path/context-boundary",
        "Numbers go wrong beyond a certain position.",
        "keep sequences within the trained context, or configure the same context extension on both sides",
    ),
    _cause(
        "path/nondeterminism",
        "The same request gives different numbers when repeated alone.",
        "find the kernel that depends on timing: disable autotuning and asynchronous scheduling",
        gating=False,
        vllm="--no-async-scheduling",
    ),
)

_WEIGHTS = (
    _cause(
        "weights/stale",
        "The engine runs other weights than the trainer's: older ones, or those of another checkpoint.",
        "deliver the update, and check it: compare logprobs after every sync",
        vllm='POST /collective_rpc {"method": "reload_weights", …}, then POST /reset_prefix_cache',
    ),
    _cause(
        "weights/other-model",
        "The engine serves another model than the reference, or has lost the weights of this one.",
        "serve the checkpoint that the audit is given, or give the audit the one that is served",
        vllm="--model MODEL; the name at /v1/models is only a label (--served-model-name)",
        llama_cpp="--model with a file converted from MODEL",
    ),
    _cause(
        "weights/partial",
        "Some tensors were updated and others were not.",
        "send every tensor of the update; see the tensors named in the evidence",
    ),
    _cause(
        "weights/swapped",
        "Tensors arrived under each other's names.",
        "fix the name mapping of the update; see the tensors named in the evidence",
    ),
    _cause(
        "weights/dtype",
        "Weights lost precision on their way to the engine.",
        "send the update in the trainer's dtype",
    ),
    _cause(
        "weights/tied-head",
        "Embedding and head are one tensor in the checkpoint, and only one of them was updated.",
        "update both ends of the tie, or re-tie after the update",
    ),
    _cause(
        "weights/buffer",
        "A buffer that no checkpoint holds (rotary tables, scales) is wrong after the update.",
        "rebuild buffers after loading; sync them with the parameters",
    ),
    _cause(
        "weights/torn",
        "A sequence was computed while weights were exchanged: some layers old, others new.",
        "exchange weights between two steps: pause, update, resume; and discard what an update that failed has touched",
        vllm="POST /pause?mode=keep before the update and POST /resume after it",
    ),
    _cause(
        "weights/version-label",
        "The engine's version label and its weights do not belong together.",
        "set the label in the same transaction as the weights",
    ),
    _cause(
        "weights/stale-prefix-cache",
        "A prefix cached under older weights is reused after an update.",
        "reset the prefix cache at every update, or salt it with the version",
        vllm='POST /reset_prefix_cache after the update, or "cache_salt": "<version>" in every request',
        sglang='"flush_cache": true in the update, or POST /flush_cache after it',
    ),
    _cause(
        "weights/replica",
        "One replica runs other weights than the rest.",
        "update every replica before any of them serves; see the replica named in the evidence",
    ),
    _cause(
        "weights/lora",
        "The engine's adapter is missing, of another step, or scaled in another way than the trainer's.",
        "load each step's adapter under a name of its own, with the trainer's rank and alpha, or merge it and send that",
    ),
)

_TRAINER = (
    _cause(
        "trainer/packing",
        "Packed sequences leak into each other in the trainer's forward.",
        "pass position ids and a block-diagonal mask, or do not pack",
    ),
    _cause(
        "trainer/autocast",
        "The trainer's forward runs in less precision than its weights.",
        "disable autocast around the logprob forward, at least for the head",
    ),
    _cause(
        "trainer/micro-batch",
        "The trainer's numbers depend on how sequences are batched or padded.",
        "pass the attention mask and position ids of the unpadded sequence",
    ),
    _cause(
        "trainer/positions",
        "The trainer's position ids are shifted.",
        "count positions from the first real token",
    ),
)

_OBJECTIVE = (
    _cause(
        "objective/staleness",
        "Rollouts are older than the objective allows for: the difference is learning, not drift.",
        "bound the age of rollouts, or weight each token by the weights that made it",
    ),
    _cause(
        "objective/sequence-ratio",
        "Ratios are multiplied over whole sequences, where a drift too small to see in a token decides.",
        "use token ratios or their geometric mean, and watch the sequence ESS",
    ),
    _cause(
        "objective/reward-misbound",
        "Rewards are bound to other completions than they were given for.",
        "match rewards to completions by id, never by order of arrival",
    ),
)

_UNEXPLAINED = _cause(
    "unexplained",
    "The difference is real and fits none of the known causes; its shape is in the evidence.",
    "keep the run directory, and bisect with the probes that failed",
)

CAUSES: Mapping[str, Cause] = FrozenDict(
    (cause.name, cause) for cause in (*_SEMANTIC, *_PATH, *_WEIGHTS, *_TRAINER, *_OBJECTIVE, _UNEXPLAINED)
)
