"""What the proxy counts, and how Prometheus reads it. Torch-free."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock

from zerodrift.serve.figures import Histogram, labelled
from zerodrift.serve.shadow.versions import EngineVersions

FURTHEST = 10.0
"""Nats."""


class Mismatch:
    """Engine's logprobs less those of the reference, of every token that was scored. Any thread."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self.samples = self.tokens = 0
        self.absolute = self.k3 = 0.0
        self.largest = self.last = 0.0
        """Since the last change of weights; mean |Δ| of the last sample."""
        self.unscored: Counter[str] = Counter()

    def add(self, engine: Sequence[float], reference: Sequence[float]) -> None:
        """One sample of at least one token."""
        gaps = [theirs - ours for theirs, ours in zip(engine, reference, strict=True)]
        sizes = [abs(gap) for gap in gaps]
        with self._mutex:
            self.samples += 1
            self.tokens += len(gaps)
            self.absolute += math.fsum(sizes)
            # Of reference from engine, over tokens of the engine. A token that is further off counts as this far, 22,000 nats:
            # one at -9999 would add 1e304, and no later token would move the sum.
            self.k3 += math.fsum(
                math.expm1(capped) - capped for capped in (min(-gap, FURTHEST) for gap in gaps)
            )
            self.largest = max(self.largest, *sizes)
            self.last = math.fsum(sizes) / len(sizes)

    def leave_out(self, reason: str) -> None:
        """One answer, or sample, that was chosen and cannot be scored."""
        with self._mutex:
            self.unscored[reason] += 1

    def begin_version(self) -> None:
        """What is largest is of the weights from here on."""
        with self._mutex:
            self.largest = 0.0


class ShadowFigures:
    """Since the start. Only the event loop writes, but for `mismatch`."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.updates: Counter[str] = Counter()
        """By how they ended."""
        self.receipts: Counter[str] = Counter()
        """By what they say, or why there is none."""
        self.confirmed: bool | None = None
        """Whether one vouches for the weights that the engine has now; None: none are taken."""
        self.failures: Counter[str] = Counter()
        """Calls that the engine did not answer, by code."""
        self.mixed = self.disconnects = 0
        self.up = False
        self.call_s = Histogram()
        self.mismatch = Mismatch()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A call of any route."""
        self.answers[path, status] += 1
        self.call_s.add(seconds)

    def lines(self, versions: EngineVersions) -> str:
        """The whole page."""
        paths = [
            ({"path": path, "status": str(n)}, count) for (path, n), count in sorted(self.answers.items())
        ]
        seen = self.mismatch
        told = [
            *labelled("zerodrift_shadow_answers_total", "Calls by path and status", paths),
            *_by(
                "zerodrift_shadow_updates_total",
                "Weight updates that passed, by how they ended",
                "result",
                self.updates,
            ),
            *_by(
                "zerodrift_shadow_receipts_total",
                "Receipts by what they say, and those that could not be taken",
                "outcome",
                self.receipts,
            ),
            *_by(
                "zerodrift_shadow_upstream_failures_total",
                "Calls without an answer of the engine's",
                "code",
                self.failures,
            ),
            *_by(
                "zerodrift_shadow_unscored_total",
                "Chosen for scoring and not scored, by reason",
                "reason",
                seen.unscored,
            ),
            *self.call_s.lines(
                "zerodrift_shadow_seconds", "From a call to the end of its answer, engine included"
            ),
        ]
        for name, kind, says, value in self._numbers(versions):
            told += [f"# HELP zerodrift_shadow_{name} {says}", f"# TYPE zerodrift_shadow_{name} {kind}"]
            told.append(f"zerodrift_shadow_{name} {value:.9g}")
        return "\n".join(told) + "\n"

    def _numbers(self, versions: EngineVersions) -> list[tuple[str, str, str, float]]:
        seen = self.mismatch
        says = "Whether a receipt vouches for the weights that the engine has now"
        confirmed = [] if self.confirmed is None else [("receipt_confirmed", "gauge", says, self.confirmed)]
        return [
            *confirmed,
            ("upstream_up", "gauge", "Whether the engine answered when it was called last", self.up),
            ("weight_version", "gauge", "Changes of weights that have passed", versions.number),
            ("requests_alive", "gauge", "Requests that generate now", len(versions.alive)),
            ("mixed_total", "counter", "Requests that were alive while weights may have changed", self.mixed),
            ("client_disconnects_total", "counter", "Clients that left early", self.disconnects),
            ("scored_samples_total", "counter", "Samples that the reference has scored", seen.samples),
            ("scored_tokens_total", "counter", "Tokens of these", seen.tokens),
            ("mismatch_nats_total", "counter", "Sum of |engine - reference| over tokens", seen.absolute),
            (
                "mismatch_k3_nats_total",
                "counter",
                "Sum of k3 over tokens: an estimate of the KL divergence",
                seen.k3,
            ),
            (
                "mismatch_largest_nats",
                "gauge",
                "Largest |engine - reference| under these weights",
                seen.largest,
            ),
            ("mismatch_last_nats", "gauge", "Mean |engine - reference| of the last sample", seen.last),
        ]


def _by(name: str, says: str, label: str, counts: Mapping[str, int]) -> list[str]:
    return labelled(name, says, [({label: each}, count) for each, count in sorted(counts.items())])
