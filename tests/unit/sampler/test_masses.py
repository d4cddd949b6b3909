import numpy as np
import torch
from tests.draws import STOP, VOCAB, distributions

from zerodrift.drift.tokens import RARE
from zerodrift.sampler.masses import draw_masses


def masses_of(probs: np.ndarray, tokens: list[int], stops: tuple[int, ...] = (STOP,)):
    return draw_masses(torch.from_numpy(probs).log(), torch.tensor(tokens), stops)


def test_masses_are_sums_over_the_tokens_that_do_not_stop():
    probs = distributions(np.random.default_rng(0), 3, stop=0.2)
    found = masses_of(probs, [7, STOP, 400])
    others = probs.copy()
    others[:, STOP] = 0
    others /= others.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.ranges, others.reshape(3, 32, 16).sum(axis=2), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.ends[:, 0], others[:, :16].sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.ends[:, 3], others[:, -256:].sum(axis=1), rtol=1e-5)
    for place, limit in enumerate(RARE):
        below = np.where(others < limit, others, 0).sum(axis=1)
        np.testing.assert_allclose(found.rarer[:, place], below, rtol=1e-4, atol=1e-9)
    assert found.rarity.tolist()[::2] == [
        int((others[row, token] < RARE).sum()) for row, token in ((0, 7), (2, 400))
    ]
    assert found.likeliest[:, 0].tolist() == others.argmax(axis=1).tolist()
    np.testing.assert_allclose(found.likeliest_mass[:, 0], others.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.stop, 0.2, rtol=1e-6)
    assert found.stopped.tolist() == [False, True, False]
    assert found.vocab_size == VOCAB


def test_a_vocabulary_that_no_piece_divides_and_one_smaller_than_the_likeliest():
    odd = masses_of(np.full((1, 37), 1 / 37), [36], ())
    assert odd.ranges.sum() == np.float32(1.0)
    assert (odd.ranges[0] > 0).sum() == 19, "two ids each, one in the last"
    tiny = masses_of(np.array([[0.75, 0.25]]), [0], ())
    assert tiny.likeliest.tolist() == [[0, 1] + [-1] * 6]
    assert tiny.likeliest_mass.tolist() == [[0.75, 0.25] + [0.0] * 6]


def test_where_only_a_stop_is_possible_nothing_else_has_mass():
    probs = np.zeros((1, VOCAB))
    probs[0, STOP] = 1.0
    found = masses_of(probs, [STOP])
    assert found.stop.tolist() == [1.0]
    assert found.ranges.sum() == found.rarer.sum() == found.likeliest_mass.sum() == 0.0
