"""Contenders side by side in one run, in turns: A B C, A B C, …

A machine's speed drifts by more than what is measured here, so a ratio is taken within each round, where both sides
met the same machine, and the median of the ratios is what counts. Where others compute on the same machine, the ratio of
processor times says more than that of the clock.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zerodrift.bench.contender import Contender, Run, Time, check
from zerodrift.bench.workload import Job, output_tokens, prompt_tokens
from zerodrift.core.errors import InvariantBroken

TARGETS: Mapping[str, float] = {"unconstrained": 0.95, "transformers": 3.0, "vllm": 1.2}
"""How many times as fast the exact engine is to be."""
Progress = Callable[[int, int], None]


class Spread(msgspec.Struct, frozen=True):
    """A number that was measured several times."""

    median: float
    low: float
    high: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How one contender did."""

    name: str
    setting: str
    tokens_per_second: tuple[float, ...]
    """Generated tokens, one number per round."""
    speed: Spread
    processor_seconds: tuple[float, ...]
    exact_is_times_as_fast: tuple[float, ...]
    """Within each round; empty where the exact engine did not take part, and for itself."""
    ratio: Spread | None
    processor_ratio: Spread | None
    """Its processor time over the exact engine's."""
    target: float | None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison, as `--json` writes it."""

    schema: int = 1
    model: str
    threads: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    standings: tuple[Standing, ...]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the contenders have in common."""

    model: str
    threads: int
    rounds: int


def compare(
    contenders: Sequence[Contender], jobs: Sequence[Job], setup: Setup, progress: Progress
) -> Throughput:
    """Every contender serves `jobs` once per round."""
    times: dict[str, list[Time]] = {contender.name: [] for contender in contenders}
    first: dict[str, Run] = {}
    total = setup.rounds * len(contenders)
    for turn in range(total):
        contender = contenders[turn % len(contenders)]
        progress(turn, total)
        run = contender.run(jobs)
        check(contender.name, jobs, run)
        times[contender.name].append(run.time)
        if contender.name == "exact" and run.served != first.setdefault("exact", run).served:
            raise InvariantBroken("the exact engine gave other bits in another round; please report it")
    progress(total, total)
    return Throughput(
        model=setup.model,
        threads=setup.threads,
        requests=len(jobs),
        prompt_tokens=prompt_tokens(jobs),
        output_tokens=output_tokens(jobs),
        rounds=setup.rounds,
        standings=tuple(_standing(contender, times, output_tokens(jobs)) for contender in contenders),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median, and the extremes."""
    return Spread(statistics.median(values), min(values), max(values))


def _standing(contender: Contender, times: Mapping[str, Sequence[Time]], num_tokens: int) -> Standing:
    own = times[contender.name]
    speeds = [num_tokens / each.clock for each in own]
    compared = "exact" in times and contender.name != "exact"
    rounds = list(zip(own, times["exact"], strict=True)) if compared else []
    ratios = [theirs.clock / exact.clock for theirs, exact in rounds]
    return Standing(
        name=contender.name,
        setting=contender.setting,
        tokens_per_second=tuple(speeds),
        speed=spread(speeds),
        processor_seconds=tuple(each.processor for each in own),
        exact_is_times_as_fast=tuple(ratios),
        ratio=spread(ratios) if rounds else None,
        processor_ratio=spread([theirs.processor / exact.processor for theirs, exact in rounds])
        if rounds
        else None,
        target=TARGETS.get(contender.name) if rounds else None,
    )
