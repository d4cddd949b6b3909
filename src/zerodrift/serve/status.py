"""Routes that say how the server is and what it serves."""

import platform
import time
import uuid
from typing import Any

import torch

from zerodrift import __version__
from zerodrift.engine.loop import EngineLoop
from zerodrift.serve.adapters import ServedAdapters
from zerodrift.serve.call import Call, CallReply
from zerodrift.serve.figures import Figures
from zerodrift.serve.openapi import document
from zerodrift.serve.settings import ServeSettings
from zerodrift.serve.watch import EngineWatch
from zerodrift.serve.weight_updates import BACKEND


class StatusRoutes:
    """Of one server."""

    def __init__(
        self,
        loop: EngineLoop,
        watch: EngineWatch,
        adapters: ServedAdapters,
        settings: ServeSettings,
        figures: Figures,
    ) -> None:
        self._loop, self._watch, self._adapters, self._figures = loop, watch, adapters, figures
        self._model, self._role, self._limits = settings.model, settings.role, settings.limits
        self._created, self._instance = int(time.time()), uuid.uuid4().hex

    async def health(self, _call: Call) -> CallReply:
        """/health."""
        if (problem := self._watch.problem) is not None:
            return CallReply({"status": "failed", "reason": problem}, 503)
        return CallReply({"status": "ok", "paused": self._loop.paused, "role": self._role})

    async def liveness(self, _call: Call) -> CallReply:
        """/liveness."""
        told = {"last_step_age_s": round(self._watch.age_s, 3), "paused": self._loop.paused}
        if self._watch.hangs or not self._loop.alive:
            return CallReply({"status": "hangs", **told}, 503)
        return CallReply({"status": "alive", **told})

    async def version(self, _call: Call) -> CallReply:
        """/version."""
        return CallReply({"version": __version__, "engine": "zerodrift"})

    async def openapi(self, _call: Call) -> CallReply:
        """/openapi.json."""
        return CallReply(document(__version__))

    async def models(self, _call: Call) -> CallReply:
        """/v1/models."""
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "zerodrift",
            "root": self._model,
            "parent": None,
            "max_model_len": self._loop.engine.facts.max_model_len,
        }
        adapters = [
            {**card, "id": each.name, "root": each.name, "parent": self._model, "digest": each.digest}
            for each in self._adapters.versions
        ]
        return CallReply({"object": "list", "data": [card, *adapters]})

    async def metrics(self, _call: Call) -> CallReply:
        """/metrics."""
        told = self._loop.metrics()
        gauges = {
            f"zerodrift_engine_{name}": (
                f"{name.replace('_', ' ')} of the engine",
                float(getattr(told, name)),
            )
            for name in told.__struct_fields__
        }
        gauges |= {
            "zerodrift_requests_in_flight": (
                "Requests of the engine that have not ended",
                len(self._loop.in_flight),
            ),
            "zerodrift_paused": ("1 while no step runs until /resume", float(self._loop.paused)),
            "zerodrift_last_step_age_seconds": ("Since the last step or canary", self._watch.age_s),
            "zerodrift_parity_pass_rate": (
                "Finished samples that were scored again and had the trainer's bits; NaN: none was yet",
                self._watch.parity_pass_rate,
            ),
            "zerodrift_canary_kl_nats": (
                "k3 of the last idle canary against the first under the same weights",
                self._watch.canary_kl,
            ),
            "zerodrift_healthy": ("1 while /health answers 200", float(self._watch.problem is None)),
        }
        version = self._loop.engine.version
        about = {
            "model": self._model,
            "role": self._role,
            "weight_version": version.label,
            "weight_digest": version.digest or "",
            "fingerprint": self._loop.fingerprint().digest,
        }
        page = self._figures.lines(gauges, about)
        return CallReply(page.encode(), media="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(self, call: Call) -> CallReply:
        """/server_info."""
        info = self._info()
        if call.query.config_format == "text":
            info = {name: str(value) for name, value in info.items()}
        return CallReply(info)

    def _info(self) -> dict[str, Any]:
        fingerprint = self._loop.fingerprint()
        return {
            "vllm_config": self._config(),
            "vllm_env": {},
            "system_env": {
                "torch_version": str(torch.__version__),
                "python_version": platform.python_version(),
                "zerodrift_version": __version__,
            },
            "zerodrift": {
                "semantic": dict(fingerprint.semantic),
                "numeric": dict(fingerprint.numeric),
                "deployment": dict(fingerprint.deployment),
                "digest": fingerprint.digest,
            },
        }

    def _config(self) -> dict[str, Any]:
        """In the form of vLLM's own, as far as the words mean the same."""
        engine = self._loop.engine
        limits = engine.scheduler.limits
        return {
            "model_config": {
                "model": self._model,
                "dtype": str(engine.model.dtype),
                "max_model_len": engine.facts.max_model_len,
                "logprobs_mode": engine.mode.value,
                "max_logprobs": self._limits.logprobs,
                "generation_config": "vllm",
                "override_generation_config": {},
                "hf_overrides": {},
                "quantization": None,
                "enforce_eager": True,
            },
            "cache_config": {
                "block_size": limits.block_size,
                "enable_prefix_caching": limits.prefix_caching,
                "cache_dtype": "auto",
                "num_gpu_blocks": limits.num_blocks,
            },
            "scheduler_config": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "enable_chunked_prefill": True,
                "async_scheduling": False,
            },
            "parallel_config": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "world_size": 1,
            },
            "device_config": {"device": engine.model.device.type},
            "lora_config": self._adapters.config,
            "speculative_config": None,
            "weight_transfer_config": {"backend": BACKEND},
            "instance_id": self._instance,
        }
