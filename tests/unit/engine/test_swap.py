"""Weights change between two steps, all of them or none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.engine.support import Make, changed, ended, finished

from zerodrift.core.errors import (
    DigestMismatch,
    InvalidValue,
    InvariantBroken,
    ModelError,
    NonFinite,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine

PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)


def bits(engine: Engine) -> tuple[float, ...]:
    return engine.generate(PROMPT, PARAMS)[0].logprobs


def test_there_and_back_again(engine_of: Make) -> None:
    engine = engine_of()
    first, state, label = bits(engine), copy.deepcopy(engine.model.state_dict()), engine.version
    (before,) = engine.generate(PROMPT, PARAMS)
    new = engine.swap_weights(changed(engine), "step 1")
    assert (new.label, new) == ("step 1", engine.version)
    (after,) = engine.generate(PROMPT, PARAMS)
    assert after.logprobs != first
    assert after.fingerprint != before.fingerprint
    assert after.numeric == before.numeric
    back = engine.swap_weights(state, "step 2")
    assert back.digest == label.digest
    (output,) = engine.generate(PROMPT, PARAMS)
    assert output.logprobs == first
    assert output.cached_tokens == 4, "what the old weights left in the cache is valid again"
    assert output.versions[0].version == back


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_every_token_knows_its_weights(engine_of: Make, kv: str) -> None:
    engine = engine_of()
    old = engine.version
    engine.add_request(PROMPT, PARAMS)
    for _ in range(3):
        engine.step()
    new = engine.swap_weights(changed(engine), "b", kv=kv)
    (output,) = finished(engine)
    assert [(span.version, span.start, span.end) for span in output.versions] == [(old, 0, 3), (new, 3, 8)]
    # Two tokens were forwarded before the swap: the third was drawn and waited for its forward.
    expected = [(new, 0, 12)] if kv == "recompute" else [(old, 0, 7), (new, 7, 12)]
    assert [(part.version, part.start, part.end) for part in output.lineage] == expected
    assert engine.runner.forwarded_tokens == (5 + 2 + 8 + 4 if kv == "recompute" else 12)


def _kept(engine: Engine, company: int) -> tuple[tuple[float, ...], object]:
    """The same request, swapped under after its third token, with KV kept."""
    name = engine.add_request(PROMPT, PARAMS)
    for number in range(company):
        engine.add_request([number + 1, 2, 3], PARAMS)
    (sample,) = engine.scheduler.requests[name]
    outputs = []
    while len(sample.output) < 3:
        outputs += ended(engine.step())
    engine.swap_weights(changed(engine), "b", kv="keep")
    outputs += finished(engine)
    (output,) = [each for each in outputs if each.request_id == name]
    return output.logprobs, output.lineage


def test_kept_kv_gives_bits_that_depend_on_the_lineage_alone(engine_of: Make) -> None:
    alone = _kept(engine_of(), company=0)
    assert alone == _kept(engine_of(block_size=7, max_num_seqs=6, max_num_batched_tokens=8), company=5)
    engine = engine_of()
    engine.swap_weights(changed(engine), "b")
    (recomputed,) = engine.generate([PROMPT], PARAMS)
    assert alone[0][3:] != recomputed.logprobs[3:]


def addresses(engine: Engine) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}


def test_weights_never_move(engine: Engine) -> None:
    before, model = addresses(engine), engine.model
    engine.swap_weights(changed(engine), "b")
    engine.generate(PROMPT, PARAMS)
    assert addresses(engine) == before
    assert engine.model is model


def test_a_swap_under_inference_mode_reaches_the_packed_weights(engine_of: Make) -> None:
    """Tensors of inference mode count no versions."""
    with torch.inference_mode():
        engine = engine_of()
        old, new = bits(engine), changed(engine)
        engine.swap_weights(new, "b")
        found = bits(engine)
    other = engine_of()
    other.swap_weights({name: tensor.clone() for name, tensor in new.items()}, "b")
    assert found == bits(other) != old


def test_versions_that_were_held_on_to_are_swapped_back(engine: Engine) -> None:
    first, initial = bits(engine), engine.retain_weights()
    staged = engine.stage_weights(changed(engine), "b")
    assert (engine.version, bits(engine)) == (initial.version, first), "nothing changes before the swap"
    assert engine.swap_weights(staged) == staged.version == engine.version
    second = bits(engine)
    for weights, expected in ((initial, first), (staged, second), (initial, first)):
        engine.swap_weights(weights)
        engine.reset_cache()
        assert bits(engine) == expected
        assert engine.version == weights.version


def test_a_replica_takes_what_was_staged_for_another(engine_of: Make, with_text: Engine) -> None:
    one, other = engine_of(), engine_of()
    staged = one.stage_weights(changed(one), "b")
    for engine in (one, other):
        engine.swap_weights(staged)
    assert bits(one) == bits(other)
    before = with_text.version
    with pytest.raises(ModelError):
        with_text.swap_weights(staged)
    assert with_text.version is before
    assert with_text.generate(PROMPT, PARAMS)[0].problem is None


def test_staged_weights_have_a_version_and_others_need_one(engine: Engine) -> None:
    staged = engine.stage_weights(changed(engine), "b")
    with pytest.raises(InvalidValue):
        engine.swap_weights(staged, "c")
    with pytest.raises(InvalidValue):
        engine.swap_weights(changed(engine))


def test_weights_that_take_part_in_training_are_taken_without_their_history(
    engine: Engine, tiny: Any
) -> None:
    engine.swap_weights(tiny.state_dict(keep_vars=True), "trained")
    assert not any(tensor.requires_grad for tensor in engine.model.parameters())
    assert bits(engine)


def test_a_swap_that_is_interrupted_halfway_stops_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, copied = engine.stage_weights(changed(engine), "b"), []

    def interrupted(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        copied.append(tensor)
        if len(copied) == 3:
            raise KeyboardInterrupt
        return real(tensor, *rest)

    real = torch.Tensor.copy_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.swap_weights(staged)
    with pytest.raises(InvariantBroken):
        bits(engine)


def _nan(state: dict[str, torch.Tensor]) -> None:
    state["lm_head.weight"][0, 0] = torch.nan


def _overflow(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], 3e38)
    state["lm_head.weight"] = torch.full_like(state["lm_head.weight"], 3e38)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda state: state.pop("lm_head.weight"), ModelError),
        (lambda state: state.update(x=torch.zeros(1)), ModelError),
        (lambda state: state.update({"lm_head.weight": state["lm_head.weight"][:3]}), ModelError),
        (lambda state: state.update({"lm_head.weight": state["lm_head.weight"].double()}), ModelError),
        (_nan, NonFinite),
        (_overflow, NonFinite),
    ],
)
def test_what_is_wrong_changes_nothing(
    engine: Engine, damage: Callable[[dict[str, torch.Tensor]], None], error: type[ZerodriftError]
) -> None:
    before, version = bits(engine), engine.version
    state = changed(engine)
    damage(state)
    with pytest.raises(error):
        engine.swap_weights(state, "bad")
    engine.reset_cache()
    assert engine.version is version
    assert bits(engine) == before


def test_a_digest_that_was_promised_is_checked(engine: Engine) -> None:
    before, state = bits(engine), changed(engine)
    with pytest.raises(DigestMismatch, match="weights 'b' should have digest abc"):
        engine.swap_weights(state, WeightVersion("b", "abc"))
    assert bits(engine) == before
    new = engine.swap_weights(state, WeightVersion("b"))
    assert engine.swap_weights(state, new) == new


def test_a_policy_that_does_not_exist_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidValue, match="kv is 'drop'; use one of recompute, keep"):
        engine.swap_weights(changed(engine), "b", kv="drop")


def test_tied_weights_may_be_given_once_or_twice() -> None:
    engine = Engine("testbed:llama", num_blocks=32)
    state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    assert "lm_head.weight" in state
    engine.swap_weights(state, "twice")
    untied = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    with pytest.raises(ModelError, match="differs from the tensor that it is tied to"):
        engine.swap_weights(untied, "untied")
    del state["lm_head.weight"]
    assert engine.swap_weights(state, "once").digest == engine.version.digest


def meddled(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, step: Callable[[], object], *, before: bool
) -> None:
    """A trainer's optimizer writes to its `tensor` just before it is copied, or just after."""
    real, address = torch.Tensor.copy_, tensor.data_ptr()

    def copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.data_ptr() == address and before:
            step()
        copied = real(to, source)
        if source.data_ptr() == address and not before:
            step()
        return copied

    monkeypatch.setattr(torch.Tensor, "copy_", copy)


def test_what_is_checked_is_the_copy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may step while its tensors are copied. The first token that is tried looks at row 0 alone."""
    before, state = engine.version, changed(engine)
    embeddings = state["model.embed_tokens.weight"]
    with monkeypatch.context() as patch:
        meddled(patch, embeddings, lambda: embeddings[7].fill_(torch.nan), before=True)
        with pytest.raises(NonFinite, match=r"embed_tokens.weight holds NaN"):
            engine.swap_weights(state, "b")
    assert engine.version is before
    state = changed(engine)
    embeddings = state["model.embed_tokens.weight"]
    meddled(monkeypatch, embeddings, lambda: embeddings[7].fill_(torch.nan), before=False)
    assert engine.swap_weights(state, "b").label == "b", (
        "what happens to the trainer's tensors later is its own"
    )


def test_ties_are_checked_against_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("testbed:llama", num_blocks=32)
    state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    embeddings = state["model.embed_tokens.weight"]
    with monkeypatch.context() as patch:
        meddled(patch, embeddings, lambda: embeddings.mul_(1.5), before=True)
        with pytest.raises(ModelError, match="differs from the tensor that it is tied to"):
            engine.stage_weights(state, "b")
    state["lm_head.weight"] = embeddings
    meddled(monkeypatch, embeddings, lambda: embeddings.mul_(1.5), before=False)
    assert engine.stage_weights(state, "b").version.label == "b", "one memory under two names is always tied"


def test_the_callers_tensors_are_copied(engine: Engine) -> None:
    state = changed(engine)
    engine.swap_weights(state, "b")
    before: Any = bits(engine)
    for tensor in state.values():
        tensor.zero_()
    engine.reset_cache()
    assert bits(engine) == before
