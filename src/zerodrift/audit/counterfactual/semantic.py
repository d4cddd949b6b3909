"""Hypotheses about meaning: which parameters were in force, and what was read off the distribution.

They need no new forward: all are arithmetic on logits that the reference has computed already. Candidates with a
continuous parameter are fitted by the same cost that later decides between them.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec
from scipy.optimize import minimize_scalar

from zerodrift.audit.counterfactual.account import Account, Hypothesis, Pick, Reported

Cost = Callable[[Account], float]

PICKS = {
    Pick.NEXT_ROW: "semantic/off-by-one",
    Pick.PREVIOUS_ROW: "semantic/off-by-one",
    Pick.NEXT_VALUE: "semantic/off-by-one",
    Pick.PREVIOUS_VALUE: "semantic/off-by-one",
    Pick.TOP: "semantic/wrong-token",
}

# Values that people and model cards use; a kept set changes in steps, so a grid loses little.
TRUNCATIONS: Mapping[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99),
    "top_k": (1, 5, 10, 20, 40, 50, 64, 100),
    "min_p": (0.01, 0.02, 0.05, 0.1, 0.2),
}

FITTED = {
    "temperature": ("semantic/temperature", 0.2, 2.0),
    "repetition_penalty": ("semantic/penalty", 0.8, 1.5),
    "presence_penalty": ("semantic/penalty", -2.0, 2.0),
    "frequency_penalty": ("semantic/penalty", -2.0, 2.0),
}


def semantic_hypotheses(
    account: Account, cost: Cost, defaults: Mapping[str, float]
) -> Iterator[Hypothesis]:
    """Every single change of meaning that can be made to `account`.

    `defaults` are the sampling parameters of the model's generation_config.json: the one place where an engine
    finds parameters that nobody sent.
    """
    yield from _reports(account)
    if defaults and not account.sampling:
        changed = msgspec.structs.replace(account, sampling=dict(defaults))
        words = ", ".join(f"{name}={value:g}" for name, value in defaults.items())
        yield Hypothesis("semantic/generation-config", f"defaults in force: {words}", changed)
    yield from _truncations(account)
    for name, (cause, low, high) in FITTED.items():
        if name not in account.sampling:
            yield _fit(account, cost, name, cause, (low, high))


def _reports(account: Account) -> Iterator[Hypothesis]:
    if account.reported is Reported.AS_CONTRACTED:
        changed = msgspec.structs.replace(account, reported=Reported.RAW)
        yield Hypothesis("semantic/raw-logprobs", "logprobs are the model's own, before processing", changed)
        changed = msgspec.structs.replace(account, reported=Reported.UNRENORMALISED)
        if _truncating(account):
            yield Hypothesis("semantic/truncation-mass", "logprobs are not renormalised", changed)
    if account.pick is Pick.SAMPLED:
        for pick, cause in PICKS.items():
            changed = msgspec.structs.replace(account, pick=pick)
            yield Hypothesis(cause, f"the value read is that of: {pick.value}", changed)


def _truncations(account: Account) -> Iterator[Hypothesis]:
    for name, grid in TRUNCATIONS.items():
        if name in account.sampling:
            continue
        for value in grid:
            changed = msgspec.structs.replace(account, sampling={**account.sampling, name: value})
            yield Hypothesis("semantic/truncation-mass", f"{name}={value:g} in force", changed, 1)
            changed = msgspec.structs.replace(changed, reported=Reported.UNRENORMALISED)
            if account.reported is Reported.AS_CONTRACTED:
                yield Hypothesis(
                    "semantic/truncation-mass", f"{name}={value:g} in force, logprobs not renormalised", changed, 1
                )


def _fit(
    account: Account, cost: Cost, name: str, cause: str, bounds: tuple[float, float]
) -> Hypothesis:
    def at(value: float) -> Account:
        return msgspec.structs.replace(account, sampling={**account.sampling, name: float(value)})

    best = minimize_scalar(lambda value: cost(at(value)), bounds=bounds, method="bounded", options={"xatol": 1e-7})
    # People set round numbers: where one does as well as the fit, it is the better explanation.
    value = min((round(best.x, 2), float(best.x)), key=lambda value: cost(at(value)) - (value != best.x))
    return Hypothesis(cause, f"{name}={value:.3g} in force", at(value), 1)


def _truncating(account: Account) -> bool:
    return any(name in account.sampling for name in TRUNCATIONS)
