"""Hypotheses about meaning: which parameters were in force, and what was read off the distribution.

They need no new forward: all are arithmetic on logits that the reference has computed already. Candidates with a
continuous parameter are fitted by the same cost that later decides between them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from scipy.optimize import minimize_scalar

from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis, Pick, Reported
from zerodrift.core.cause import CAUSES

Cost = Callable[[Explanation], float]

LEAST_HOPE = 2.0
"""Nats that a first look must gain before a parameter is fitted."""

PICKS = {
    Pick.NEXT_ROW: "semantic/off-by-one",
    Pick.PREVIOUS_ROW: "semantic/off-by-one",
    Pick.NEXT_VALUE: "semantic/off-by-one",
    Pick.PREVIOUS_VALUE: "semantic/off-by-one",
    Pick.TOP: "semantic/wrong-token",
    Pick.NO_STOP: "semantic/eos",
    Pick.NO_FIRST: "semantic/nonfinite",
}
_READ_AS = {
    Pick.NEXT_ROW: "each logprob is read one position late",
    Pick.PREVIOUS_ROW: "each logprob is read one position early",
    Pick.NEXT_VALUE: "each logprob belongs to the token after it",
    Pick.PREVIOUS_VALUE: "each logprob belongs to the token before it",
    Pick.TOP: "each logprob is that of the likeliest token",
    Pick.NO_STOP: "a token that ends an output carries zero",
    Pick.NO_FIRST: "the first token of every output carries one and the same number, a placeholder",
}

# Values that people and model cards use; a kept set changes in steps, so a grid loses little.
TRUNCATIONS: Mapping[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99),
    "top_k": (1, 5, 10, 20, 40, 50, 64, 100),
    "min_p": (0.01, 0.02, 0.05, 0.1, 0.2),
}


CONFIG_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of a generation_config.json that shape the distribution."""
LEAST_TEMPERATURE = 0.01
"""Below it requests are refused: logits overflow."""


class Fitted(NamedTuple):
    """A parameter that is fitted, and where to look first: it is fitted only if one of these helps at all."""

    cause: str
    low: float
    high: float
    looks: tuple[float, ...]


FITTED = {
    "repetition_penalty": Fitted("semantic/penalty", 0.8, 1.5, (0.95, 1.02, 1.05, 1.1, 1.2)),
    "presence_penalty": Fitted("semantic/penalty", -2.0, 2.0, (-0.5, 0.1, 0.5, 1.0)),
    "frequency_penalty": Fitted("semantic/penalty", -2.0, 2.0, (-0.3, 0.05, 0.3, 0.8)),
}


TEMPERATURES = (0.5, 0.7, 0.9, 0.98, 1.02, 1.1, 1.3)
"""Looks in units of the requested temperature: 0.63 where 0.7 was asked for gains nothing at 0.5 or at 0.9."""


class ExpectedSampling(NamedTuple):
    """What a healthy engine samples with, and where an unhealthy one finds something else."""

    temperature: float = 1.0
    """As requested."""
    defaults: Mapping[str, float] = {}
    """Of the model's generation_config.json: the one place where an engine finds parameters that nobody sent."""


def told_hypotheses(explanation: Explanation, cost: Cost, expected: ExpectedSampling) -> Iterator[Hypothesis]:
    """Single changes of meaning that show in the reported numbers."""
    yield from _readings(explanation)
    yield from _parameters(explanation, cost, expected, explanation.reported)
    yield from _counts(explanation, cost)


def hidden_hypotheses(
    explanation: Explanation, cost: Cost, expected: ExpectedSampling
) -> Iterator[Hypothesis]:
    """Single changes of the sampler that the reported numbers hide: only the tokens themselves give them away.

    Raw logprobs hide everything; an engine may also process what it reports and sample from something else.
    """
    hiding = Reported.RAW if explanation.reported is Reported.RAW else Reported.AS_REQUESTED
    for hypothesis in _parameters(explanation, cost, expected, hiding):
        # The number reported is right and the draw is not: that is a fault of the sampler.
        name = CAUSES[hypothesis.cause].when_hidden or hypothesis.cause
        yield msgspec.structs.replace(hypothesis, cause=name)


def _readings(explanation: Explanation) -> Iterator[Hypothesis]:
    if explanation.reported is Reported.AS_CONTRACTED:
        changed = msgspec.structs.replace(explanation, reported=Reported.RAW)
        yield Hypothesis("semantic/raw-logprobs", "logprobs are the model's own, before processing", changed)
        changed = msgspec.structs.replace(explanation, reported=Reported.UNRENORMALISED)
        yield Hypothesis(
            "semantic/truncation-mass", "logprobs are not renormalised after truncation", changed
        )
    if explanation.pick is Pick.SAMPLED:
        for pick, cause in PICKS.items():
            changed = msgspec.structs.replace(explanation, pick=pick)
            yield Hypothesis(cause, _READ_AS[pick], changed)


def _parameters(
    explanation: Explanation, cost: Cost, expected: ExpectedSampling, reported: Reported
) -> Iterator[Hypothesis]:
    """Sampling parameters in force that nobody asked for."""
    explanation = msgspec.structs.replace(explanation, reported=reported)
    # A default that shapes no distribution (max_new_tokens) explains nothing.
    defaults = {name: value for name, value in expected.defaults.items() if name in CONFIG_KEYS}
    if defaults and not explanation.sampling:
        words = ", ".join(f"{name}={value:g}" for name, value in defaults.items())
        yield Hypothesis(
            "semantic/generation-config", f"defaults in force: {words}", _with(explanation, **defaults)
        )
    for name, grid in TRUNCATIONS.items():
        if name not in explanation.sampling:
            for value in grid:
                changed = _with(explanation, **{name: value})
                yield Hypothesis("semantic/truncation-mass", f"{name}={value:g} in force", changed, 1)
    for name, fitted in {"temperature": _temperatures(expected.temperature), **FITTED}.items():
        if name not in explanation.sampling:
            yield from _fit(explanation, cost, name, fitted)


def _counts(explanation: Explanation, cost: Cost) -> Iterator[Hypothesis]:
    """Any number of likeliest tokens that logprobs are renormalised over: those drawn from, or in the report alone."""
    if "top_k" in explanation.sampling or explanation.reported is not Reported.AS_CONTRACTED:
        return
    report = msgspec.structs.replace(explanation, reported=Reported.OVER_LIKELIEST)
    if (count := _best_count(report, cost, cost(explanation))) is not None:
        message = f"reported logprobs are renormalised over the {count} likeliest tokens"
        yield Hypothesis("semantic/truncation-mass", message, _with(report, top_k=count), 1)
    count = _best_count(explanation, cost, cost(explanation))
    if count is not None and count not in TRUNCATIONS["top_k"]:
        changed = _with(explanation, top_k=count)
        yield Hypothesis("semantic/truncation-mass", f"top_k={count} in force", changed, 1)


def _best_count(explanation: Explanation, cost: Cost, now: float) -> int | None:
    """The `top_k` that costs least; None where no look gains anything.

    What is kept grows with it, token by token, so that costs fall towards the best and rise after it.
    """

    def at(count: int) -> float:
        return cost(_with(explanation, top_k=count))

    looks = [int(look) for look in TRUNCATIONS["top_k"]]
    best = min(looks, key=at)
    if at(best) > now - LEAST_HOPE:
        return None
    place = looks.index(best)
    low, high = looks[max(place - 1, 0)], (*looks, 2 * looks[-1])[place + 1]
    while low < high:
        middle = (low + high) // 2
        if at(middle) <= at(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


def _temperatures(requested: float) -> Fitted:
    """Around the requested temperature, and at 1, which is what engines fall back to."""
    base = requested or 1.0
    looks = tuple(sorted({1.0, *(max(LEAST_TEMPERATURE, base * factor) for factor in TEMPERATURES)}))
    return Fitted("semantic/temperature", max(LEAST_TEMPERATURE, looks[0] / 2), looks[-1] * 2, looks)


def _fit(explanation: Explanation, cost: Cost, name: str, fitted: Fitted) -> Iterator[Hypothesis]:
    def at(value: float) -> float:
        return cost(_with(explanation, **{name: float(value)}))

    looks = sorted(fitted.looks, key=at)
    if at(looks[0]) > cost(explanation) - LEAST_HOPE:
        return
    # Between the neighbours of the best look; a bounded search over the whole range costs three times as much.
    grid = sorted({fitted.low, *fitted.looks, fitted.high})
    place = grid.index(looks[0])
    bounds = (grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)])
    # Reported numbers pin a parameter down to many digits; the choice of tokens to two.
    tolerance = 1e-3 if explanation.reported in (Reported.RAW, Reported.AS_REQUESTED) else 1e-7
    best = float(minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": tolerance}).x)
    # People set round numbers: where one does about as well as the fit, it is the better explanation.
    rounded = (round(best, digits) for digits in (1, 2))
    value = next(
        (each for each in rounded if bounds[0] <= each <= bounds[1] and at(each) <= at(best) + 1), best
    )
    yield Hypothesis(fitted.cause, f"{name}={value:.3g} in force", _with(explanation, **{name: value}), 1)


def _with(explanation: Explanation, **sampling: float) -> Explanation:
    return msgspec.structs.replace(explanation, sampling={**explanation.sampling, **sampling})
