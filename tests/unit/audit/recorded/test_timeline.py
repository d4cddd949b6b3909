import pytest

from zerodrift.audit.recorded.timeline import Selection, observer, timeline
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import RecordError


def test_steps_are_put_in_order(rollout):
    order = timeline([rollout(step=step) for step in (7, 3, 7, 10)])
    assert (order.unit, order.labels) == ("step", (3, 7, 10))
    assert order.of_sequence.tolist() == [1, 0, 1, 2]


def test_lines_stand_in_for_steps_in_blocks_that_can_say_something(rollout):
    rollouts = [rollout(line=line, output=(5,) * 90) for line in range(1, 9)]
    order = timeline(rollouts)
    assert (order.unit, order.labels) == ("line", (1, 4, 7))
    assert order.of_sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_everything_is_judged_unless_asked_otherwise(rollout):
    rollouts = [rollout(step=1), rollout(step=2)]
    assert Selection().of(rollouts) == rollouts
    assert Selection().message == ""


@pytest.mark.parametrize(
    ("selection", "steps", "says"),
    [
        (Selection(first=2), [2, 3], "from step 2"),
        (Selection(last=2), [1, 2], "to step 2"),
        (Selection(first=2, last=2), [2], "from step 2, to step 2"),
        (Selection(version="b"), [2], "of version b"),
    ],
)
def test_some_are_asked_for(selection, steps, says, rollout):
    rollouts = [rollout(step=step, version="b" if step == 2 else "a") for step in (1, 2, 3)]
    assert [each.step for each in selection.of(rollouts)] == steps
    assert selection.message == says


def test_a_few_of_each_step_evenly_spaced(rollout):
    rollouts = [rollout(step=step, line=line) for step in (0, 1) for line in range(1, 8 if step else 3)]
    chosen = Selection(per_step=3).of(rollouts)
    assert [(each.step, each.line) for each in chosen] == [(0, 1), (0, 2), (1, 1), (1, 4), (1, 7)]
    assert Selection(per_step=3).message == "at most 3 of each step"


@pytest.mark.parametrize("selection", [Selection(first=9), Selection(version="c")])
def test_a_selection_of_nothing_is_refused(selection, rollout):
    with pytest.raises(RecordError, match=r"none of 1 rollouts is asked for .*; widen --steps or --version"):
        selection.of([rollout(step=1)])


def test_steps_cannot_be_chosen_where_there_are_none(rollout):
    with pytest.raises(RecordError, match="none of 1"):
        Selection(last=9).of([rollout()])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, FinishReason.LENGTH),
        ({"output": (2, 9)}, FinishReason.STOP),
        ({"output": (2, 9), "finish_reason": FinishReason.LENGTH}, FinishReason.LENGTH),
    ],
)
def test_a_rollout_as_the_measurement_takes_it(fields, reason, rollout):
    recorded = rollout(**fields)
    completion, requested = observer([9])(recorded)
    assert completion.finish_reason is reason
    assert completion.sequence == recorded.prompt + recorded.output
    assert completion.kind is LogprobKind.PROCESSED
    assert requested == recorded.sampling


def test_a_quick_look_takes_some_of_each_step(rollout):
    rollouts = [rollout(step=number // 8, line=number + 1) for number in range(32)]
    chosen = Selection(positions=40).of(rollouts)
    # Four tokens each: forty are ten rollouts, of four steps.
    assert [each.step for each in chosen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(Selection(positions=1).of(rollouts)) == 4
    assert "quick" in Selection(positions=40).message
