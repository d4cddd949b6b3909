"""Biased ids are read off the numbers: whoever is sampled shows its bias, and everyone else its mass."""

from collections.abc import Callable

import numpy as np
import pytest

from zerodrift.audit.counterfactual.bias import SeenTokens, bias_hypotheses, moved
from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis

VOCABULARY, TOKENS = 256, 500
SIGMA = 3e-6


class Drawn:
    """Tokens of a made-up model, drawn with a bias on some of its likelier ids."""

    def __init__(self, count: int, size: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 2.5, (TOKENS, VOCABULARY)) + rng.normal(0, 1.5, VOCABULARY)
        self.masses = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        likelier = np.argsort(-self.masses.mean(axis=0))[: VOCABULARY // 3]
        self.ids = tuple(sorted(rng.choice(likelier, count, replace=False).tolist()))
        biased = self.masses.copy()
        biased[:, list(self.ids)] *= np.exp(size)
        biased /= biased.sum(axis=1, keepdims=True)
        self.tokens = np.array([rng.choice(VOCABULARY, p=row) for row in biased])
        self.noise = rng.normal(0, 1e-6, TOKENS)
        rows = np.arange(TOKENS)
        self.logprobs = np.log(self.masses[rows, self.tokens])
        self.residual = np.log(biased[rows, self.tokens]) - self.logprobs + self.noise

    def seen(self, residual: np.ndarray | None = None) -> SeenTokens:
        residual = self.residual if residual is None else residual
        return SeenTokens(residual, np.full(TOKENS, SIGMA), self.tokens, self.masses.astype(np.float32))

    def cost(self, temperature: float = 1.0) -> Callable[[Explanation], float]:
        def of(account: Explanation) -> float:
            ids = list(account.bias)
            size = account.bias[ids[0]] / temperature
            told = moved(size, np.isin(self.tokens, ids), self.masses[:, ids].sum(axis=1))
            return float(np.log1p(((self.residual - told) / SIGMA) ** 2).sum())

        return of


def only(drawn: Drawn, temperature: float = 1.0) -> Hypothesis:
    (hypothesis,) = bias_hypotheses(Explanation(), drawn.seen(), temperature, drawn.cost(temperature))
    return hypothesis


@pytest.mark.parametrize(("count", "size"), [(3, 0.31), (3, -0.4), (5, 2.0), (10, 0.7), (1, 0.1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_biased_id_is_found_with_the_size_of_the_bias(count, size, seed):
    drawn = Drawn(count, size, seed)
    hypothesis = only(drawn)
    assert tuple(hypothesis.explanation.bias) == drawn.ids
    assert list(hypothesis.explanation.bias.values()) == pytest.approx([size] * count, abs=1e-5)
    assert (hypothesis.cause, hypothesis.parameters) == ("semantic/logit-bias", 1 + count)


def test_words_that_are_banned_are_found_by_the_mass_that_others_got():
    drawn = Drawn(2, -100.0)
    assert not set(drawn.ids) & set(drawn.tokens.tolist())
    hypothesis = only(drawn)
    assert tuple(hypothesis.explanation.bias) == drawn.ids
    assert all(value < -8 for value in hypothesis.explanation.bias.values())


def test_a_bias_is_added_before_the_temperature_divides():
    drawn = Drawn(3, 0.5)
    assert list(only(drawn, 0.8).explanation.bias.values()) == pytest.approx([0.4] * 3, abs=1e-5)


def test_few_tokens_are_off_and_most_are_at_the_floor():
    """Ids that are seldom likely: most rows have next to none of their mass."""
    drawn = Drawn(3, 0.25, seed=4)
    rare = drawn.masses[:, list(drawn.ids)].sum(axis=1) < 0.03
    own = np.isin(drawn.tokens, drawn.ids)
    drawn.residual = np.where(rare & ~own, drawn.noise, drawn.residual)
    drawn.masses[np.ix_(rare & ~own, list(drawn.ids))] = 0.0
    assert np.median(np.abs(drawn.residual)) < SIGMA
    assert tuple(only(drawn).explanation.bias) == drawn.ids


def test_unknown_residuals_are_left_out():
    drawn = Drawn(3, 0.25)
    residual = np.where(np.arange(TOKENS) % 7 == 0, np.nan, drawn.residual)
    (hypothesis,) = bias_hypotheses(Explanation(), drawn.seen(residual), 1.0, drawn.cost())
    assert tuple(hypothesis.explanation.bias) == drawn.ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["rounding", "temperature", "healthy"])
def test_what_is_no_bias_has_no_ids(kind, seed):
    drawn = Drawn(3, 0.0, seed)
    others = {
        "rounding": np.random.default_rng(seed).normal(0, 0.02, TOKENS),
        "temperature": 0.1 * (drawn.logprobs - drawn.logprobs.mean()),
        "healthy": drawn.noise,
    }
    assert not list(bias_hypotheses(Explanation(), drawn.seen(others[kind]), 1.0, drawn.cost()))


@pytest.mark.parametrize("noise", [1e-6, 0.02])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_what_is_taken_from_every_token_is_no_bias_of_some(spread, noise):
    """Where rounding is as coarse as bf16's and no id is likely, a bias on ten that are hardly drawn lowers all others alike."""
    rng = np.random.default_rng(1)
    masses = np.exp(rng.normal(0, spread, (TOKENS, VOCABULARY)))
    masses /= masses.sum(axis=1, keepdims=True)
    tokens = np.array([rng.choice(VOCABULARY, p=row) for row in masses])
    residual = -0.2 + rng.normal(0, noise, TOKENS)
    seen = SeenTokens(residual, np.full(TOKENS, 0.05), tokens, masses.astype(np.float32))

    def cost(account):
        ids = list(account.bias)
        told = moved(account.bias[ids[0]], np.isin(tokens, ids), masses[:, ids].sum(axis=1))
        return float(np.log1p(((residual - told) / 0.05) ** 2).sum())

    assert not list(bias_hypotheses(Explanation(), seen, 1.0, cost))


def test_one_bias_is_enough():
    drawn = Drawn(3, 0.25)
    account = Explanation(bias={3: 1.0})
    assert not list(bias_hypotheses(account, drawn.seen(), 1.0, drawn.cost()))
