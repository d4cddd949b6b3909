"""What the server counts, and how Prometheus reads it. Torch-free."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EndedCall(Protocol):
    """A call that came to its end."""

    first_token_s: float | None


class Histogram:
    """Durations."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[next((i for i, most in enumerate(BUCKETS_S) if seconds <= most), len(BUCKETS_S))] += 1
        self.total_s += seconds

    def lines(self, name: str, says: str) -> list[str]:
        """As Prometheus has it: each bucket counts those before, too."""
        found, so_far = [f"# HELP {name} {says}", f"# TYPE {name} histogram"], 0
        for most, count in zip((*BUCKETS_S, "+Inf"), self.counts, strict=True):
            so_far += count
            found.append(f'{name}_bucket{{le="{most}"}} {so_far}')
        return [*found, f"{name}_sum {self.total_s:.6f}", f"{name}_count {so_far}"]


class Figures:
    """Since the start. Only the event loop writes."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        """By path and status; paths that the table does not have are one."""
        self.updates: Counter[str] = Counter()
        """By how they ended."""
        self.canaries: Counter[str] = Counter()
        """By whether their bits were those of the first under the same weights."""
        self.disconnects = 0
        self.call_s, self.first_token_s = Histogram(), Histogram()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A call of any route."""
        self.answers[path, status] += 1
        self.call_s.add(seconds)

    def served(self, ask: EndedCall) -> None:
        """A call that generated, to its end."""
        if ask.first_token_s is not None:
            self.first_token_s.add(ask.first_token_s)

    def lines(self, gauges: Mapping[str, tuple[str, float]], about: Mapping[str, str]) -> str:
        """The whole page; `gauges` by name, each with what it means."""
        told = [
            *labelled("zerodrift_http_answers_total", "Calls by path and status", self._answer_rows()),
            *labelled(
                "zerodrift_weight_updates_total", "Updates by how they ended", _rows("result", self.updates)
            ),
            *labelled(
                "zerodrift_canaries_total",
                "Idle canaries by whether their bits held",
                _rows("result", self.canaries),
            ),
            *labelled(
                "zerodrift_client_disconnects_total", "Clients that left early", [({}, self.disconnects)]
            ),
            *self.call_s.lines("zerodrift_http_seconds", "From a call to the end of its answer"),
            *self.first_token_s.lines("zerodrift_first_token_seconds", "From a call to its first token"),
            *labelled("zerodrift_serving", "What is served", [(about, 1)], "gauge"),
        ]
        for name, (says, value) in gauges.items():
            told += [f"# HELP {name} {says}", f"# TYPE {name} gauge", f"{name} {value:.9g}"]
        return "\n".join(told) + "\n"

    def _answer_rows(self) -> Iterable[tuple[Mapping[str, str], float]]:
        return [
            ({"path": path, "status": str(status)}, n) for (path, status), n in sorted(self.answers.items())
        ]


def _rows(label: str, counts: Mapping[str, int]) -> list[tuple[Mapping[str, str], float]]:
    return [({label: name}, count) for name, count in sorted(counts.items())]


def labelled(
    name: str, says: str, rows: Iterable[tuple[Mapping[str, str], float]], kind: str = "counter"
) -> list[str]:
    """One metric with a value for each set of labels, as Prometheus reads it."""
    found = [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
    for labels, value in rows:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        found.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
