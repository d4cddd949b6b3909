"""Hypotheses about positions: by which angles were queries and keys turned?

Three numbers may be wrong, and any value of them: the base of the rotary embedding, a factor on all positions, and the
place from which on positions are one too high. A fourth is how far back is seen: a window that the model does not have. Each is looked for on a few tokens, since a look costs a forward, and the
best look is refined. Predictions move smoothly with base and factor, so that the value is where secants through the
residuals of all tokens meet zero: they double the digits with each forward, where a golden section of the cost would take
27 forwards to 1e-6. The place of a jump is bracketed by what it leaves alone: rows before it are right.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.audit.counterfactual.attention import windowed, with_attention
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.backends import variants
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.rope import rope_bases
from zerodrift.stats.arrays import Bools, Floats, Ids

At = Callable[[float], Explanation]
"""A value to the explanation with it in force."""

LEAST_HOPE = 2.0
"""Nats that a look must gain before a value is refined."""
BASES = tuple(10 ** (third / 3) for third in range(-6, 7) if third)
"""Looks at other bases, in units of the model's own. At positions up to 60 a base that is three times too large was seen
from 1.2 to 8 times the own one; thirds of a decade are never further than a factor of 1.5 from the value."""
USUAL_BASES = (1e4, 5e5, 1e6)
"""What engines fall back to, however far away it is."""
STRETCHES = (0.125, 0.25, 0.5, 0.8, 0.88, 0.94, 0.98, 1.02, 1.06, 1.12, 1.2, 1.5, 2.0, 4.0, 8.0)
"""Looks at factors on positions. One of 1.07 was seen from 1.01 to 1.15: close looks around 1, and beyond them those
factors that context extensions use."""
MOST_PAGES = 6
"""Looks at multiples of 16 below the first row that is off."""
PAGE = 16
MOST_SECANTS = 8
NUDGE = 0.003
"""Relative step that shows how predictions move: a thousandth of a nat, and a thousand times their rounding."""
PROMISE = 0.5
"""Share of the residuals that the first secant must leave at most, where no look helps. Of noise it leaves nine tenths."""
ROUND = 2e-3
"""A round value within this relative distance may be what was meant."""


class FitCost(NamedTuple):
    """What is asked of the few tokens that values are fitted on."""

    cost: Callable[[Explanation], float]
    residual: Callable[[Explanation], Floats]
    at_floor: Callable[[Explanation], bool]


class FirstOff(NamedTuple):
    """Where along the position, or the length of prompts, a difference begins."""

    last_right: int
    """It is right there and before, as far as was looked at."""
    first_off: int


class Dial(NamedTuple):
    """One number that may be wrong: where to look, how to refine the best look, and what a value means."""

    looks: tuple[float, ...]
    refine: Callable[[At, FitCost, float], float]
    variant: Callable[[float], Variant]
    right: float | None = None
    """What it should be; None where nothing should be there."""


def jumped(boundary: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Positions from `boundary` on are one too high."""
    return lambda positions: positions + (positions >= boundary).long()


def stretched(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Positions are multiplied, as a context extension does that only one side applies."""
    return lambda positions: positions * scale


def first_off(off: Bools, places: Ids) -> FirstOff | None:
    """At which of their places rows begin to be off; None where none is."""
    if not off.any():
        return None
    first = int(places[off].min())
    return FirstOff(int(places[places < first].max(initial=0)), first)


def position_hypotheses(
    explanation: Explanation, paths: Paths, fit: FitCost, begins: FirstOff | None
) -> Iterator[Hypothesis]:
    """The best value of each dial, the most promising first; none after one that explains the fit."""
    if explanation.forward != VANILLA or fit.at_floor(explanation):
        return
    yield from dial_hypotheses(explanation, paths, fit, _in_turn(paths, begins))


def dial_hypotheses(
    explanation: Explanation, paths: Paths, fit: FitCost, turns: Iterable[list[Dial]]
) -> Iterator[Hypothesis]:
    """The best value of each dial; those of one turn are compared with each other, after the turns before have failed."""

    def at(dial: Dial, value: float) -> Explanation:
        variant = dial.variant(value)
        return msgspec.structs.replace(explanation, forward=paths.add(variant.message, variant))

    for dials in turns:
        starts = [(*_start(dial, partial(at, dial), fit, fit.cost(explanation)), dial) for dial in dials]
        for _, start, dial in sorted(starts, key=lambda entry: entry[0]):
            if start is None:
                continue
            value = dial.refine(partial(at, dial), fit, start)
            variant, changed = dial.variant(value), at(dial, value)
            yield Hypothesis(variant.cause, variant.message, changed, 1)
            if fit.at_floor(changed):
                return


def _start(dial: Dial, at: At, fit: FitCost, now: float) -> tuple[float, float | None]:
    """Where to refine from, and what it costs there: the best look, the right value itself, or nowhere."""
    cost, look = min((fit.cost(at(look)), look) for look in dial.looks)
    if cost < now - LEAST_HOPE:
        return cost, look
    if dial.right is not None:
        # Nearer to it than to any look, a value shows in how predictions begin to move.
        off = fit.residual(at(dial.right))
        slope = (fit.residual(at(dial.right * math.exp(NUDGE))) - off) / NUDGE
        if np.nansum(np.abs(off + slope * _meeting(off, slope))) < PROMISE * np.nansum(np.abs(off)):
            return now, dial.right
    return now, None


def _in_turn(paths: Paths, begins: FirstOff | None) -> Iterator[list[Dial]]:
    """Dials to be compared with each other, after those before them have failed; those of angles only where there are any."""
    turned = bool(rope_bases(paths.model.config))
    jump = [_jump_dial(begins)] if begins is not None and begins.first_off and turned else []
    some_right = begins is not None and begins.last_right > 0
    if some_right:
        # Base and factor leave no row right; these do, and one look may be all that it takes.
        yield jump
        yield list(_window_dials(paths.model, begins))
        jump = []
    if turned:
        stretch = Dial(STRETCHES, partial(by_secants, reach=0.06), _stretch, right=1.0)
        yield [*_base_dials(paths.model), stretch, *jump]
    if not some_right:
        yield list(_window_dials(paths.model, begins))


def _window_dials(model: Any, begins: FirstOff | None) -> Iterator[Dial]:
    """How far back is seen, where the model has no window or one that begins later: rows before its width are right."""
    if begins is None or not begins.first_off or not has_a_choice_of_attention(model):
        return
    own = getattr(model.config, "sliding_window", None)
    if own is None:
        yield Dial(_places(begins), partial(_by_halves, begins=begins), _new_window)
        return
    narrower = FirstOff(begins.last_right, min(begins.first_off, own - 1))
    # A wider one is wrong from the own one on, whatever its width is.
    wider = (own + 2, own + 4, own + 8, own + 16, own + 32)
    looks = tuple(place for place in _places(narrower) if place < own) + wider
    limit = FirstOff(begins.last_right, 2 * own)
    yield Dial(looks, partial(_by_halves, begins=limit), partial(_other_window, own))


def _base_dials(model: Any) -> Iterator[Dial]:
    """The base of all layers; where types of layers have their own (Gemma 3), each of them, and all by one factor."""
    refine = partial(by_secants, reach=math.log(10) / 3)
    bases = rope_bases(model.config)
    for kind, own in bases.items():
        looks = {*(own * factor for factor in BASES), *USUAL_BASES} - {own}
        yield Dial(tuple(looks), refine, partial(_other_base, kind, own), right=own)
    if len(bases) > 1:
        yield Dial(BASES, refine, partial(_other_bases, bases), right=1.0)


def _jump_dial(begins: FirstOff) -> Dial:
    return Dial(_places(begins), partial(_by_halves, begins=begins), _jump)


def _other_base(kind: str, own: float, base: float) -> Variant:
    message = f"rotary base {base:.9g} instead of {own:g}{kind and f' in {kind} layers'}"
    return Variant("path/rope", message, partial(variants.with_rope_bases, bases={kind: base}))


def _other_bases(bases: Mapping[str, float], factor: float) -> Variant:
    changed = {kind: base * factor for kind, base in bases.items()}
    return Variant(
        "path/rope",
        f"rotary bases {factor:.9g} times as large",
        partial(variants.with_rope_bases, bases=changed),
    )


def _stretch(factor: float) -> Variant:
    return Variant(
        "path/rope", f"positions multiplied by {factor:.9g}", lambda m: m, positions=stretched(factor)
    )


def _jump(place: float) -> Variant:
    message = f"positions from {place:.0f} on are one too high"
    return Variant("path/context-boundary", message, lambda m: m, positions=jumped(int(place)))


def _new_window(width: float) -> Variant:
    message = f"only the last {width:.0f} tokens are seen, and the model has no sliding window"
    change = windowed(int(width))
    return Variant("path/window", message, partial(with_attention, change=change))


def _other_window(own: int, width: float) -> Variant:
    message = f"sliding window of {width:.0f} instead of {own}"
    return Variant("path/window", message, partial(variants.with_window, width=int(width)))


def _places(begins: FirstOff) -> tuple[float, ...]:
    """The first row that is off, and pages and powers of two before it.

    Where outputs reach across a jump, the first row that is off is its place. It may also lie in a prompt that every
    wrong output follows, because prompts are not scored. A row after it may be right by chance (a token that is certain
    whatever the positions): powers of two are looked at wherever the bracket begins.
    """
    pages = range(begins.first_off - begins.first_off % PAGE, begins.last_right, -PAGE)
    powers = (2**power for power in range(4, begins.first_off.bit_length()))
    return tuple(sorted({begins.first_off, *pages[:: _thinning(begins)], *powers} - {0}))


def _thinning(begins: FirstOff) -> int:
    """Of so many pages in the bracket one is looked at."""
    return -(-max(begins.first_off - begins.last_right, 1) // (PAGE * MOST_PAGES))


def _by_halves(at: At, fit: FitCost, place: float, begins: FirstOff) -> float:
    """Whole numbers, by steps that halve: the further a jump is misplaced, the more keys are turned wrongly."""
    step = PAGE * _thinning(begins) // 2
    while step and not fit.at_floor(at(place)):
        around = [other for other in (place - step, place + step) if 1 <= other <= begins.first_off]
        better = min((place, *around), key=lambda other: fit.cost(at(other)))
        if better == place:
            step //= 2
        place = better
    return place


def by_secants(at: At, fit: FitCost, look: float, reach: float) -> float:
    """The value at which predictions meet what was reported; on a logarithmic scale, `reach` at a time at most."""

    def there(point: float) -> Explanation:
        return at(math.exp(point))

    here = math.log(look)
    other = here + NUDGE
    for _ in range(MOST_SECANTS):
        if fit.at_floor(there(here)):
            break
        off = fit.residual(there(here))
        slope = (fit.residual(there(other)) - off) / (other - here)
        step = float(np.clip(_meeting(off, slope), -reach, reach))
        better = _first_better(lambda point: fit.cost(there(point)), here, step)
        if better is None:
            break
        here, other = better, here
    return _rounded(math.exp(here), at, fit)


def _meeting(off: Floats, slope: Floats) -> float:
    """The step after which Σ|off + slope · step| is least: the weighted median of each token's own step."""
    known = np.isfinite(off) & np.isfinite(slope) & (slope != 0)
    if not known.any():
        return 0.0
    steps, weights = -off[known] / slope[known], np.abs(slope[known])
    order = np.argsort(steps)
    below = np.cumsum(weights[order])
    return float(steps[order][np.searchsorted(below, below[-1] / 2)])


def _first_better(cost: Callable[[float], float], here: float, step: float) -> float | None:
    """Along `step`, or half or a quarter of it; None where all are worse."""
    now = cost(here)
    return next((here + step / part for part in (1, 2, 4) if cost(here + step / part) < now), None)


def _rounded(value: float, at: At, fit: FitCost) -> float:
    """People set round numbers: where one does about as well as the fit, it is the better explanation."""
    for digits in (1, 2, 3, 4):
        plain = float(f"{value:.{digits}g}")
        near = abs(plain / value - 1) < ROUND
        if near and fit.cost(at(plain)) <= fit.cost(at(value)) + 1:
            return plain
    return value
