"""One engine, many threads: who asks gets all of it, in order, once; and nobody waits for ever."""

import asyncio
import ctypes
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.engine.support import PROMPT, Make, bits, changed, seeded

from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import (
    DuplicateRequest,
    EngineError,
    EngineStopped,
    InvalidPrompt,
    InvalidSampling,
    InvalidValue,
    InvariantBroken,
    OutOfBlocks,
    QueueFull,
    UnknownRequest,
)
from zerodrift.engine import weights as engine_weights
from zerodrift.engine.engine import Engine
from zerodrift.engine.handle import RequestHandle
from zerodrift.engine.loop import EngineLoop


@pytest.fixture
def loop(engine: Engine) -> Iterator[EngineLoop]:
    with EngineLoop(engine) as loop:
        yield loop
    assert not loop.alive


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("prompt", "settings", "error"),
    [
        ([], {}, InvalidPrompt),
        ([5, 61], {}, InvalidPrompt),
        ("text", {}, InvalidPrompt),
        ([5] * 90, {"max_tokens": 7}, InvalidSampling),
        ([5] * 50, {"max_tokens": 30}, OutOfBlocks),
    ],
)
def test_what_could_never_be_served_is_refused_at_once(
    engine_of: Make, prompt: Any, settings: dict[str, Any], error: type[Exception]
) -> None:
    with EngineLoop(engine_of(num_blocks=15)) as loop, pytest.raises(error):
        loop.submit(prompt, seeded(**settings))


@pytest.mark.parametrize("wrong", [{"request_id": 7}, {"request_id": [1]}, {"on_update": 5}])
def test_what_is_no_id_and_no_function_is_refused_at_once(loop: EngineLoop, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        loop.submit(PROMPT, seeded(), **wrong)


def test_a_pause_does_not_outlive_a_stop(engine: Engine) -> None:
    """Nobody could resume it: whoever stops the loop would wait for ever."""
    loop, errors = EngineLoop(engine), list[EngineStopped]()
    drains = threading.Event()

    def pause_while_it_drains(update: Any) -> None:
        drains.wait(30)
        try:
            loop.pause()
        except EngineStopped as error:
            errors.append(error)

    handle = loop.submit(PROMPT, seeded(max_tokens=6), on_update=pause_while_it_drains)
    stop = threading.Thread(target=loop.stop)
    stop.start()
    while not loop._closed:
        time.sleep(0.001)
    # Behind the first step, which waits here, the worker takes the stop from its inbox.
    drains.set()
    stop.join(60)
    assert not stop.is_alive()
    assert len(handle.result()[0].token_ids) == 6
    assert errors


def test_ids(loop: EngineLoop) -> None:
    loop.pause()
    mine = loop.submit(PROMPT, seeded(), request_id="request-1")
    with pytest.raises(DuplicateRequest):
        loop.submit(PROMPT, seeded(), request_id="request-1")
    assert loop.submit(PROMPT, seeded()).request_id == "request-2"
    with pytest.raises(UnknownRequest):
        loop.abort("nobody")
    loop.resume()
    mine.result()
    assert loop.submit([1], seeded(), request_id="request-1").result()


def test_the_queue_is_bounded(engine_of: Make) -> None:
    with EngineLoop(engine_of(max_waiting=3)) as loop:
        loop.pause()
        handles = [loop.submit([number], seeded()) for number in (1, 2, 3)]
        with pytest.raises(QueueFull):
            loop.submit([4], seeded())
        loop.resume()
        assert all(handle.result() for handle in handles)


def test_memory_that_runs_short_meanwhile_is_told_by_the_handle(loop: EngineLoop) -> None:
    """The scheduler has the last word, whatever was true at submission."""
    loop.engine.queue = lambda *_: (_ for _ in ()).throw(QueueFull("full"))  # type: ignore[method-assign]
    handle = loop.submit(PROMPT, seeded())
    with pytest.raises(QueueFull):
        handle.result()
    with pytest.raises(QueueFull):
        next(handle)


def test_an_aborted_request_keeps_what_it_has(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, seeded(max_tokens=80))
    begun = [next(handle) for _ in range(3)]
    handle.abort()
    updates = [*begun, *handle]
    (output,) = handle.result()
    assert output.finish_reason is FinishReason.ABORT
    assert list(handle) == [], "the end stays the end"
    assert tuple(token for update in updates for token in update.token_ids) == output.token_ids
    handle.abort()
    with pytest.raises(UnknownRequest):
        loop.abort(handle.request_id)


def test_who_leaves_the_block_ends_the_request(loop: EngineLoop) -> None:
    with loop.submit(PROMPT, seeded(max_tokens=80)) as handle:
        next(handle)
    assert handle.result()[0].finish_reason is FinishReason.ABORT


def test_an_abort_that_comes_too_late_spares_the_next_of_its_name(loop: EngineLoop) -> None:
    """The id is free again when the request has ended, though its abort is still in the inbox."""
    loop.pause()
    first = loop.submit(PROMPT, seeded(max_tokens=1), request_id="mine")
    late: list[RequestHandle] = []

    def step() -> None:
        loop.abort("mine")
        loop._deliver(loop.engine.step())
        late.append(loop.submit(PROMPT, seeded(), request_id="mine"))

    loop._between_steps(step)
    loop.resume()
    assert first.result()[0].finish_reason is FinishReason.LENGTH
    assert late[0].result()[0].finish_reason is FinishReason.LENGTH


def test_an_id_is_free_when_its_result_is_there(loop: EngineLoop) -> None:
    for _ in range(200):
        assert loop.submit([1], seeded(max_tokens=1), request_id="mine").result()


def test_nothing_moves_while_paused(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, seeded(max_tokens=60))
    next(handle)
    loop.pause()
    steps = loop.metrics().steps
    other = loop.submit([1, 2], seeded())
    with pytest.raises(TimeoutError):
        other.result(timeout=0.05)
    assert loop.metrics().steps == steps
    assert loop.metrics().waiting == 1
    loop.resume()
    assert len(handle.result()[0].token_ids) == 60
    (output,) = other.result()
    assert (len(output.token_ids), output.finish_reason) == (6, FinishReason.LENGTH)


def test_a_job_that_ends_just_as_its_waiter_looks_up_gives_its_result(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends exactly when the waiter has looked for it in vain, at the first line that this comes to."""
    monkeypatch.setattr("zerodrift.engine.loop.LOOK_AFTER_S", 0.1)
    began, go, ended = time.monotonic(), threading.Event(), threading.Event()

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code is not EngineLoop._between_steps.__code__:
            return None
        if event == "line" and time.monotonic() >= began + 0.1 and not go.is_set():
            go.set()
            loop._inbox.put(ended.set)
            ended.wait(10)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert loop._between_steps(lambda: (go.wait(10), "done")[1]) == "done"
    finally:
        sys.settrace(before)
    assert ended.is_set()


def test_a_job_raises_its_own_error(loop: EngineLoop) -> None:
    def job() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        loop._between_steps(job)


def test_an_abort_that_overtakes_its_request_is_kept(loop: EngineLoop) -> None:
    """Who gives ids can abort one from another thread, or from a signal handler, before its submission is through."""
    real, loop._inbox = loop._inbox, queue.SimpleQueue()
    handle = loop.submit(PROMPT, seeded(max_tokens=80), request_id="mine")
    late, loop._inbox = loop._inbox, real
    loop.abort("mine")
    loop._between_steps(lambda: None)
    loop._inbox.put(late.get())
    (output,) = handle.result()
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
    assert len(loop.submit(PROMPT, seeded(), request_id="mine").result()[0].token_ids) == 6


def test_updates_that_go_to_a_callback_cannot_be_iterated_over(loop: EngineLoop) -> None:
    loop.pause()
    handle = loop.submit(PROMPT, seeded(), on_update=lambda _: None)
    began = time.monotonic()
    for read in (next, list):
        with pytest.raises(EngineError, match="on_update"):
            read(handle)
    assert not handle.done
    assert time.monotonic() - began < 1
    loop.resume()
    assert len(handle.result()[0].token_ids) == 6


def test_asyncio_is_fed(loop: EngineLoop) -> None:
    async def read() -> list[int]:
        running, updates = asyncio.get_running_loop(), asyncio.Queue[Any]()
        loop.submit(
            PROMPT,
            seeded(),
            on_update=lambda update: running.call_soon_threadsafe(updates.put_nowait, update),
        )
        tokens: list[int] = []
        while (update := await updates.get()).output is None:
            tokens += update.token_ids
        return [*tokens, *update.token_ids]

    assert tuple(asyncio.run(read())) == loop.submit(PROMPT, seeded()).result()[0].token_ids


def test_a_callback_that_fails_costs_its_own_request_alone(loop: EngineLoop) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("mine")

    broken, fine = loop.submit(PROMPT, seeded(n=2), on_update=fails), loop.submit([1, 2], seeded())
    with pytest.raises(RuntimeError, match="mine"):
        broken.result()
    assert fine.result()[0].problem is None
    loop.pause()
    assert loop.metrics().running == loop.metrics().waiting == 0


def test_a_callback_may_submit(loop: EngineLoop) -> None:
    followed: list[Any] = []
    handle = loop.submit(
        PROMPT,
        seeded(max_tokens=1),
        on_update=lambda update: followed.append((loop.submit([1, 2], seeded()), loop.reset_cache())),
    )
    handle.result()
    assert followed[0][0].result()[0].problem is None


def test_weights_that_run_are_held_on_to_between_two_steps(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, seeded(max_tokens=80))
    next(handle)
    initial = loop.retain_weights()
    assert initial.version == loop.engine.version
    before = bits(loop.submit([1, 2], seeded()).result()[0])
    loop.swap_weights(changed(loop.engine), "b")
    assert bits(loop.submit([1, 2], seeded()).result()[0]) != before
    assert loop.swap_weights(initial) == initial.version
    assert bits(loop.submit([1, 2], seeded()).result()[0]) == before


def test_only_the_copy_of_what_runs_is_taken_between_two_steps(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker steps; digests and the first token through the copy are the caller's."""
    threads: dict[str, threading.Thread] = {}

    def noted(name: str) -> None:
        real = getattr(engine_weights, name)

        def note(*arguments: Any) -> Any:
            threads[name] = threading.current_thread()
            return real(*arguments)

        monkeypatch.setattr(engine_weights, name, note)

    for name in ("_copied", "version_of", "try_out"):
        noted(name)
    loop.retain_weights()
    ours = threading.current_thread()
    assert threads["version_of"] is threads["try_out"] is ours
    assert threads["_copied"] is not ours


def test_steps_go_on_while_weights_are_staged(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    real, staged = engine_weights.version_of, []

    def waits(*arguments: Any) -> Any:
        """Staging ends when forty more steps have run."""
        enough = loop.metrics().steps + 40
        while loop.metrics().steps < enough:
            time.sleep(0.001)
        staged.append(handle.done)
        return real(*arguments)

    handle = loop.submit(PROMPT, seeded(max_tokens=80))
    next(handle)
    monkeypatch.setattr(engine_weights, "version_of", waits)
    loop.swap_weights(changed(loop.engine), "b")
    assert staged == [False]
    (output,) = handle.result()
    assert len(output.versions) == 2
    assert output.versions[0].end >= 40


def test_another_thread_cannot_use_its_engine(loop: EngineLoop) -> None:
    for call in (loop.engine.step, lambda: loop.engine.generate(PROMPT), lambda: loop.engine.abort("x")):
        with pytest.raises(EngineError, match="EngineLoop"):
            call()


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(InvalidValue):
        EngineLoop("testbed:llama")  # type: ignore[arg-type]


def test_an_engine_with_requests_is_not_taken_over(engine: Engine) -> None:
    engine.add_request(PROMPT, seeded())
    with pytest.raises(EngineError, match="in flight"):
        EngineLoop(engine)


@pytest.mark.parametrize("drain", [True, False])
def test_a_stop_leaves_nobody_waiting(engine: Engine, drain: bool) -> None:
    loop = EngineLoop(engine)
    loop.pause()
    handles = [loop.submit([number], seeded(max_tokens=30)) for number in range(1, 9)]
    loop.stop(drain=drain)
    reasons = {handle.result()[0].finish_reason for handle in handles}
    assert reasons == {FinishReason.LENGTH if drain else FinishReason.ABORT}
    for call in (lambda: loop.submit(PROMPT), loop.pause, loop.reset_cache):
        with pytest.raises(EngineStopped):
            call()
    loop.stop()
    assert engine.generate(PROMPT, seeded())[0].problem is None, "the engine is its owner's again"


def test_an_engine_that_breaks_tells_everybody(engine: Engine) -> None:
    loop = EngineLoop(engine)
    loop.pause()
    told: list[object] = []
    handles = [loop.submit([number], seeded()) for number in range(1, 5)]
    loop.submit([9], seeded(), on_update=told.append)
    engine.scheduler.pool.allocate()
    loop.resume()
    for handle in handles:
        with pytest.raises(InvariantBroken):
            list(handle)
        with pytest.raises(InvariantBroken):
            handle.result()
    assert any(isinstance(each, InvariantBroken) for each in told)
    with pytest.raises(InvariantBroken):
        loop.submit(PROMPT)
    loop.stop()


def test_a_step_that_raises_ends_the_loop_with_its_cause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("zerodrift.engine.runner.forward_step", fail)
    loop = EngineLoop(engine)
    with pytest.raises(EngineError, match="MemoryError: none left"):
        loop.submit(PROMPT).result()
    assert isinstance(loop.error.__cause__ if loop.error else None, MemoryError)
    loop.stop()


def ended(handle: RequestHandle) -> tuple[int, ...] | EngineError:
    try:
        return handle.result(timeout=20)[0].token_ids
    except EngineError as error:
        return error


def interrupt(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )


@pytest.mark.parametrize("num_seeds", [6, pytest.param(200, marks=pytest.mark.long)])
def test_interrupted_anywhere_it_stops_clean(engine_of: Make, num_seeds: int) -> None:
    """The worker is hit between any two of its instructions: everybody who waits hears of it."""
    hit_alive = 0
    for seed in range(num_seeds):
        draw, loop = random.Random(seed), EngineLoop(engine_of())
        handles = [loop.submit([number], seeded(max_tokens=60)) for number in range(1, 7)]
        step = draw.randrange(60)
        while loop.metrics().steps < step:
            time.sleep(draw.uniform(0, 0.002))
        interrupt(loop._worker)
        ends = {
            type(end) if isinstance(end := ended(handle), EngineError) else len(end) for handle in handles
        }
        assert ends <= {EngineError, 60}
        hit_alive += EngineError in ends
        loop.stop(drain=False)
        assert not loop.alive
        with pytest.raises(EngineError):
            loop.submit(PROMPT)
    assert hit_alive > 0, "nobody was still waiting when the worker was hit"


PROGRAM = """
import signal, sys
# Whoever runs tests in the background may have told them to ignore interrupts, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop

loop = EngineLoop(Engine("testbed:qwen3", num_blocks=512))
handles = [loop.submit([5, n], SamplingParams(max_tokens=400, ignore_eos=True)) for n in range(64)]
print("started", flush=True)
if sys.argv[1] == "forgets":
    sys.exit(0)
with loop:
    for handle in handles:
        handle.result()
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 20))])
@pytest.mark.parametrize("how", ["forgets", "interrupted"])
def test_a_program_ends_though_requests_run(how: str, seed: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "started\n"
    if how == "interrupted":
        time.sleep(random.Random(seed).uniform(0, 0.5))
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == (0 if how == "forgets" else -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors or how == "forgets"
    assert "Fatal" not in errors
