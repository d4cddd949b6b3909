"""A `/generate` request of SGLang's native API: its fields, its refusals, and the distribution it asks for.

From python/sglang/srt/managers/io_struct.py, entrypoints/http_server.py (shapes of errors),
sampling/sampling_params.py (names, defaults, ranges), sampling/penaltylib/ and sampling/sampling_batch_info.py (penalties look at the output alone, before the temperature) and layers/sampler.py
(what is reported) of the public repository sgl-project/sglang.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import http_peer
import numpy as np
import policy as policies
from http_peer import Answer, Call, Refused
from policy import Distribution, Floats, Policy, Rule

WHOLE_VOCABULARY = 1 << 30


@dataclasses.dataclass
class SamplingParams:
    """`sampling_params`; a name that is not here is an unhandled TypeError, and a null is the default."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = WHOLE_VOCABULARY
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stop_regex: str | list[str] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, field.default)
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = WHOLE_VOCABULARY
        if any((self.json_schema, self.regex, self.ebnf, self.structural_tag, self.stop_regex)):
            raise http_peer.not_in_this_peer("constrained decoding")

    def verify(self) -> None:
        limits = {
            "temperature": self.temperature >= 0 and np.isfinite(self.temperature),
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "top_k": self.top_k >= 1,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "repetition_penalty": 0 < self.repetition_penalty <= 2,
            "min_new_tokens": 0 <= self.min_new_tokens <= (self.max_new_tokens or 0),
            "max_new_tokens": (self.max_new_tokens or 0) >= 0,
        }
        for name, holds in limits.items():
            if not holds:
                raise ValueError(f"{name} is out of range: {getattr(self, name)}")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


@dataclasses.dataclass
class Generation:
    """One prompt of a `/generate` call. Fields of the body that are not known are dropped in silence."""

    ids: list[int]
    sampling: SamplingParams
    logprobs: bool
    start: int  # of the prompt's log-probabilities; len(ids) for none
    top: int
    id: str


def invalid(message: str) -> Answer:
    about = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return Answer(about, 400)


def body_of(call: Call) -> dict[str, Any]:
    try:
        body = call.json()
    except ValueError as error:
        raise Refused(invalid(f"not JSON: {error}")) from error
    if not isinstance(body, dict):
        raise Refused(invalid("the body has to be an object"))
    return body


def check_types(body: dict[str, Any]) -> None:
    """The types of the declared fields, refused before the request is looked at; the rest is not looked at at all."""
    ids = body.get("input_ids")
    if ids is not None:
        flat = ids if isinstance(ids, list) and not (ids and isinstance(ids[0], list)) else None
        rows = [flat] if flat is not None else ids
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and all(type(token) is int for token in row) for row in rows
        ):
            raise Refused(invalid("input_ids: a list of integers, or a list of such lists"))
    params = body.get("sampling_params")
    if params is not None and not isinstance(params, dict | list):
        raise Refused(invalid("sampling_params: an object, or a list of objects"))


def item(body: dict[str, Any], name: str, index: int, default: Any) -> Any:
    """One value for all prompts, or a list with one for each; null is the default."""
    value = body.get(name)
    if isinstance(value, list):
        value = value[index]
    return default if value is None else value


def rule(params: SamplingParams, policy: Policy, *, original: bool) -> Rule:
    """Reported: after penalties and temperature, before top-k, top-p and min-p.

    `original` is SGLANG_RETURN_ORIGINAL_LOGPROB=true: without the temperature. Greedy decoding never has one.
    """

    def distribution(logits: Floats, _: Sequence[int], output: Sequence[int]) -> Distribution:
        logits = _penalised(params, policy, logits, output)
        if params.top_k <= 1:
            return Distribution(policies.only(logits), policies.log_softmax(logits))
        scaled = logits / np.float32(params.temperature)
        probabilities = policies.softmax(scaled)
        kept = policies.top_k_mask(probabilities, params.top_k)
        kept &= policies.nucleus_mask(probabilities, params.top_p)
        kept &= policies.min_p_mask(probabilities, params.min_p)
        return Distribution(probabilities * kept, policies.log_softmax(logits if original else scaled))

    return distribution


def _penalised(params: SamplingParams, policy: Policy, logits: Floats, output: Sequence[int]) -> Floats:
    count = policies.counts(output, policy.vocabulary)
    logits = policies.subtract_seen(logits, count, params.presence_penalty, params.frequency_penalty)
    logits = policies.scale_seen(logits, count > 0, params.repetition_penalty)
    if len(output) < params.min_new_tokens:
        for token in {policy.end, *(params.stop_token_ids or [])}:
            logits[token] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[int(token_id)] += np.float32(bias)
    return logits
