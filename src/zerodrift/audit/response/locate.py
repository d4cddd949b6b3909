"""From the windows that attribution looks at to where in the model Δ comes from.

Derivatives of the reported logprobs by every knob, a sparse regression of Δ on them, and then the proof: the knobs are
turned for real, and Δ must fall to the floor. The fit is refined on the way by secants along the derivatives at 0,
because a dead neuron and an eps ten times as large are not small.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

from zerodrift.audit.counterfactual.evaluate import CaseWindow
from zerodrift.audit.response.answer import Localisation
from zerodrift.audit.response.derivatives import LinearResponse
from zerodrift.audit.response.knobs import Knob, by_knob, knobs_of
from zerodrift.audit.response.levers import Member
from zerodrift.audit.response.pursuit import Pursuit, alike, pursue, singles
from zerodrift.audit.response.runs import Places, with_ends
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Floats
from zerodrift.stats.intervals import bootstrap_ratio

TOO_FAR = 0.5
"""Nats of median |Δ|: what moves logprobs further is no small change, and derivatives say nothing about it."""
REFINEMENTS = 8
SETTLED = 1e-3
"""Steps of a refinement, relative to the value."""
AT_FLOOR = 4.0
FAR_OFF = 100.0
"""As attribution has them: nine in ten tokens within the one, and none beyond the other."""
REFUTES = 0.8
"""R² from which on Δ is no rounding even if something is left of it. Products that are cut off instead of rounded shrink all
that they make: a gain of all norms of 0.9994 had an R² of 0.64 there, and left half of Δ.
"""
STORED = 0.95
"""Share of Δ that storing in fp8 must explain. A key at the edge of two fp8 numbers falls on either side by the rounding
of fp32, and each that does is far above the floor: 99.9 % were explained where fp8 was planted."""
CERTAIN = 4.0
"""Standard deviations of a rank correlation: chance reaches so many in one of 30,000, and four are looked at."""
ROUNDED = (torch.bfloat16, torch.float16)
"""What weights are rounded to before they are multiplied; TF32 has as many bits as fp16."""
SIMPLER = 3
"""So many knobs are tried alone where several were chosen: a large change of one bends away from its derivative, and what
is left of it looks like others."""
MOST_ALIKE = 2
"""So many others are mentioned that could not be told apart."""


def respond(
    model: Any, windows: Sequence[CaseWindow], stop_ids: Sequence[int], rng: np.random.Generator
) -> Localisation | None:
    """What Δ follows; None where it is too large, or too little was seen, for derivatives to say anything."""
    return followed_by(LinearResponse(model, windows, stop_ids), windows, rng)


def followed_by(
    response: LinearResponse, windows: Sequence[CaseWindow], rng: np.random.Generator
) -> Localisation | None:
    """The same for `windows` of the tokens that `response` is about, whatever was reported of them."""
    reported = np.concatenate([window.reported for window in windows])
    sigma = np.concatenate([window.sigma for window in windows])
    difference = reported - response.logprobs({})
    if float(np.median(np.abs(difference))) > TOO_FAR or not difference.any():
        return None
    knobs = knobs_of(response.levers)
    unit = _unit(difference, sigma)
    slopes_NK = by_knob(knobs, response.jacobian) / unit[:, None].astype(np.float32)
    low_K, high_K = (np.array(side) for side in zip(*(knob.bounds for knob in knobs), strict=True))
    found = pursue(difference / unit, slopes_NK, _sequences(windows), (low_K, high_K), rng)
    answer = Localisation(
        r2=found.r2, null=found.null, follows=False, missing=tuple(response.plumbing.missing)
    )
    if found.follows:
        steps = difference / unit
        alone = singles(steps, slopes_NK, (low_K, high_K), SIMPLER)
        proof = _Proof(response, knobs, slopes_NK, reported, unit, sigma)
        answer = proof.answer(found, rng)
        if len(found.chosen) > 1 or not answer.to_floor:
            others = [pair for pair in alone if (pair[0],) != found.chosen]
            answer = proof.simpler(answer, found, others, rng)
    if not answer.located or len(answer.located) > 1:
        places = Places(response.jacobian, unit, response.levers)
        r2, knob = places.followed(difference / unit, _sequences(windows), rng)
        if knob is not None:
            proof = _Proof(response, knobs, slopes_NK, reported, unit, sigma)
            answer = proof.run(answer, knob, r2, difference / unit, rng)
    if answer.follows:
        return answer
    return msgspec.structs.replace(answer, rounding=_of_rounded_weights(response, difference))


def _fit(steps: Floats, slopes: Floats) -> float:
    one = slopes.astype(np.float64)
    return float(steps @ one / max(float(one @ one), 1e-30))


def _unit(difference: Floats, sigma: Floats) -> Floats:
    """What each token is measured in: its σ, or its own Δ where that is larger than usual.

    An equation stays true whatever its rows are divided by, and no token is louder than others. Where attention scores
    of a mixture of experts were 2 % too large, three tokens went to other experts, and without this they were all that was seen.
    """
    usual = max(1.0, float(np.median(np.abs(difference) / sigma)))
    return np.hypot(usual * sigma, difference)


def _of_rounded_weights(response: LinearResponse, difference: Floats) -> float:
    """Rank correlation of Δ with what rounded weights do, in the precision where it is largest; 0 where it may be chance.

    An engine that computes in bf16 rounds its weights first, and that part of its rounding any kernel shares: rank
    correlations are 0.3 to 0.5 where the body is in bf16 or fp16, and those of other weights are of no sign.
    """
    plain, found = response.logprobs({}), [0.0]
    for dtype, only in product(ROUNDED, (nn.Module, nn.Linear)):
        rounded = _with_rounded(response.plumbing.model, dtype, only)
        moved = LinearResponse(rounded, response.windows, response.stop_ids).logprobs({}) - plain
        # A checkpoint that was saved in bf16 is not moved by it, and what is the same everywhere has no ranks.
        if np.ptp(moved) and np.ptp(difference):
            found.append(float(spearmanr(moved, difference).statistic))
    likeliest = max(found)
    return likeliest if likeliest * np.sqrt(len(difference)) >= CERTAIN else 0.0


def _with_rounded(model: Any, dtype: torch.dtype, only: type[nn.Module]) -> Any:
    """A copy whose weights went through `dtype`: all of them, or those of linears, as autocast does it."""
    changed = copy.deepcopy(model)
    for module in changed.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, only) else ():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    return changed


class _Proof:
    """Knobs that Δ follows, turned for real."""

    def __init__(
        self, response: LinearResponse, knobs: Sequence[Knob], slopes_NK: Floats, *tokens: Floats
    ) -> None:
        """`tokens`: what was reported of each, its unit, and its σ."""
        self._response, self._knobs, self._slopes_NK = response, knobs, slopes_NK
        self._reported, self._unit, self._sigma = tokens

    def answer(self, found: Pursuit, rng: np.random.Generator) -> Localisation:
        columns = self._slopes_NK[:, found.chosen].astype(np.float64)
        values, steps = self._refined(found, columns)
        before = np.abs(self._reported - self._response.logprobs({})).sum()
        sizes = np.abs(steps) * self._unit / self._sigma
        share = float(1 - (sizes * self._sigma).sum() / before)
        at_floor = bool(np.quantile(sizes, 0.9) <= AT_FLOOR and sizes.max() <= FAR_OFF)
        stored = any(knob.quantity == "fp8" for knob in self._of(found))
        to_floor = at_floor or (stored and share >= STORED)
        return Localisation(
            r2=found.r2,
            null=found.null,
            follows=to_floor or found.r2 >= REFUTES,
            knobs=tuple(
                self._evidence(column, float(value), columns[:, place], steps, found.r2, rng)
                for place, (column, value) in enumerate(zip(found.chosen, values, strict=True))
            ),
            to_floor=to_floor,
            share=share,
            missing=tuple(self._response.plumbing.missing),
        )

    def run(
        self, answer: Localisation, knob: Knob, r2: float, steps: Floats, rng: np.random.Generator
    ) -> Localisation:
        """A run of channels near one that is followed, where it brings Δ to the floor; `answer` where it does not."""
        about = self._alone(knob, steps)
        value = self._alone(with_ends(knob, partial(self._squared, about)), steps)
        found = Pursuit((len(self._knobs) - 1,), (value,), r2, 0.0)
        single = self.answer(found, rng)
        return single if single.to_floor else answer

    def _alone(self, knob: Knob, steps: Floats) -> float:
        """The value that fits best with nothing else turned, of a knob that is one of this proof now."""
        slopes_N1 = by_knob([knob], self._response.jacobian) / self._unit[:, None].astype(np.float32)
        self._knobs = [*self._knobs, knob]
        self._slopes_NK = np.hstack([self._slopes_NK, slopes_N1])
        start = Pursuit((len(self._knobs) - 1,), (_fit(steps, slopes_N1[:, 0]),), 0.0, 0.0)
        values, _ = self._refined(start, slopes_N1.astype(np.float64))
        return float(values[0])

    def _squared(self, value: float, knob: Knob) -> float:
        left = (self._reported - self._response.logprobs(knob.settings(value))) / self._unit
        return float((left**2).sum())

    def simpler(
        self,
        answer: Localisation,
        found: Pursuit,
        alone: Sequence[tuple[int, float]],
        rng: np.random.Generator,
    ) -> Localisation:
        """One knob where one brings Δ to the floor: a stream × 0.985 is all that comes after it × 1.015, and is said so."""
        for column, value in alone:
            single = self.answer(found._replace(chosen=(column,), values=(value,)), rng)
            if single.to_floor:
                return single
        return answer

    def _refined(self, found: Pursuit, columns: Floats) -> tuple[Floats, Floats]:
        """Values that fit best, and what they leave of Δ, in units of each token."""
        values = np.array(found.values)
        left = self._left(found.chosen, values)
        for _ in range(REFINEMENTS):
            step: Floats = np.linalg.lstsq(columns, left, rcond=None)[0].astype(np.float64)
            better = self._better(found.chosen, values, left, step)
            if better is None:
                break
            tried, then = better
            moved = tried - values
            # What the step did in the place of what derivatives at 0 said it would.
            if moved.any():
                columns = columns + np.outer((left - then) - columns @ moved, moved) / (moved @ moved)
            settled = bool((np.abs(moved) <= SETTLED * np.abs(tried)).all())
            values, left = tried, then
            if settled:
                break
        # In fp8 or not: between the two is nothing that an engine could do.
        whole = [
            1.0 if knob.quantity == "fp8" else value
            for knob, value in zip(self._of(found), values, strict=True)
        ]
        exact = self._left(found.chosen, np.array(whole))
        return (np.array(whole), exact) if (exact**2).sum() <= 2 * (left**2).sum() else (values, left)

    def _better(
        self, chosen: Sequence[int], values: Floats, left: Floats, step: Floats
    ) -> tuple[Floats, Floats] | None:
        """Along `step`, or half or a quarter of it; None where all are worse."""
        for part in (1, 2, 4):
            tried = self._within(chosen, values + step / part)
            then = self._left(chosen, tried)
            if (then**2).sum() < (left**2).sum():
                return tried, then
        return None

    def _of(self, found: Pursuit) -> list[Knob]:
        return [self._knobs[column] for column in found.chosen]

    def _within(self, chosen: Sequence[int], values: Floats) -> Floats:
        """Values that were possible stay so: an eps has no sign."""
        low, high = zip(*(self._knobs[column].bounds for column in chosen), strict=True)
        slack = 1e-3 * (np.array(high) - np.array(low))
        kept: Floats = np.clip(values, np.array(low) + slack * 1e-6, np.array(high) - slack)
        return kept

    def _left(self, chosen: Sequence[int], values: Floats) -> Floats:
        settings: dict[Member, float] = {}
        for column, value in zip(chosen, values, strict=True):
            for member, share in self._knobs[column].settings(float(value)).items():
                settings[member] = settings.get(member, 0.0) + share
        left: Floats = (self._reported - self._response.logprobs(settings)) / self._unit
        return left

    def _evidence(
        self, column: int, value: float, slopes: Floats, left: Floats, r2: float, rng: np.random.Generator
    ) -> LocatedEvidence:
        knob, groups = self._knobs[column], _sequences(self._response.windows)
        moved = bootstrap_ratio(slopes * left, slopes**2 + 1e-30, groups, rng)
        ends = sorted(knob.value(value + each) for each in (moved.low, moved.high))
        same = [self._knobs[other] for other in alike(self._slopes_NK, column)]
        others = [other for other in same if other.members != knob.members][:MOST_ALIKE]
        return LocatedEvidence(
            layer=knob.layer,
            part=knob.part,
            index=knob.number,
            channels=knob.channels,
            quantity=knob.quantity,
            estimate=knob.value(value),
            low=ends[0],
            high=ends[1],
            neutral=knob.neutral,
            r2=r2,
            alike=" or ".join(f"{other.place} {other.quantity}" for other in others),
        )


def _sequences(windows: Sequence[CaseWindow]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which prompt each judged token came after: samples of one prompt are no strangers to each other."""
    numbers: dict[tuple[int, ...], int] = {}
    each = [numbers.setdefault(window.prompt, len(numbers)) for window in windows]
    return np.repeat(each, [len(window.judged) for window in windows])
