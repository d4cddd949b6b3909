"""What TGI accepts, how it refuses the rest, and the distribution a request asks for.

From router/src/lib.rs (fields, types, defaults), router/src/validation.rs (ranges, and the order of looking),
server/text_generation_server/utils/tokens.py and utils/logits_process.py (sampling) of the public repository huggingface/text-generation-inference.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import http_peer
import numpy as np
import policy as policies
from http_peer import TEXT, Answer, Call, Refused
from policy import Distribution, Floats, Policy, Rule


@dataclass(frozen=True)
class Limits:
    """The launcher's defaults; a client may ask for nothing beyond them."""

    max_input_tokens: int
    max_total_tokens: int
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4


@dataclass(frozen=True)
class Generation:
    ids: list[int]
    temperature: float
    repetition_penalty: float
    frequency_penalty: float
    top_k: int
    top_p: float
    sampling: bool
    max_new_tokens: int
    stop: list[str]
    seed: int
    top: int


def _unsigned(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# name -> (what its type takes, whether null stands for "not given")
_PARAMETERS: dict[str, tuple[Callable[[Any], bool], bool]] = {
    "best_of": (_unsigned, True),
    "temperature": (_number, True),
    "repetition_penalty": (_number, True),
    "frequency_penalty": (_number, True),
    "top_k": (lambda value: type(value) is int, True),
    "top_p": (_number, True),
    "typical_p": (_number, True),
    "do_sample": (_flag, False),
    "max_new_tokens": (_unsigned, True),
    "return_full_text": (_flag, True),
    "stop": (_texts, False),
    "truncate": (_unsigned, True),
    "watermark": (_flag, False),
    "details": (_flag, False),
    "decoder_input_details": (_flag, False),
    "seed": (_unsigned, True),
    "top_n_tokens": (_unsigned, True),
    "grammar": (lambda value: isinstance(value, dict), True),
    "adapter_id": (lambda value: isinstance(value, str), True),
}


_FALSE = dict.fromkeys(("do_sample", "watermark", "details", "decoder_input_details"), False)


def refused(message: str) -> Refused:
    """A request that could be read and not be done."""
    about = {"error": f"Input validation error: {message}", "error_type": "validation"}
    return Refused(Answer(about, 422))


def _unreadable(message: str) -> Refused:
    """A body that does not fit the types: plain text, not JSON."""
    return Refused(Answer(f"Failed to deserialize the JSON body into the target type: {message}", 422, TEXT))


def _object(call: Call) -> dict[str, Any]:
    if not call.headers.get("content-type", "").startswith("application/json"):
        raise Refused(Answer("Expected request with `Content-Type: application/json`", 415, TEXT))
    try:
        body = call.json()
    except ValueError as error:
        raise Refused(Answer(f"Failed to parse the request body as JSON: {error}", 400, TEXT)) from error
    if not isinstance(body, dict):
        raise _unreadable("a struct was expected")
    return body


def _check(given: dict[str, Any], types: dict[str, tuple[Callable[[Any], bool], bool]], where: str) -> None:
    """Names that are not known are not looked at, so a misspelt one changes nothing and nobody is told."""
    for name, (fits, optional) in types.items():
        if name in given and not (optional and given[name] is None) and not fits(given[name]):
            raise _unreadable(f"{where}{name}: invalid value")


def generate_body(call: Call) -> dict[str, Any]:
    body = _object(call)
    if not isinstance(body.get("inputs"), str):
        raise _unreadable("inputs: a string was expected")  # ids are not taken
    if not isinstance(body.get("parameters", {}), dict):
        raise _unreadable("parameters: a struct was expected")
    _check(body.get("parameters", {}), _PARAMETERS, "parameters.")
    return body


def parameters(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling is on where `parameters` is left out and off where it is there without `do_sample`."""
    given = body.get("parameters")
    defaults = dict.fromkeys(_PARAMETERS) | _FALSE | {"stop": []}
    return defaults | ({"do_sample": True} if given is None else given)


def validated(policy: Policy, limits: Limits, inputs: str, given: dict[str, Any]) -> Generation:
    _check_absent(given)
    _check_ranges(limits, given)
    if not inputs:
        raise refused("`inputs` is empty")
    ids = policy.encode(inputs)
    if given["truncate"] is not None:
        ids = ids[-given["truncate"] :]
    limit = given["max_new_tokens"]
    if limit is None:
        limit = max(limits.max_total_tokens - len(ids), 0)
    if len(ids) + min(limit, 1024) > limits.max_total_tokens:
        raise refused(f"{len(ids)} tokens and `max_new_tokens` {limit} exceed {limits.max_total_tokens}")
    if len(ids) > limits.max_input_tokens:
        raise refused(f"`inputs` has {len(ids)} tokens, the limit is {limits.max_input_tokens}")
    temperature = 1.0 if given["temperature"] is None else given["temperature"]
    top_k, top_p = given["top_k"] or 0, 1.0 if given["top_p"] is None else given["top_p"]
    penalty = given["repetition_penalty"]
    return Generation(
        ids=ids,
        temperature=temperature,
        repetition_penalty=1.0 if penalty is None else penalty,
        frequency_penalty=given["frequency_penalty"] or 0.0,
        top_k=top_k,
        top_p=top_p,
        # A temperature of 1 is no reason to sample: with `do_sample` left out it decodes greedily.
        sampling=given["do_sample"] or temperature != 1 or top_k != 0 or top_p < 1,
        max_new_tokens=limit,
        stop=given["stop"],
        seed=random.getrandbits(64) if given["seed"] is None else given["seed"],
        top=given["top_n_tokens"] or 0,
    )


def _check_absent(given: dict[str, Any]) -> None:
    for name in ("typical_p", "watermark", "grammar"):
        if given[name]:
            raise http_peer.not_in_this_peer(name)
    if (given["best_of"] or 1) != 1:
        raise http_peer.not_in_this_peer("best_of")


def _check_ranges(limits: Limits, given: dict[str, Any]) -> None:
    ranges: list[tuple[str, Callable[[Any], bool], str]] = [
        ("temperature", lambda value: value > 0, "has to be above 0"),
        ("repetition_penalty", lambda value: value > 0, "has to be above 0"),
        ("frequency_penalty", lambda value: -2 <= value <= 2, "has to be within -2 and 2"),
        ("top_p", lambda value: 0 < value < 1, "has to be above 0 and below 1"),
        ("top_k", lambda value: value > 0, "has to be above 0"),
        ("max_new_tokens", lambda value: value > 0, "has to be above 0"),
        ("stop", lambda value: len(value) <= limits.max_stop_sequences, "has too many strings"),
        ("top_n_tokens", lambda value: value <= limits.max_top_n_tokens, f"<= {limits.max_top_n_tokens}"),
        ("truncate", lambda value: 0 < value <= limits.max_input_tokens, "is out of range"),
    ]
    for name, holds, why in ranges:
        if given[name] is not None and not holds(given[name]):
            raise refused(f"`{name}` {why}. Given: {given[name]}")


def rule(request: Generation, policy: Policy) -> Rule:
    """Reported: after everything, top-k and top-p included, so that what cannot be drawn has minus infinity.

    Penalties look at the prompt too, and the frequency is a share of its length and the output's.
    """

    def distribution(logits: Floats, prompt: Sequence[int], output: Sequence[int]) -> Distribution:
        seen = [*prompt, *output]
        count = policies.counts(seen, policy.vocabulary)
        logits = policies.scale_seen(logits, count > 0, request.repetition_penalty)
        logits = logits - (np.float32(request.frequency_penalty) * (count / len(seen)).astype(np.float32))
        logits = logits / np.float32(request.temperature)
        if request.top_k:
            least = np.sort(logits)[-min(request.top_k, len(logits))]
            logits = np.where(logits < least, np.float32(-np.inf), logits)
        if request.top_p < 1:
            kept = policies.nucleus_mask(policies.softmax(logits), request.top_p)
            logits = np.where(kept, logits, np.float32(-np.inf))
        probabilities = policies.softmax(logits) if request.sampling else policies.only(logits)
        return Distribution(probabilities, policies.log_softmax(logits))

    return distribution
