"""The monitor's numbers under the names that dashboards know (`monitor.metrics`), and several batches as one point."""

from collections.abc import Mapping

from zerodrift.monitor.metrics import LEVELS, MEANINGS, PREFIX, metrics_of

__all__ = ["HIGHEST", "LEVELS", "MEANINGS", "PREFIX", "Window", "metrics_of"]

HIGHEST = frozenset({"state", "max", "misbound", "raw_max"})
"""Last parts of names whose highest value counts where several batches become one point; of all others the mean."""


class Window:
    """Batches since the last point of a dashboard, as one."""

    def __init__(self) -> None:
        """Empty."""
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """One batch."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Means, or the highest where that counts; the window is empty afterwards."""
        taken, self._values = self._values, {}
        return {
            name: max(values) if name.rpartition("/")[2] in HIGHEST else sum(values) / len(values)
            for name, values in taken.items()
        }
