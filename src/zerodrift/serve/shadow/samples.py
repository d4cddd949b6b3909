"""What can be scored of an answer that passed? Its samples, by ids and logprobs, or a word that says why not. Torch-free.

Nothing is added to what a client asked for: where it wants no ids or no logprobs there is nothing to compare.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends import sse
from zerodrift.backends.http import Stream
from zerodrift.backends.stream_deltas import join
from zerodrift.backends.vllm_routes import ROUTES, Choice
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import ZerodriftError

CHAT, IN_TOKENS = "/v1/chat/completions", "/inference/v1/generate"
_BY_PATH = {route.path: route for route in ROUTES.values()}
_FROM_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What generation_config.json of a checkpoint fills in where a request is silent."""
_SHAPES = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "vllm_xargs",
)
"""What changes a processed logprob beside these; nothing asks for nothing."""


class Unscored(Exception):
    """Why there is no score; the word is a label of a metric."""


class UpstreamFacts(NamedTuple):
    """What the engine says of itself."""

    kind: LogprobKind | None
    """None: it does not say."""
    adapters: frozenset[str]
    """Names of models that are a base and something on it."""
    fills_in: bool = True
    """Where a request is silent, a checkpoint's generation_config.json may speak."""


class Passed(NamedTuple):
    """A request and its answer, as they passed."""

    path: str
    asked: bytes
    answered: bytes
    streamed: bool


class ScorableSample(NamedTuple):
    """What the engine said of one sample."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def samples_of(passed: Passed, facts: UpstreamFacts) -> list[ScorableSample]:
    """Every sample of an answer."""
    asked = msgspec.json.decode(passed.asked)
    _check_asked(asked, facts, passed.path)
    try:
        return [_sample(choice, passed.path) for choice in _choices(passed)]
    except (ZerodriftError, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise Unscored("unreadable") from error


def _check_asked(asked: Mapping[str, Any], facts: UpstreamFacts, path: str) -> None:
    if asked.get("model") in facts.adapters:
        raise Unscored("adapter")
    parts = [message.get("content") for message in asked.get("messages") or [] if isinstance(message, dict)]
    kinds = {
        part.get("type")
        for content in parts
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    }
    if kinds - {"text"} or asked.get("features"):
        raise Unscored("multimodal")
    inner = asked.get("sampling_params") if path == IN_TOKENS else None
    sampling = inner if isinstance(inner, dict) else asked
    if _is_structured(asked, sampling):
        raise Unscored("structured")
    if facts.kind is not LogprobKind.RAW and not _is_plain(sampling, fills_in=facts.fills_in):
        raise Unscored("processed" if facts.kind else "kind-unknown")


def _is_structured(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> bool:
    """vLLM masks logits by a grammar before it takes raw logprobs of them, so that these are shaped too."""
    form = asked.get("response_format")
    free = form is None or (isinstance(form, dict) and form.get("type") == "text")
    forced = asked.get("tool_choice") not in (None, "none", "auto")
    return bool(sampling.get("structured_outputs")) or forced or not free


def _is_plain(asked: Mapping[str, Any], *, fills_in: bool) -> bool:
    """Whether raw and processed logprobs are the same number."""
    for name, plain in _FROM_DEFAULTS.items():
        told = asked.get(name)
        # -1 is another word of vLLM's for no top-k.
        if told not in (plain, -1 if name == "top_k" else plain) and (told is not None or fills_in):
            return False
    return not any(asked.get(name) for name in _SHAPES)


def _choices(passed: Passed) -> list[dict[str, Any]]:
    if passed.path == CHAT:
        if passed.streamed:
            raise Unscored("chat-stream")
        answer = msgspec.json.decode(passed.answered)
        return [
            {"prompt_token_ids": answer.get("prompt_token_ids"), **choice} for choice in answer["choices"]
        ]
    route = _BY_PATH[passed.path]
    if not passed.streamed:
        return route.choices(msgspec.json.decode(passed.answered), ())
    events = sse.read(passed.answered).data
    documents = [msgspec.json.decode(each) for each in events if each != sse.DONE]
    stream = Stream([each for each in documents if isinstance(each, dict)], events[-1:] == [sse.DONE])
    return route.choices(join(stream, route.streaming, passed.path).answer, ())


def _sample(raw: dict[str, Any], path: str) -> ScorableSample:
    choice = msgspec.convert(raw, Choice)
    if choice.token_ids is None or choice.prompt_token_ids is None:
        raise Unscored("no-ids")
    if choice.logprobs is None:
        raise Unscored("no-logprobs")
    if path == CHAT:
        logprobs = [entry["logprob"] for entry in choice.logprobs["content"]]
    else:
        logprobs = _BY_PATH[path].told(choice.logprobs).logprobs
    if len(logprobs) != len(choice.token_ids) or not logprobs or None in logprobs:
        raise Unscored("no-logprobs")
    if choice.weight_versions is not None and len(choice.weight_versions) > 1:
        raise Unscored("mixed")
    return ScorableSample(choice.prompt_token_ids, choice.token_ids, [float(each) for each in logprobs])
