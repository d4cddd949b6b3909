"""What the metrics of six frameworks show of planted faults at the thresholds that each documents, and what the monitor shows.

    python tests/reliability/metric_table.py                # the table of docs/metrics.md
    python tests/reliability/metric_table.py values         # each metric on the last healthy and the first bad batch

Every column gets the same batches: a stream of `monitor_figures.py`, 20,000 tokens a step, with the fault from step 30 on, for
thirty steps. A cell is the number of bad batches that went by before the metric first lay beyond its threshold: 0 is the first.
Metrics are computed here as the frameworks compute them (docs/metrics.md says where that was read), not by the frameworks.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from monitor_figures import FAULTS, RNG, SINCE, first_bad, grown, stream
from monitor_streams import Batch, Fault, biased, noisy, one_replica, scaled

Gaps = np.ndarray
"""Δ, the trainer's logprob less the rollout's, of every token."""


def gaps(batch: Batch) -> Gaps:
    return batch.old.astype(np.float64) - batch.behavior


# --- metrics ------------------------------------------------------------------------------------------------------------


def mean_abs(batch: Batch) -> float:
    """TRL: over tokens, those without a number left out."""
    return float(np.nanmean(np.abs(gaps(batch))))


def mean_abs_of_samples(batch: Batch) -> float:
    """slime: each output counts alike, however long it is."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    return float((np.add.reduceat(np.abs(gaps(batch)), starts) / batch.lengths).mean())


def probs_diff(batch: Batch) -> float:
    """verl: of probabilities, although the name of the function says logprobs."""
    return float(np.abs(np.exp(batch.old.astype(np.float64)) - np.exp(batch.behavior)).mean())


def k1(batch: Batch) -> float:
    return float(-gaps(batch).mean())


def k3(batch: Batch) -> float:
    delta = gaps(batch)
    return float((np.expm1(delta) - delta).mean())


def mult_prob_error(batch: Batch) -> float:
    return float(np.exp(np.abs(gaps(batch))).mean())


def ess(batch: Batch) -> float:
    ratio = np.exp(gaps(batch))
    return float(ratio.mean() ** 2 / (ratio**2).mean())


def chi2(batch: Batch) -> float:
    return float((np.exp(gaps(batch)) ** 2).mean() - 1)


class Metric(NamedTuple):
    """One number of one framework, and where its documentation draws a line; None where it draws none."""

    framework: str
    name: str
    value: Callable[[Batch], float]
    beyond: Callable[[float], bool] | None
    line: str


METRICS = (
    Metric("TRL", "sampling/sampling_logp_difference/mean", mean_abs, None, "none documented"),
    Metric("verl", "training/rollout_probs_diff_mean", probs_diff, lambda value: value > 0.01, "> 0.01"),
    Metric("verl", "rollout_corr/kl", k1, lambda value: abs(value) > 0.1, "beyond ±0.1"),
    Metric("verl", "rollout_corr/rollout_is_eff_sample_size", ess, lambda value: value < 0.3, "< 0.3"),
    Metric("verl", "rollout_corr/chi2_token", chi2, lambda value: value > 1, "> 1"),
    Metric("NeMo-RL", "token_mult_prob_error", mult_prob_error, lambda value: value > 1.05, "> 1.05"),
    Metric("NeMo-RL", "gen_kl_error", k3, lambda value: value > 1e-3, "> 0.001"),
    Metric("prime-rl", "mismatch_kl/all/mean", k3, lambda value: value > 0.015, "> 0.015"),
    Metric(
        "slime",
        "train/train_rollout_logprob_abs_diff",
        mean_abs_of_samples,
        lambda value: value > 0.1,
        "> 0.1",
    ),
    Metric("OpenRLHF", "vllm_kl", k1, None, "none documented"),
)
FRAMEWORKS = tuple(dict.fromkeys(metric.framework for metric in METRICS))


# --- faults beside those of monitor_figures -----------------------------------------------------------------------------


def at_tokens(chosen: Callable[[Batch], np.ndarray], change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """The engine reports something else at chosen tokens."""

    def apply(given: Batch) -> Batch:
        behavior = given.behavior.astype(np.float64)
        behavior = np.where(chosen(given), np.minimum(change(behavior), 0), behavior)
        return replace(given, behavior=behavior.astype(np.float32))

    return apply


def place(given: Batch) -> np.ndarray:
    """Of every token in its output."""
    starts = np.repeat(np.cumsum(given.lengths) - given.lengths, given.lengths)
    return np.arange(given.behavior.size) - starts


def everywhere(given: Batch) -> np.ndarray:
    return np.ones(given.behavior.size, dtype=bool)


def one_in(count: int) -> Callable[[Batch], np.ndarray]:
    return lambda given: np.arange(given.behavior.size) % count == count // 2


def ends(given: Batch) -> np.ndarray:
    return place(given) == given.of_tokens(given.lengths) - 1


def shifted(given: Batch) -> Batch:
    """Each token has the logprob of the one before it."""
    behavior = np.where(place(given) > 0, np.roll(given.behavior, 1), given.behavior)
    return replace(given, behavior=behavior)


def late_noise(given: Batch) -> Batch:
    """A cache or a position that goes wrong from the 64th token on."""
    late = place(given) >= 64
    more = RNG.normal(0, 0.1, given.old.size)
    return replace(given, old=np.minimum(given.old + np.where(late, more, 0), 0).astype(np.float32))


def flipped(given: Batch) -> Batch:
    """One token in a hundred goes through other experts."""
    more = np.where(RNG.random(given.old.size) < 0.01, RNG.normal(0, 0.5, given.old.size), 0)
    return replace(given, old=np.minimum(given.old + more, 0).astype(np.float32))


def backwards(given: Batch) -> Batch:
    """The engine labels tokens with versions that the trainer does not have yet."""
    return replace(given, more={"versions": given.step + 3})


MORE: dict[str, Fault] = {
    "healthy: no fault": lambda given: given,
    "temperature 0.95 on one side": at_tokens(everywhere, lambda value: value + 0.05 * (value + 1.2)),
    "top-p 0.95, reported renormalised": at_tokens(everywhere, lambda value: value + 0.05),
    "8-bit weights, noise of 0.04": noisy(0.04, RNG),
    "one replica of eight keeps old weights": noisy(0.1, RNG, one_replica),
    "first token 0.3 nats off": at_tokens(lambda given: place(given) == 0, lambda value: value - 0.3),
    "last token 0.5 nats off": at_tokens(ends, lambda value: value - 0.5),
    "noise of 0.08 from the 64th token on": late_noise,
    "one token in 100 by other experts": flipped,
    "one token in 500 reported as 0": at_tokens(one_in(500), lambda value: value * 0),
    "logprobs cut at -3": at_tokens(everywhere, lambda value: np.maximum(value, -3.0)),
    "logprobs rounded to two digits": at_tokens(everywhere, lambda value: np.round(value, 2)),
    "logprobs shifted by one token": shifted,
    "labels of weights that are not there yet": backwards,
    "fp8 cache on one replica, ×2": scaled(2.0, one_replica),
    "a ramp of 0.2 % a step": grown(scaled, 0.002, 1.0),
    "bias of 0.0003": biased(0.0003),
    "rewards swapped, and nobody gave ids": lambda given: replace(given, rewards=given.rewards[::-1].copy()),
}
PLANTED: dict[str, Fault] = {**MORE, **{name: planted.fault for name, planted in FAULTS.items()}}


# --- the table ----------------------------------------------------------------------------------------------------------


def first_beyond(metric: Metric, steps: list[Batch]) -> int | None:
    """Bad batches before the metric lay beyond its line."""
    if metric.beyond is None:
        return None
    found = (number for number, batch in enumerate(steps) if metric.beyond(metric.value(batch)))
    return next(found, None)


def shown(framework: str, steps: list[Batch]) -> str:
    """By whichever of its metrics comes first."""
    of_it = [metric for metric in METRICS if metric.framework == framework]
    if all(metric.beyond is None for metric in of_it):
        return "no line"
    found = [number for metric in of_it if (number := first_beyond(metric, steps)) is not None]
    return str(min(found)) if found else "–"


def ours(fault: Fault) -> str:
    decision = first_bad(fault)
    if decision is None:
        return "– | "
    bad = next(reason for reason in decision.reasons if reason.bad)
    where = f" {bad.where}" if bad.where else ""
    return f"{decision.step - SINCE} | {decision.gap or ''} `{bad.code}`{where}"


def table() -> Iterator[str]:
    columns = "".join(f" {name} |" for name in (*FRAMEWORKS, "zerodrift", "what it says"))
    yield f"| from step k on |{columns}\n|---|{'---|' * (len(FRAMEWORKS) + 2)}"
    healthy, _ = stream()
    seen = dict.fromkeys((*FRAMEWORKS, "zerodrift"), 0)
    for name, fault in PLANTED.items():
        with np.errstate(invalid="ignore"):
            steps = [fault(batch) for batch in healthy[SINCE:]]
            cells = {framework: shown(framework, steps) for framework in FRAMEWORKS}
        cells["zerodrift"] = ours(fault)
        yield f"| {name} | {' | '.join(cells.values())} |"
        if fault is not MORE["healthy: no fault"]:
            for column, cell in cells.items():
                seen[column] += cell[0].isdigit()
    faults = len(PLANTED) - 1
    counts = " | ".join(f"{count} of {faults}" for count in seen.values())
    yield f"| **shown within 30 steps** | {counts} | |"


def values() -> Iterator[str]:
    columns = "".join(f" {metric.framework} `{metric.name}` {metric.line} |" for metric in METRICS)
    yield f"| first bad batch |{columns}\n|---|{'---|' * len(METRICS)}"
    healthy, _ = stream()
    for name, fault in PLANTED.items():
        with np.errstate(invalid="ignore"):
            bad = fault(healthy[SINCE])
            found = " | ".join(f"{metric.value(bad):.4g}" for metric in METRICS)
        yield f"| {name} | {found} |"


def main(words: list[str]) -> None:
    for line in (values if words == ["values"] else table)():
        print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main(sys.argv[1:])
