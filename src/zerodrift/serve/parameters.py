"""Which of vLLM's sampling parameters are honoured, and which refused? One table as data; none is ignored. Torch-free.

A parameter that is not honoured may be sent with the value that asks for nothing, as clients do that write out defaults.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from zerodrift.serve.errors import CallRefused


class Support(StrEnum):
    """What becomes of a parameter."""

    HONOURED = "honoured"
    REFUSED = "refused"


class ParameterRow(NamedTuple):
    """One row."""

    support: Support
    says: str
    """How it is honoured, or why it is not."""
    neutral: tuple[Any, ...] = (None,)
    """Of a refused one: values that ask for nothing, and are taken."""


def _honoured(says: str) -> ParameterRow:
    return ParameterRow(Support.HONOURED, says)


def _refused(says: str, neutral: Sequence[Any] = ()) -> ParameterRow:
    """Beside null, which every client may send."""
    return ParameterRow(Support.REFUSED, says, (None, *neutral))


SAMPLING: Mapping[str, ParameterRow] = {
    "n": _honoured("samples per prompt; noise depends on (seed, sample index, position) alone"),
    "presence_penalty": _honoured("over output tokens"),
    "frequency_penalty": _honoured("over output tokens"),
    "repetition_penalty": _honoured("over prompt and output"),
    "temperature": _honoured("0 is greedy; n is 1 there, and nothing is truncated"),
    "top_p": _honoured("1 keeps every token"),
    "top_k": _honoured("0 and -1 keep every token"),
    "min_p": _honoured("0 keeps every token"),
    "seed": _honoured("0 to 2^63 - 1; without one a seed is drawn, and the answer reports it"),
    "stop": _honoured(
        "a string or a list; the text ends before it, the token ids with the token that completed it"
    ),
    "stop_token_ids": _honoured("beside the model's own"),
    "ignore_eos": _honoured("go on after the end-of-sequence token"),
    "max_tokens": _honoured("16 in /v1/completions, else what the context leaves, unless given"),
    "min_tokens": _honoured("no stop token before"),
    "logprobs": _honoured("of the distribution that was sampled; alternatives up to --max-logprobs"),
    "prompt_logprobs": _honoured("raw, at temperature 1, as vLLM's; not in streams"),
    "logit_bias": _honoured("token id to bias in [-100, 100]"),
    "output_kind": _honoured(
        "a stream carries differences, an answer is whole: 0, 1 and 2 are the same here"
    ),
    "detokenize": _refused("text is always made where the model has a tokenizer", [True]),
    "skip_special_tokens": _refused("text leaves special tokens out; token ids have them all", [True]),
    "spaces_between_special_tokens": _refused("there are none in the text", [True]),
    "include_stop_str_in_output": _refused(
        "the text ends before a stop string; its token ids are whole", [False]
    ),
    "watermarking": _refused("it changes the distribution in a way that no trainer replays", [False]),
    "prompt_logprob_token_ids": _refused("ask for alternatives by prompt_logprobs"),
    "prompt_logprob_start": _refused("every prompt token is scored", [0]),
    "logprob_token_ids": _refused("ask for alternatives by logprobs"),
    "flat_logprobs": _refused("it is a form of vLLM's Python interface", [False]),
    "stream_interval": _refused("every step is streamed; a slow reader gets several together", [1]),
    "skip_clone": _refused("it is a matter of vLLM's Python interface", [False]),
    "output_text_buffer_length": _refused("a stream holds back what a stop string may cut, and no more", [0]),
    "structured_outputs": _refused("grammars mask logits in a way that no trainer replays"),
    "allowed_token_ids": _refused("it truncates in a way that no trainer replays; use logit_bias", [[]]),
    "bad_words": _refused("it masks logits by text; use logit_bias", [[]]),
    "extra_args": _refused("nothing reads them", [{}]),
    "skip_reading_prefix_cache": _refused(
        "a cache hit changes no bit here; use cache_salt to keep prompts apart", [False]
    ),
    "thinking_token_budget": _refused("it forces tokens that were not sampled"),
    "repetition_detection": _refused("it ends outputs by another rule than the trainer knows"),
    "routed_experts_prompt_start": _honoured(
        "routed experts are not reported, from wherever they would begin"
    ),
    "trace_decode_token_ids": _refused("score given tokens at /v1/token_logprobs"),
}
"""All public fields of SamplingParams in vLLM 0.32; a test compares the two."""

TEXT: Mapping[str, ParameterRow] = {
    name: SAMPLING[name]._replace(neutral=(None, True, False))
    for name in (
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    )
}
"""Those of the text, where ids alone are answered: none asks for anything there. `renderers` sends one with every request."""

OPENAI: Mapping[str, ParameterRow] = {
    "echo": _refused(
        "read the prompt's ids from prompt_token_ids, and its logprobs from prompt_logprobs", [False]
    ),
    "suffix": _refused("the model continues a prompt, and fills no gaps", [""]),
    "best_of": _refused("ask for n samples, and choose", [1]),
    "use_beam_search": _refused("beam search samples from no distribution", [False]),
    "length_penalty": _refused("it belongs to beam search", [1, 1.0]),
    "truncate_prompt_tokens": _refused("a prompt is never cut to size"),
    "truncation_side": _refused("a prompt is never cut to size"),
    "prompt_embeds": _refused("no tensors are taken from requests"),
    "add_special_tokens": _refused(
        "text is tokenized as the tokenizer does by default; send ids for another way", [True]
    ),
    "response_format": _refused("grammars mask logits in a way that no trainer replays", [{"type": "text"}]),
    "priority": _refused("requests are served in the order in which they came", [0]),
    "session_id": _refused("there is one engine, and no routing"),
    "return_token_offsets": _refused("offsets are not reported", [False]),
    "mm_payload": _refused("there are no images or sounds", [{}]),
    "return_mm_kwargs": _refused("there are no images or sounds", [False]),
    "kv_transfer_params": _refused("KV stays in this process", [{}]),
    "ec_transfer_params": _refused("KV stays in this process", [{}]),
    "vllm_xargs": _refused("nothing reads them", [{}]),
    "metadata": _refused("nothing is stored", [{}]),
    "store": _refused("nothing is stored", [False]),
    "service_tier": _refused("there is one", ["auto", "default"]),
    "user": _refused("nothing is kept of who asked"),
}
CHAT: Mapping[str, ParameterRow] = {
    "chat_template": _refused("a template from a request could run for ever; the model's own is used"),
    "tools": _refused("render them into the messages; the server calls no tools", [[]]),
    "tool_choice": _refused("the server calls no tools", ["none"]),
    "parallel_tool_calls": _refused("the server calls no tools", [True]),
    "functions": _refused("the server calls no tools", [[]]),
    "function_call": _refused("the server calls no tools", ["none"]),
    "reasoning_effort": _refused("set what the template reads by chat_template_kwargs"),
    "include_reasoning": _refused("the text is not parsed: reasoning is part of it", [True]),
    "continue_final_message": _refused(
        "render the prompt yourself, and send ids to /v1/completions", [False]
    ),
    "documents": _refused("put them into the messages", [[]]),
    "media_io_kwargs": _refused("there are no images or sounds", [{}]),
    "mm_processor_kwargs": _refused("there are no images or sounds", [{}]),
    "modalities": _refused("there is text alone", [["text"]]),
    "audio": _refused("there is text alone"),
    "prediction": _refused("nothing is predicted"),
    "return_prompt_text": _refused("read prompt_token_ids", [False]),
}
GENERATE: Mapping[str, ParameterRow] = {
    "token_offsets": _refused("offsets are not read"),
    "features": _refused("there are no images or sounds"),
    "content_parts": _refused("there are no images or sounds", [[]]),
    "reasoning_ended": _refused("the output is not parsed"),
    "reasoning_parser_kwargs": _refused("the output is not parsed"),
    "priority": OPENAI["priority"],
    "kv_transfer_params": OPENAI["kv_transfer_params"],
    "ec_transfer_params": OPENAI["ec_transfer_params"],
    "session_id": OPENAI["session_id"],
}


def refused_in(*tables: Mapping[str, ParameterRow]) -> dict[str, ParameterRow]:
    """The rows that are refused."""
    return {name: row for table in tables for name, row in table.items() if row.support is Support.REFUSED}


def without_refused(
    fields: Mapping[str, Any], refused: Mapping[str, ParameterRow], where: str = ""
) -> dict[str, Any]:
    """`fields` without those that ask for nothing; one that asks for something is refused by its name."""
    for name in fields.keys() & refused.keys():
        row, value = refused[name], fields[name]
        if not any(type(value) is type(each) and value == each for each in row.neutral):
            raise CallRefused(
                400, f"{where}{name} is not supported: {row.says}", code="parameter/not-supported", param=name
            )
    return {name: value for name, value in fields.items() if name not in refused}
