import numpy as np
import pytest
import torch

from zerodrift.audit.recorded.shared_prompts import LEAST_TOKENS, SharedPrompts, scoring_teacher
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher

PROMPTS = [
    tuple(np.random.default_rng(seed).integers(4, 500, length).tolist())
    for seed, length in enumerate((LEAST_TOKENS, 40, LEAST_TOKENS - 1, 25))
]


@pytest.mark.parametrize("spec", ["testbed:llama", "testbed:qwen3"])
@pytest.mark.parametrize("batch", [2, 16])
def test_the_numbers_of_every_sequence_alone(spec, batch):
    model = ReferenceBackend(spec).model
    rng = np.random.default_rng(9)
    # The last prompt stands alone, and the short one is not worth sharing.
    asked = [*PROMPTS[:3] * 3, PROMPTS[3]]
    sequences = [(*prompt, *rng.integers(4, 500, rng.integers(1, 30)).tolist()) for prompt in asked]
    starts = [len(prompt) for prompt in asked]
    teacher = scoring_teacher(model, batch)
    assert isinstance(teacher, SharedPrompts)
    shared = list(teacher.logprobs(sequences, starts))
    alone = list(Teacher(model, layout=Layout.ALONE).logprobs(sequences, starts))
    for one, other, ids, start in zip(shared, alone, sequences, starts, strict=True):
        assert len(one) == len(ids) - start
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_a_window_is_not_shared():
    assert not isinstance(scoring_teacher(ReferenceBackend("testbed:gemma3").model, 4), SharedPrompts)
