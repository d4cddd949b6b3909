"""Sums and reasons, put into the `Decision` that the caller reads."""

from zerodrift.monitor.batch import BatchSums
from zerodrift.monitor.cells import ALL, CellSums
from zerodrift.monitor.decide import Outcome
from zerodrift.monitor.decision import BaselineView, Code, Decision, GroupView, Reason, State
from zerodrift.monitor.judge import WHOLE
from zerodrift.monitor.state import MonitorState


def decision_of(
    step: int, sums: BatchSums, outcome: Outcome, reference_kl: float | None, *, enabled: bool
) -> Decision:
    """Everything that is known of the batch."""
    state, reasons = outcome.state, outcome.reasons
    breaker = state.breaker
    if breaker.probing:
        message = f"half open: {breaker.good_in_a_row} good windows in a row"
        reasons = (*reasons, Reason(code=Code.HALF_OPEN, message=message, value=float(breaker.good_in_a_row)))
    if breaker.state is State.HALT and not any(reason.bad for reason in reasons):
        message = "the breaker halted before; find the cause, then call half_open"
        reasons = (*reasons, Reason(code=Code.HALTED, message=message))
    return Decision(
        step=step,
        state=breaker.state if enabled else State.WARN if reasons else State.OK,
        would_be=breaker.state,
        reasons=reasons,
        tokens=sums.tokens,
        sequences=sums.sequences,
        mismatch=sums.mismatch.view(),
        staleness=sums.staleness.view(),
        update=sums.update.view(),
        total=sums.total.view(),
        entropy=sums.surprise / sums.told if sums.told else None,
        lag_mean=None if sums.lag is None or not sums.lag_tokens else sums.lag / sums.lag_tokens,
        lag_max=sums.lag_max,
        ratios=None if sums.corrected is None else sums.corrected.view(sums.total),
        groups=tuple(_group(cell) for cell in sums.cells if cell.kind != ALL),
        baseline=_baseline(sums, state),
        rewards=outcome.rewards,
        reference_kl=reference_kl,
        probe_due=outcome.probe_due,
    )


def _group(cell: CellSums) -> GroupView:
    return GroupView(
        kind=cell.kind,
        label=cell.label,
        tokens=int(cell.tokens),
        mean_abs=cell.size / cell.tokens,
        bias=cell.ratio / cell.tokens,
        against_baseline=cell.against_baseline if cell.baseline else 0.0,
    )


def _baseline(sums: BatchSums, state: MonitorState) -> BaselineView | None:
    whole = next((cell for cell in sums.cells if cell.kind == ALL), None)
    if state.baseline is None or whole is None:
        return None
    bias, factor = state.tracks[WHOLE].expected
    return BaselineView(
        source=state.baseline.source,
        mean_abs=factor * whole.baseline / whole.tokens,
        bias=bias,
        growth=factor,
    )
