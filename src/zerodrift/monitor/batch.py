"""One batch as sums: what a rank sends, and what the decision is made of."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from zerodrift.monitor.baseline import Baseline, WarmUp
from zerodrift.monitor.cells import CellSums, Expected, cells_of, merged
from zerodrift.monitor.correction import CorrectedSums, Correction
from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.gaps import Difference, GapSums, differences
from zerodrift.monitor.groups import UNIT
from zerodrift.monitor.intake import Tokens
from zerodrift.monitor.measure import GapMeasured, largest, measure
from zerodrift.monitor.rewards import read
from zerodrift.monitor.sight import LabelSeen, seen_of
from zerodrift.monitor.sight import merged as together
from zerodrift.stats.arrays import Ids


class BatchSums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over one batch; `+` is the batches of two ranks together."""

    tokens: int = 0
    sequences: int = 0
    padding: int = 0
    """Of them, those that look like padding which nobody masked."""
    surprise: float = 0.0
    """-Σ log p of the behaviour."""
    told: int = 0
    """Tokens whose behaviour logprob is known."""
    lag: float | None = None
    lag_tokens: int = 0
    """Tokens whose version is known."""
    lag_max: int | None = None
    mismatch: GapSums = GapSums()
    staleness: GapSums = GapSums()
    update: GapSums = GapSums()
    total: GapSums = GapSums()
    k3: float = 0.0
    """Σ k3(ψ) of the mismatch: of tokens that count for at most one nat."""
    k3_squares: float = 0.0
    """Σ ψ⁴/4, nearly that of their squares."""
    warm_up: WarmUp = WarmUp()
    cells: tuple[CellSums, ...] = ()
    sight: tuple[LabelSeen, ...] = ()
    corrected: CorrectedSums | None = None
    trips: tuple[Reason, ...] = ()
    rewards: tuple[float, ...] = ()
    misbound: int = 0

    def __add__(self, other: "BatchSums") -> "BatchSums":
        """Both."""
        values: dict[str, Any] = {
            name: _either(getattr(self, name), getattr(other, name)) for name in BatchSums.__struct_fields__
        }
        values["lag_max"] = max(
            (lag for lag in (self.lag_max, other.lag_max) if lag is not None), default=None
        )
        values["cells"] = tuple(merged(iter([list(self.cells), list(other.cells)])).values())
        values["sight"] = together((*self.sight, *other.sight))
        return BatchSums(**values)


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first if second is None else first + second


def batch_sums(
    tokens: Tokens,
    *,
    epsilon: float,
    baseline: Baseline | None,
    expect: Callable[[str], Expected],
    correction: Correction | None,
) -> BatchSums:
    """Everything but rewards. Of a batch that trips by its numbers nothing is measured."""
    if tokens.trips or not tokens.size:
        why = "the batch has numbers that cannot be measured" if tokens.trips else "no token is left"
        none = GapSums(why=why)
        return BatchSums(
            tokens=tokens.size, sequences=len(tokens.counts), trips=tokens.trips, mismatch=none, staleness=none,
            update=none, total=none,
        )  # fmt: skip
    found = differences(tokens)
    measured = _measured(found, tokens, epsilon)
    impossible = [
        _impossible(gap, found[gap], tokens.counts) for gap, each in measured.items() if each is None
    ]
    if impossible:
        return batch_sums(
            Tokens(tokens.logprobs, tokens.counts, tokens.kept, trips=tuple(impossible)),
            epsilon=epsilon, baseline=baseline, expect=expect, correction=correction,
        )  # fmt: skip
    gaps = {gap: each for gap, each in measured.items() if each is not None}
    sums = _summed(tokens, gaps, _corrected(found[None], correction))
    counted = gaps[Gap.MISMATCH].counted
    sums = msgspec.structs.replace(sums, sight=seen_of(tokens, counted))
    if counted is None:
        return sums
    cells = () if baseline is None else tuple(cells_of(counted, tokens, baseline, expect))
    return msgspec.structs.replace(
        sums, k3=counted.k3, k3_squares=counted.k3_squares, warm_up=WarmUp.of(counted), cells=cells
    )


def _measured(
    found: Mapping[Gap | None, Difference | str], tokens: Tokens, epsilon: float
) -> dict[Gap | None, GapMeasured | None]:
    measured: dict[Gap | None, GapMeasured | None] = {}
    for gap, each in found.items():
        if gap is None and each is found[Gap.MISMATCH]:
            # Without old weights and without updates the total is the mismatch, and is not summed twice.
            measured[gap] = measured[Gap.MISMATCH]
        else:
            measured[gap] = measure(each, tokens.counts, epsilon, by_stratum=gap is Gap.MISMATCH)
    return measured


def _impossible(gap: Gap | None, difference: Difference | str, counts: Ids) -> Reason:
    assert not isinstance(difference, str)
    most = largest(difference, counts)
    message = f"a token has a ratio of e^{most:.0f}: no sampler draws what it gives such a probability"
    return Reason(code=Code.IMPOSSIBLE_RATIO, message=message, gap=gap, value=most)


def _summed(
    tokens: Tokens, gaps: Mapping[Gap | None, GapMeasured], corrected: CorrectedSums | None
) -> BatchSums:
    behavior = tokens.logprobs.get("behavior_logprobs")
    return BatchSums(
        tokens=tokens.size,
        sequences=len(tokens.counts),
        padding=tokens.padding,
        surprise=0.0 if behavior is None else -float(behavior.sum(dtype=np.float64)),
        told=0 if behavior is None else behavior.size,
        lag=tokens.lag_sum,
        lag_tokens=0 if tokens.lag is None else tokens.size,
        lag_max=tokens.lag_max,
        mismatch=gaps[Gap.MISMATCH].sums,
        staleness=gaps[Gap.STALENESS].sums,
        update=gaps[Gap.UPDATE].sums,
        total=gaps[None].sums,
        corrected=corrected,
    )


def _corrected(total: Difference | str, correction: Correction | None) -> CorrectedSums | None:
    if correction is None or isinstance(total, str):
        return None
    return CorrectedSums.of((total.later - total.earlier).astype(np.float64), correction)


def rewarded(sums: BatchSums, tokens: Tokens, rewards: Any, outputs: Any) -> BatchSums:
    """With rewards, as far as they can be believed."""
    if rewards is None:
        return sums
    found = read(rewards, outputs, tokens.given, tokens.kept)
    values = found.values
    units = tokens.groups.get(UNIT)
    if units is not None and len(values):
        # Samples of one prompt move together; their mean is one value.
        codes = np.unique(np.array(units), return_inverse=True)[1]
        values = np.bincount(codes, weights=values) / np.bincount(codes)
    return msgspec.structs.replace(
        sums,
        rewards=tuple(values.tolist()),
        misbound=found.misbound,
        trips=(*sums.trips, *found.trips),
    )
