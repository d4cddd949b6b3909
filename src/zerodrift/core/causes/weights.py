"""Causes of layer `weights`: the number belongs to other weights."""

from zerodrift.core.causes.entry import AFTER_AN_UPDATE, OF_THE_MODEL, cause

WEIGHTS = (
    cause(
        "weights/stale",
        "The engine runs other weights than the trainer's: older ones, or those of another checkpoint.",
        "deliver the update, and check it: compare logprobs after every sync",
        vllm='POST /collective_rpc {"method": "reload_weights", …}, then POST /reset_prefix_cache',
    ),
    cause(
        "weights/other-model",
        "The engine serves another model than the reference, or has lost the weights of this one.",
        "serve the checkpoint that the audit is given, or give the audit the one that is served",
        vllm="--model MODEL; the name at /v1/models is only a label (--served-model-name)",
        llama_cpp="--model with a file converted from MODEL",
        outranks=True,
        predicts=OF_THE_MODEL,
    ),
    cause(
        "weights/partial",
        "Some tensors were updated and others were not.",
        "send every tensor of the update; see the tensors named in the evidence",
        predicts=AFTER_AN_UPDATE,
    ),
    cause(
        "weights/rows",
        "Of a tensor some rows were updated and others were not.",
        "send every shard of every tensor, and check that each lands at its own rows; see the rows named in the evidence",
        predicts=AFTER_AN_UPDATE,
    ),
    cause(
        "weights/fraction",
        "The engine holds a fraction of the update: weights between the old and the new ones.",
        "replace weights instead of averaging them; of an adapter, merge with the trainer's alpha / rank",
        predicts=AFTER_AN_UPDATE,
    ),
    cause(
        "weights/multiple",
        "The engine holds a multiple of the update: a difference was added more than once, or with another factor.",
        "send weights, or add each difference once: a push that is tried again must not be applied twice",
        predicts=AFTER_AN_UPDATE,
    ),
    cause(
        "weights/swapped",
        "Tensors arrived under each other's names.",
        "fix the name mapping of the update; see the tensors named in the evidence",
    ),
    cause(
        "weights/dtype",
        "Weights lost precision on their way to the engine.",
        "send the update in the trainer's dtype",
    ),
    cause(
        "weights/tied-head",
        "Embedding and head are one tensor in the checkpoint, and only one of them was updated.",
        "update both ends of the tie, or re-tie after the update",
    ),
    cause(
        "weights/buffer",
        "A buffer that no checkpoint holds (rotary tables, scales) is wrong after the update.",
        "rebuild buffers after loading; sync them with the parameters",
    ),
    cause(
        "weights/torn",
        "A sequence was computed while weights were exchanged: part of it by the old ones, the rest by the new.",
        "exchange weights between two steps: pause, update, resume; and discard what an update that failed has touched",
        vllm="POST /pause?mode=keep before the update and POST /resume after it",
    ),
    cause(
        "weights/version-label",
        "The engine's version label and its weights do not belong together.",
        "set the label in the same transaction as the weights",
    ),
    cause(
        "weights/stale-prefix-cache",
        "A prefix cached under older weights is reused after an update.",
        "reset the prefix cache at every update, or salt it with the version",
        vllm='POST /reset_prefix_cache after the update, or "cache_salt": "<version>" in every request',
        sglang='"flush_cache": true in the update, or POST /flush_cache after it',
    ),
    cause(
        "weights/replica",
        "One replica runs other weights than the rest.",
        "update every replica before any of them serves; which one is behind, the same request sent to each by its own "
        "address tells",
    ),
    cause(
        "weights/lora",
        "The engine's adapter is missing, of another step, or scaled in another way than the trainer's.",
        "load each step's adapter under a name of its own, with the trainer's rank and alpha, or merge it and send that",
    ),
)
