"""Up to which length Δ stays at the floor: found where it depends on length, and nowhere else."""

import numpy as np
import pytest

from zerodrift.drift.gates import Gates
from zerodrift.drift.power import positions_asked
from zerodrift.drift.reach import stable_context
from zerodrift.drift.tokens import TokenTable, no_masses

GATES = Gates(mean=1e-5, p90=2.5e-5, k3=1e-6, veto=2.0)
OUTPUT = 24


def table(off: np.ndarray, prompts: np.ndarray, size: float = 0.05) -> TokenTable:
    """Sequences of one prompt length each; Δ is `size` where a token is off, and rounding elsewhere."""
    count = len(prompts)
    delta = np.where(off, size, 1e-6).ravel()
    index = np.tile(np.arange(OUTPUT), count)
    reported = np.full(len(delta), -2.0)
    nothing = np.zeros(len(delta))
    return TokenTable(
        sequence=np.repeat(np.arange(count), OUTPUT),
        index=index,
        position=np.repeat(prompts, OUTPUT) + index,
        token=np.zeros(len(delta), dtype=np.int64),
        reported=reported,
        contracted=reported + delta,
        raw=reported,
        entropy=nothing,
        variance=nothing,
        by_likelihood=nothing,
        by_id=nothing,
        sigma=nothing,
        masses=no_masses(len(delta), 512),
        ends_told=True,
    )


@pytest.fixture
def prompts():
    return np.random.default_rng(3).integers(1, 200, 48)


def positions(prompts: np.ndarray) -> np.ndarray:
    return prompts[:, None] + np.arange(OUTPUT)


@pytest.mark.parametrize("boundary", [48, 64, 130])
def test_the_length_at_which_it_goes_wrong_is_found(prompts, boundary):
    reach = stable_context(table(positions(prompts) >= boundary, prompts), GATES)
    assert reach is not None
    assert reach.tokens == boundary
    assert not reach.whole


def test_a_few_tokens_beyond_that_happen_to_be_right(prompts):
    """What is certain stays so, whatever the positions are."""
    certain = np.random.default_rng(1).random((len(prompts), OUTPUT)) < 0.2
    reach = stable_context(table((positions(prompts) >= 64) & ~certain, prompts), GATES)
    assert reach is not None
    assert 64 <= reach.tokens <= 66


def test_a_healthy_table_is_stable_to_the_end_of_what_was_asked(prompts):
    healthy = table(np.zeros((len(prompts), OUTPUT), dtype=bool), prompts)
    reach = stable_context(healthy, GATES)
    assert reach is not None
    assert reach.whole
    assert reach.asked == reach.tokens == prompts.max() + OUTPUT
    assert positions_asked(healthy, 1024, reach).seen_from == reach.asked


def test_what_is_wrong_everywhere_depends_on_no_length(prompts):
    assert stable_context(table(np.ones((len(prompts), OUTPUT), dtype=bool), prompts), GATES) is None


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_sequences_that_are_off_by_chance_have_no_length_in_common(share):
    rng = np.random.default_rng(7)
    for _ in range(100):
        prompts = rng.integers(1, 300, 64)
        off = np.repeat(rng.random(64) < share, OUTPUT).reshape(64, OUTPUT)
        off[0] = True
        assert stable_context(table(off, prompts), GATES) is None


def test_what_goes_wrong_early_only_is_not_called_stable(prompts):
    assert stable_context(table(positions(prompts) < 64, prompts), GATES) is None
