"""Where a draw falls: by hand, and evenly where tokens are drawn as claimed."""

import numpy as np
import pytest
import torch
from scipy import stats

from zerodrift.sampler.placement import place

LOGPROBS = torch.tensor([[0.1, 0.4, 0.1, 0.3, 0.1]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("token", "by_likelihood", "by_id"),
    [
        (1, 0.0 + 0.25 * 0.4, 0.1 + 0.25 * 0.4),
        (3, 0.4 + 0.25 * 0.3, 0.6 + 0.25 * 0.3),
        (2, 0.7 + 0.25 * 0.3, 0.525),
    ],
)
def test_by_hand(token, by_likelihood, by_id):
    """A quarter into its piece; three tokens of 0.1 share one."""
    points = place(LOGPROBS, torch.tensor([token]), torch.tensor([0.25], dtype=torch.float64))
    assert float(points.by_likelihood_T) == pytest.approx(by_likelihood)
    assert float(points.by_id_T) == pytest.approx(by_id)


def test_excluded_tokens_take_no_room():
    logprobs = torch.tensor([[-torch.inf, 0.5, 0.5]], dtype=torch.float64)
    logprobs[0, 1:] = logprobs[0, 1:].log()
    points = place(logprobs, torch.tensor([1]), torch.tensor([0.5], dtype=torch.float64))
    assert float(points.by_id_T) == pytest.approx(0.25)
    assert float(points.by_likelihood_T) == pytest.approx(0.5)


def test_honest_draws_are_even():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (4000, 30)))
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    points = place(logprobs, tokens, torch.from_numpy(rng.random(4000)))
    for part in points:
        assert stats.kstest(part.numpy(), "uniform").pvalue > 1e-3
    greedy = place(logprobs, logprobs.argmax(dim=-1), torch.from_numpy(rng.random(4000)))
    assert stats.kstest(greedy.by_likelihood_T.numpy(), "uniform").pvalue < 1e-50
