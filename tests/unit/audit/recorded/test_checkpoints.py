from pathlib import Path

import pytest

from zerodrift.audit.recorded.checkpoints import Checkpoints, per_step
from zerodrift.core.errors import ConfigError, ModelNotFound, RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import RecordedRollout


def rollout(step: int | None) -> RecordedRollout:
    return RecordedRollout(
        source="d", line=1, step=step, prompt=(1,), output=(2,), logprobs=(-1.0,), sampling=SamplingParams()
    )


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("ckpt/step_{step}", "ckpt/step_7"),
        ("ckpt/step_{step-1}", "ckpt/step_6"),
        ("ckpt/{step:06}/actor", "ckpt/000007/actor"),
        ("ckpt/{step+2:03d}", "ckpt/009"),
        ("a{step}/b{step}", "a7/b7"),
    ],
)
def test_the_step_stands_where_it_is_written(pattern, path):
    checkpoints = per_step(pattern)
    assert checkpoints is not None
    assert checkpoints.at(7) == Path(path)


def test_one_checkpoint_has_no_place_for_a_step(tmp_path):
    assert per_step("testbed:llama") is None
    odd = tmp_path / "{odd}"
    odd.mkdir()
    assert per_step(str(odd)) is None
    with pytest.raises(ConfigError):
        per_step("ckpt/{stap}")


def test_a_missing_checkpoint_is_refused_by_name_with_what_is_there(tmp_path):
    for name in ("step_9", "step_10", "step_x", "step_[2]"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(f"{tmp_path}/step_{{step}}")
    assert checkpoints.found() == [tmp_path / "step_9", tmp_path / "step_10"]
    assert checkpoints.first() == tmp_path / "step_9"
    assert checkpoints.of([rollout(10), rollout(9)]) == {9: tmp_path / "step_9", 10: tmp_path / "step_10"}
    with pytest.raises(ModelNotFound) as refused:
        checkpoints.of([rollout(9), rollout(11)])
    assert f"{tmp_path}/step_11" in str(refused.value)
    assert f"{tmp_path}/step_9, {tmp_path}/step_10" in str(refused.value)
    with pytest.raises(RecordError):
        checkpoints.of([rollout(9), rollout(None)])
    with pytest.raises(ModelNotFound):
        Checkpoints(f"{tmp_path}/other_{{step}}").first()
