"""A peer that answers as Hugging Face's Text Generation Inference (TGI) does.

Sources, all from the public repository huggingface/text-generation-inference (main, January 2026, 3.3.6-dev0):
docs/openapi.json and docs/source/reference/launcher.md; router/src/lib.rs, router/src/validation.rs,
router/src/server.rs, router/src/infer/mod.rs; server/text_generation_server/utils/tokens.py,
utils/logits_process.py and models/flash_causal_lm.py. How the router refuses a body that is not what it expects is
axum's `Json` extractor (axum documentation, "JsonRejection"). README.md beside this file says what comes from where.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import http_peer
import numpy as np
import policy as policies
import tgi_request
from http_peer import Answer, Call, Events, Refused
from policy import Step
from tgi_request import Generation, Limits

VERSION = "3.3.6-dev0"


class TgiPeer:
    def __init__(self, model: str, limits: Limits | None) -> None:
        self.policy = policies.load(model)
        context = self.policy.context
        self.limits = limits or Limits(max_input_tokens=context - 1, max_total_tokens=context)

    @property
    def routes(self) -> dict[str, Callable[[Call], Answer | Events]]:
        return {
            "POST /generate": self.generate,
            "POST /generate_stream": self.generate_stream,
            "POST /tokenize": self.tokenize,
            "GET /v1/models": lambda _: Answer({"object": "list", "data": [self._card()]}),
            "GET /info": lambda _: Answer(self.info()),
            "GET /health": lambda _: Answer(),
            "GET /ping": lambda _: Answer(),
            "GET /": lambda _: Answer(),
        }

    def absent(self, status: int) -> Answer:
        return Answer(None, status)

    def _card(self) -> dict[str, Any]:
        return {"id": self.policy.spec, "object": "model", "created": 0, "owned_by": self.policy.spec}

    def info(self) -> dict[str, Any]:
        """No dtype and no device since 3.0, and of the weights only a commit of the hub, null for local ones."""
        return {
            "model_id": self.policy.spec,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": 128,
            "max_best_of": self.limits.max_best_of,
            "max_stop_sequences": self.limits.max_stop_sequences,
            "max_input_tokens": self.limits.max_input_tokens,
            "max_total_tokens": self.limits.max_total_tokens,
            "validation_workers": 2,
            "max_client_batch_size": self.limits.max_client_batch_size,
            "router": "text-generation-router",
            "version": VERSION,
            "sha": None,
            "docker_label": None,
        }

    def tokenize(self, call: Call) -> Answer:
        """With special tokens, exactly as /generate would; offsets are in bytes."""
        inputs = tgi_request.generate_body(call)["inputs"]
        encoded = self.policy.tokenizer(inputs, return_offsets_mapping=True)
        tokens = []
        for token, (first, last) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            start, stop = len(inputs[:first].encode()), len(inputs[:last].encode())
            tokens.append({"id": int(token), "text": inputs[first:last], "start": start, "stop": stop})
        return Answer(tokens)

    def generate(self, call: Call) -> Answer:
        body = tgi_request.generate_body(call)
        given = tgi_request.parameters(body)
        request = tgi_request.validated(self.policy, self.limits, body["inputs"], given)
        done, reason, text = self._finish(request)
        answer: dict[str, Any] = {"generated_text": self._with_prompt(given, body["inputs"], text)}
        if given["details"] or given["decoder_input_details"]:
            answer["details"] = {
                "finish_reason": reason,
                "generated_tokens": len(done),
                "seed": request.seed if request.sampling else None,
                "prefill": [],  # as of a server started without --enable-prefill-logprobs
                "tokens": self._tokens(done),
            }
            if request.top:
                answer["details"]["top_tokens"] = [self._top(request, step) for step in done]
        return Answer(answer, headers=_sizes(request, done))

    def generate_stream(self, call: Call) -> Events:
        body = tgi_request.generate_body(call)
        return Events(self._events(body, tgi_request.parameters(body)))

    def _events(self, body: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
        """What is refused here is refused inside the stream, after status 200."""
        try:
            if given["decoder_input_details"]:
                raise tgi_request.refused("`decoder_input_details` cannot be streamed")
            request = tgi_request.validated(self.policy, self.limits, body["inputs"], given)
        except Refused as refused:
            yield _event(refused.answer.body)
            return
        done: list[Step] = []
        for step, piece, reason in self._run(request):
            done.append(step)
            event: dict[str, Any] = {
                "index": len(done),
                "token": self._token(step.token, piece, step.logprob),
            }
            if request.top:
                event["top_tokens"] = self._top(request, step)
            text = self.policy.decode([each.token for each in done]) if reason else None
            event["generated_text"] = None if text is None else self._with_prompt(given, body["inputs"], text)
            event["details"] = self._stream_details(request, done, reason) if given["details"] else None
            yield _event(event)

    def _stream_details(self, request: Generation, done: list[Step], reason: str | None) -> Any:
        if reason is None:
            return None
        seed = request.seed if request.sampling else None
        counted = {"generated_tokens": len(done), "seed": seed, "input_length": len(request.ids)}
        return {"finish_reason": reason, **counted}

    def _run(self, request: Generation) -> Iterator[tuple[Step, str, str | None]]:
        """(step, its text, why it was the last). The length is looked at before the end token and the stop strings."""
        pieces = policies.Pieces(self.policy, skip_special=False)
        rule, limit = tgi_request.rule(request, self.policy), request.max_new_tokens
        written = ""
        draws = np.random.default_rng(request.seed)
        for count, step in enumerate(policies.steps(self.policy, request.ids, rule, draws, limit), start=1):
            piece = pieces.push(step.token)
            written += piece
            reason = None
            if count == limit:
                reason = "length"
            elif step.token == self.policy.end:
                reason = "eos_token"
            elif any(written.endswith(stop) for stop in request.stop):
                reason = "stop_sequence"
            yield step, piece, reason
            if reason:
                return

    def _finish(self, request: Generation) -> tuple[list[Step], str, str]:
        ran = list(self._run(request))
        done = [step for step, _, _ in ran]
        # A stop string stays in the text.
        return done, ran[-1][2] or "length", self.policy.decode([step.token for step in done])

    def _with_prompt(self, given: dict[str, Any], prompt: str, text: str) -> str:
        return prompt + text if given["return_full_text"] else text

    def _tokens(self, done: list[Step]) -> list[dict[str, Any]]:
        pieces = policies.Pieces(self.policy, skip_special=False)
        return [self._token(step.token, pieces.push(step.token), step.logprob) for step in done]

    def _token(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        special = token in self.policy.tokenizer.all_special_ids
        return {"id": token, "text": text, "logprob": single(logprob), "special": special}

    def _top(self, request: Generation, step: Step) -> list[dict[str, Any]]:
        """As many as tie with the n-th; fewer where top-k or top-p left fewer than n."""
        least = np.sort(step.reported)[-min(request.top, len(step.reported))]
        least = max(least, np.finfo(np.float32).min)
        best = policies.top(step.reported, int((step.reported >= least).sum()))
        return [
            self._token(token, self.policy.decode([token], skip_special=False), float(step.reported[token]))
            for token in best
        ]


def single(value: float) -> float | None:
    """As the router writes an f32: the shortest digits that name it, which read as a double are another number."""
    return float(str(np.float32(value))) if math.isfinite(value) else None


def _event(answer: Any) -> str:
    return f"data:{json.dumps(answer, ensure_ascii=False)}\n\n"  # no space, as in the documentation's example


def _sizes(request: Generation, done: list[Step]) -> dict[str, str]:
    counted = {"x-prompt-tokens": str(len(request.ids)), "x-generated-tokens": str(len(done))}
    return {"x-compute-type": "cpu", **counted}


def serve(
    model: str = policies.DEFAULT_MODEL, port: int = 0, limits: Limits | None = None
) -> AbstractContextManager[str]:
    return http_peer.listening(TgiPeer(model, limits), port)
