"""A peer that answers as SGLang's native HTTP API does.

Sources, all from the public repository sgl-project/sglang (main, August 2026): docs "SGLang Native APIs", "Sampling
Parameters" and "Environment Variables"; python/sglang/srt/entrypoints/http_server.py, managers/io_struct.py,
managers/tokenizer_manager.py, managers/scheduler.py, managers/schedule_batch.py, sampling/sampling_params.py,
sampling/sampling_batch_info.py, sampling/penaltylib/, layers/sampler.py,
managers/scheduler_components/logprob_result_processor.py. README.md beside this file says what comes from where.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import http_peer
import numpy as np
import policy as policies
import sglang_request
from http_peer import Answer, Call, Events, Refused
from policy import Floats, Policy, Step
from sglang_request import Generation, SamplingParams, body_of, check_types, invalid, item

VERSION = "0.0.0+peer"  # no release of SGLang
SEED_WITHOUT_A_SEED = 42  # what deterministic inference takes for a request that names none


class SglangPeer:
    def __init__(self, model: str, *, deterministic: bool, incremental: bool, original: bool) -> None:
        self.policy = policies.load(model)
        self.deterministic, self.incremental, self.original = deterministic, incremental, original
        self.model_path, self.served, self.tokenizer_path = model, model, model
        self.weight_version = "default"
        self.started = time.time()
        self._cached: list[list[int]] = []
        self._draws = np.random.default_rng()

    @property
    def routes(self) -> dict[str, Callable[[Call], Answer | Events]]:
        return {
            "POST /generate": self.generate,
            "PUT /generate": self.generate,
            "GET /health": lambda _: Answer(),
            "GET /health_generate": lambda _: Answer(),
            "GET /model_info": lambda _: Answer(self.model_info()),
            "GET /get_model_info": lambda _: Answer(self.model_info()),
            "GET /server_info": lambda _: Answer(self.server_info()),
            "GET /get_server_info": lambda _: Answer(self.server_info()),
            "GET /get_weight_version": lambda _: _deprecated_weight_version(),
            "GET /weight_version": lambda _: _deprecated_weight_version(),
            "GET /flush_cache": self.flush_cache,
            "POST /flush_cache": self.flush_cache,
            "POST /update_weights_from_disk": self.update_weights_from_disk,
            "GET /v1/models": lambda _: Answer(self.model_cards()),
        }

    def absent(self, status: int) -> Answer:
        return Answer({"detail": "Not Found" if status == 404 else "Method Not Allowed"}, status)

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "served_model_name": self.served,
            "tokenizer_path": self.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.policy.config.model_type,
            "architectures": self.policy.config.architectures,
        }

    def server_info(self) -> dict[str, Any]:
        """The launch arguments as they were, never updated by a weight update; a few of some hundred."""
        return {
            "model_path": self.tokenizer_path,
            "tokenizer_path": self.tokenizer_path,
            "served_model_name": self.tokenizer_path,
            "weight_version": "default",
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "quantization": None,
            "context_length": None,
            "random_seed": 0,
            "tp_size": 1,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_radix_cache": False,
            "chunked_prefill_size": -1,
            "enable_deterministic_inference": self.deterministic,
            "rl_on_policy_target": None,
            "speculative_algorithm": None,
            "incremental_streaming_output": self.incremental,
            "sampling_defaults": "model",
            "max_total_num_tokens": self.policy.context,
            "startup_time": self.started,
            "internal_states": [{}],
            "version": VERSION,
            "kv_events": None,
        }

    def model_cards(self) -> dict[str, Any]:
        card = {"id": self.served, "object": "model", "created": int(self.started), "owned_by": "sglang"}
        rest = {"root": self.served, "parent": None, "max_model_len": self.policy.context}
        return {"object": "list", "data": [{**card, **rest}]}

    def flush_cache(self, _: Call) -> Answer:
        self._cached.clear()
        return Answer("Cache flushed.\n", media=http_peer.TEXT)

    def update_weights_from_disk(self, call: Call) -> Answer:
        body = body_of(call)
        if not isinstance(body.get("model_path"), str):
            raise Refused(invalid("model_path: a string is required"))
        try:
            loaded = Policy(body["model_path"])  # anew: the files may have changed since
            _check_same_shape(self.policy, loaded)
        except Exception as error:
            return Answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.policy = loaded
        self.model_path = self.served = body["model_path"]
        if body.get("flush_cache", True):
            self._cached.clear()
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
            message += f" Weight version updated to {self.weight_version}."
        return Answer({"success": True, "message": message, "num_paused_requests": 0})

    def generate(self, call: Call) -> Answer | Events:
        body = body_of(call)
        check_types(body)
        if body.get("stream"):
            return Events(self._events(body))
        try:
            requests, batched = self._requests(body)
            answers = [list(self._run(request))[-1] for request in requests]
        except ValueError as error:
            return Answer({"error": {"message": str(error)}}, 400)
        return Answer(answers if batched else answers[0])

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        try:
            requests, batched = self._requests(body)
            for index, request in enumerate(requests):
                for answer in self._run(request, incremental=self.incremental):
                    yield _event({**answer, "index": index} if batched else answer)
        except ValueError as error:
            about = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            yield _event({"error": about})
        yield "data: [DONE]\n\n"

    def _requests(self, body: dict[str, Any]) -> tuple[list[Generation], bool]:
        """Every prompt, `n` times each, and whether the answer is a list."""
        given, text = body.get("input_ids"), body.get("text")
        if given is None and text is None:
            raise ValueError("one of text, input_ids and input_embeds has to be given")
        if given is not None and not given:
            raise ValueError("input_ids is empty")
        batched = isinstance(given[0] if given else text, list)
        prompt_or_prompts: Any = given or text
        prompts: list[Any] = prompt_or_prompts if batched else [prompt_or_prompts]
        requests = []
        for index, prompt in enumerate(prompts):
            ids = self.policy.encode(prompt) if isinstance(prompt, str) else prompt
            sampling = item(body, "sampling_params", index, {})
            params = SamplingParams(**sampling)
            params.verify()
            requests += [self._request(body, index, ids, params, sampling) for _ in range(params.n)]
        return requests, batched or len(requests) > 1

    def _request(
        self, body: dict[str, Any], index: int, ids: list[int], params: SamplingParams, given: dict[str, Any]
    ) -> Generation:
        if len(ids) >= self.policy.context:
            raise ValueError(f"{len(ids)} input tokens do not fit a context of {self.policy.context}")
        asked = given.get("max_new_tokens")
        if asked is not None and asked + len(ids) > self.policy.context:
            raise ValueError(f"{len(ids)} + {asked} tokens do not fit a context of {self.policy.context}")
        logprobs = bool(item(body, "return_logprob", index, default=False))
        start = int(item(body, "logprob_start_len", index, -1)) if logprobs else -1
        if start > len(ids):
            raise ValueError(f"logprob_start_len {start} is beyond the {len(ids)} input tokens")
        return Generation(
            ids=ids,
            sampling=params,
            logprobs=logprobs,
            start=len(ids) if start == -1 else start,
            top=int(item(body, "top_logprobs_num", index, 0)),
            id=str(item(body, "rid", index, uuid.uuid4().hex)),
        )

    def _run(self, request: Generation, *, incremental: bool = False) -> Iterator[dict[str, Any]]:
        """An answer after every token; each holds everything so far unless streaming is incremental."""
        began, params = time.time(), request.sampling
        cached = self._prefix(request)
        prompt_rows = self._prompt_logprobs(request) if request.logprobs else {}
        seed = SEED_WITHOUT_A_SEED if params.sampling_seed is None else params.sampling_seed
        draws = np.random.default_rng(seed) if self.deterministic else self._draws
        limit = min(params.max_new_tokens or 0, self.policy.context - len(request.ids) - 1)
        done: list[Step] = []
        rule = sglang_request.rule(params, self.policy, original=self.original)
        source = policies.steps(self.policy, request.ids, rule, draws, limit)
        reason: dict[str, Any] | None = {"type": "length", "length": limit} if not limit else None
        while True:
            if not reason:
                done.append(next(source))
                reason = self._finished(params, [step.token for step in done], limit)
            sent = len(done) - 1 if incremental and done else 0
            meta: dict[str, Any] = {
                "id": request.id,
                "finish_reason": reason,
                "prompt_tokens": len(request.ids),
                "weight_version": self.weight_version,
                "num_retractions": 0,
                **prompt_rows,
                **(self._output_logprobs(request, done, sent) if request.logprobs else {}),
                "reasoning_tokens": 0,
                "completion_tokens": len(done),
                "cached_tokens": cached,
            }
            if reason:
                meta |= {"e2e_latency": time.time() - began, "response_sent_to_client_ts": time.time()}
                self._cached.append([*request.ids, *(step.token for step in done[:-1])])
            ids = [step.token for step in done]
            answer: dict[str, Any] = {
                "text": self._text(params, ids, reason),
                "output_ids": ids[sent:],
                "meta_info": meta,
            }
            if incremental:
                answer["text"] = answer["text"][len(self._text(params, ids[:sent], None)) :]
            yield answer
            if reason:
                return

    def _prefix(self, request: Generation) -> int:
        """Tokens found in the cache: the last one never is, nor any from where prompt log-probabilities begin."""
        most = 0
        for sequence in self._cached:
            same = next(
                (i for i, (a, b) in enumerate(zip(sequence, request.ids, strict=False)) if a != b), None
            )
            most = max(most, min(len(sequence), len(request.ids)) if same is None else same)
        limit = len(request.ids) - 1
        return min(most, limit, request.start) if request.logprobs else min(most, limit)

    def _finished(self, params: SamplingParams, ids: list[int], limit: int) -> dict[str, Any] | None:
        text = self.policy.decode(ids, skip_special=params.skip_special_tokens)
        for stop in params.stops:
            if stop in text:
                return {"type": "stop", "matched": stop}
        # ignore_eos switches stop_token_ids off as well.
        if not params.ignore_eos and ids[-1] in {self.policy.end, *(params.stop_token_ids or [])}:
            return {"type": "stop", "matched": ids[-1]}
        return {"type": "length", "length": limit} if len(ids) >= limit else None

    def _text(self, params: SamplingParams, ids: Sequence[int], reason: dict[str, Any] | None) -> str:
        matched = None if reason is None or params.no_stop_trim else reason.get("matched")
        kept = ids[:-1] if isinstance(matched, int) else ids
        text = self.policy.decode(kept, skip_special=params.skip_special_tokens)
        return text[: text.find(matched)] if isinstance(matched, str) else text

    def _rows(self, reported: Floats, tokens: Sequence[int]) -> list[list[Any]]:
        return [_row(float(reported[token]), token) for token in tokens]

    def _output_logprobs(self, request: Generation, done: list[Step], sent: int) -> dict[str, Any]:
        fresh = done[sent:]
        rows: dict[str, Any] = {
            "output_token_logprobs": [_row(step.logprob, step.token) for step in fresh],
            "output_token_logprobs_length": len(done),
        }
        if request.top:
            rows["output_top_logprobs"] = [
                self._rows(step.reported, policies.top(step.reported, request.top)) for step in fresh
            ]
        return rows

    def _prompt_logprobs(self, request: Generation) -> dict[str, Any]:
        """Raw whatever the temperature. The first entry is null even where `start` leaves a token to condition on."""
        ids, start = request.ids, request.start
        rows: dict[str, Any] = {"input_token_logprobs": []}
        if request.top:
            rows["input_top_logprobs"] = []
        if start == len(ids):
            return rows
        reported = [policies.log_softmax(row) for row in self.policy.logits(ids)]
        for position in range(start, len(ids)):
            before = None if position == start else reported[position - 1]
            # The last id of the vocabulary is taken for padding and written as 0.
            token = ids[position] if ids[position] < self.policy.vocabulary - 1 else 0
            value = None if before is None else float(before[ids[position]])
            rows["input_token_logprobs"].append(_row(value, token))
            if request.top:
                best = None if before is None else policies.top(before, request.top)
                rows["input_top_logprobs"].append(
                    None if before is None or best is None else self._rows(before, best)
                )
        return rows


def _row(value: float | None, token: int) -> list[Any]:
    return [value, token, None]


def _event(answer: dict[str, Any]) -> str:
    return f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"


def _check_same_shape(now: Policy, loaded: Policy) -> None:
    if now.shapes != loaded.shapes:
        differing = sorted({name for name, _ in now.shapes.items() ^ loaded.shapes.items()})
        raise ValueError(f"the new weights differ in the shape of {differing[0]}")


def _deprecated_weight_version() -> Answer:
    about = {"object": "error", "message": "deprecated; see /model_info", "type": "404", "param": None}
    return Answer({**about, "code": 404}, 404)


def serve(
    model: str = policies.DEFAULT_MODEL,
    port: int = 0,
    *,
    deterministic: bool = False,
    incremental: bool = False,
    original: bool = False,
) -> AbstractContextManager[str]:
    """The switches are --enable-deterministic-inference, --incremental-streaming-output and
    SGLANG_RETURN_ORIGINAL_LOGPROB, all off as in a server started without them."""
    peer = SglangPeer(model, deterministic=deterministic, incremental=incremental, original=original)
    return http_peer.listening(peer, port)
