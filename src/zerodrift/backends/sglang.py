"""SGLang's own `/generate`, which takes ids and returns them; its OpenAI routes return none.

Read in its documentation and source of August 2026, and never run here against the engine itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from zerodrift.backends.base import Capability
from zerodrift.backends.http import not_declined
from zerodrift.backends.json_path import facts_at, look_up
from zerodrift.backends.samples import ToldSample, parse, scores, shorten, value_at
from zerodrift.backends.server import MODELS, UNKNOWN, ServerBackend, changed, stated
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.errors import BadAnswer, CapabilityMissing, EngineError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
LARGEST_SEED = 2**63 - 1
KEPT_FREE = 6
"""Outputs that would pass the end of the context are cut down in silence; what is shorter by this much is always whole."""
NAMELESS = 0
"""So it writes the last id of the vocabulary where it scores."""
INFO, UPDATE, FLUSH = "/model_info", "/update_weights_from_disk", "/flush_cache"

# To find out whether seeds are honoured: more than one token, at a temperature at which eight hardly come twice by
# chance. At worst, with three answers that are equally likely, a server without seeds passes once in 180 times.
PROBE = Request(Prompt((0, 0)), SamplingParams(max_tokens=8, logprobs=2))
FLAT = 2.0
SEEDS = (7, 8, 9, 10)
LEAST_DIFFERENT = 3

HINTS = {
    Capability.TOP_LOGPROBS: "the server must read top_logprobs_num; a newer release does",
    Capability.SCORE: "the server must read logprob_start_len; a newer release does",
    Capability.SEED: "start the server with --enable-deterministic-inference",
    Capability.CACHE_SALT: "the server must read cache_salt; a newer release does",
    Capability.CACHED_TOKENS: "the server must report meta_info/cached_tokens; a newer release does",
    Capability.RESET_CACHE: "the server must have /flush_cache; a newer release does",
    Capability.LOAD_WEIGHTS: "the server must have /update_weights_from_disk; a newer release does",
    Capability.WEIGHT_VERSION: "the server must report meta_info/weight_version; a newer release does",
    Capability.EFFECTIVE_CONFIG: "the server must show /server_info; a newer release does",
    Capability.STREAM: "the server must stream output_ids; a newer release does",
}
NEVER = {Capability.TOKENIZE: "SGLang shows no ids of rendered chat"}

CANNOT = {
    "min_p": "a server that honours seeds fails on it (an assertion in its sampler)",
    "repetition_penalty": "it looks at the output alone, not at the prompt",
    "prompt_logprobs": "score the tokens in a call of their own",
}

SEMANTIC = (
    *("tokenizer_path", "preferred_sampling_params", "sampling_defaults", "enable_custom_logit_processor"),
    *("json_model_override_args", "lora_paths"),
)
NUMERIC = (
    *("dtype", "quantization", "kv_cache_dtype", "attention_backend", "prefill_attention_backend"),
    *(
        "decode_attention_backend",
        "sampling_backend",
        "enable_deterministic_inference",
        "rl_on_policy_target",
    ),
    *(
        "enable_fp32_lm_head",
        "chunked_prefill_size",
        "disable_radix_cache",
        "disable_cuda_graph",
        "page_size",
    ),
    *("pp_size", "ep_size", "device"),
)
NUMERIC_RENAMED = {
    "tensor_parallel_size": "tp_size",
    "speculative": "speculative_algorithm",
    "build": "version",
}
DEPLOYMENT = {"max_num_seqs": "max_running_requests", "data_parallel_size": "dp_size"}

STREAMING = Streaming(
    ask={"stream": True},
    lists=("output_ids", "meta_info/output_token_logprobs", "meta_info/output_top_logprobs"),
    text="text",
    finish="meta_info/finish_reason",
    cumulative=True,
)


class _Row(msgspec.Struct, array_like=True):
    logprob: float | None
    token_id: int


class _Finish(msgspec.Struct):
    type: Literal["length", "stop", "abort"]


class _About(msgspec.Struct):
    finish_reason: _Finish
    prompt_tokens: int
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    output_token_logprobs: list[_Row] | None = None
    output_top_logprobs: list[list[_Row]] | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _About
    text: str | None = None


class SglangBackend(ServerBackend):
    """One model of one SGLang server."""

    name = "sglang"
    path = "/generate"
    hints = HINTS | NEVER
    cannot = CANNOT
    label_route = INFO

    def __init__(self, url: str, *, kind: LogprobKind = LogprobKind.PROCESSED, **connection: Any) -> None:
        """Its numbers come after bias, penalties and temperature; SGLANG_RETURN_ORIGINAL_LOGPROB makes them raw, and nothing tells."""
        if kind is LogprobKind.RAW:
            raise CapabilityMissing(
                "sglang cannot be asked for raw logprobs; leave engine.logprobs_mode at processed_logprobs"
            )
        super().__init__(url, **connection)

    def fingerprint(self) -> EngineFingerprint:
        """As the server shows it now: one that was started anew may show other settings."""
        return self._facts(self._shown(MODELS, "/server_info", INFO))

    def reset_cache(self) -> None:
        """Only an idle server can: with requests in flight it refuses."""
        self._need(Capability.RESET_CACHE)
        reply = self._http.exchange("POST", FLUSH)
        if reply.status != 200:
            self._http.read(FLUSH, reply)

    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """The server labels what it read, and touches no cache."""
        body = {"model_path": str(directory), "weight_version": version.label, "flush_cache": False}
        if not value_at(self._http.post(UPDATE, body), "success", bool, UPDATE):
            raise EngineError(f"{UPDATE} says that {directory} was not loaded; the cause is in its log")

    def body(self, request: Request) -> dict[str, Any]:
        """Without `n`: see `_calls`."""
        sampling = stated(request.sampling)
        del sampling["n"]
        body: dict[str, Any] = {"input_ids": request.prompt.token_ids, "return_logprob": True}
        if count := sampling.pop("logprobs", 0):
            body["top_logprobs_num"] = count
        if request.prompt.cache_salt is not None:
            body["cache_salt"] = request.prompt.cache_salt
        return body | {
            "sampling_params": {RENAMED.get(name, name): value for name, value in sampling.items()}
        }

    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """A call that generates nothing; the first token has no logprob."""
        asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
        answer = self._http.post(self.path, {"input_ids": token_ids, **asked})
        rows = value_at(answer, "meta_info/input_token_logprobs", list[_Row], self.path)
        owners = [row.token_id for row in rows]
        if len(owners) != len(token_ids) or any(
            told not in (sent, NAMELESS) for told, sent in zip(owners, token_ids, strict=True)
        ):
            raise BadAnswer(f"{self.path} was sent {shorten(token_ids)} and scored {shorten(owners)}")
        return scores(row.logprob for row in rows[1:])

    def _connect(self, model: str | None) -> None:
        cards = self._choose(model)
        self.model = model or self._only(cards)
        shown = self._shown(MODELS, "/server_info", INFO)
        self.max_model_len = self._longest(shown)
        differences = shown.get("incremental_streaming_output") is True
        self.streaming = msgspec.structs.replace(STREAMING, cumulative=not differences)
        self._effective = {"dtype", "preferred_sampling_params"} <= shown.keys()
        self._digest = self._facts(shown).digest

    def _longest(self, shown: dict[str, Any]) -> int:
        if "max_req_input_len" in shown:
            return value_at(shown, "max_req_input_len", int, "/server_info")
        return value_at(shown, "data/0/max_model_len", int, MODELS) - KEPT_FREE

    def _facts(self, shown: dict[str, Any]) -> EngineFingerprint:
        return EngineFingerprint(
            engine=self.name,
            semantic={"model": self.model, "logprobs_mode": "processed_logprobs"}
            | facts_at(shown, dict(zip(SEMANTIC, SEMANTIC, strict=True))),
            numeric=facts_at(shown, dict(zip(NUMERIC, NUMERIC, strict=True)) | NUMERIC_RENAMED),
            deployment={"max_model_len": str(self._longest(shown))} | facts_at(shown, DEPLOYMENT),
        )

    def _probe(self) -> dict[Capability, bool]:
        body = self.body(PROBE)
        sample = parse(self._http.post(self.path, body), _Generated, self.path)
        about = sample.meta_info
        if not sample.output_ids or about.output_token_logprobs is None:
            raise CapabilityMissing(
                f"{self.path} returns no output_ids, or no output_token_logprobs with them; use a newer release"
            )
        self._has_label = bool(about.weight_version)
        return {
            Capability.TOP_LOGPROBS: any(about.output_top_logprobs or ()),
            Capability.SCORE: not_declined(lambda: len(self.score_one((0, 0))) == 1),
            Capability.SEED: self._honours_seeds(),
            # It catches nothing around what it makes of parameters: on nonsense in some it fails, and is well.
            Capability.CACHE_SALT: self._reads(body | {"cache_salt": 7}, falls_over=(500,)),
            Capability.CACHED_TOKENS: about.cached_tokens is not None,
            Capability.RESET_CACHE: self._has_route(FLUSH),
            Capability.LOAD_WEIGHTS: self._has_route(UPDATE),
            Capability.WEIGHT_VERSION: self._has_label,
            Capability.EFFECTIVE_CONFIG: self._effective,
            Capability.STREAM: self._streams(body),
        }

    def _honours_seeds(self) -> bool:
        """Without --enable-deterministic-inference a seed is read and dropped: the same must draw the same, and others others."""
        drawn: list[object] = []
        for seed in SEEDS:
            sampling = msgspec.structs.replace(PROBE.sampling, seed=seed, temperature=FLAT)
            asked = Request(PROBE.prompt, sampling)
            once, again = (look_up(self.complete(asked), "output_ids") for _ in range(2))
            if once != again:
                return False
            drawn += [] if once in drawn else [once]
        # Where all seeds draw alike it cannot be told, and what was not seen to work is no capability.
        return len(drawn) >= LEAST_DIFFERENT

    def _check(self, request: Request) -> None:
        sampling = request.sampling
        if {"stop_token_ids", "ignore_eos"} <= changed(sampling):
            raise CapabilityMissing(f"{self.name} forgets stop_token_ids where ignore_eos is given")
        if sampling.truncates and not _untruncated(sampling).own_distribution:
            raise CapabilityMissing(
                f"{self.name} cannot report logprobs of truncated samples: its numbers are of the distribution "
                "before top_p and top_k, which beside a temperature, a bias or a penalty is neither the model's "
                "own nor the one sampled from; sample with top_p=1 and top_k=0"
            )
        self._check_numbers(sampling, LARGEST_SEED)
        super()._check(request)

    def _calls(self, request: Request) -> list[Request]:
        """One for each sample, with the seeds that follow each other: all samples of one call would share its seed."""
        sampling = request.sampling
        seeds = [None if sampling.seed is None else sampling.seed + index for index in range(sampling.n)]
        return [Request(request.prompt, msgspec.structs.replace(sampling, n=1, seed=seed)) for seed in seeds]

    def _numbered(self, answers: Sequence[object], request: Request) -> list[tuple[int, Any]]:
        return list(enumerate(answers))

    def _sample(self, raw: Any, request: Request, version: WeightVersion) -> ToldSample:
        told = parse(raw, _Generated, self.path)
        about, rows, sampling = told.meta_info, told.meta_info.output_token_logprobs or [], request.sampling
        known = version if about.weight_version == version.label else UNKNOWN
        tops = about.output_top_logprobs
        return ToldSample(
            prompt_token_ids=request.prompt.token_ids,
            token_ids=told.output_ids,
            owners=[row.token_id for row in rows],
            logprobs=[row.logprob for row in rows],
            top_logprobs=None
            if tops is None
            else [[(row.token_id, row.logprob) for row in top] for top in tops],
            # Numbers that leave truncation out are, under truncation alone, the model's own.
            kind=LogprobKind.RAW if sampling.truncates else LogprobKind.PROCESSED,
            finish_reason=FinishReason(about.finish_reason.type),
            versions=(VersionSpan(known, 0, len(told.output_ids)),) if told.output_ids else (),
            cached_tokens=about.cached_tokens,
            text=told.text,
            prompt_tokens=about.prompt_tokens,
            made=about.completion_tokens,
        )


def _untruncated(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
