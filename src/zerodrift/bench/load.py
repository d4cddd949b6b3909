"""What a token costs as more requests run together, who takes the time, and how much memory keys and values take.

A crowd must not make a token dearer: decoding is timed at each load in turn, with prompts that share nothing.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from zerodrift.bench.contender import Stopwatch, Time
from zerodrift.bench.throughput import Spread, spread
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.exact.paged import PagedKV

LOADS = (1, 4, 16, 64, 256)
PROMPT_TOKENS = 16
STEPS = 6
"""Decode steps timed at a load of 16 and above; fewer sequences give more, so that all time about as long."""
MOST_DEARER, MOST_BOOKKEEPING, MOST_KV_ERROR = 1.1, 0.05, 0.05
KV_BLOCKS = 256
"""Blocks whose memory is measured: 180 MB for SmolLM2, enough to drown what else a process allocates."""
RESIDENT = Path("/proc/self/smaps_rollup")
"""Where Linux says how much memory the process holds; other systems have no such file."""
Progress = Callable[[int, int], None]


class Cost(msgspec.Struct, frozen=True):
    """Decoding at one load."""

    concurrent: int
    milliseconds_per_token: Spread
    times_the_cheapest: float
    """Median over the least median of all loads."""
    processor_milliseconds_per_token: Spread
    processor_times_the_cheapest: float
    """The same by processor time, for a machine that is shared."""
    bookkeeping: float
    """Share of a step outside of forward and draw."""


class KvMemory(msgspec.Struct, frozen=True):
    """Keys and values, by arithmetic and by what the process holds."""

    arithmetic_bytes: int
    """2 · layers · kv heads · head size · bytes of a number · tokens."""
    measured_bytes: int | None
    """Growth of resident memory when every block was written; None where the system does not tell."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, as `--json` writes it."""

    schema: int = 1
    model: str
    threads: int
    rounds: int
    costs: tuple[Cost, ...]
    kv: KvMemory


class _Timed(NamedTuple):
    per_token: Time
    bookkeeping: float


def measure_costs(
    model: Any, rounds: int, progress: Progress, loads: Sequence[int] = LOADS
) -> tuple[Cost, ...]:
    """All loads in turn, `rounds` times."""
    if rounds < 1:
        raise InvalidValue(f"asked for {rounds} rounds; a measurement needs one at least")
    engine = Engine(model, enable_prefix_caching=False, max_num_seqs=max(loads))
    found: dict[int, list[_Timed]] = {load: [] for load in loads}
    _timed(engine, loads[0])  # the first forward also packs weights
    total = rounds * len(loads)
    for turn in range(total):
        progress(turn, total)
        load = loads[turn % len(loads)]
        found[load].append(_timed(engine, load))
    progress(total, total)
    clock = {load: spread([1e3 * each.per_token.clock for each in timed]) for load, timed in found.items()}
    processor = {
        load: spread([1e3 * each.per_token.processor for each in timed]) for load, timed in found.items()
    }
    return tuple(
        Cost(
            load,
            clock[load],
            clock[load].median / min(each.median for each in clock.values()),
            processor[load],
            processor[load].median / min(each.median for each in processor.values()),
            spread([each.bookkeeping for each in timed]).median,
        )
        for load, timed in found.items()
    )


def _timed(engine: Engine, load: int) -> _Timed:
    """Prefill `load` requests, then time steps in which all of them decode."""
    draw, vocabulary = random.Random(load), engine.model.config.vocab_size
    steps = STEPS * max(1, LOADS[2] // load)
    for seed in range(load):
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        engine.add_request(prompt, SamplingParams(max_tokens=steps + 2, ignore_eos=True, seed=seed))
    while engine.scheduler.waiting or any(sample.remaining > 1 for sample in engine.scheduler.running):
        engine.step()
    before, watch = engine.metrics(), Stopwatch()
    for _ in range(steps):
        engine.step()
    taken, after = watch.read(), engine.metrics()
    count = after.sampled_tokens - before.sampled_tokens
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    return _Timed(
        Time(taken.clock / count, taken.processor / count),
        (after.bookkeeping_seconds - before.bookkeeping_seconds) / (after.seconds - before.seconds),
    )


def measure_kv(model: Any, num_blocks: int = KV_BLOCKS, block_size: int = 16) -> KvMemory:
    """Allocate, write every block, and look how much the process grew."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize
    _release_free_memory()
    before = _resident_bytes()
    kv = PagedKV(model, num_blocks, block_size)
    for block in range(num_blocks):
        kv.copy_block(block, block)
    after = _resident_bytes()
    measured = None if before is None or after is None else after - before
    return KvMemory(per_token * block_size * num_blocks, measured)


def _release_free_memory() -> None:
    """Hand free memory back to the system: glibc serves even 64 MiB from what was freed, and nothing would grow."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int | None:
    if not RESIDENT.is_file():
        return None
    line = next(line for line in RESIDENT.read_text().splitlines() if line.startswith("Rss:"))
    return 1024 * int(line.split()[1])
