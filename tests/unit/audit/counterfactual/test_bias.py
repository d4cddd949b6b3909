from collections.abc import Callable

import numpy as np
import pytest

from zerodrift.audit.counterfactual.bias import LEAST_SEEN, MOST_TOKENS, bias_hypotheses
from zerodrift.audit.counterfactual.explanation import Explanation

TOKENS = np.repeat(np.arange(40), 5)
MANY = np.repeat(np.arange(3 * MOST_TOKENS), LEAST_SEEN)


def residuals(biased: tuple[int, ...], size: float, others: float = -0.1) -> np.ndarray:
    return np.where(np.isin(TOKENS, biased), size + others, others)


def explained(residual: np.ndarray, tokens: np.ndarray = TOKENS) -> Callable[[Explanation], np.ndarray]:
    """Biased tokens are right under an account of their bias, and the others keep what they had."""
    return lambda account: np.where(np.isin(tokens, list(account.bias)), 0.0, residual)


def valley(truth: float) -> Callable[[Explanation], float]:
    return lambda account: abs(next(iter(account.bias.values())) - truth)


@pytest.mark.parametrize("size", [2.0, 0.3, -1.5])
def test_the_tokens_that_stand_out_and_the_bias_that_fits(size: float) -> None:
    residual = residuals((3, 17, 30), size)
    (hypothesis,) = bias_hypotheses(Explanation(), explained(residual), TOKENS, valley(size))
    assert set(hypothesis.explanation.bias) == {3, 17, 30}
    assert list(hypothesis.explanation.bias.values()) == [pytest.approx(size, abs=1e-4)] * 3
    assert hypothesis.cause == "semantic/logit-bias"
    assert f"a bias of {size:+.3g} on 3 tokens (3, 17, 30)" == hypothesis.message
    assert hypothesis.parameters == 2


def test_only_the_first_five_tokens_are_listed() -> None:
    chosen = (1, 2, 3, 4, 5, 6, 7)
    (hypothesis,) = bias_hypotheses(Explanation(), explained(residuals(chosen, 2.0)), TOKENS, valley(2.0))
    assert "on 7 tokens (1, 2, 3, 4, 5, …)" in hypothesis.message


def test_unknown_residuals_are_left_out() -> None:
    residual = residuals((3,), 2.0)
    residual[TOKENS == 9] = np.nan
    (hypothesis,) = bias_hypotheses(Explanation(), explained(residual), TOKENS, valley(2.0))
    assert set(hypothesis.explanation.bias) == {3}


@pytest.mark.parametrize(
    ("residual", "tokens"),
    [
        # Seen too rarely to tell bias from chance.
        (np.ones(40), np.arange(40)),
        # Too few tokens to call any of them typical.
        (np.ones(15), np.repeat(np.arange(5), LEAST_SEEN)),
        # So many stand out that it is no list of words.
        (np.where(MANY <= MOST_TOKENS, 1.0, -1.0), MANY),
    ],
)
def test_no_suspects_no_hypothesis(residual: np.ndarray, tokens: np.ndarray) -> None:
    assert list(bias_hypotheses(Explanation(), explained(residual, tokens), tokens, valley(1.0))) == []


def test_one_bias_is_enough() -> None:
    account = Explanation(bias={3: 1.0})
    assert list(bias_hypotheses(account, explained(residuals((3,), 2.0)), TOKENS, valley(2.0))) == []


def test_a_biased_token_that_is_likely_anyway_joins_the_others() -> None:
    """It stands out by less than half, and is seen once: off to the side of the bias it is still."""
    residual, tokens = np.append(residuals((3, 17), 2.0), 0.3), np.append(TOKENS, 99)
    (hypothesis,) = bias_hypotheses(Explanation(), explained(residual, tokens), tokens, valley(2.0))
    assert set(hypothesis.explanation.bias) == {3, 17, 99}


def test_where_everything_is_off_to_that_side_nothing_joins() -> None:
    residual = residuals((3, 17), 2.0, others=0.3)
    (hypothesis,) = bias_hypotheses(Explanation(), explained(residual), TOKENS, valley(2.0))
    assert set(hypothesis.explanation.bias) == {3, 17}
