import math
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.records.archived import ArchivedBatch, BatchState
from zerodrift.records.archived_rows import Rows

PADDED = [[-0.5, -0.25, -1.0], [-2.0, 0.0, 0.0]]
GIVEN: dict[str, Any] = {"prompts": [[1], [2, 3]], "outputs": [[7, 8, 9], [5]], "behavior_logprobs": PADDED}


def made(**changes: Any) -> ArchivedBatch:
    return Rows(**{**GIVEN, **changes}).batch(
        step=4, state=BatchState.WARN, reasons=("why",), trainer_version=9
    )


@pytest.mark.parametrize(
    "kind", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.bfloat16)]
)
def test_padding_is_cut_whatever_the_rows_are(kind):
    batch = made(
        behavior_logprobs=kind(PADDED),
        old_logprobs=kind(PADDED),
        versions=kind([[1, 1, 2], [3, 0, 0]]),
        mask=kind([[1, 0, 1], [1, 0, 0]]),
        rewards=kind([1, 0]),
    )
    one, two = batch.rollouts
    assert (batch.step, batch.state, batch.reasons, batch.trainer_version) == (4, "warn", ("why",), "9")
    assert (one.id, one.prompt_token_ids, one.token_ids) == ("0", (1,), (7, 8, 9))
    assert (one.behavior_logprobs, one.old_logprobs) == ((-0.5, -0.25, -1.0), (-0.5, -0.25, -1.0))
    assert (two.behavior_logprobs, two.token_ids, two.mask) == ((-2.0,), (5,), (True,))
    assert one.mask == (True, False, True)
    assert (one.version, two.version) == ("1+2", "3")
    assert (one.reward, two.reward) == (1.0, 0.0)


def test_rows_without_padding_and_labels_for_each_rollout():
    batch = made(
        behavior_logprobs=[np.array([-0.5, -0.25, -1.0]), torch.tensor([-2.0])],
        versions=[7, "8"],
        ids=["a", "b"],
        environments=("maths", "code"),
        replicas=["r0", "r1"],
        groups=["g", "g"],
        sampling=SamplingParams(temperature=0.7),
        stated=("temperature",),
    )
    two = batch.rollouts[1]
    assert (two.id, two.environment, two.replica, two.group, two.version) == ("b", "code", "r1", "g", "8")
    assert (two.sampling.temperature, two.stated) == (0.7, ("temperature",))


def test_flat_arrays_with_lengths_and_padded_outputs_are_the_same_batch():
    wanted = made(
        behavior_logprobs=[[-0.5, -0.25, -1.0], [-2.0]], versions=[[1, 1, 2], [3]], mask=[[1, 0, 1], [1]]
    )
    flat = made(
        outputs=np.array([7, 8, 9, 5]),
        behavior_logprobs=torch.tensor([-0.5, -0.25, -1.0, -2.0]),
        versions=np.array([1, 1, 2, 3]),
        mask=[1, 0, 1, 1],
        lengths=np.array([3, 1]),
    )
    padded = made(
        outputs=torch.tensor([[7, 8, 9], [5, 0, 0]]),
        versions=[[1, 1, 2], [3, 0, 0]],
        mask=np.array([[1, 0, 1], [1, 0, 0]]),
        lengths=torch.tensor([3, 1]),
    )
    assert flat == padded == wanted


def test_what_is_missing_is_nan():
    one = made(behavior_logprobs=[[-0.5, None, -1.0], [-2.0]]).rollouts[0]
    assert math.isnan(one.behavior_logprobs[1])
    assert (one.behavior_logprobs[0], one.behavior_logprobs[2]) == (-0.5, -1.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"behavior_logprobs": [[-0.5, -0.25], [-2.0]]}, InvalidCompletion),
        ({"behavior_logprobs": [[-0.5] * 3, [-2.0, 0.0]]}, InvalidCompletion),
        ({"behavior_logprobs": [[-0.5] * 4, [-2.0] * 4]}, InvalidCompletion),
        ({"behavior_logprobs": [["x"] * 3, [-2.0]]}, InvalidCompletion),
        ({"behavior_logprobs": PADDED[:1]}, InvalidValue),
        ({"behavior_logprobs": torch.tensor(1.0)}, InvalidValue),
        ({"old_logprobs": [-1.0, -2.0]}, InvalidCompletion),
        ({"prompts": [[1]]}, InvalidValue),
        ({"ids": ["a", "a"]}, InvalidValue),
        ({"rewards": [1.0]}, InvalidValue),
        ({"outputs": [[7.0, 8.0, 9.0], [5]]}, InvalidCompletion),
        ({"mask": [[1, 1], [1]]}, InvalidCompletion),
        ({"lengths": [4, 1]}, InvalidValue),
        ({"lengths": [3, -1]}, InvalidValue),
        ({"outputs": [7, 8]}, InvalidValue),
        ({"outputs": None}, InvalidValue),
        ({"prompts": [1, 2]}, InvalidValue),
        ({"prompts": None}, InvalidValue),
        ({"lengths": [3]}, InvalidValue),
        ({"outputs": [7, 8, 9, 5], "lengths": [3, 2]}, InvalidValue),
        ({"outputs": [[7, 8, 9], [5, 0, 0]], "lengths": [3, 1], "mask": [1, 1, 1]}, InvalidValue),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes, error):
    with pytest.raises(error):
        made(**changes)
