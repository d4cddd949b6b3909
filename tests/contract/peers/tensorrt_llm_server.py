"""A peer that answers as trtllm-serve (TensorRT-LLM, PyTorch backend) does on its OpenAI routes.

Sources, all from the public repository NVIDIA/TensorRT-LLM (files as of 2026): docs "trtllm-serve" and "Sampling";
tensorrt_llm/serve/openai_protocol.py, serve/openai_server.py, serve/postprocess_handlers.py, sampling_params.py,
executor/result.py, executor/base_worker.py, _torch/pyexecutor/sampler/logprobs.py; pull requests 9675 and 12514
(raw and processed log-probabilities), 10809 (log-probabilities of completions), 13520 and 16851 (how many), 17172
(seeds). README.md beside this file says what comes from where.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import http_peer
import numpy as np
import policy as policies
from http_peer import TEXT, Answer, Call, Events, Refused
from policy import Distribution, Floats, Policy, Rule, Step

VERSION = "0.0.0+peer"  # no release of TensorRT-LLM
LEAST = -9999.0  # what minus infinity is written as
# Every field of the request; one that is not here is refused.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(
        ("model", "prompt", "best_of", "logit_bias", "logprobs", "max_tokens", "seed", "stream_options")
    ),
    **dict.fromkeys(
        ("suffix", "temperature", "top_p", "user", "lora_request", "length_penalty", "early_stopping")
    ),
    **dict.fromkeys(("truncate_prompt_tokens", "thinking_token_budget", "response_format", "priority")),
    **dict.fromkeys(("disaggregated_params", "conversation_params")),
    **dict.fromkeys(("echo", "stream", "use_beam_search", "include_stop_str_in_output", "ignore_eos"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    **dict.fromkeys(("detokenize", "add_special_tokens"), True),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_p_min", "min_p"), 0.0),
    **dict.fromkeys(("top_k", "min_tokens", "prompt_ignore_length"), 0),
    "return_context_logits": False,
    "repetition_penalty": 1.0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
}
INTEGERS = frozenset({"logprobs", "max_tokens", "seed", "n", "top_k", "min_tokens", "best_of"})
NOT_HERE = (
    "best_of",
    "use_beam_search",
    "lora_request",
    "response_format",
    "return_context_logits",
    "top_p_min",
)


@dataclass(frozen=True)
class Generated:
    steps: list[Step]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def ids(self) -> list[int]:
        return [step.token for step in self.steps]


class TensorrtLlmPeer:
    def __init__(self, model: str, *, seeded: bool, most_logprobs: int) -> None:
        self.policy = policies.load(model)
        self.seeded, self.most_logprobs = seeded, most_logprobs
        self._draws = np.random.default_rng()

    @property
    def routes(self) -> dict[str, Callable[[Call], Answer | Events]]:
        return {
            "POST /v1/completions": self.completions,
            "GET /v1/models": lambda _: Answer({"object": "list", "data": [self._card()]}),
            "GET /health": lambda _: Answer(),
            "GET /version": lambda _: Answer({"version": VERSION}),
            "GET /metrics": lambda _: Answer([]),
            "GET /server_info": lambda _: Answer({"disaggregated_params": {}}),
            # Needs the asynchronous engine of a trainer; trtllm-serve alone fails an assertion.
            "POST /update_weights": lambda _: Answer("Internal Server Error", 500, TEXT),
        }

    def absent(self, status: int) -> Answer:
        return Answer({"detail": "Not Found" if status == 404 else "Method Not Allowed"}, status)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.policy.spec,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "tensorrt_llm",
        }

    def completions(self, call: Call) -> Answer | Events:
        request = self._request(call)
        prompt = request["prompt"]
        single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        prompts = [prompt] if single else prompt
        try:
            ids = [self.policy.encode(each) if isinstance(each, str) else each for each in prompts]
            for given, each in zip(prompts, ids, strict=True):
                self._check(request, given, each)
            if request["stream"]:
                return Events(self._events(request, prompts, ids))
            finished = [list(self._run(request, each))[-1] for each in ids]
        except (ValueError, TypeError, IndexError) as error:
            return _failed(str(error))
        choices = []
        for index, (each, generated) in enumerate(zip(prompts, finished, strict=True)):
            choice = self._choice(request, generated, index, each if request["echo"] else "")
            choices.append({**choice, "context_logits": None, "disaggregated_params": None})
        answer = self._answer(request, choices, _usage(ids, finished))
        return Answer({**answer, "prompt_token_ids": None if single or len(prompts) == 1 else []})

    def _request(self, call: Call) -> dict[str, Any]:
        try:
            given = call.json()
        except ValueError as error:
            raise _invalid(f"JSON decode error: {error}") from error
        if not isinstance(given, dict):
            raise _invalid("the body has to be an object")
        _check_fields(given)
        if not 0 <= (given.get("logprobs") or 0) <= self.most_logprobs:
            raise _invalid(f"logprobs has to be within 0 and {self.most_logprobs}")
        for name in NOT_HERE:
            if given.get(name):
                raise http_peer.not_in_this_peer(name)
        if given.get("n", 1) != 1:
            raise http_peer.not_in_this_peer("n")
        return DEFAULTS | given

    def _check(self, request: dict[str, Any], given: Any, ids: Sequence[int]) -> None:
        if request["echo"] and not isinstance(given, str):
            raise TypeError("an echo of token ids cannot be put before the text")
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) >= self.policy.context:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves nothing of {self.policy.context}")
        ranges = {
            "temperature": (request["temperature"] or 0) >= 0,
            "top_p": 0 <= (1 if request["top_p"] is None else request["top_p"]) <= 1,
            "top_k": request["top_k"] >= 0,
            "repetition_penalty": request["repetition_penalty"] > 0,
        }
        for name, holds in ranges.items():
            if not holds:
                raise ValueError(f"{name} is out of range: {request[name]}")

    def _events(self, request: dict[str, Any], prompts: list[Any], ids: list[list[int]]) -> Iterator[str]:
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        about["model"] = request["model"]
        options = request["stream_options"] or {"include_usage": False}
        include = options.get("include_usage", True)
        continuous = include and options.get("continuous_usage_stats", False)
        for index, (prompt, each) in enumerate(zip(prompts, ids, strict=True)):
            sent, generated = 0, Generated([], None, None)
            for generated in self._run(request, each):
                before = prompt if request["echo"] and not sent else ""
                choice = self._choice(request, generated, index, before, sent)
                usage = _usage([each], [generated]) if continuous else None
                yield _event({**about, "choices": [choice], "usage": usage})
                sent = len(generated.steps)
            if include:
                yield _event({**about, "choices": [], "usage": _usage([each], [generated])})
        yield "data: [DONE]\n\n"

    def _run(self, request: dict[str, Any], ids: list[int]) -> Iterator[Generated]:
        """After every token, everything so far. A matched stop token or string is taken off again at the end."""
        seed = request["seed"]
        draws = np.random.default_rng(seed) if self.seeded and seed is not None else self._draws
        room = self.policy.context - len(ids)
        limit = room if request["max_tokens"] is None else min(request["max_tokens"], room)
        done: list[Step] = []
        for step in policies.steps(self.policy, ids, _rule(request, self.policy), draws, limit):
            done.append(step)
            stop = self._stopped(request, [each.token for each in done])
            if stop is not None:
                kept = done if request["include_stop_str_in_output"] else done[: len(done) - stop[1]]
                yield Generated(list(kept), "stop", stop[0])
                return
            if step.token == self.policy.end and not request["ignore_eos"]:
                yield Generated(list(done), "stop", None)
                return
            yield Generated(list(done), "length" if len(done) == limit else None, None)

    def _stopped(self, request: dict[str, Any], ids: list[int]) -> tuple[int | str, int] | None:
        """(the reason, tokens to take off)."""
        if ids[-1] in (request["stop_token_ids"] or []):
            return ids[-1], 1
        stops = [request["stop"]] if isinstance(request["stop"], str) else request["stop"] or []
        for stop in stops:
            words = self.policy.encode(stop)
            if ids[-len(words) :] == words:
                return stop, len(words)
        return None

    def _choice(
        self, request: dict[str, Any], generated: Generated, index: int, before: str, sent: int = 0
    ) -> dict[str, Any]:
        """Ids and text exclude each other: ids come with `detokenize: false` alone."""
        skip = request["skip_special_tokens"]
        text = self.policy.decode(generated.ids, skip_special=skip)
        known = self.policy.decode(generated.ids[:sent], skip_special=skip)
        fresh = generated.steps[sent:]
        detokenize = request["detokenize"]
        return {
            "index": index,
            "text": before + text[len(known) :] if detokenize else "",
            "token_ids": None if detokenize else generated.ids[sent:],
            # 0 is false: it gives none at all, not the sampled token's alone.
            "logprobs": self._logprobs(fresh, request["logprobs"], len(known))
            if request["logprobs"]
            else None,
            "finish_reason": generated.finish_reason,
            "stop_reason": generated.stop_reason,
            "avg_decoded_tokens_per_iter": None,
        }

    def _logprobs(self, done: list[Step], n: int, offset: int) -> dict[str, Any]:
        """Tokens are strings even where ids were asked for; two tokens with one string share an entry of the top.

        Each offset but the first adds the length of its own token where the one before was meant.
        """
        words = [self.policy.decode([step.token], skip_special=False) for step in done]
        offsets: list[int] = []
        for word in words:
            offsets.append(offset if not offsets else offsets[-1] + len(word))
        best: list[dict[str, float]] = []
        for step in done:
            ranked = [step.token, *policies.top(step.reported, n)]
            best.append(
                {
                    self.policy.decode([token], skip_special=False): _value(float(step.reported[token]))
                    for token in dict.fromkeys(ranked)
                }
            )
        values = [_value(step.logprob) for step in done]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": words, "top_logprobs": best}

    def _answer(self, request: dict[str, Any], choices: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        return {**about, "model": request["model"], "choices": choices, "usage": usage}


def _check_fields(given: dict[str, Any]) -> None:
    for name in given.keys() - DEFAULTS.keys():
        raise _invalid(f"{name}: extra inputs are not permitted")
    if not isinstance(given.get("model"), str) or not isinstance(given.get("prompt"), str | list):
        raise _invalid("model and prompt are required")
    for name in INTEGERS & given.keys():
        if given[name] is not None and type(given[name]) is not int:
            raise _invalid(f"{name}: an integer was expected")
    if given.get("stream_options") and not given.get("stream"):
        raise _invalid("stream_options without stream")
    if given.get("suffix"):
        raise _invalid("suffix is not supported")


def _value(logprob: float) -> float:
    return max(logprob, LEAST)


def _usage(ids: list[list[int]], finished: list[Generated]) -> dict[str, Any]:
    prompt, completion = sum(map(len, ids)), sum(len(each.steps) for each in finished)
    counted = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return {**counted, "prompt_tokens_details": {"cached_tokens": 0}}


def _event(answer: dict[str, Any]) -> str:
    return f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"


def _invalid(message: str) -> Refused:
    """The request does not fit its type: one key, and the list of what is wrong as one string."""
    return Refused(Answer({"error": message}, 400))


def _failed(message: str) -> Answer:
    """Whatever else went wrong, on either side: status 400."""
    about = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return Answer(about, 400)


def _rule(request: dict[str, Any], policy: Policy) -> Rule:
    """Reported: raw, as the model has it; the route has no field for the processed ones.

    Penalties look at prompt and output; min-p comes first, then top-k, then top-p on what top-k left.
    """
    temperature = 1.0 if request["temperature"] is None else request["temperature"]
    top_p = 1.0 if request["top_p"] is None else request["top_p"]
    greedy = temperature == 0 or top_p == 0 or request["top_k"] == 1 or request["min_p"] == 1

    def distribution(logits: Floats, prompt: Sequence[int], output: Sequence[int]) -> Distribution:
        reported = policies.log_softmax(logits)
        counted = policies.counts([*prompt[request["prompt_ignore_length"] :], *output], policy.vocabulary)
        seen = policies.counts([*prompt, *output], policy.vocabulary) > 0
        logits = policies.scale_seen(logits, seen, request["repetition_penalty"])
        penalties = request["presence_penalty"] or 0.0, request["frequency_penalty"] or 0.0
        logits = policies.subtract_seen(logits, counted, *penalties)
        for token, bias in (request["logit_bias"] or {}).items():
            logits[int(token)] += np.float32(bias)
        if len(output) < request["min_tokens"]:
            logits[policy.end] = -np.inf
        if greedy:
            return Distribution(policies.only(logits), reported)
        probabilities = policies.softmax(logits / np.float32(temperature))
        probabilities = probabilities * policies.min_p_mask(probabilities, request["min_p"])
        probabilities = probabilities * policies.top_k_mask(probabilities, request["top_k"])
        return Distribution(probabilities * policies.nucleus_mask(probabilities, top_p), reported)

    return distribution


def serve(
    model: str = policies.DEFAULT_MODEL, port: int = 0, *, seeded: bool = True, most_logprobs: int = 100
) -> AbstractContextManager[str]:
    """`seeded=False` is a release before August 2026, `most_logprobs=20` one before July 2026."""
    return http_peer.listening(TensorrtLlmPeer(model, seeded=seeded, most_logprobs=most_logprobs), port)
