"""One pretended server, in the formats of vLLM's two routes and of llama.cpp, that lies as a test tells it to.

Token i of sample s after a prompt that ends in p is 10·s + p + i, with logprob -(i + 1) / 2; alternatives are 500, 501, …,
with logprobs of -0.1, -0.2, … .
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from loopback import Loopback, event

from zerodrift.backends.base import Capability
from zerodrift.backends.llama_cpp import HINTS, LlamaCppBackend
from zerodrift.backends.server import ServerBackend
from zerodrift.backends.vllm import VllmBackend

INFO = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "auto",
            "hf_overrides": {},
            "quantization": None,
        },
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "scheduler_config": {"max_num_seqs": 128},
        "parallel_config": {"tensor_parallel_size": 1},
    },
    "vllm_env": {"VLLM_CPU_ATTN_SPLIT_KV": True, "VLLM_CACHE_ROOT": "/somewhere"},
    "system_env": {
        "torch_version": "2.13.0+cpu",
        "cpu_info": "Vendor ID:  X\nModel name:   Fast CPU\nFlags: sse",
        "env_vars": "OMP_NUM_THREADS=2\nHOME=/root",
    },
}


class Pretend:
    """Tests change its state before they connect, or after."""

    path: str
    backend: Callable[..., ServerBackend]
    whole: frozenset[Capability]
    nonsense: ClassVar[dict[str, object]]
    """Fields that are read, and what is refused in them."""

    def __init__(self, loopback: Loopback) -> None:
        self.url, self.calls, self.routes = loopback.url, loopback.calls, loopback.routes
        self.models: list[dict[str, Any]] = [{"id": "tiny", "max_model_len": 64}]
        self.reads = set(self.nonsense)
        self.cached_tokens: int | None = 16
        self.spoil: Callable[[list[Any]], object] = lambda samples: None
        self.spoil_answer: Callable[[Any], object] = lambda answer: None
        self.spoil_stream: Callable[[list[Any]], object] = lambda chunks: None
        self.interval = 1
        self.routes |= {
            "GET /v1/models": lambda *_: (200, {"object": "list", "data": self.models}),
            f"POST {self.path}": self.complete,
            "POST /tokenize": self.tokenize,
        }

    def answers(
        self,
        status: int,
        when: Callable[[Any], object] = lambda body: True,
        path: str = "",
        words: str = "not now",
    ) -> None:
        """Calls with such a body get this status, in these words."""
        route = f"POST {path or self.path}"
        usual = self.routes[route]
        self.routes[route] = lambda call, handler: (
            handler.send(status, {"error": {"message": words}}, retry_after="0")
            if when(call.body)
            else usual(call, handler)
        )

    def without(self, *paths: str) -> None:
        for name in [name for name in self.routes if name.split(" ")[1].split("?")[0] in paths]:
            del self.routes[name]

    def asked(self, body: Any) -> Any:
        """Where the sampling parameters are."""
        return body

    def complete(self, call: Any, handler: Any) -> tuple[int, Any] | None:
        body, asked = call.body, self.asked(call.body)
        for name in self.reads & (asked.keys() | body.keys()):
            if (asked | body)[name] == self.nonsense[name]:
                return 400, {"error": {"message": f"bad {name}", "type": "BadRequestError", "code": 400}}
        prompt = body.get("prompt") or body["token_ids"]
        samples = [self.sample(body, prompt, index) for index in range(asked.get("n", 1))]
        self.spoil(samples)
        answer = self.answer(body, prompt, samples)
        self.spoil_answer(answer)
        if not body.get("stream"):
            return 200, answer
        chunks = list(self.chunks(samples, answer))
        self.spoil_stream(chunks)
        handler.stream([event(chunk) for chunk in chunks])
        return None

    def drawn(self, prompt: list[int], index: int, count: int) -> tuple[list[int], list[float]]:
        return [10 * index + prompt[-1] + i for i in range(count)], [-(i + 1) / 2 for i in range(count)]

    def others(self, count: int) -> list[tuple[int, float]]:
        return [(500 + rank, -0.1 * (rank + 1)) for rank in range(count)]

    def tokenize(self, call: Any, _: Any) -> tuple[int, Any]:
        body = call.body
        text = body.get("prompt") or body.get("content") or "".join(m["content"] for m in body["messages"])
        return 200, {"count": len(text), "tokens": list(text.encode())}

    def sample(self, body: Any, prompt: list[int], index: int) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, body: Any, prompt: list[int], samples: list[Any]) -> Any:
        raise NotImplementedError

    def chunks(self, samples: list[Any], answer: Any) -> Iterator[Any]:
        raise NotImplementedError


class _Vllm(Pretend):
    whole = frozenset(Capability)
    nonsense: ClassVar = {
        "seed": "?",
        "cache_salt": "",
        "prompt_logprobs": -7,
        "return_tokens_as_token_ids": "?",
    }

    def __init__(self, loopback: Loopback) -> None:
        super().__init__(loopback)
        self.info: Any = copy.deepcopy(INFO)
        self.versions = ["v1"]
        self.reset = self.returns_ids = True
        self.routes |= {
            "GET /server_info?config_format=json": lambda *_: (200, self.info),
            "GET /weight_info": lambda *_: (200, {"weight_version": self.version()}),
            "POST /update_weight_version": lambda *_: (200, {"success": True}),
            "POST /collective_rpc": lambda *_: (200, {"results": [None]}),
            "POST /reset_prefix_cache": lambda *_: (200, {"success": self.reset}),
        }

    def version(self) -> str:
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    def sample(self, body: Any, prompt: list[int], index: int) -> dict[str, Any]:
        asked = self.asked(body)
        tokens, values = self.drawn(prompt, index, asked["max_tokens"])
        shown = None if asked.get("logprobs") is None else self.shown(tokens, values, asked["logprobs"])
        ids = tokens if self.returns_ids else None
        return {"index": index, "logprobs": shown, "finish_reason": "length", "token_ids": ids}

    def answer(self, body: Any, prompt: list[int], samples: list[Any]) -> Any:
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        scores = None
        if self.asked(body).get("prompt_logprobs") is not None:
            scores = [None, *({str(t): {"logprob": -float(t)}, "7": {"logprob": -9.0}} for t in prompt[1:])]
        about = {"prompt_token_ids": prompt if self.returns_ids else None, "prompt_logprobs": scores}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        return self.told(about, samples) | {"id": "cmpl-1", "usage": usage}

    def chunks(self, samples: list[Any], answer: Any) -> Iterator[Any]:
        """As vLLM's generator: differences in turn, what is said of the prompt once, then usage, then [DONE]."""
        count = max(len(sample["token_ids"] or ()) for sample in samples)
        for at in range(0, count, self.interval):
            for sample in samples:
                place, ids = slice(at, at + self.interval), sample["token_ids"] or []
                last = place.stop >= len(ids)
                piece = {
                    name: sample[name] if last else None
                    for name in ("finish_reason", "weight_versions")
                    if name in sample
                }
                piece |= {"index": sample["index"], "token_ids": ids[place]}
                logprobs = sample["logprobs"]
                piece["logprobs"] = logprobs and {name: values[place] for name, values in logprobs.items()}
                once = {"prompt_token_ids": sample.get("prompt_token_ids", answer.get("prompt_token_ids"))}
                beside = {} if "prompt_token_ids" in sample else once
                if "text" in sample:
                    piece["text"] = "" if at else sample["text"]
                yield {"choices": [piece | ({} if beside or at else once)], **({} if at else beside)}
        yield {"choices": [], "usage": answer["usage"]}
        yield "[DONE]"

    def shown(self, tokens: list[int], values: list[float], count: int) -> dict[str, Any]:
        raise NotImplementedError

    def told(self, about: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
        raise NotImplementedError


class Completions(_Vllm):
    path = "/v1/completions"
    backend = VllmBackend

    def shown(self, tokens: list[int], values: list[float], count: int) -> dict[str, Any]:
        names = [f"token_id:{token}" for token in tokens]
        others = {f"token_id:{token}": value for token, value in self.others(count)}
        tops = [{name: value, **others} for name, value in zip(names, values, strict=True)]
        return {"token_logprobs": values, "tokens": names, "top_logprobs": tops}

    def told(self, about: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
        for sample in samples:
            sample |= {"text": "…", **about}
        return {"choices": samples}


class Generate(_Vllm):
    path = "/inference/v1/generate"
    backend = partial(VllmBackend, route="generate")
    nonsense: ClassVar = {"seed": "?", "cache_salt": "", "prompt_logprobs": -7}
    named = False
    """Ids as 0.28 writes them."""

    def asked(self, body: Any) -> Any:
        return body["sampling_params"]

    def sample(self, body: Any, prompt: list[int], index: int) -> dict[str, Any]:
        sample = super().sample(body, prompt, index)
        spans = [{"version": "v1", "start": 0, "end": len(sample["token_ids"] or ())}]
        return sample | {"weight_versions": spans}

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = {"token": f"token_id:{token}"} if self.named else {"token_id": token}
        return name | {"logprob": logprob}

    def shown(self, tokens: list[int], values: list[float], count: int) -> dict[str, Any]:
        """The sampled token is the first of the list, which is cut behind `count`, or 1."""
        content = []
        for token, value in zip(tokens, values, strict=True):
            listed = [(token, value), *self.others(count)][: max(count, 1)]
            content.append(
                self.entry(token, value) | {"top_logprobs": [self.entry(*each) for each in listed]}
            )
        return {"content": content}

    def told(self, about: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
        return {"choices": samples, **about}


class LlamaCpp(Pretend):
    path = "/completion"
    backend = LlamaCppBackend
    whole = frozenset(HINTS)
    nonsense: ClassVar = {"seed": "?", "n_probs": "?"}

    def __init__(self, loopback: Loopback) -> None:
        super().__init__(loopback)
        self.slots, self.context = 4, 64
        self.defaults: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0}
        self.defaults |= {"samplers": ["top_k"], "repeat_penalty": 1.0, "mirostat": 0, "lora": []}
        self.defaults |= {"speculative.types": "none"}
        self.routes |= {"GET /props": lambda *_: (200, self.props()), "POST /apply-template": self.render}

    def props(self) -> dict[str, Any]:
        settings = {"params": self.defaults, "n_ctx": self.context}
        shown = {"model_ftype": "Q4_0", "build_info": "b1", "total_slots": self.slots}
        return {"default_generation_settings": settings, **shown}

    def render(self, call: Any, _: Any) -> tuple[int, Any]:
        return 200, {"prompt": "".join(each["content"] for each in call.body["messages"])}

    def sample(self, body: Any, prompt: list[int], index: int) -> dict[str, Any]:
        tokens, values = self.drawn(prompt, index, body["n_predict"])
        after = body.get("post_sampling_probs", False)
        word, told = ("prob", math.exp) if after else ("logprob", float)
        tops = [{"id": token, word: told(value)} for token, value in self.others(body["n_probs"])]
        entries = [
            {"id": token, word: told(value), f"top_{word}s": copy.deepcopy(tops)}
            for token, value in zip(tokens, values, strict=True)
        ]
        return {
            "index": index,
            "content": "…",
            "tokens": tokens if body.get("return_tokens") else [],
            "tokens_evaluated": len(prompt),
            "tokens_predicted": len(tokens),
            "stop_type": "limit",
            "completion_probabilities": entries,
            "timings": {"cache_n": self.cached_tokens},
        }

    def answer(self, body: Any, prompt: list[int], samples: list[Any]) -> Any:
        return samples if len(samples) > 1 else samples[0]

    def chunks(self, samples: list[Any], answer: Any) -> Iterator[Any]:
        """A token at a time, and at the end all that is known of the sample but its tokens."""
        for sample in samples:
            for place, token in enumerate(sample["tokens"]):
                piece = {
                    "index": sample["index"],
                    "content": sample["content"] if place == 0 else "",
                    "tokens": [token],
                }
                entries = sample["completion_probabilities"][place : place + 1]
                yield piece | {"tokens_predicted": place + 1, "completion_probabilities": entries}
            last = {name: value for name, value in sample.items() if name != "completion_probabilities"}
            yield last | {"content": "", "tokens": []}


KINDS: dict[str, type[Pretend]] = {"completions": Completions, "generate": Generate, "llama-cpp": LlamaCpp}
