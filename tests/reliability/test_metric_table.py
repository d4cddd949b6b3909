"""The table of docs/metrics.md: metrics are what they are said to be, and its healthy row is empty."""

from dataclasses import replace

import numpy as np
import pytest

FAINT, LOUD = "scale ×1.1", "0.2 nats everywhere"


@pytest.fixture(scope="module")
def table(script):
    return script("reliability/metric_table")


@pytest.fixture
def batch(table):
    """Two outputs of three tokens and one: Δ is 0.1 four times, of opposite sign in the second output."""
    healthy = table.stream()[0][0]
    old = np.log(np.array([0.5, 0.25, 0.5, 0.5]))
    behavior = old - np.array([0.1, 0.1, 0.1, -0.1])
    return replace(healthy, behavior=behavior, old=old, lengths=np.array([3, 1]))


def test_each_metric_by_hand(table, batch):
    values = {metric.name: metric.value(batch) for metric in table.METRICS}
    up, down = np.exp(0.1), np.exp(-0.1)
    assert values["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1)
    assert values["vllm_kl"] == values["rollout_corr/kl"] == pytest.approx(-0.05)
    assert values["token_mult_prob_error"] == pytest.approx(up)
    k3 = (3 * (up - 1.1) + (down - 0.9)) / 4
    assert values["gen_kl_error"] == values["mismatch_kl/all/mean"] == pytest.approx(k3)
    assert values["training/rollout_probs_diff_mean"] == pytest.approx(
        (1.25 * (1 - down) + 0.5 * (up - 1)) / 4
    )
    assert values["rollout_corr/chi2_token"] == pytest.approx((3 * up**2 + down**2) / 4 - 1)
    assert values["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.1)


def test_slime_counts_outputs_and_trl_tokens(table, batch):
    longer = replace(batch, behavior=batch.old - np.array([0.1, 0.1, 0.1, 0.3]))
    values = {metric.framework: metric.value(longer) for metric in table.METRICS}
    assert values["TRL"] == pytest.approx(0.15)
    assert values["slime"] == pytest.approx(0.2)


def test_what_trl_leaves_out_of_its_mean_the_others_make_nan(table, batch):
    broken = replace(batch, behavior=np.array([np.nan, *batch.behavior[1:]]))
    values = {metric.framework: metric.value(broken) for metric in table.METRICS}
    assert np.isfinite(values["TRL"])
    assert np.isnan(values["slime"])
    assert not any(metric.beyond and metric.beyond(metric.value(broken)) for metric in table.METRICS)


def test_a_healthy_stream_is_beyond_no_line(table):
    steps = table.stream()[0][table.SINCE :]
    assert {table.shown(framework, steps) for framework in table.FRAMEWORKS} == {"–", "no line"}


def test_a_loud_fault_is_beyond_every_line_at_once_and_a_faint_one_beyond_none(table):
    steps = table.stream()[0][table.SINCE :]
    with_lines = {metric.framework for metric in table.METRICS if metric.beyond}
    loud, faint = ([table.PLANTED[name](batch) for batch in steps[:2]] for name in (LOUD, FAINT))
    assert {table.shown(framework, loud) for framework in with_lines} == {"0"}
    assert {table.shown(framework, faint) for framework in with_lines} == {"–"}


def test_there_are_enough_faults_and_six_frameworks(table):
    assert len(table.PLANTED) >= 21
    assert len(table.FRAMEWORKS) == 6
