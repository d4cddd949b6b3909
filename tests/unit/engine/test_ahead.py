"""Rounds that are launched before the last ones are read change no bit, whatever happens in between."""

from collections.abc import Callable
from typing import Any

import pytest

from zerodrift import SamplingParams
from zerodrift.engine import runner
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output
from zerodrift.engine.plan import StepPlan

Engines = Callable[..., Engine]
Between = Callable[[Engine, int], None]
"""What somebody does after each step, by its number."""


def params(number: int) -> SamplingParams:
    """Some end at a token, in rounds that nobody has read when the next ones are launched."""
    return SamplingParams(
        max_tokens=11 + 3 * number, seed=number, stop_token_ids=(7, 8) if number % 3 else ()
    )


def nothing(_engine: Engine, _number: int) -> None:
    pass


def served(engine: Engine, between: Between = nothing, count: int = 6) -> tuple[dict[str, Output], int]:
    """Outputs by request, and how many steps were ahead when a step returned."""
    for number in range(count):
        engine.add_request([1 + number, 2, 3 + number], params(number), request_id=str(number))
    outputs, ahead, number = dict[str, Output](), 0, 0
    while engine.has_unfinished:
        outputs |= {each.output.request_id: each.output for each in engine.step() if each.output is not None}
        ahead += engine._steps.ahead is not None
        between(engine, number)
        number += 1
    return outputs, ahead


def bits(outputs: dict[str, Output], but: str = "") -> dict[str, Any]:
    return {key: (each.token_ids, each.logprobs) for key, each in outputs.items() if key != but}


def abort_one(engine: Engine, number: int) -> None:
    if number == 2:
        engine.abort("3")


def another_arrives(engine: Engine, number: int) -> None:
    if number == 2:
        engine.add_request([9, 9, 9], SamplingParams(max_tokens=5, seed=9), request_id="late")


def look_at_the_books(engine: Engine, _number: int) -> None:
    engine.check()


def same_weights_again(engine: Engine, number: int) -> None:
    if number % 2:
        engine.swap_weights(engine.retain_weights(), kv="keep")


@pytest.mark.parametrize("decode_rounds", [2, 7])
@pytest.mark.parametrize(
    ("between", "gone"),
    [
        (nothing, ""),
        (abort_one, "3"),
        (another_arrives, "late"),
        (look_at_the_books, ""),
        (same_weights_again, ""),
    ],
)
def test_no_bit_changes(engine_of: Engines, decode_rounds: int, between: Between, gone: str) -> None:
    one_by_one, ahead = served(engine_of())
    assert not ahead
    found, ahead = served(engine := engine_of(decode_rounds=decode_rounds), between)
    assert ahead > 0, "nothing was launched ahead: nothing is shown"
    assert bits(found, but=gone) == bits(one_by_one, but=gone)
    assert engine.metrics().blocks_held == 0
    engine.check()


def test_a_wrong_token_fed_on_is_seen(engine_of: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    right = runner.resolved

    def wrong(plan: StepPlan, results: Any) -> StepPlan:
        return right(plan, results[:-1] + results[:1])

    one_by_one, _ = served(engine_of())
    monkeypatch.setattr(runner, "resolved", wrong)
    found, _ = served(engine_of(decode_rounds=4))
    assert bits(found) != bits(one_by_one)


def test_memory_that_does_not_suffice_for_more_rounds_is_not_taken(engine_of: Engines) -> None:
    one_by_one, _ = served(engine_of())
    engine = engine_of(decode_rounds=4, num_blocks=16)
    found, _ = served(engine)
    assert bits(found) == bits(one_by_one)
    assert engine.metrics().preemptions > 0


def test_blocks_come_back_while_steps_follow_each_other(engine_of: Engines) -> None:
    """One request goes on for long: what others left must not wait for the end of all steps ahead."""
    engine = engine_of(decode_rounds=4, enable_prefix_caching=False)
    engine.add_request([5, 6], SamplingParams(max_tokens=80, seed=1))
    engine.add_request([5, 7], SamplingParams(max_tokens=8, seed=2), request_id="short")
    due = []
    while engine.has_unfinished:
        engine.step()
        due.append(len(engine.scheduler.releases_due))
    assert max(due) > 0, "nothing was released in flight: nothing is shown"
    assert due.count(0) > len(due) // 2
