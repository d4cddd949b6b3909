"""One step of the monitor as a function: the state before, the sums of a batch, and out come reasons and the state after."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.precision import Magnitude
from zerodrift.monitor import judge
from zerodrift.monitor.baseline import LEAST_TOKENS, WARM_UP, Baseline, WarmUp
from zerodrift.monitor.batch import BatchSums
from zerodrift.monitor.cells import ALL, EXCHANGEABLE, REPLICA, CellSums, Expected
from zerodrift.monitor.decision import Code, Gap, Reason, RewardView
from zerodrift.monitor.gates import judge_gates
from zerodrift.monitor.judge import WHOLE
from zerodrift.monitor.labels import room_for
from zerodrift.monitor.sight import hides_doubt, is_seen, looked
from zerodrift.monitor.state import MonitorState
from zerodrift.monitor.tracks import Track

MOST_VERSIONS = 5
"""That one step may follow the policy for: after a pause the level is to be measured, not assumed."""

SURPRISING = 200
"""Tokens of which two programs in bf16 do not all agree to the last bit."""


class Settings(NamedTuple):
    """What does not change from step to step."""

    config: MonitoringConfig
    gate: Magnitude
    audited: bool
    vouched: bool = False
    """Somebody knows that both sides may agree to the last bit: it was audited, or they said fp32."""


class Outcome(NamedTuple):
    """What one batch led to."""

    state: MonitorState
    reasons: tuple[Reason, ...]
    rewards: RewardView | None
    probe_due: bool


def expected(state: MonitorState, key: str) -> Expected:
    """What a cell is held against: its own history, or the whole's."""
    kind = key.partition("=")[0]
    own, whole = state.tracks.get(key), state.tracks.get(WHOLE)
    if own is not None and (kind == ALL or kind not in EXCHANGEABLE):
        return own.expected
    bias = 0.0 if state.baseline is None else state.baseline.bias
    return whole.expected if whole is not None else Expected(bias, 1.0)


def _with_room(
    state: MonitorState, sums: BatchSums, interval: int
) -> tuple[MonitorState, tuple[Reason, ...]]:
    """Memory is constant, whatever ranks and steps together name."""
    sight = state.sight
    known = {*state.tracks, *sight.hidden, *sight.behind} - {""}
    batch = {each.where for each in sums.sight if each.where}
    labels, gone, reasons = room_for(state.labels, known, batch, state.observed, interval)
    if gone:
        kept = {
            name: {key: value for key, value in getattr(sight, name).items() if key not in gone}
            for name in ("hidden", "behind")
        }
        sight = msgspec.structs.replace(sight, **kept)
        tracks = {key: track for key, track in state.tracks.items() if key not in gone}
        state = msgspec.structs.replace(state, tracks=tracks, sight=sight)
    return msgspec.structs.replace(state, labels=labels), reasons


def with_baseline(state: MonitorState, baseline: Baseline) -> MonitorState:
    """A new one. How far a cell was from the old curve says nothing of the new one, so cells of their own learn anew where
    they stand; those in alarm do not, since a fault would become their place, nor do replicas, which are held against the whole."""
    whole = state.tracks.get(WHOLE)
    was = Expected(0.0, 1.0) if whole is None else whole.expected
    tracks = {
        key: track.moved(was, baseline.bias)
        for key, track in state.tracks.items()
        if key.partition("=")[0] in EXCHANGEABLE or track.alarmed
    }
    tracks[WHOLE] = Track.start(ALL, Expected(baseline.bias, 1.0))
    return msgspec.structs.replace(state, baseline=baseline, tracks=tracks)


def without_evidence(state: MonitorState) -> MonitorState:
    """Every chart at rest; what they are held against stays."""
    tracks = {key: track.rested() for key, track in state.tracks.items()}
    cusum = msgspec.structs.replace(state.scalar.cusum, score=0.0)
    return msgspec.structs.replace(
        state,
        tracks=tracks,
        gate=state.gate.rested(),
        scalar=msgspec.structs.replace(state.scalar, cusum=cusum),
    )


def decide(
    state: MonitorState, step: int, sums: BatchSums, trainer_version: int | None, settings: Settings
) -> Outcome:
    """Judge the batch, move the breaker, and follow the policy if the batch was good."""
    config = settings.config
    state, crowded = _with_room(state, sums, config.check_interval_steps)
    gated = judge_gates(sums, settings.gate, state.gate, config.consecutive_windows)
    reasons = [*_backwards(state, trainer_version), *judge.levels(sums, config), *gated.reasons, *crowded]
    cells = {cell.key: cell for cell in sums.cells}
    tracks = {**state.tracks, **_started(state, cells)}
    charted = judge.charts(cells, tracks, config.consecutive_windows)
    sight = looked(state.sight, step, sums.sight, cells.get(WHOLE), config)
    reasons += [
        *charted.reasons,
        *judge.moved(tracks),
        *_unseen(state, step, sums, config.check_interval_steps),
        *_identical(state, sums, settings),
        *sight.reasons,
    ]
    probe_due = is_probe_due(state, config)
    rewards, shifted = _rewards(state, sums, whole_test=probe_due)
    reasons = sorted([*reasons, *shifted], key=lambda reason: not reason.bad)
    bad = any(reason.bad for reason in reasons)
    tracks = dict(charted.tracks)
    if not bad:
        passed = _passed(state.trainer_version, trainer_version)
        learned = {**cells, **_undoubted(cells, tracks)}
        tracks |= {key: tracks[key].follow(cell, passed) for key, cell in learned.items()}
    after = msgspec.structs.replace(
        state,
        step=step,
        trainer_version=_newest(state.trainer_version, trainer_version),
        tracks=tracks,
        gate=gated.chart,
        breaker=state.breaker.update(
            bad=bad,
            warned=bool(reasons),
            windows=config.consecutive_windows,
            measured=_is_seen(sums) and not hides_doubt(sums.sight, tracks),
        ),
        observed=state.observed + 1,
        bad=state.bad + bad,
        sight=sight.sight,
        mismatch_seen=step if _is_seen(sums) else state.mismatch_seen,
        rewards=state.rewards.after(sums.rewards, sums.misbound, config.reward_baseline_window, bad=bad),
    )
    if not bad and after.baseline is None and sums.mismatch.summary.count:
        after = _warmed(after, sums, settings)
    return Outcome(after, tuple(reasons), rewards, probe_due)


def is_probe_due(state: MonitorState, config: MonitoringConfig) -> bool:
    """Whether the next step is one for costly checks."""
    return (state.observed + 1) % config.check_interval_steps == 0


def _passed(last: int | None, now: int | None) -> int:
    """Versions of the weights since the last step; one where nobody counts them."""
    return 1 if last is None or now is None else min(max(now - last, 0), MOST_VERSIONS)


def _newest(last: int | None, now: int | None) -> int | None:
    return max((version for version in (last, now) if version is not None), default=None)


def _undoubted(cells: Mapping[str, CellSums], tracks: Mapping[str, Track]) -> dict[str, CellSums]:
    """The whole without replicas that are in doubt: one that is a tenth off would draw along what it is held against."""
    doubted = [cell for key, cell in cells.items() if cell.kind == REPLICA and tracks[key].in_doubt]
    if not doubted or WHOLE not in cells:
        return {}
    rest = cells[WHOLE].without(doubted)
    return {WHOLE: rest} if rest.tokens > 0 and rest.baseline > 0 else {}


def _backwards(state: MonitorState, trainer_version: int | None) -> list[Reason]:
    last = state.trainer_version
    if trainer_version is None or last is None or trainer_version >= last:
        return []
    message = f"the trainer's version went from {last} back to {trainer_version}; after a resume, call rewind"
    return [
        Reason(code=Code.VERSION_BACKWARDS, message=message, value=float(trainer_version), limit=float(last))
    ]


def _started(state: MonitorState, cells: Mapping[str, CellSums]) -> dict[str, Track]:
    return {
        key: Track.start(cell.kind, expected(state, key))
        for key, cell in cells.items()
        if key not in state.tracks
    }


def _is_seen(sums: BatchSums) -> bool:
    return is_seen(sums.mismatch.summary.count, sums.tokens)


def _unseen(state: MonitorState, step: int, sums: BatchSums, interval: int) -> list[Reason]:
    """Nobody could look at the engine for too long; of a first batch that is said at once, since whoever forgot to give
    versions would otherwise read OK a hundred times."""
    last = -1 if state.mismatch_seen is None else state.mismatch_seen
    late = step - last > interval or not state.observed
    if _is_seen(sums) or sums.trips or not sums.tokens or not late:
        return []
    since = "yet" if state.mismatch_seen is None else f"since step {last}"
    shown = sums.mismatch.summary.count
    why = f"only {shown:g} of {sums.tokens} tokens show one; re-score some" if shown else sums.mismatch.why
    message = f"no mismatch could be measured {since}, so the engine is not judged: {why}"
    return [Reason(code=Code.NOT_OBSERVED, gap=Gap.MISMATCH, message=message, value=float(step - last))]


def _identical(state: MonitorState, sums: BatchSums, settings: Settings) -> list[Reason]:
    """Said once, of the first tokens: whoever runs an exact engine knows."""
    if settings.vouched or state.baseline is not None:
        return []
    before, after = sum(state.warm_up.tokens), sum(state.warm_up.tokens) + sum(sums.warm_up.tokens)
    apart = sum(state.warm_up.sizes) + sum(sums.warm_up.sizes)
    if apart > 0 or not before < SURPRISING <= after:
        return []
    message = (
        f"of {after:g} tokens the trainer's logprobs are the engine's to the last bit. An exact engine does that, and so does a "
        "trainer that took the engine's for its own, of which nothing is ever seen: give its own forward"
    )
    return [Reason(code=Code.NOT_OBSERVED, gap=Gap.MISMATCH, message=message)]


def _rewards(
    state: MonitorState, sums: BatchSums, *, whole_test: bool
) -> tuple[RewardView | None, tuple[Reason, ...]]:
    if not (sums.rewards or sums.misbound):
        return None, ()
    window = msgspec.structs.replace(state.rewards, misbound=state.rewards.misbound + sums.misbound)
    return window.judge(np.array(sums.rewards), whole_test=whole_test)


def _warmed(state: MonitorState, sums: BatchSums, settings: Settings) -> MonitorState:
    warm_up = state.warm_up.then(sums.warm_up)
    state = msgspec.structs.replace(state, warm_up=warm_up)
    if warm_up.batches < WARM_UP or sum(warm_up.tokens) < LEAST_TOKENS:
        return state
    found = warm_up.baseline("audit and first batches" if settings.audited else "first batches")
    if found.mean_abs > settings.gate.mean_abs:
        # Each was above by no more than chance allows, and all together are no baseline: ten others are taken.
        return msgspec.structs.replace(state, warm_up=WarmUp())
    return with_baseline(state, found)
