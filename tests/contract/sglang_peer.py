"""A server that answers as SGLang's native HTTP API does; sglang_peer.md has every fact with its source.

It follows those facts and takes nothing from `zerodrift.backends`. Behind it is one model in fp32, one sequence at a
time, the whole prefix again for every token. A seed fixes its draws, and does not reproduce the engine's random numbers.
"""

import contextlib
import functools
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import loopback
import torch

from zerodrift import models

DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "stop": [], "stop_token_ids": [], "temperature": 1.0}
DEFAULTS |= {"top_p": 1.0, "top_k": 1 << 30, "frequency_penalty": 0.0, "presence_penalty": 0.0}
DEFAULTS |= {"min_new_tokens": 0, "ignore_eos": False, "logit_bias": {}, "sampling_seed": 42}
"""`sampling_params`; a name that is not here ends in status 500. 42 is what deterministic inference takes for no seed."""


class SglangPeer:
    def __init__(self, model: str, **switches: bool) -> None:
        self.switches = switches
        self.path = model
        self.tokenizer: Any = models.tokenizer(model)
        self.model: Any = models.load(model)
        self.context, self.end = self.model.config.max_position_embeddings, self.tokenizer.eos_token_id
        self.weight_version = "default"
        self.cached: list[list[int]] = []
        self.turn, self.unseeded = threading.Lock(), torch.Generator()
        self.unseeded.seed()
        # Hundreds of draws after one prefix come in a row; what a model says of the same ids is the same.
        self.rows = functools.lru_cache(maxsize=64)(self.computed)

    def routes(self) -> dict[str, Any]:
        card = {"id": self.path, "max_model_len": self.context}
        info = {"dtype": "float32", "preferred_sampling_params": None, "tp_size": 1, "version": "0.0.0+peer"}
        info |= {"enable_deterministic_inference": self.switches.get("deterministic", False)}
        info |= {"incremental_streaming_output": self.switches.get("incremental", False)}
        return {
            "POST /generate": self.generate,
            "GET /v1/models": lambda *_: (200, {"data": [card]}),
            "GET /server_info": lambda *_: (200, info),
            "GET /model_info": lambda *_: (200, {"weight_version": self.weight_version}),
            "GET /flush_cache": self.flush,
            "POST /flush_cache": self.flush,
            "POST /update_weights_from_disk": self.update,
        }

    def flush(self, *_: Any) -> tuple[int, bytes]:
        self.cached.clear()
        return 200, b"Cache flushed.\n"

    def update(self, call: Any, _: Any) -> tuple[int, Any]:
        loaded = models.load(call.body["model_path"])
        shapes = [{name: t.shape for name, t in each.state_dict().items()} for each in (self.model, loaded)]
        if shapes[0] != shapes[1]:
            return 400, {"success": False, "message": "another shape"}
        with self.turn:
            self.model, self.weight_version = loaded, call.body["weight_version"]
            self.rows.cache_clear()
        if call.body.get("flush_cache", True):
            self.cached.clear()
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def generate(self, call: Any, handler: Any) -> tuple[int, Any] | None:
        try:
            answers = list(self.run(call.body))
        except ValueError as refused:
            error = {"error": {"message": str(refused), "code": 400}}
            if not call.body.get("stream"):
                return 400, error
            answers = [error]
        except Exception:
            traceback.print_exc()  # the engine writes it to its log, too: a test that fails shows it
            return 500, b"Internal Server Error"
        if not call.body.get("stream"):
            return 200, answers[-1]
        if self.switches.get("incremental") and "error" not in answers[0]:
            answers = [differences(*pair) for pair in zip([None, *answers], answers, strict=False)]
        handler.stream([*map(loopback.event, answers), loopback.event("[DONE]")])
        return None

    def run(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An answer after every token, each with everything so far."""
        ids, params = body["input_ids"], DEFAULTS | body["sampling_params"]
        if unknown := params.keys() - DEFAULTS.keys():
            raise TypeError(f"unexpected {unknown}")
        if len(ids) + params["max_new_tokens"] > self.context:
            raise ValueError("does not fit the context")
        about: dict[str, Any] = {"prompt_tokens": len(ids), "weight_version": self.weight_version}
        about["cached_tokens"] = self.prefix(ids, body.get("logprob_start_len", -1))
        if body.get("logprob_start_len", -1) >= 0:
            about["input_token_logprobs"] = self.scores(ids)
        # Outputs that would reach the end of the context are cut in silence.
        limit = min(params["max_new_tokens"], self.context - len(ids) - 1)
        draws = self.unseeded
        if self.switches.get("deterministic"):
            draws = torch.Generator().manual_seed(params["sampling_seed"])
        output: list[int] = []
        rows: list[Any] = []
        tops: list[Any] = []
        reason = self.reason(params, output, limit)
        while True:
            if reason is None:
                drawn, reported = self.distribution(self.logits([*ids, *output])[-1], params, output)
                output.append(int(torch.multinomial(drawn, 1, generator=draws)))
                rows.append([float(reported[output[-1]]), output[-1], None])
                best = reported.topk(body.get("top_logprobs_num") or 1)
                tops.append(
                    [[float(v), int(t), None] for v, t in zip(best.values, best.indices, strict=True)]
                )
                reason = self.reason(params, output, limit)
            told = {**about, "finish_reason": reason, "completion_tokens": len(output)}
            if body.get("return_logprob"):
                told["output_token_logprobs"] = rows[:]
            if body.get("top_logprobs_num"):
                told["output_top_logprobs"] = tops[:]
            yield {"text": self.tokenizer.decode(output), "output_ids": output[:], "meta_info": told}
            if reason is not None:
                self.cached.append([*ids, *output[:-1]])
                return

    def logits(self, ids: list[int]) -> torch.Tensor:
        with self.turn:
            return self.rows(tuple(ids)).clone()

    def computed(self, ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return rows

    def distribution(
        self, logits: torch.Tensor, params: dict[str, Any], output: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drawn from, and reported: after penalties of the output, bias and temperature, before top-k and top-p."""
        count = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(logits))
        logits -= params["presence_penalty"] * (count > 0) + params["frequency_penalty"] * count
        if len(output) < params["min_new_tokens"]:
            logits[[self.end, *params["stop_token_ids"]]] = -torch.inf
        for token, bias in params["logit_bias"].items():
            logits[int(token)] += bias
        if params["temperature"] == 0:
            # Temperature 1 with top_k 1.
            return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float(), logits.log_softmax(-1)
        scaled = logits / params["temperature"]
        ranked, order = scaled.softmax(-1).double().sort(descending=True, stable=True)
        kept = ranked.cumsum(-1) - ranked < params["top_p"]
        kept[params["top_k"] :] = False
        drawn = torch.zeros_like(ranked).scatter(0, order, ranked * kept)
        # SGLANG_RETURN_ORIGINAL_LOGPROB leaves the temperature out.
        return drawn, (logits if self.switches.get("original") else scaled).log_softmax(-1)

    def reason(self, params: dict[str, Any], output: list[int], limit: int) -> dict[str, Any] | None:
        # ignore_eos switches stop_token_ids off as well.
        ends = () if params["ignore_eos"] else (self.end, *params["stop_token_ids"])
        if output and (output[-1] in ends or any(s in self.tokenizer.decode(output) for s in params["stop"])):
            return {"type": "stop", "matched": output[-1]}
        return {"type": "length", "length": limit} if len(output) >= limit else None

    def prefix(self, ids: list[int], start: int) -> int:
        """Tokens found in the cache: the last one never is, nor any that is scored."""
        same = [
            next(
                (i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b),
                min(len(known), len(ids)),
            )
            for known in self.cached
        ]
        return min(max(same, default=0), len(ids) - 1, start if start >= 0 else len(ids))

    def scores(self, ids: list[int]) -> list[list[Any]]:
        """Raw whatever the temperature; the last id of the vocabulary is taken for padding and written as 0."""
        rows = self.logits(ids).log_softmax(-1)
        values = [None, *(float(rows[place, token]) for place, token in enumerate(ids[1:]))]
        last = rows.shape[-1] - 1
        return [
            [value, 0 if token == last else token, None] for value, token in zip(values, ids, strict=True)
        ]


def differences(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What --incremental-streaming-output sends of `now`."""
    if before is None:
        return now
    about, known = dict(now["meta_info"]), len(before["output_ids"])
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in about:
            about[name] = about[name][known:]
    text = now["text"][len(before["text"]) :]
    return {"text": text, "output_ids": now["output_ids"][known:], "meta_info": about}


@contextlib.contextmanager
def serve(model: str, **switches: bool) -> Iterator[str]:
    """The switches are `deterministic` (--enable-deterministic-inference), `incremental`
    (--incremental-streaming-output) and `original` (SGLANG_RETURN_ORIGINAL_LOGPROB), all off as in a server started
    without them."""
    with loopback.serving() as server:
        server.routes |= SglangPeer(model, **switches).routes()
        yield server.url
