"""Control routes, as vLLM, TRL and prime-rl call them: pauses, updates, caches.

What becomes of KV at an update is on the wire already, in how the client paused before it:

    /pause?mode=keep&clear_cache=false   keep        requests in flight go on with the KV they have (prime-rl, SkyRL)
    /pause?mode=keep                     recompute   nothing of the old weights is looked at again (TRL)
    /pause?mode=wait                     drain       what is in flight ends first, under the old weights
    /pause?mode=abort, or no pause       recompute
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from zerodrift.core.errors import CapabilityMissing, OutOfOrder, ZerodriftError
from zerodrift.serve import control_wire as wire
from zerodrift.serve.adapters import ServedAdapters
from zerodrift.serve.bridge import Bridge
from zerodrift.serve.call import Call, CallReply
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.figures import Figures
from zerodrift.serve.settings import ServeSettings
from zerodrift.serve.weight_updates import WeightUpdates

Result = TypeVar("Result")
_IN_FLIGHT = {"keep": "keep", "wait": "drain", "abort": "abort"}
RECOMPUTE = "recompute"


class Control:
    """Answers for one engine."""

    def __init__(
        self,
        bridge: Bridge,
        weights: WeightUpdates,
        adapters: ServedAdapters,
        settings: ServeSettings,
        figures: Figures,
    ) -> None:
        self._bridge, self._weights, self._adapters, self._figures = bridge, weights, adapters, figures
        self._model, self._most = settings.model, settings.limits.control_calls
        self._loop = bridge.engine_loop
        self._calls = 0
        self._kv = RECOMPUTE
        self._sleeping = False
        # Each may wait for a step, and a draining pause for all that is in flight.
        self._threads = ThreadPoolExecutor(self._most, "zerodrift-control")

    def close(self) -> None:
        """Take nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def pause(self, call: Call) -> CallReply:
        """/pause."""
        query: wire.Pause = call.query
        await self._pause(query.mode, clear_cache=query.clear_cache)
        return CallReply({"status": "paused"})

    async def resume(self, _call: Call) -> CallReply:
        """/resume; twice does nothing."""
        if self._sleeping:
            raise OutOfOrder("the server sleeps; POST /wake_up")
        await self._off_loop(self._loop.resume)
        self._kv = RECOMPUTE
        return CallReply({"status": "resumed"})

    async def is_paused(self, _call: Call) -> CallReply:
        """/is_paused."""
        return CallReply({"is_paused": self._loop.paused})

    async def sleep(self, call: Call) -> CallReply:
        """/sleep: vLLM gives memory back; this engine keeps weights and KV where they are, and says so."""
        query: wire.Sleep = call.query
        if query.level == 2:
            raise CapabilityMissing(
                "level 2 throws the weights away, which this server does not; sleep at level 1"
            )
        await self._pause(query.mode, clear_cache=query.level > 0)
        self._sleeping = True
        return CallReply({"status": "sleeping", "level": query.level, "freed_bytes": 0})

    async def wake_up(self, _call: Call) -> CallReply:
        """/wake_up; whatever tags it names, all is awake then."""
        await self._off_loop(self._loop.resume)
        self._sleeping, self._kv = False, RECOMPUTE
        return CallReply({"status": "awake"})

    async def is_sleeping(self, _call: Call) -> CallReply:
        """/is_sleeping."""
        return CallReply({"is_sleeping": self._sleeping})

    async def abort_requests(self, call: Call) -> CallReply:
        """/abort_requests."""
        aborted = self._bridge.abort(call.body.request_ids)
        return CallReply({"status": "aborted", "aborted": aborted})

    async def reset_prefix_cache(self, call: Call) -> CallReply:
        """/reset_prefix_cache: no update needs it, since cached KV is found by the digest of its weights."""
        query: wire.ResetCache = call.query
        if query.reset_running_requests or query.reset_external:
            raise CapabilityMissing(
                "running requests keep their KV, and there is no other cache; call it without options"
            )
        await self._off_loop(self._loop.reset_cache)
        return CallReply({"success": not self._loop.in_flight})

    async def init_transfer(self, call: Call) -> CallReply:
        """/init_weight_transfer_engine."""
        await self._off_loop(self._weights.init, call.body.init_info or {})
        return CallReply({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, _call: Call) -> CallReply:
        """/shutdown_weight_transfer_engine."""
        await self._off_loop(self._weights.shutdown)
        return CallReply({"message": "Weight transfer shut down"})

    async def start_update(self, call: Call) -> CallReply:
        """/start_weight_update."""
        await self._off_loop(self._weights.start, call.body.expect)
        return CallReply({"message": "Weight update started"})

    async def update_weights(self, call: Call) -> CallReply:
        """/update_weights, by what its body says."""
        body: wire.UpdateBody = call.body
        if body.update_info is not None:
            if body.weight_dir is not None or body.expect is not None:
                raise CallRefused(
                    400,
                    "update_info comes alone; `expect` belongs to /start_weight_update",
                    param="update_info",
                )
            await self._counted(self._weights.add, body.update_info, success=None)
            return CallReply({"message": "Weights updated"})
        version = await self._counted(self._weights.whole, body.weight_dir, body.expect, self._kv)
        return CallReply({"status": "ok", "weight_version": version.label, "digest": version.digest})

    async def finish_update(self, call: Call) -> CallReply:
        """/finish_weight_update."""
        version = await self._counted(self._weights.finish, call.body.weight_version, self._kv)
        told = {"weight_version": version.label, "digest": version.digest}
        return CallReply({"message": "Weight update finished", **told})

    async def relabel(self, call: Call) -> CallReply:
        """/update_weight_version."""
        version = await self._counted(self._weights.relabel, call.body.new_version)
        return CallReply({"success": True, "new_version": version.label, "digest": version.digest})

    async def weight_info(self, _call: Call) -> CallReply:
        """/weight_info."""
        version = self._loop.engine.version
        return CallReply({"weight_version": version.label, "digest": version.digest})

    async def weight_checker(self, call: Call) -> CallReply:
        """/weight_checker."""
        body: wire.Check = call.body
        if body.action == "reset":
            raise CapabilityMissing(
                "reset overwrites the weights that are served, which this server does not do"
            )
        if body.action == "compare" and body.baseline is None:
            raise CallRefused(
                400, "compare needs a baseline: what checksum answered before", param="baseline"
            )
        checksums = await self._off_loop(self._weights.checksums)
        if body.baseline is None or body.action == "checksum":
            return CallReply({"checksums": checksums})
        baseline = body.baseline
        names = sorted(checksums.keys() | baseline.keys())
        differing = [name for name in names if checksums.get(name) != baseline.get(name)]
        return CallReply({"match": not differing, "mismatches": differing})

    async def world_size(self, _call: Call) -> CallReply:
        """/get_world_size."""
        return CallReply({"world_size": 1})

    async def load_adapter(self, call: Call) -> CallReply:
        """/v1/load_lora_adapter."""
        return await self._load_adapter(call.body, replace=bool(call.body.load_inplace))

    async def replace_adapter(self, call: Call) -> CallReply:
        """/load_lora_adapter: prime-rl sends every version under one name."""
        return await self._load_adapter(call.body, replace=True)

    async def unload_adapter(self, call: Call) -> CallReply:
        """/v1/unload_lora_adapter."""
        name: str = call.body.lora_name
        await self._off_loop(self._adapters.unload, name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _load_adapter(self, body: wire.LoadAdapter, *, replace: bool) -> CallReply:
        name = body.lora_name
        if name == self._model:
            raise CallRefused(
                400, f"{name!r} is the model itself; call the adapter otherwise", param="lora_name"
            )
        load = functools.partial(self._adapters.load, name, body.lora_path, replace=replace)
        version = await self._off_loop(load)
        reply = _text(f"Success: LoRA adapter '{name}' added successfully.")
        return reply._replace(headers={"x-adapter-digest": version.digest})

    async def _pause(self, mode: str, *, clear_cache: bool) -> None:
        await self._off_loop(functools.partial(self._loop.pause, in_flight=_IN_FLIGHT[mode]))
        self._kv = "keep" if mode == "keep" and not clear_cache else RECOMPUTE
        if clear_cache:
            await self._off_loop(self._loop.reset_cache)

    async def _counted(
        self, function: Callable[..., Result], *arguments: object, success: str | None = "published"
    ) -> Result:
        try:
            result = await self._off_loop(function, *arguments)
        except ZerodriftError:
            self._figures.updates["refused"] += 1
            raise
        if success is not None:
            self._figures.updates[success] += 1
        return result

    async def _off_loop(self, function: Callable[..., Result], *arguments: object) -> Result:
        """In another thread; some calls at a time."""
        if self._calls >= self._most:
            raise CallRefused(
                429, f"{self._calls} control calls wait already", code="limit", headers={"retry-after": "1"}
            )
        self._calls += 1
        try:
            call = asyncio.get_running_loop().run_in_executor(
                self._threads, functools.partial(function, *arguments)
            )
            return await call
        finally:
            self._calls -= 1


def _text(line: str) -> CallReply:
    """In a line, as vLLM answers."""
    return CallReply(line.encode(), media="text/plain; charset=utf-8")
