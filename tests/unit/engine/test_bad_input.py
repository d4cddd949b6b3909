"""A request that cannot be served ends with a clear error, and its neighbours' bits do not change."""

from typing import Any

import pytest
import torch
from tests.unit.engine.support import Make, ended, finished, seeded

from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import DuplicateRequest, EngineError, InvalidPrompt, InvalidValue, UnknownRequest
from zerodrift.core.request import Prompt
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output

GOOD = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
POISON = 60


def bits(outputs: list[Output]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.finish_reason) for output in outputs]


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([], {}, "value/prompt"),
        ([5, -1], {}, "value/prompt"),
        ([5, 2**70], {}, "value/prompt"),
        ([5, "6"], {}, "value/prompt"),
        ([5, 61], {}, "value/prompt"),
        ([5] * 96, {}, "value/prompt"),
        ([5] * 90, {"max_tokens": 7}, "value/sampling"),
        ([5] * 50, {"max_tokens": 15}, "engine/kv-memory"),
        ([5], {"logprobs": 10**6}, "value/sampling"),
        ([5], {"stop_token_ids": (99,)}, "value/sampling"),
        ([5], {"stop": ("x" * 10_240,)}, "value/sampling"),
        ([5], {"stop": ("x",)}, "value/sampling"),
        ([5], {"min_tokens": 1, "stop_token_ids": tuple(range(61))}, "value/sampling"),
    ],
)
def test_it_ends_alone(engine_of: Make, prompt: Any, sampling: dict[str, Any], code: str) -> None:
    engine = engine_of(num_blocks=15)
    expected = bits(engine.generate(GOOD, seeded()))
    outputs = engine.generate(
        [GOOD[0], prompt, *GOOD[1:]], [seeded(), seeded(**sampling), seeded(), seeded()], on_error="return"
    )
    bad = outputs.pop(1)
    assert bits(outputs) == expected
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.problem is not None
    assert bad.problem.code == code
    assert bad.token_ids == ()


def test_by_default_it_raises_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(InvalidPrompt):
        engine.generate([*GOOD, [5, 61]], seeded())
    assert engine.metrics().steps == 0
    with pytest.raises(InvalidValue):
        engine.generate(GOOD, seeded(), on_error="ignore")


def test_by_default_what_fails_while_it_runs_raises_too(poisoned: Engine) -> None:
    with pytest.raises(EngineError):
        poisoned.generate([*GOOD, [5, POISON]], seeded())
    assert not poisoned.has_unfinished


@pytest.mark.parametrize("forced", [[61], [1] * 7, [5.0], [True], [-1], ["a"]])
def test_tokens_that_cannot_be_forced(engine: Engine, forced: Any) -> None:
    (output,) = engine.generate([[5]], seeded(), forced=[forced], on_error="return")
    assert output.problem is not None
    assert output.problem.code in ("value/prompt", "value/sampling")


@pytest.fixture
def poisoned(engine_of: Make) -> Engine:
    """One token of the vocabulary has NaN for an embedding: who uses it has NaN logits from there on."""
    engine = engine_of()
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[POISON] = torch.nan
    return engine


@pytest.mark.parametrize("prompt", [[POISON], [5, 6, POISON, 7, 8], [5, 6, 7, POISON]])
@pytest.mark.parametrize("n", [1, 2])
def test_nan_in_one_request(engine_of: Make, poisoned: Engine, prompt: list[int], n: int) -> None:
    expected = bits(engine_of().generate(GOOD, seeded(logit_bias={POISON: -100})))
    params = seeded(logit_bias={POISON: -100})
    outputs = poisoned.generate(
        [GOOD[0], prompt, *GOOD[1:]], [params, seeded(n=n), params, params], on_error="return"
    )
    bad = [output for output in outputs if output.prompt_token_ids == tuple(prompt)]
    good = [output for output in outputs if output.prompt_token_ids != tuple(prompt)]
    assert bits(good) == expected
    assert len(bad) == n
    for output in bad:
        assert output.finish_reason is FinishReason.ERROR
        assert output.problem is not None
        assert output.problem.code == "value/non-finite"
        assert f"at positions 0 to {len(prompt) - 1} are not finite" in output.problem.message
    # What it left in its blocks reaches nobody who gets them next.
    assert bits(poisoned.generate(GOOD, params)) == expected


def test_nan_after_some_tokens_keeps_those_before(poisoned: Engine) -> None:
    outputs = poisoned.generate([[5, 6], [7, 8]], seeded(), forced=[[9, POISON], []], on_error="return")
    assert outputs[0].token_ids == (9, POISON)
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert len(outputs[0].logprobs) == 2


def test_nan_in_the_head_alone_is_seen_too(engine_of: Make) -> None:
    engine = engine_of()
    with torch.no_grad():
        engine.model.lm_head.weight[3] = torch.nan
    (output,) = engine.generate([[5]], seeded(), on_error="return")
    assert output.problem is not None
    assert "the logits of output token 0 are not finite" in output.problem.message


def test_wrong_ids_change_nobodys_bits(engine_of: Make) -> None:
    """A duplicate, and aborts of unknown and of real requests, between the steps of others."""
    expected = bits(engine_of().generate(GOOD, seeded()))
    engine, outputs = engine_of(), []
    for number, prompt in enumerate(GOOD):
        engine.add_request(prompt, seeded(), request_id=str(number))
    engine.add_request([1, 2, 3], seeded(), request_id="gone")
    outputs += ended(engine.step())
    with pytest.raises(DuplicateRequest):
        engine.add_request([40, 41], seeded(), request_id="1")
    with pytest.raises(UnknownRequest):
        engine.abort("3")
    engine.abort("gone")
    outputs += finished(engine)
    assert bits(sorted(outputs, key=lambda output: output.request_id)) == expected


def test_a_request_that_raises_is_not_queued(engine: Engine) -> None:
    with pytest.raises(InvalidPrompt):
        engine.add_request(Prompt((99,)), seeded())
    assert not engine.has_unfinished
