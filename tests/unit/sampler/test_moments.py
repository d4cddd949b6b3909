import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from zerodrift.sampler.moments import surprise_moments


def test_of_a_uniform_row():
    found = surprise_moments(torch.full((1, 8), -math.log(8), dtype=torch.float64))
    assert found.entropy_T[0] == pytest.approx(math.log(8))
    assert found.variance_T[0] == pytest.approx(0.0, abs=1e-30)


def test_of_rows_by_scipy():
    p = np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])
    found = surprise_moments(torch.tensor(p).log())
    entropy = stats.entropy(p, axis=1)
    np.testing.assert_allclose(found.entropy_T, entropy)
    np.testing.assert_allclose(found.variance_T, (p * np.log(p) ** 2).sum(axis=1) - entropy**2)


def test_excluded_tokens_change_nothing():
    whole, cut = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.0, 0.5]]).log()
    assert surprise_moments(cut).entropy_T.tolist() == surprise_moments(whole).entropy_T.tolist()
    certain = surprise_moments(torch.tensor([[0.0, -torch.inf]]))
    assert (certain.entropy_T.tolist(), certain.variance_T.tolist()) == ([0.0], [0.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_dtype_is_kept(dtype):
    found = surprise_moments(torch.randn(2, 5, dtype=dtype).log_softmax(-1))
    assert found.entropy_T.dtype is found.variance_T.dtype is dtype


@given(hnp.arrays(np.float64, (6, 9), elements=st.floats(-20, 20)))
def test_moments_make_the_mean_of_a_step_zero_and_its_variance_known(rows):
    log_p = torch.tensor(rows).log_softmax(-1).numpy()
    p, found = np.exp(log_p), surprise_moments(torch.tensor(log_p))
    entropy, variance = found.entropy_T.numpy(), found.variance_T.numpy()
    assert (entropy >= -1e-12).all()
    assert (entropy <= np.log(9) + 1e-9).all()
    assert (variance >= 0).all()
    steps = log_p + entropy[:, None]
    np.testing.assert_allclose((p * steps).sum(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose((p * steps**2).sum(axis=1), variance, rtol=1e-6, atol=1e-9)
