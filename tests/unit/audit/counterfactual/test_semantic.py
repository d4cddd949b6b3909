from collections.abc import Callable

import numpy as np
import pytest

from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis, Pick, Reported
from zerodrift.audit.counterfactual.semantic import (
    FITTED,
    PICKS,
    TRUNCATIONS,
    ExpectedSampling,
    hidden_hypotheses,
    told_hypotheses,
)

Cost = Callable[[Explanation], float]
FLAT = 1000.0


def flat(account: Explanation) -> float:
    """Nothing is better than anything else."""
    return FLAT


def valley(name: str, truth: float, healthy: float, depth: float = 500.0, width: float = 0.05) -> Cost:
    """Costs that fall off towards the truth as a Cauchy likelihood does; accounts that leave `name` alone sit at
    `healthy`."""

    def cost(account: Explanation) -> float:
        off = (account.sampling.get(name, healthy) - truth) / width
        return FLAT - depth / (1 + off * off)

    return cost


def fitted(hypotheses: list[Hypothesis], name: str) -> list[float]:
    grid = TRUNCATIONS.get(name, ())
    return [h.explanation.sampling[name] for h in hypotheses if name in h.explanation.sampling and not grid]


HEALTHY, USUAL = Explanation(), ExpectedSampling()


def told(
    cost: Cost = flat, expected: ExpectedSampling = USUAL, account: Explanation = HEALTHY
) -> list[Hypothesis]:
    return list(told_hypotheses(account, cost, expected))


@pytest.mark.parametrize("truth", [0.5, 0.63, 0.69, 0.72, 0.77, 1.0])
def test_a_temperature_near_the_requested_one_is_recovered(truth):
    cost = valley("temperature", truth, 0.7)
    (value,) = fitted(told(cost, ExpectedSampling(0.7)), "temperature")
    assert value == pytest.approx(truth, abs=1e-4)


@pytest.mark.parametrize("requested", [0.0, 0.01, 0.3, 1.0, 1.6])
def test_a_temperature_of_one_is_recovered_whatever_was_requested(requested):
    cost = valley("temperature", 1.0, requested, width=0.2)
    values = fitted(told(cost, ExpectedSampling(requested)), "temperature")
    assert values == ([] if requested == 1.0 else [pytest.approx(1.0)])


@pytest.mark.parametrize(
    ("name", "truth", "healthy"),
    [
        ("repetition_penalty", 1.05, 1.0),
        ("repetition_penalty", 1.15, 1.0),
        ("presence_penalty", 0.5, 0.0),
        ("presence_penalty", -0.4, 0.0),
        ("frequency_penalty", 0.3, 0.0),
        ("frequency_penalty", 0.05, 0.0),
    ],
)
def test_a_penalty_is_recovered(name, truth, healthy):
    (value,) = fitted(told(valley(name, truth, healthy)), name)
    assert value == pytest.approx(truth, abs=1e-4)


def test_a_round_number_is_preferred_where_it_does_as_well():
    hypotheses = told(valley("temperature", 0.8999, 0.7, width=1.0), ExpectedSampling(0.7))
    assert fitted(hypotheses, "temperature") == [0.9]
    hypotheses = told(valley("temperature", 0.8333, 0.7, width=0.02), ExpectedSampling(0.8))
    (value,) = fitted(hypotheses, "temperature")
    assert value == pytest.approx(0.8333, abs=1e-5)


def test_what_does_not_help_at_a_first_look_is_not_fitted():
    asked = []

    def cost(account):
        asked.append(account)
        return FLAT

    hypotheses = told(cost)
    assert not any(set(h.explanation.sampling) & {"temperature", *FITTED} for h in hypotheses)
    # Looks alone: a search would take twenty more for each parameter.
    assert len(asked) < 60


def test_every_reading_and_every_truncation_is_proposed_once():
    hypotheses = told()
    readings = {h.explanation.reported for h in hypotheses}
    assert {Reported.RAW, Reported.UNRENORMALISED} <= readings
    assert {h.explanation.pick for h in hypotheses} == {Pick.SAMPLED, *PICKS}
    for name, grid in TRUNCATIONS.items():
        assert [h.explanation.sampling[name] for h in hypotheses if name in h.explanation.sampling] == list(
            grid
        )
    assert len({repr(h.explanation) for h in hypotheses}) == len(hypotheses)


def test_a_change_already_made_is_not_proposed_again():
    account = Explanation(
        reported=Reported.RAW,
        pick=Pick.TOP,
        sampling={"top_p": 0.9, "temperature": 0.5, "presence_penalty": 1},
    )
    for hypothesis in told(valley("temperature", 0.7, 0.5), ExpectedSampling(1.0, {"top_k": 20}), account):
        assert hypothesis.explanation.reported is Reported.RAW
        assert hypothesis.explanation.pick is Pick.TOP
        assert hypothesis.explanation.sampling.items() >= account.sampling.items()
        assert hypothesis.cause != "semantic/generation-config"


def test_defaults_of_the_checkpoint_are_one_hypothesis_without_fitted_values():
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048}
    (hypothesis,) = [h for h in told(expected=ExpectedSampling(1.0, defaults)) if "config" in h.cause]
    # max_new_tokens shapes no distribution, and no sampler takes it.
    assert hypothesis.explanation.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert hypothesis.parameters == 0
    only = told(expected=ExpectedSampling(1.0, {"max_new_tokens": 5}))
    assert not [h for h in only if "config" in h.cause]


@pytest.mark.parametrize(
    ("reported", "hiding"),
    [(Reported.AS_CONTRACTED, Reported.AS_REQUESTED), (Reported.RAW, Reported.RAW)],
)
def test_hidden_changes_leave_the_reported_numbers_alone(reported, hiding):
    cost = valley("temperature", 0.9, 1.0)
    hypotheses = list(hidden_hypotheses(Explanation(reported=reported), cost, ExpectedSampling()))
    assert {h.explanation.reported for h in hypotheses} == {hiding}
    assert {h.explanation.pick for h in hypotheses} == {Pick.SAMPLED}
    shaping = {"temperature", "top_p", "top_k", "min_p"}
    causes = {h.cause for h in hypotheses if shaping & h.explanation.sampling.keys()}
    assert causes == {"semantic/sampling-bias"}


@pytest.mark.parametrize("truth", [1, 3, 12, 33, 64, 150])
def test_the_number_of_likeliest_tokens_is_fitted_whatever_it_is(truth):
    def cost(account):
        count = account.sampling.get("top_k")
        if count is None or account.reported is not Reported.OVER_LIKELIEST:
            return FLAT
        return FLAT - 500 / (1 + abs(np.log(count / truth)))

    (fit,) = [h for h in told(cost) if h.explanation.reported is Reported.OVER_LIKELIEST]
    assert (fit.cause, fit.explanation.sampling, fit.parameters) == (
        "semantic/truncation-mass",
        {"top_k": truth},
        1,
    )


def test_a_number_in_force_that_stands_on_no_model_card_is_fitted_too():
    hypotheses = told(valley("top_k", 12, 0, width=2.0))
    in_force = [
        h.explanation.sampling for h in hypotheses if h.explanation.reported is Reported.AS_CONTRACTED
    ]
    values = [sampling["top_k"] for sampling in in_force if "top_k" in sampling]
    assert values == [*TRUNCATIONS["top_k"], 12]
