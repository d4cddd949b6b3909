"""Causes of layer `semantic`: the number means something else."""

from zerodrift.core.causes.entry import cause
from zerodrift.core.request import SHAPING

SEMANTIC = (
    cause(
        "semantic/raw-logprobs",
        "The engine reports logprobs of the model's own distribution, not of the one it sampled from.",
        "report logprobs after temperature and truncation",
        vllm="--logprobs-mode processed_logprobs",
        sglang="unset SGLANG_RETURN_ORIGINAL_LOGPROB, and sample with top_p=1 and top_k=-1",
        llama_cpp='"post_sampling_probs": true in every request',
        unless_requested=("temperature",),
        trainer="shape the trainer's logits as the request shaped the engine's, before the softmax",
    ),
    cause(
        "semantic/temperature",
        "The engine samples or reports at another temperature than requested.",
        "set temperature explicitly in every request, and the same in the trainer",
        when_hidden="semantic/sampling-bias",
        vllm="--generation-config vllm",
        unless_requested=("temperature",),
        trainer="divide the trainer's logits by the temperature of the rollouts, once, before the softmax",
    ),
    cause(
        "semantic/truncation-mass",
        "Logprobs are renormalised over the tokens that top-p, top-k or min-p kept.",
        "sample with top_p=1, top_k=0, min_p=0, or replay the kept set in the trainer",
        vllm='set "top_p": 1, "top_k": 0, "min_p": 0 in every request, or --generation-config vllm',
        llama_cpp="--top-k 0 --top-p 1 --min-p 0, or the same in every request",
        unless_requested=("top_p", "top_k", "min_p"),
        trainer="take the trainer's softmax over the tokens that the request keeps, and no others",
    ),
    cause(
        "semantic/penalty",
        "A repetition, presence or frequency penalty that nobody asked for shapes the distribution.",
        "set repetition_penalty=1, presence_penalty=0, frequency_penalty=0 explicitly",
        vllm="--generation-config vllm",
        unless_requested=("repetition_penalty", "presence_penalty", "frequency_penalty"),
        trainer="take penalties that were not requested out of the trainer's forward",
    ),
    cause(
        "semantic/logit-bias",
        "Some tokens carry a constant bias in the engine.",
        "remove logit_bias, banned words and grammar masks from the engine, or replay them in the trainer",
        unless_requested=("logit_bias",),
        trainer="take biases and masks that were not requested out of the trainer's forward",
    ),
    cause(
        "semantic/generation-config",
        "The engine fills in sampling defaults from the model's generation_config.json.",
        "send every sampling parameter explicitly, or delete generation_config.json",
        vllm="--generation-config vllm",
        unless_requested=SHAPING,
        trainer="give the trainer the request's parameters, not those of generation_config.json",
    ),
    cause(
        "semantic/off-by-one",
        "The logprob reported for a token belongs to its neighbour.",
        "align logprobs[i] with token_ids[i]: the logits at position i-1 predict token i",
        trainer="align the trainer's logits with its labels: those at position i-1 predict token i",
    ),
    cause(
        "semantic/wrong-token",
        "The logprob reported is that of another token than the sampled one.",
        "read the entry of the sampled token id, not the first of the top-k",
        trainer="gather the trainer's logprob at the sampled token id",
    ),
    cause(
        "semantic/nonfinite",
        "The engine reports NaN, infinities or a placeholder in place of logprobs.",
        "find the corrupt row: check weights and KV for NaN, and never replace the value",
    ),
    cause(
        "semantic/bos",
        "The engine sees one BOS token more or fewer than the trainer.",
        "send token ids, or add_special_tokens=false on one of the two sides",
        vllm='send "prompt" as token ids',
        trainer="train on the token ids that the engine was sent, without adding or dropping a BOS",
    ),
    cause(
        "semantic/template",
        "The engine renders the chat template differently from the trainer.",
        "render the template once, in the trainer, and send token ids",
        vllm='send "prompt" as token ids to /v1/completions',
        trainer="train on the token ids that the engine was sent; never render the template a second time",
    ),
    cause(
        "semantic/tokenizer",
        "The engine makes other token ids of the same text than the trainer.",
        "give the engine the trainer's tokenizer, or send token ids",
        vllm='--tokenizer MODEL, or send "prompt" as token ids',
    ),
    cause(
        "semantic/retokenised",
        "Tokens were decoded to text and encoded again; the ids are no longer those that were sampled.",
        "carry token ids from turn to turn; never decode and encode a history",
    ),
    cause(
        "semantic/eos",
        "The end-of-sequence token is missing, added, or carries no logprob of its own.",
        "keep the stop token in the output with its own logprob, and use one set of EOS ids on both sides",
    ),
    cause(
        "semantic/seed",
        "Samples that should be independent share their noise.",
        "give every sample its own seed, or none",
    ),
    cause(
        "semantic/misbound-output",
        "Outputs are bound to the wrong requests.",
        "match outputs to requests by id, never by order of arrival",
    ),
    cause(
        "semantic/streaming",
        "What is streamed is not what is answered whole: pieces lose, repeat or misplace tokens or logprobs.",
        '"stream": false in every request, or the route that answers whole',
        sglang='"stream": false in every request, or start the server without --incremental-streaming-output',
    ),
    cause(
        "semantic/sampling-bias",
        "Sampled tokens do not follow the distribution whose logprobs are reported.",
        "look for truncation, penalties or a biased random generator between logits and token",
        llama_cpp="--top-k 0 --top-p 1 --min-p 0, or the same in every request: by default it cuts off",
    ),
)
