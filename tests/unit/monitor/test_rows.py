"""Rows of every kind that an engine or a trainer hands over: missing, ragged, of tensors."""

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor

torch = pytest.importorskip("torch")

ROWS, TOKENS = 8, 30
BEHAVIOR = -np.random.default_rng(0).exponential(1.0, (ROWS, TOKENS)) - 0.5
RAGGED = [BEHAVIOR[place, : place + 1].tolist() for place in range(ROWS)]


def copied(rows):
    return [row.tolist() if hasattr(row, "tolist") else None if row is None else list(row) for row in rows]


def observe(behavior, old=None, monitor=None, **more):
    return (monitor or Monitor(precision="fp32")).observe(
        behavior_logprobs=behavior,
        old_logprobs=copied(behavior) if old is None else old,
        versions=3,
        trainer_version=3,
        **more,
    )


class Kept:
    def __init__(self):
        self.batches = []

    def append(self, batch):
        self.batches.append(batch)


def with_hole(rows):
    return [None, *rows[1:]]


@pytest.mark.parametrize(
    ("behavior", "more", "missing"),
    [
        (with_hole(BEHAVIOR.tolist()), {"old": BEHAVIOR}, TOKENS),
        (with_hole(list(BEHAVIOR)), {"old": BEHAVIOR}, TOKENS),
        (with_hole([torch.tensor(row) for row in BEHAVIOR]), {"old": BEHAVIOR}, TOKENS),
        ([*RAGGED[:-1], None], {"old": RAGGED}, ROWS),
        ([*RAGGED[:-1], None], {}, 2),
        ([*RAGGED[:-1], None], {"lengths": range(1, ROWS + 1)}, 2 * ROWS),
        ([None] * ROWS, {"old": BEHAVIOR}, ROWS * TOKENS),
        ([None] * ROWS, {}, 2 * ROWS),
        (
            np.where(np.arange(240) < 5, None, BEHAVIOR.ravel()),
            {"old": BEHAVIOR.ravel(), "lengths": [TOKENS] * ROWS},
            5,
        ),
    ],
)
def test_a_row_that_is_missing_trips(behavior, more, missing):
    if "lengths" in more:
        more = {**more, "lengths": np.array(more["lengths"])}
    decision = observe(behavior, **more)
    assert decision.state is State.QUARANTINE
    found = [reason for reason in decision.reasons if reason.code is Code.MISSING_LOGPROBS]
    assert sum(reason.value for reason in found) == missing


def test_a_row_that_is_missing_is_no_fault_where_the_mask_drops_it():
    mask = np.ones((ROWS, TOKENS))
    mask[0] = 0
    assert observe(with_hole(BEHAVIOR.tolist()), BEHAVIOR, mask=mask).state is State.OK


def test_a_row_that_is_missing_is_archived_as_missing():
    archive = Kept()
    observe(
        with_hole(BEHAVIOR.tolist()), BEHAVIOR, Monitor(archive=archive),
        prompt_ids=[[1]] * ROWS, completion_ids=[[2] * TOKENS] * ROWS,
    )  # fmt: skip
    first, second, *_ = archive.batches[0].rollouts
    assert np.isnan(first.behavior_logprobs).all()
    assert second.behavior_logprobs == tuple(BEHAVIOR[1].tolist())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ragged", [False, True])
def test_lists_of_tensors_are_read_row_by_row(kind, ragged):
    rows = [torch.tensor(row, dtype=kind, requires_grad=True) for row in BEHAVIOR]
    if ragged:
        rows = [row[: place + 1] for place, row in enumerate(rows)]
    decision = observe(rows)
    assert decision.state is State.OK
    assert decision.tokens == sum(map(len, rows))


@pytest.mark.parametrize("wrong", [[1] * ROWS, [1] * 3, [ROWS] * ROWS])
def test_lengths_that_are_not_those_of_the_rows_are_refused(wrong):
    with pytest.raises(InvalidValue, match="lengths"):
        observe(RAGGED, lengths=wrong)
    assert observe(RAGGED, lengths=list(range(1, ROWS + 1))).state is State.OK


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0, *BEHAVIOR[1:].tolist()],
        [[{"1": -0.5}] * TOKENS] * ROWS,
        [[[-1.0], [-2.0, -1.0]], [[-1.0]]],
        [None, 1.0],
        torch.ones(ROWS, TOKENS).to_sparse(),
        torch.ones(ROWS, TOKENS, device="meta"),
        "abc",
    ],
)
def test_what_is_no_row_is_refused_by_name(wrong):
    with pytest.raises(InvalidValue):
        observe(wrong, wrong)


@pytest.mark.parametrize(
    ("behavior", "versions"),
    [
        (BEHAVIOR, [[3] * TOKENS] * (ROWS - 1) + [None]),
        (BEHAVIOR, [None] * ROWS),
        (RAGGED, [[3] * len(row) for row in RAGGED[:-1]] + [None]),
        (RAGGED, [None] * ROWS),
        (RAGGED, [None, *[3] * (ROWS - 1)]),
        (RAGGED, [[None] * len(row) for row in RAGGED]),
    ],
)
def test_versions_of_which_some_are_missing_are_unknown(behavior, versions):
    archive = Kept()
    given = {"behavior_logprobs": behavior, "old_logprobs": behavior, "trainer_version": 3}
    ids = {"prompt_ids": [[1]] * ROWS, "completion_ids": [[7] * len(row) for row in behavior]}
    found = Monitor(archive=archive).observe(**given, **ids, versions=versions)
    assert [reason.code for reason in found.reasons if reason.bad] == [Code.VERSION_UNKNOWN]
    assert len(archive.batches[0].rollouts) == ROWS


def test_versions_of_another_width_are_a_callers_bug_whatever_else_is_missing():
    with pytest.raises(InvalidValue):
        Monitor().observe(
            behavior_logprobs=BEHAVIOR, versions=[[3] * 7] * (ROWS - 1) + [None], trainer_version=3
        )
