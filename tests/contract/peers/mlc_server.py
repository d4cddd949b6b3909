"""A peer that answers as MLC LLM's REST server does on /v1/completions.

Sources, all from the public repository mlc-ai/mlc-llm (main, July 2026): docs/deploy/rest.rst;
python/mlc_llm/protocol/openai_api_protocol.py and error_protocol.py, python/mlc_llm/serve/engine_base.py,
serve/engine_utils.py, serve/entrypoints/, serve/server/server_context.py, interface/serve.py,
compiler_pass/attach_logit_processor.py and attach_softmax_with_temperature.py; cpp/serve/data.cc, config.cc,
logit_processor.cc, request_state.cc, sampler/cpu_sampler.cc, engine_actions/batch_decode.cc. README.md beside this
file says what comes from where.
"""

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import http_peer
import numpy as np
import policy as policies
from http_peer import TEXT, Answer, Call, Events, Refused
from policy import Distribution, Floats, Policy, Rule, Step

MOST_TOP_LOGPROBS = 5  # of a completion; 20 of a chat
LEAST_PROBABILITY = 1e-10
NO_TEMPERATURE = 1e-5  # below it the softmax is one over the number of maxima
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("model", "prompt", "frequency_penalty", "presence_penalty", "logprobs", "logit_bias")),
    **dict.fromkeys(
        ("max_tokens", "seed", "stop", "stream_options", "suffix", "temperature", "top_p", "user")
    ),
    **dict.fromkeys(("response_format", "debug_config")),
    "best_of": 1,
    "n": 1,
    "echo": False,
    "stream": False,
}
NUMBERS = frozenset({"frequency_penalty", "presence_penalty", "temperature", "top_p"})
INTEGERS = frozenset({"best_of", "logprobs", "max_tokens", "n", "seed"})


class MlcPeer:
    def __init__(self, model: str, *, debug: bool) -> None:
        self.policy = policies.load(model)
        self.debug = debug

    @property
    def routes(self) -> dict[str, Callable[[Call], Answer | Events]]:
        return {
            "POST /v1/completions": self.completions,
            "GET /v1/models": lambda _: Answer({"object": "list", "data": [self._card()]}),
            "GET /metrics": lambda _: Answer("", media=TEXT),
        }

    def absent(self, status: int) -> Answer:
        return Answer({"detail": "Not Found" if status == 404 else "Method Not Allowed"}, status)

    def _card(self) -> dict[str, Any]:
        return {"id": self.policy.spec, "created": int(time.time()), "object": "model", "owned_by": "MLC-LLM"}

    def completions(self, call: Call) -> Answer | Events:
        """One engine answers whatever `model` says, and `user` is taken for the request's id."""
        request = _request(call)
        if request["best_of"] != 1:
            raise _bad_request("best_of is not supported")
        if request["n"] != 1 or request["response_format"]:
            raise http_peer.not_in_this_peer("n and response_format")
        prompt = request["prompt"]
        ids = self.policy.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise _bad_request("the prompt is empty")
        if len(ids) > self.policy.context:
            raise _bad_request(f"the prompt has {len(ids)} tokens, the limit is {self.policy.context}")
        name = request["user"] or f"cmpl-{uuid.uuid4().hex}"
        chunks = self._chunks(request, ids)
        if request["stream"]:
            return Events(self._events(request, name, chunks))
        return Answer(_gathered(request, name, list(chunks)))

    def _events(self, request: dict[str, Any], name: str, chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
        for chunk in chunks:
            usage = chunk.pop("usage", None)
            if usage is None:
                yield _event(_response(request, name, [chunk], None))
            elif (request["stream_options"] or {}).get("include_usage"):
                yield _event(_response(request, name, [], usage))
        yield "data: [DONE]\n\n"

    def _chunks(self, request: dict[str, Any], ids: list[int]) -> Iterator[dict[str, Any]]:
        """Choices as they are streamed, the usage last.

        A token that adds no text yet, a part of a character, sends nothing, and its log-probability is lost.
        """
        if request["echo"]:
            yield _choice(self.policy.decode(ids, skip_special=False), None, None)
        pieces = policies.Pieces(self.policy)
        done = 0
        for step, reason, visible in self._run(request, ids):
            done += 1
            text = pieces.push(step.token) if visible else ""
            text += pieces.rest() if reason else ""
            if text or reason:
                yield _choice(text, reason, self._logprobs(request, step))
        if request["suffix"] is not None:
            yield _choice(request["suffix"], None, None)
        counted = {"prompt_tokens": len(ids), "completion_tokens": done, "total_tokens": len(ids) + done}
        yield {"usage": {**counted, "extra": None}}

    def _run(self, request: dict[str, Any], ids: list[int]) -> Iterator[tuple[Step, str | None, bool]]:
        """(step, why it was the last, whether its text is sent): the stop token's is not, its log-probability is."""
        debug = (request["debug_config"] or {}) if self.debug else {}
        room = self.policy.context - len(ids)
        limit = room if request["max_tokens"] is None else min(request["max_tokens"], room)
        stops = [request["stop"]] if isinstance(request["stop"], str) else request["stop"] or []
        seed = random.getrandbits(31) if request["seed"] is None else request["seed"]
        draws = np.random.default_rng(abs(seed))
        output: list[int] = []
        for step in policies.steps(self.policy, ids, _rule(request, self.policy), draws, limit):
            output.append(step.token)
            if step.token == self.policy.end and not debug.get("ignore_eos"):
                yield step, "stop", False
                return
            stopped = any(stop in self.policy.decode(output) for stop in stops)
            yield step, "stop" if stopped else "length" if len(output) == limit else None, not stopped
            if stopped:
                return

    def _logprobs(self, request: dict[str, Any], step: Step) -> dict[str, Any] | None:
        if request["logprobs"] is None:
            return None
        best: dict[str, float] = {}
        for token in policies.top(step.reported, request["logprobs"]):
            # Two tokens with the same visible characters: the less probable one is what remains.
            best[self._visible(token)] = _written(float(step.reported[token]))
        return {
            "text_offset": None,
            "token_logprobs": [_written(step.logprob)],
            "tokens": [self._visible(step.token)],
            "top_logprobs": [best],
        }

    def _visible(self, token: int) -> str:
        """Of a token's bytes only the visible ASCII ones are written: no space, no newline, no other script."""
        return "".join(c for c in self.policy.decode([token], skip_special=False) if "!" <= c <= "~")


def _written(logprob: float) -> float:
    """Six significant digits, and never below the logarithm of 1e-10."""
    return float(f"{max(logprob, float(np.log(np.float32(LEAST_PROBABILITY)))):.6g}")


def _rule(request: dict[str, Any], policy: Policy) -> Rule:
    """Reported: of the distribution drawn from, after temperature and top-p, so 0 for whatever greedy decoding takes.

    Penalties look at the output alone. There is no top-k, no min-p and no repetition penalty on this route.
    """
    temperature = 1.0 if request["temperature"] is None else request["temperature"]
    top_p = 1.0 if request["top_p"] is None else request["top_p"]

    def distribution(logits: Floats, _: Sequence[int], output: Sequence[int]) -> Distribution:
        for token, bias in (request["logit_bias"] or {}).items():
            logits[int(token)] += np.float32(bias)
        penalties = request["presence_penalty"] or 0.0, request["frequency_penalty"] or 0.0
        logits = policies.subtract_seen(logits, policies.counts(output, policy.vocabulary), *penalties)
        if temperature < NO_TEMPERATURE:
            probabilities = (logits == logits.max()).astype(np.float32)
        else:
            probabilities = policies.softmax(logits / np.float32(temperature))
        if top_p < 1:
            probabilities = probabilities * policies.nucleus_mask(probabilities, top_p)
        probabilities = probabilities / probabilities.sum()
        return Distribution(probabilities, np.log(np.maximum(probabilities, np.float32(LEAST_PROBABILITY))))

    return distribution


def _choice(text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"finish_reason": reason, "index": 0, "logprobs": logprobs, "text": text}


def _gathered(request: dict[str, Any], name: str, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Without streaming: the streamed chunks put together, with what they lost."""
    *pieces, last = chunks
    lists = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    logprobs: dict[str, Any] | None = None
    if lists:
        logprobs = {"text_offset": None}
        for key in ("token_logprobs", "tokens", "top_logprobs"):
            logprobs[key] = [value for each in lists for value in each[key]]
    reason = next((piece["finish_reason"] for piece in pieces if piece["finish_reason"]), None)
    choice = _choice("".join(piece["text"] for piece in pieces), reason, logprobs)
    return _response(request, name, [choice], last["usage"])


def _response(request: dict[str, Any], name: str, choices: list[Any], usage: Any) -> dict[str, Any]:
    about = {"id": name, "choices": choices, "created": int(time.time()), "model": request["model"]}
    return {**about, "object": "text_completion", "usage": usage}


def _event(answer: dict[str, Any]) -> str:
    return f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"


def _bad_request(message: str) -> Refused:
    """JSON inside a JSON string: the error is encoded twice."""
    return Refused(Answer(json.dumps({"object": "error", "message": message, "code": 400}), 400))


def _invalid(name: str, message: str) -> Refused:
    detail = {"type": "value_error", "loc": ["body", name], "msg": message, "input": None}
    return Refused(Answer({"detail": [detail]}, 422))


def _request(call: Call) -> dict[str, Any]:
    """Names that are not known are dropped in silence."""
    try:
        given = call.json()
    except ValueError as error:
        raise _invalid("json", str(error)) from error
    if not isinstance(given, dict):
        raise _invalid("body", "an object was expected")
    prompt = given.get("prompt")
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not ids:
        raise _invalid("prompt", "a string or one list of integers was expected")
    for name in (NUMBERS | INTEGERS) & given.keys():
        kind: Any = int if name in INTEGERS else int | float
        if given[name] is not None and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise _invalid(name, "a number was expected")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= (given.get(name) or 0) <= 2:
            raise _invalid(name, "outside of -2 to 2")
    if given.get("logprobs") is not None and not 0 <= given["logprobs"] <= MOST_TOP_LOGPROBS:
        raise _invalid("logprobs", f"outside of 0 to {MOST_TOP_LOGPROBS}")
    if any(abs(bias) > 100 for bias in (given.get("logit_bias") or {}).values()):
        raise _invalid("logit_bias", "outside of -100 to 100")
    return DEFAULTS | {name: value for name, value in given.items() if name in DEFAULTS}


def serve(
    model: str = policies.DEFAULT_MODEL, port: int = 0, *, debug: bool = False
) -> AbstractContextManager[str]:
    """`debug` is --enable-debug, without which `debug_config` (and so `ignore_eos`) is dropped in silence."""
    return http_peer.listening(MlcPeer(model, debug=debug), port)


if __name__ == "__main__":
    http_peer.run("answers as MLC LLM does", serve, policies.DEFAULT_MODEL)
