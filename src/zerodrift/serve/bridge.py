"""Between the event loop, which never waits for the engine, and the engine's worker, which never waits for a client.

What a step gives crosses by one `call_soon_threadsafe` for all streams together. A client that reads slowly keeps what its
own request made, which max_tokens bounds, and nothing of anybody else's.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from zerodrift.core.errors import DuplicateRequest, QueueFull
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.engine.handle import RequestHandle
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output, SampleUpdate
from zerodrift.engine.prompts import as_prompt
from zerodrift.serve.asked import AskedSamples
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import LARGE_WORK, ServeLimits


class Piece(NamedTuple):
    """What one sample of a call got."""

    choice: int
    """Prompt-major: the n samples of a prompt come before those of the next."""
    update: SampleUpdate


class Ask:
    """One call while it is served: one request of the engine for each prompt."""

    def __init__(self, request_id: str, asked: AskedSamples) -> None:
        """`request_id` is what the client knows it by."""
        self.request_id, self.asked = request_id, asked
        self.begun = time.monotonic()
        self.first_token_s: float | None = None
        self.prompts: list[Prompt] = []
        self.handles: list[RequestHandle] = []
        self.outputs: dict[int, Output] = {}
        self.named: dict[int, int] = {}
        """Characters of the names of tokens that were written, by choice."""
        self.aborted = False
        self._pieces: deque[Piece | BaseException] = deque()
        self._arrived = asyncio.Event()

    def arrive(self, piece: Piece | BaseException) -> None:
        """In the event loop."""
        self._pieces.append(piece)
        self._arrived.set()

    def abort(self) -> None:
        """Nobody waits for it any more. What is still being queued is aborted by whoever queues it."""
        self.aborted = True
        for handle in self.handles:
            handle.abort()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """All that has come since the last ones were taken, until every sample has ended."""
        while len(self.outputs) < self.asked.samples:
            await self._arrived.wait()
            self._arrived.clear()
            taken = []
            while self._pieces:
                piece = self._pieces.popleft()
                if isinstance(piece, BaseException):
                    raise piece
                taken.append(piece)
                if piece.update.output is not None:
                    self.outputs[piece.choice] = piece.update.output
            if taken and self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.begun
            yield taken

    async def result(self) -> list[Output]:
        """Every sample, in order."""
        async for _ in self.pieces():
            pass
        return [self.outputs[choice] for choice in sorted(self.outputs)]


class Bridge:
    """Submits calls to one engine loop, from one event loop."""

    def __init__(self, engine_loop: EngineLoop, limits: ServeLimits) -> None:
        """In the event loop that will be served."""
        self.engine_loop, self._limits = engine_loop, limits
        self.live: dict[str, Ask] = {}
        self._events = asyncio.get_running_loop()
        self._box: deque[tuple[Ask, Piece | BaseException]] = deque()
        self._called = False
        # Tokenizing a long text takes longer than anybody else should wait.
        self._submitters = ThreadPoolExecutor(2, "zerodrift-submit")
        self._large = ThreadPoolExecutor(2, "zerodrift-large")

    async def off_loop(self, function: Callable[..., Any], *arguments: Any, size: int) -> Any:
        """What takes the processor for long, in another thread; `size`: characters or numbers that it goes through."""
        threads = self._large if size > LARGE_WORK else self._submitters
        return await self._events.run_in_executor(threads, function, *arguments)

    async def submit(self, asked: AskedSamples, prefix: str) -> Ask:
        """Queue all of it or none; the caller ends it by `done`."""
        request_id = f"{prefix}-{asked.request_id or uuid.uuid4().hex}"
        if request_id in self.live:
            raise DuplicateRequest(
                f"a request called {asked.request_id!r} is not finished yet; give each its own id"
            )
        ask = self.live[request_id] = Ask(request_id, asked)
        try:
            await self.off_loop(self._queue, ask, size=sum(map(len, asked.prompts)))
        except BaseException:
            self.done(ask)
            raise
        return ask

    def done(self, ask: Ask) -> None:
        """Whatever of it still runs is of no use."""
        self.live.pop(ask.request_id, None)
        ask.abort()

    def abort(self, request_ids: list[str] | None) -> int:
        """End calls by the ids that clients know, or by those that they gave; None: all."""
        named = {*request_ids} if request_ids is not None else None
        found = [
            ask
            for ask in self.live.values()
            if named is None or ask.request_id in named or ask.asked.request_id in named
        ]
        for ask in found:
            ask.abort()
        return len(found)

    def close(self) -> None:
        """Take nothing more."""
        for threads in (self._submitters, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _queue(self, ask: Ask) -> None:
        engine, asked = self.engine_loop.engine, ask.asked
        waiting, most = engine.metrics().waiting, engine.scheduler.limits.max_waiting
        if waiting + len(asked.prompts) > most:
            raise QueueFull(
                f"{waiting} samples wait, and {len(asked.prompts)} prompts more are beyond {most}; come again later"
            )
        ask.prompts = [
            msgspec.structs.replace(as_prompt(prompt, engine.tokenizer), cache_salt=asked.cache_salt)
            for prompt in asked.prompts
        ]
        requests = [(prompt, self._sampling(prompt, asked)) for prompt in ask.prompts]
        self._check_numbers(requests)
        for request in requests:
            engine.checked(*request, lora=asked.model.lora)
        try:
            for number, (prompt, sampling) in enumerate(requests):
                ask.handles.append(
                    self.engine_loop.submit(
                        prompt,
                        sampling,
                        stream_text=asked.streams and asked.with_text,
                        lora=asked.model.lora,
                        on_update=self._deliver_to(ask, number * sampling.n),
                    )
                )
                if ask.aborted:
                    ask.handles[-1].abort()
        except BaseException:
            ask.abort()
            raise

    def _check_numbers(self, requests: list[tuple[Prompt, SamplingParams]]) -> None:
        """Before anything is computed: an answer is held whole until it is sent."""
        asked = 0
        for prompt, sampling in requests:
            asked += sampling.n * sampling.max_tokens * (1 + (sampling.logprobs or 0))
            if sampling.prompt_logprobs is not None:
                asked += len(prompt.token_ids) * (1 + sampling.prompt_logprobs)
        if asked > self._limits.numbers:
            raise CallRefused(
                400,
                f"up to {asked} logprobs are asked for in one answer, and this server writes {self._limits.numbers}; ask for "
                "fewer prompts, samples, tokens or alternatives at a time",
                code="limit",
            )

    def _sampling(self, prompt: Prompt, asked: AskedSamples) -> SamplingParams:
        if not asked.fills:
            return asked.sampling
        engine = self.engine_loop.engine
        limits, length = engine.scheduler.limits, len(prompt.token_ids)
        room = min(engine.facts.max_model_len, limits.num_blocks * limits.block_size + 1) - length
        return msgspec.structs.replace(asked.sampling, max_tokens=max(room, asked.sampling.min_tokens, 1))

    def _deliver_to(self, ask: Ask, first: int) -> Callable[[SampleUpdate | BaseException], None]:
        streams = ask.asked.streams

        def on_update(update: SampleUpdate | BaseException) -> None:
            """In the engine's thread."""
            if isinstance(update, BaseException):
                self._post(ask, update)
            elif streams or update.output is not None:
                self._post(ask, Piece(first + update.sample_index, update))

        return on_update

    def _post(self, ask: Ask, piece: Piece | BaseException) -> None:
        self._box.append((ask, piece))
        if not self._called:
            self._called = True
            try:
                self._events.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return  # the event loop is closed: nobody is left to tell

    def _empty(self) -> None:
        # In this order: what is put in from here on calls again.
        self._called = False
        while self._box:
            ask, piece = self._box.popleft()
            ask.arrive(piece)
