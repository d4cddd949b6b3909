import pytest

from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import InvariantBroken
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineageSegment, WeightVersion
from zerodrift.engine.plan import Drawn
from zerodrift.engine.sample import Phase, Sample, ended_by_tokens, expand

OLD, NEW = WeightVersion("old", "a"), WeightVersion("new", "b")


def sample(**settings: object) -> Sample:
    params = SamplingParams(seed=1, **{"max_tokens": 8, **settings})  # type: ignore[arg-type]
    return Sample(0, "r", 0, (1, 2, 3), params)


def drawn(token: int) -> Drawn:
    return Drawn(token, -1.0, (), None, (), 0.0)


def test_tokens_run_over_prompt_and_output() -> None:
    one = sample()
    one.output = [4, 5]
    assert one.tokens(0, 5) == (1, 2, 3, 4, 5)
    assert one.tokens(1, 2) == (2,)
    assert one.tokens(2, 4) == (3, 4)
    assert one.tokens(3, 5) == (4, 5)
    assert one.length == one.remaining == 5


@pytest.mark.parametrize(
    ("before", "after"),
    [(Phase.FINISHED, Phase.RUNNING), (Phase.RUNNING, Phase.RUNNING), (Phase.WAITING, Phase.WAITING)],
)
def test_only_the_drawn_moves_exist(before: Phase, after: Phase) -> None:
    one = sample()
    one.phase = before
    with pytest.raises(InvariantBroken, match=f"went from {before} to {after}"):
        one.move(after)


@pytest.mark.parametrize("end", [0, 4])
def test_kv_is_written_forward_and_for_known_tokens(end: int) -> None:
    with pytest.raises(InvariantBroken, match=f"cannot be written to {end}"):
        sample().write(end, OLD)


def test_a_token_is_drawn_only_when_all_others_are_forwarded() -> None:
    one = sample()
    one.write(2, OLD)
    with pytest.raises(InvariantBroken, match="1 still to be forwarded"):
        one.append(drawn(4), OLD)


def test_lineage_is_that_of_the_last_token_even_when_its_kv_is_forgotten() -> None:
    one = sample()
    one.write(3, OLD)
    one.append(drawn(4), OLD)
    one.blocks = [7, 8]
    assert one.forget() == [8, 7]
    assert one.lineage == (LineageSegment(OLD, 0, 3),)
    one.write(2, NEW)
    assert one.lineage == (LineageSegment(OLD, 0, 3),)
    one.write(4, NEW)
    one.append(drawn(5), NEW)
    assert one.lineage == (LineageSegment(NEW, 0, 4),)
    one.write(5, OLD)
    assert one.lineage == (LineageSegment(NEW, 0, 4),)


def test_forgotten_prompts_are_scored_anew_unless_an_output_stands() -> None:
    one = sample()
    one.prompt_scores = ["x"]  # type: ignore[list-item]
    one.forget()
    assert one.prompt_scores == []
    one.prompt_scores, one.output = ["x"], [4]  # type: ignore[list-item]
    one.forget()
    assert one.prompt_scores == ["x"]


def test_reuse_reports_the_first_admission_only() -> None:
    one = sample()
    one.reuse(0, OLD)
    assert one.cached_tokens == 0
    one.reuse(2, OLD)
    assert (one.cached_tokens, one.computed) == (0, 2)


def test_siblings_share_prompt_and_parameters() -> None:
    one = sample(n=3)
    expand(one, range(5, 7))
    assert [(each.key, each.sample_index, each.prompt) for each in one.siblings] == [
        (5, 1, (1, 2, 3)),
        (6, 2, (1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("settings", "output", "forced", "reason"),
    [
        ({}, [4], (), None),
        ({}, [9], (), FinishReason.STOP),
        ({"ignore_eos": True}, [9], (), None),
        ({"stop_token_ids": (4,)}, [4], (), FinishReason.STOP),
        ({"stop_token_ids": (4,), "min_tokens": 2}, [4], (), None),
        ({"stop_token_ids": (4,)}, [4], (4, 4), None),
        ({"max_tokens": 2}, [4, 4], (), FinishReason.LENGTH),
    ],
)
def test_where_ids_end_a_sample(
    settings: dict[str, object], output: list[int], forced: tuple[int, ...], reason: object
) -> None:
    one = sample(**settings)
    one.output, one.forced = output, forced
    assert ended_by_tokens(one, {9}) is reason


def test_forced_tokens_run_out() -> None:
    one = sample()
    one.forced = (4,)
    assert one.next_forced == 4
    one.output = [4]
    assert one.next_forced is None
