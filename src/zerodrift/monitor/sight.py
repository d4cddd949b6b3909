"""Who was not looked at: cells whose mismatch nobody could see for many batches, and weights that training has left behind.

Charts see what is measured. A replica whose tokens are always of older weights, and never scored again, is in none of them, and
every other number may be fine. So for each label of a kind that `groups=` names, and for all tokens together, it is counted how long
nothing was seen, and said once that is `check_interval_steps` batches: once, until it was seen again.

Old weights are told by the freshest token of a batch, since one long sample may be old in a healthy run. Where even that is
`check_interval_steps` versions old, the engine is not taking updates, or falls ever further behind.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.frozen import freeze
from zerodrift.monitor.cells import CellSums
from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.groups import UNIT
from zerodrift.monitor.intake import Tokens
from zerodrift.monitor.strata import Counted
from zerodrift.monitor.tracks import LEAST_UNITS, Track, has_spread
from zerodrift.stats.arrays import Ids

MOST_NAMED = 12
"""In one decision; the others have their turn in the next."""
LEAST_SHOWN = 0.01
"""Of the tokens, to have been looked at: of 20,000 a step they are the 200 that a gate is asked of. Whoever scores one sequence of
a hundred again looks; the last token of a few sequences, fresh by chance while all others are of older weights, shows nobody."""


class LabelSeen(msgspec.Struct, frozen=True, array_like=True):
    """What one batch has of one label, or of all (an empty `where`); `+` adds what another rank has of it."""

    where: str
    tokens: int
    shown: int
    """Tokens that show a mismatch."""
    freshest: int | None = None
    """Versions that its youngest token is old; None where versions are unknown."""

    @property
    def seen(self) -> bool:
        """Whether enough of them do."""
        return is_seen(self.shown, self.tokens)

    def __add__(self, other: "LabelSeen") -> "LabelSeen":
        """Both."""
        known = [each.freshest for each in (self, other) if each.freshest is not None]
        return LabelSeen(
            self.where, self.tokens + other.tokens, self.shown + other.shown, min(known, default=None)
        )


class Spell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches in a row in which a label had tokens, and too few that showed a mismatch."""

    since: int
    """Step of the first."""
    batches: int = 0
    told: bool = False


class Sight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered of it."""

    hidden: Mapping[str, Spell] = {}
    behind: Mapping[str, int] = {}
    """How many versions old the freshest token was when that was last said."""
    thin: int = 0
    """Batches in a row of too few prompts to know a spread from."""

    def __post_init__(self) -> None:
        """What was remembered stays."""
        freeze(self, "hidden", "behind")


class Looked(NamedTuple):
    """What one batch says of it, with what is remembered then."""

    reasons: list[Reason]
    sight: Sight


def is_seen(shown: float, tokens: int) -> bool:
    """Whether a mismatch that so many tokens show was looked at."""
    return shown > 0 and shown >= LEAST_SHOWN * tokens


def seen_of(tokens: Tokens, counted: Counted | None) -> tuple[LabelSeen, ...]:
    """Every label of the batch."""
    shown = np.zeros(len(tokens.counts)) if counted is None else counted.tokens.sum(axis=(1, 2))
    # Versions only rise within a sequence, so its last token is its youngest.
    lag = None if tokens.lag is None else tokens.lag[np.cumsum(tokens.counts) - 1]
    found = [_seen("", np.zeros(len(tokens.counts), dtype=np.int64), tokens.counts, shown, lag)]
    for kind, labels in tokens.groups.items():
        if kind != UNIT:
            names, codes = np.unique(np.array(labels), return_inverse=True)
            found += [
                _seen(f"{kind}={name}", codes - place, tokens.counts, shown, lag)
                for place, name in enumerate(names.tolist())
            ]
    return tuple(found)


def _seen(where: str, not_chosen: Ids, counts: Ids, shown: np.ndarray, lag: Ids | None) -> LabelSeen:
    chosen = not_chosen == 0
    freshest = None if lag is None else int(lag[chosen].min())
    return LabelSeen(where, int(counts[chosen].sum()), int(shown[chosen].sum()), freshest)


def merged(parts: Iterable[LabelSeen]) -> tuple[LabelSeen, ...]:
    """By label, of all ranks."""
    found: dict[str, LabelSeen] = {}
    for each in parts:
        found[each.where] = found[each.where] + each if each.where in found else each
    return tuple(found[where] for where in sorted(found))


def looked(
    sight: Sight, step: int, seen: tuple[LabelSeen, ...], whole: CellSums | None, config: MonitoringConfig
) -> Looked:
    """One more batch; of one that was not measured, since it trips, nothing is known."""
    interval, max_lag = config.check_interval_steps, config.max_lag
    hidden, reasons = _hidden(sight.hidden, step, seen, interval)
    thin = sight.thin if whole is None else 0 if has_spread(whole) else sight.thin + 1
    if whole is not None and thin == interval:
        reasons.append(_too_few(whole, thin))
    behind = dict(sight.behind)
    if max_lag is None:
        behind, more = _behind(sight.behind, seen, interval)
        reasons += more
    return Looked(reasons, Sight(hidden=hidden, behind=behind, thin=thin))


def _hidden(
    before: Mapping[str, Spell], step: int, seen: tuple[LabelSeen, ...], interval: int
) -> tuple[dict[str, Spell], list[Reason]]:
    after, reasons = dict(before), list[Reason]()
    # Where nothing shows at all, that is said of the whole, and not of each part of it.
    blind = not any(each.seen for each in seen)
    for each in seen:
        if not each.where or not each.tokens:
            continue
        if each.seen:
            after.pop(each.where, None)
            continue
        spell = after.get(each.where, Spell(since=step))
        spell = msgspec.structs.replace(spell, batches=spell.batches + 1)
        if spell.batches >= interval and not spell.told and not blind and len(reasons) < MOST_NAMED:
            spell = msgspec.structs.replace(spell, told=True)
            reasons.append(_not_observed(each.where, spell))
        after[each.where] = spell
    return after, reasons


def _not_observed(where: str, spell: Spell) -> Reason:
    message = (
        f"no mismatch of {where} could be measured in {spell.batches} batches, since step {spell.since}, and it is not judged: "
        f"all its tokens, or all but {LEAST_SHOWN:.0%}, are of older weights; re-score some under their own (rescored_logprobs)"
    )
    return Reason(
        code=Code.NOT_OBSERVED, gap=Gap.MISMATCH, where=where, value=float(spell.batches), message=message
    )


def _too_few(whole: CellSums, batches: int) -> Reason:
    message = (
        f"for {batches} batches there were too few prompts to know how far they differ (now {whole.units}, worth "
        f"{whole.effective:.1f}), so nothing is judged but gates, ESS and lag; charts need {LEAST_UNITS} in a batch"
    )
    return Reason(code=Code.NOT_OBSERVED, gap=Gap.MISMATCH, value=float(batches), message=message)


def _behind(
    before: Mapping[str, int], seen: tuple[LabelSeen, ...], interval: int
) -> tuple[dict[str, int], list[Reason]]:
    """Told at `interval`, and whenever it has doubled since."""
    after, reasons = dict(before), list[Reason]()
    for each in sorted(seen, key=lambda each: each.where):
        age, last = each.freshest, before.get(each.where)
        if age is None or age < (interval if last is None else 2 * last):
            continue
        if len(reasons) < MOST_NAMED:
            after[each.where] = age
            # What is said of the whole is not said of each part of it.
            if not any(reason.where == "" for reason in reasons):
                reasons.append(_old(each.where, age))
    return after, reasons


def _old(where: str, age: int) -> Reason:
    message = (
        f"every token{' of ' + where if where else ''} was made by weights at least {age} versions old: does the engine still take "
        "updates? max_lag would keep such batches back"
    )
    return Reason(
        code=Code.LAG, gap=Gap.STALENESS, where=where, value=float(age), warning=True, message=message
    )


def hides_doubt(seen: tuple[LabelSeen, ...], tracks: Mapping[str, Track]) -> bool:
    """A cell whose chart has tripped is in this batch, and none of it shows: the others say nothing of it."""
    return any(
        each.tokens and not each.seen and any(chart.tripped for chart in tracks[each.where].charts)
        for each in seen
        if each.where in tracks
    )
