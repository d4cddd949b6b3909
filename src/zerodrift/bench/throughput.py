"""Contenders side by side in one run, in turns: A B C, A B C, …

A machine's speed drifts by more than what is measured here, so a ratio is taken within each round, where both sides
met the same machine, and the median of the ratios is what counts.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zerodrift.bench.contender import Contender, Run, check
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
    exact_is_times_as_fast: tuple[float, ...]
    """Within each round; empty where the exact engine did not take part, and for itself."""
    ratio: Spread | None
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
    speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    first: dict[str, Run] = {}
    total = setup.rounds * len(contenders)
    for turn in range(total):
        contender = contenders[turn % len(contenders)]
        progress(turn, total)
        run = contender.run(jobs)
        check(contender.name, jobs, run)
        speeds[contender.name].append(output_tokens(jobs) / run.seconds)
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
        standings=tuple(_standing(contender, speeds) for contender in contenders),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median, and the extremes."""
    return Spread(statistics.median(values), min(values), max(values))


def _standing(contender: Contender, speeds: Mapping[str, Sequence[float]]) -> Standing:
    own = speeds[contender.name]
    compared = "exact" in speeds and contender.name != "exact"
    ratios = [mine / other for mine, other in zip(speeds["exact"], own, strict=True)] if compared else []
    return Standing(
        name=contender.name,
        setting=contender.setting,
        tokens_per_second=tuple(own),
        speed=spread(own),
        exact_is_times_as_fast=tuple(ratios),
        ratio=spread(ratios) if ratios else None,
        target=TARGETS.get(contender.name) if ratios else None,
    )
