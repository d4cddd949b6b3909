"""One engine for many threads: a worker thread owns it, everybody else submits and waits.

    with EngineLoop(Engine("testbed:qwen3")) as loop:
        request = loop.submit("3+4=", SamplingParams(max_tokens=64))
        for update in request:
            print(update.text, end="")

The worker takes what was asked for, in order, runs a step, hands out what it gave, and begins again: a request, an
abort, a pause or new weights take effect between two steps and never within one.

There is no lock: a signal handler may stop the loop wherever it finds its thread, and then waits for the worker, which
must never wait for that thread. What is shared is a dict and a queue, each changed by one call that is atomic.
"""

import atexit
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from zerodrift.core import require
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import (
    DuplicateRequest,
    EngineError,
    EngineStopped,
    InvalidValue,
    OutOfOrder,
    QueueFull,
    UnknownRequest,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import AdapterVersion, WeightVersion
from zerodrift.engine.adapters import AdapterSource
from zerodrift.engine.engine import Engine
from zerodrift.engine.handle import LOOK_AFTER_S, OnUpdate, RequestHandle
from zerodrift.engine.latch import Latch
from zerodrift.engine.limits import KVPolicy, PausePolicy
from zerodrift.engine.metrics import EngineMetrics
from zerodrift.engine.output import SampleUpdate
from zerodrift.engine.prompts import CheckedRequest, PromptLike
from zerodrift.engine.weights import StagedWeights, copy_running

Result = TypeVar("Result")


class EngineLoop:
    """Submit from any thread. Nobody else may use the engine until the loop is stopped."""

    def __init__(self, engine: Engine) -> None:
        """Starts at once. `engine` has no requests in flight."""
        if not isinstance(engine, Engine):
            raise InvalidValue(
                f"an engine is a {type(engine).__name__}; give EngineLoop(zerodrift.Engine(MODEL))"
            )
        if engine.has_unfinished:
            raise EngineError(
                "the engine has requests in flight, whose updates nobody would read; step() first"
            )
        self.engine = engine
        self.error: ZerodriftError | None = None
        """Why the worker ended, where it was not stopped: every waiter gets it, and every later call."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, RequestHandle] = {}
        self._aborted_early: set[RequestHandle] = set()
        """The worker's own: requests whose abort came before they did."""
        self._closed = False
        self._serves_no_more = False
        self._over = Latch()
        self._stopping = False
        self._paused = False
        self._when_empty: list[Callable[[], None]] = []
        """The worker's own: swaps that wait until nothing is in flight; meanwhile new requests are held."""
        self._held: list[tuple[RequestHandle, CheckedRequest]] = []
        self._worker = threading.Thread(target=self._run, name="zerodrift-engine", daemon=True)
        self._worker.start()
        # A daemon, lest a program hang that forgot to stop it; but Python must not take down torch under its feet.
        atexit.register(self.stop, drain=False)
        self._between_steps(lambda: None)

    def __enter__(self) -> "EngineLoop":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stop(drain=error is None)

    def submit(  # noqa: PLR0913  as Engine.add_request, and where its updates go
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        forced: Sequence[int] = (),
        stream_text: bool = True,
        lora: str | None = None,
        on_update: OnUpdate | None = None,
    ) -> RequestHandle:
        """Queue a request, without waiting for the step that runs. What could never be served raises here.

        `on_update` is called in the worker's thread with each update, or with the error that ended the request; it
        must not wait. asyncio is fed by `lambda update: loop.call_soon_threadsafe(queue.put_nowait, update)`.
        """
        request = self.engine.checked(prompt, sampling_params, forced, stream_text=stream_text, lora=lora)
        require.instance(InvalidValue, "request_id", request_id, str | None)
        if on_update is not None and not callable(on_update):
            raise InvalidValue(
                f"on_update is a {type(on_update).__name__}; give a function that takes one update"
            )
        self._require_open()
        waiting = self.engine.metrics().waiting + self._inbox.qsize() + len(self._held)
        if waiting >= self.engine.scheduler.limits.max_waiting:
            raise QueueFull(f"{waiting} samples wait already; come again later, or raise max_waiting")
        handle = self._registered(request_id, request.sampling.n, on_update)
        self._inbox.put(lambda: self._admit(handle, request))
        # The worker says so first and then fails all that are live, so that one of the two finds it.
        if self._serves_no_more and self._live.pop(handle.request_id, None) is not None:
            raise self.end_error()
        return handle

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its updates end with the tokens that it has."""
        if (handle := self._live.get(request_id)) is None:
            raise UnknownRequest(
                f"no unfinished request is called {request_id!r}; it ended, or was never submitted"
            )
        self._inbox.put(lambda: self._abort(handle))

    def pause(self, *, in_flight: str = "keep") -> None:
        """No step runs when this returns, and none until `resume`. Requests can be submitted, and wait.

        What is in flight is kept and goes on later, ends first ("drain"; who comes meanwhile waits), or is aborted.
        """
        what = require.one_of(PausePolicy, "in_flight", in_flight)
        if what is PausePolicy.DRAIN and self._paused and self.engine.has_unfinished:
            raise OutOfOrder(
                "the engine is paused, so what is in flight never ends; resume it, or abort what is there"
            )
        if what is PausePolicy.ABORT:
            self._between_steps(self._abort_all)
        self._between_steps(self._pause, drain=what is PausePolicy.DRAIN)

    @property
    def paused(self) -> bool:
        """Whether no step runs until `resume`."""
        return self._paused

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Ids of all requests that have not ended."""
        return tuple(self._live)

    def resume(self) -> None:
        """Go on."""
        self._between_steps(lambda: setattr(self, "_paused", False))

    def swap_weights(
        self,
        state: Mapping[str, torch.Tensor] | StagedWeights,
        version: str | WeightVersion | None = None,
        kv: str = "recompute",
        *,
        before: Callable[[], object] = lambda: None,
    ) -> WeightVersion:
        """As `Engine.swap_weights`: staged in the calling thread while steps go on, and copied in between two of them.

        With kv="drain" that is when all that is in flight has ended; requests that come meanwhile wait for it. `before`
        is called there, when nothing else can refuse the copy, and calls it off by raising.
        """
        drain = require.one_of(KVPolicy, "kv", kv) is KVPolicy.DRAIN
        if not isinstance(state, StagedWeights) and version is not None:
            state, version = self.engine.stage_weights(state, version), None

        return self._between_steps(lambda: self.engine.swap_weights(state, version, kv, before), drain=drain)

    def retain_weights(self) -> StagedWeights:
        """As `Engine.retain_weights`: copied between two steps, digested and tried while steps go on."""
        engine = self.engine
        return self._between_steps(lambda: copy_running(engine.model, engine.version)).retained()

    def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        config: Any = None,
        *,
        replace: bool = False,
        most: int | None = None,
    ) -> AdapterVersion:
        """As `Engine.load_adapter`: read and verified in the calling thread, loaded between two steps."""
        adapter = self.engine.adapters.staged(name, source, config)
        return self._between_steps(lambda: self.engine.load_adapter(adapter, replace=replace, most=most))

    def unload_adapter(self, name: str, *, in_use: str = "refuse") -> None:
        """As `Engine.unload_adapter`, between two steps."""
        self._between_steps(lambda: self.engine.unload_adapter(name, in_use=in_use))

    def reset_cache(self) -> None:
        """Forget every cached prefix that no request in flight looks at."""
        self._between_steps(self.engine.reset_cache)

    def metrics(self) -> EngineMetrics:
        """As they were after the last step."""
        return self.engine.metrics()

    def fingerprint(self) -> EngineFingerprint:
        """Of the weights of the last step."""
        return self.engine.fingerprint()

    @property
    def alive(self) -> bool:
        """Whether the worker runs."""
        return self._worker.is_alive()

    def end_error(self) -> ZerodriftError:
        """What whoever comes too late is told."""
        # The same error is raised in many threads: without this each would add its own frames to it.
        error = self.error or EngineStopped("the engine loop was stopped; start another one on its engine")
        return error.with_traceback(None)

    def stop(self, *, drain: bool = True) -> None:
        """Take nothing new, serve what was submitted (or abort it, without `drain`), and end the worker.

        Any thread may, and a signal handler too. What is being submitted meanwhile is served or told that it is not.
        """
        self._closed = True
        self._inbox.put(lambda: self._stop(drain=drain))
        if threading.current_thread() is not self._worker:
            try:
                while not self._over.wait(LOOK_AFTER_S) and self.alive:
                    pass
                # Bounded, since a handler that interrupts this very line finds the thread's lock taken by it.
                self._worker.join(LOOK_AFTER_S)
            except BaseException:
                # Whoever waited was interrupted: nobody is left to take what would still be computed.
                self._inbox.put(lambda: self._stop(drain=False))
                raise
            atexit.unregister(self.stop)

    def _between_steps(self, function: Callable[[], Result], *, drain: bool = False) -> Result:
        """Run `function` in the worker's thread, between two steps, and wait for it; with `drain`, when all has ended."""
        if threading.current_thread() is self._worker:
            if drain and self.engine.has_unfinished:
                raise OutOfOrder(
                    "what is in flight cannot end while its own on_update waits for that; drain from another thread"
                )
            return function()
        done, results, errors = Latch(), list[Result](), list[Exception]()

        def job() -> None:
            try:
                results.append(function())
            except Exception as error:
                errors.append(error)
            done.set()

        self._require_open()
        self._inbox.put((lambda: self._when_empty.append(job)) if drain else job)
        while not done.wait(LOOK_AFTER_S):
            # In this order: what has ended may have done the job before.
            if not self.alive and not done.is_set():
                raise self.end_error()
        if errors:
            raise errors[0]
        return results[0]

    def _require_open(self) -> None:
        if self.error is not None or self._closed or not self._worker.is_alive():
            raise self.end_error()

    def _registered(self, asked: str | None, num_samples: int, on_update: OnUpdate | None) -> RequestHandle:
        """A handle whose id is taken from now on."""
        while True:
            request_id = self.engine.new_id(self._live) if asked is None else asked
            handle = RequestHandle(self, request_id, num_samples, on_update)
            if self._live.setdefault(request_id, handle) is handle:
                return handle
            if asked is not None:
                raise DuplicateRequest(
                    f"a request called {asked!r} is not finished yet; give every request an id of its own"
                )

    # What follows runs in the worker's thread.

    def _run(self) -> None:
        try:
            with self.engine.owned():
                self._serve()
        except BaseException as error:
            if not isinstance(error, ZerodriftError):
                failed = EngineError(f"the engine's worker ended in {type(error).__name__}: {error}")
                failed.__cause__ = error
                error = failed
            self.error = error
        finally:
            self._closed = self._serves_no_more = True
            for request_id in list(self._live):
                if (handle := self._live.pop(request_id, None)) is not None:
                    handle.fail(self.end_error())
            self._over.set()

    def _serve(self) -> None:
        while not (self._stopping and not self.engine.has_unfinished and not self._when_empty):
            if self._when_empty and not self.engine.has_unfinished:
                self._drained()
                continue
            steps = self.engine.has_unfinished and not self._paused
            try:
                job = self._inbox.get(block=not steps)
            except queue.Empty:
                self._deliver(self.engine.step())
                continue
            job()
            del job  # it may hold a whole set of weights, and the next one may be long in coming
            if self.engine.broken is not None:
                raise self.engine.broken

    def _drained(self) -> None:
        """What waited for the end of all requests, and then those that waited for that."""
        jobs, self._when_empty = self._when_empty, []
        for job in jobs:
            job()
            if self.engine.broken is not None:
                raise self.engine.broken
        held, self._held = self._held, []
        for handle, request in held:
            self._admit(handle, request)

    def _admit(self, handle: RequestHandle, request: CheckedRequest) -> None:
        if self._when_empty:
            self._held.append((handle, request))
            return
        try:
            self.engine.queue(request, handle.request_id)
        except ZerodriftError as error:
            # Memory ran short since it was submitted, and those who gave way fill the queue.
            self._live.pop(handle.request_id, None)
            handle.fail(error)
        if handle in self._aborted_early:
            self._aborted_early.remove(handle)
            self._abort(handle)

    def _abort(self, handle: RequestHandle) -> None:
        request_id = handle.request_id
        if self._live.get(request_id) is not handle:
            return  # it ended meanwhile, and the id may be another's
        if request_id in self.engine.scheduler.requests:
            self._deliver(self.engine.abort(request_id))
        else:
            # Its id was taken, and the line that puts it into the inbox is yet to run.
            self._aborted_early.add(handle)

    def _pause(self) -> None:
        if self._stopping:
            # Nobody could resume it, and whoever stops it waits for what is in flight.
            raise self.end_error()
        self._paused = True

    def _stop(self, *, drain: bool) -> None:
        self._stopping, self._paused = True, False
        if not drain:
            self._abort_all()

    def _abort_all(self) -> None:
        self._aborted_early.update(handle for handle, _ in self._held)
        for request_id in list(self.engine.scheduler.requests):
            self._deliver(self.engine.abort(request_id))

    def _deliver(self, updates: Iterable[SampleUpdate]) -> None:
        failed: dict[str, Exception] = {}
        for update in updates:
            handle = self._live.get(update.request_id)
            if handle is None or update.request_id in failed:
                continue
            try:
                ended = handle.take(update)
            except Exception as error:
                failed[update.request_id] = error
                continue
            if ended:
                # In this order: whoever waited for it may use its id again.
                del self._live[update.request_id]
                handle.end()
        for request_id, problem in failed.items():
            if request_id in self.engine.scheduler.requests:
                self.engine.abort(request_id)
            self._live.pop(request_id).fail(problem)
