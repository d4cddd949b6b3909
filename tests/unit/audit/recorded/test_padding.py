import pytest

from zerodrift.audit.recorded.padding import Trimmed, padding_ids, trim

STOP = 2


@pytest.mark.parametrize(
    ("prompt", "output", "left"),
    [
        ((9, 9, 5, 6), (7, 8), Trimmed((5, 6), 0, 2)),
        ((5, 6, 9), (7, 8), Trimmed((5, 6), 0, 2)),
        ((5, 6), (7, STOP, 9, 9), Trimmed((5, 6), 0, 2)),
        ((5, 6), (9, 7, 8), Trimmed((5, 6), 1, 3)),
        ((5, 9, 6), (7, 9, 8), None),
        ((9, 9), (7, 8), None),
    ],
)
def test_ends_are_trimmed(prompt, output, left, rollout):
    assert trim(rollout(prompt=prompt, output=output), 9, (STOP,)) == left


def test_the_token_that_ended_the_output_was_sampled(rollout):
    """One id both stops and pads, as in SmolLM2."""
    assert trim(rollout(output=(7, STOP)), STOP, (STOP,)) is None
    assert trim(rollout(output=(7, STOP, STOP)), STOP, (STOP,)) == Trimmed((1,), 0, 2)


def test_what_may_pad(rollout):
    padded = [rollout(prompt=(31, 31, 5), output=(7, 8, 9))] * 3 + [rollout()]
    assert padding_ids(padded, [STOP]) == [STOP, 31, 0]
    assert padding_ids([rollout(prompt=(31, 5, 6))] * 4, [STOP]) == [STOP, 0]
