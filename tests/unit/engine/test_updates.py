"""Weight transactions: old or new, whole, and nothing in between."""

import copy
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.engine.support import Make
from tests.unit.engine.update_history import broken_promises

from zerodrift.core.errors import (
    ArchiveFull,
    ArchiveLocked,
    DigestMismatch,
    InvalidValue,
    ModelError,
    NonFinite,
    NotRetained,
    OutOfOrder,
    RecordError,
    VersionConflict,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.engine.weights import StagedWeights
from zerodrift.weights.digest import checkpoint_state, model_digest
from zerodrift.weights.of_model import update_of
from zerodrift.weights.registry import Kind, Registry
from zerodrift.weights.session import Stage

PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)


@pytest.fixture
def loop(engine_of: Make) -> Iterator[EngineLoop]:
    with EngineLoop(engine_of(version="step 0")) as made:
        yield made


@pytest.fixture
def updates(loop: EngineLoop, tmp_path: Path) -> Iterator[Updates]:
    """Whatever a test does to them, every promise is kept afterwards."""
    with Updates(loop, tmp_path / "weights") as made:
        yield made
        assert broken_promises(loop, made, tmp_path / "weights") == []


@pytest.fixture
def trainer(tiny: Any) -> Any:
    """A model whose weights are a little further."""
    return trained(tiny, 1.25)


def trained(model: Any, scale: float) -> Any:
    further = copy.deepcopy(model)
    with torch.no_grad():
        for weight in further.parameters():
            weight.mul_(scale)
    return further


def bits(loop: EngineLoop) -> tuple[float, ...]:
    loop.reset_cache()
    (output,) = loop.submit(PROMPT, PARAMS).result()
    return output.logprobs


def pushed(updates: Updates, model: Any, label: str, expected: str) -> WeightUpdate:
    update = updates.begin(update_of(model, label), expected)
    for name, tensor in checkpoint_state(model).items():
        update.push(name, tensor)
    return update


def publish(updates: Updates, model: Any, label: str, expected: str, kv: str = "recompute") -> WeightVersion:
    with pushed(updates, model, label, expected) as update:
        update.verify()
        update.commit()
        return update.publish(kv)


def test_the_new_weights_serve_when_they_are_published_and_not_before(
    loop: EngineLoop, updates: Updates, trainer: Any
) -> None:
    old, first = bits(loop), updates.current
    assert first == loop.engine.version
    update = pushed(updates, trainer, "step 1", "step 0")
    for step, stage in ((update.verify, Stage.VERIFIED), (update.commit, Stage.COMMITTED)):
        step()
        assert (update.stage, loop.engine.version, bits(loop)) == (stage, first, old)
    new = update.publish()
    assert (new, new.digest) == (updates.current, model_digest(trainer))
    assert loop.engine.version == new
    assert bits(loop) != old
    assert updates.retained == (first, new)
    assert [entry.kind for entry in updates.entries] == [Kind.COMMITTED, Kind.PUBLISHED] * 2


def test_a_promise_that_is_broken_would_be_seen(
    engine_of: Make, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every test here ends with: of one tensor that never arrived, and of a log that lost its last line."""
    real = StagedWeights.copy_into
    with EngineLoop(engine_of(version="step 0")) as loop, Updates(loop, tmp_path) as updates:
        head = loop.engine.model.lm_head.weight.clone()

        def copy_into(staged: StagedWeights, model: Any) -> None:
            real(staged, model)
            model.lm_head.weight.copy_(head)

        assert broken_promises(loop, updates, tmp_path) == []
        monkeypatch.setattr(StagedWeights, "copy_into", copy_into)
        publish(updates, trainer, "step 1", "step 0")
        assert [found.invariant for found in broken_promises(loop, updates, tmp_path)] == ["I2", "I1"]
        updates._registry._entries.pop()
        assert {found.invariant for found in broken_promises(loop, updates, tmp_path)} == {"I2", "I1"}
        assert "I8" in {found.invariant for found in broken_promises(loop, updates, tmp_path, retain=1)}


def test_back_and_forth(loop: EngineLoop, updates: Updates, trainer: Any) -> None:
    old = bits(loop)
    publish(updates, trainer, "step 1", "step 0")
    new = bits(loop)
    assert updates.rollback("step 1").label == "step 0"
    assert bits(loop) == old
    assert updates.rollback("step 0", to="step 1") == updates.current
    assert bits(loop) == new
    with pytest.raises(VersionConflict):
        updates.rollback("step 0")
    with pytest.raises(NotRetained):
        updates.rollback("step 1", to="step 7")
    assert bits(loop) == new


def test_one_who_expects_another_version_is_refused(loop: EngineLoop, updates: Updates, trainer: Any) -> None:
    manifest = update_of(trainer, "step 1")
    for expected in ("step 1", "", WeightVersion("step 0", "0" * 64), WeightVersion("step 0")):
        with pytest.raises(VersionConflict):
            updates.begin(manifest, expected)
    updates.begin(manifest, updates.current).abort()


def test_weights_that_somebody_else_swapped_in_are_not_published_over(
    loop: EngineLoop, updates: Updates, trainer: Any, tiny: Any, tmp_path: Path
) -> None:
    """By hand, or by updates over another directory: what is said to be current here is not what runs."""
    update = pushed(updates, trainer, "step 1", "step 0")
    update.verify()
    update.commit()
    with Updates(loop, tmp_path / "others") as others:
        publish(others, trained(tiny, 1.5), "step 1", "step 0")
        lines = len(updates.entries)
        with pytest.raises(VersionConflict, match="somebody else"):
            update.publish()
        assert (len(updates.entries), loop.engine.version) == (lines, others.current)
        update.abort()
        for attempt in (
            lambda: updates.begin(update_of(trainer, "step 2"), "step 0"),
            lambda: updates.rollback("step 0"),
        ):
            with pytest.raises(VersionConflict, match="somebody else"):
                attempt()
    updates.close()
    with Updates(loop, tmp_path / "weights") as again:
        assert loop.engine.version == again.current
        publish(again, trainer, "step 3", "step 0")
        again.rollback("step 3")


def test_a_second_trainer_is_refused_and_the_first_goes_on(
    loop: EngineLoop, updates: Updates, trainer: Any, tiny: Any
) -> None:
    update = pushed(updates, trainer, "step 1", "step 0")
    other = update_of(trained(tiny, 1.5), "other 1")
    for attempt in (lambda: updates.begin(other, "step 0"), lambda: updates.rollback("step 0")):
        with pytest.raises(VersionConflict):
            attempt()
    update.verify()
    update.commit()
    assert update.publish().label == "step 1"
    with pytest.raises(VersionConflict):
        updates.begin(other, "step 0")
    updates.begin(other, "step 1").abort()


def test_of_many_trainers_at_once_one_wins(loop: EngineLoop, updates: Updates, tiny: Any) -> None:
    wins, refused = list[str](), list[str]()
    start = threading.Barrier(4)

    def train(number: int) -> None:
        model = trained(tiny, 1 + number / 8)
        start.wait()
        try:
            wins.append(publish(updates, model, f"by {number}", "step 0").label)
        except VersionConflict as error:
            refused.append(error.code)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(wins), len(refused)) == (1, 3)
    assert updates.current.label == wins[0]


def test_replays_are_refused(loop: EngineLoop, updates: Updates, trainer: Any) -> None:
    manifest = update_of(trainer, "step 1")
    assert not updates.published(manifest)
    publish(updates, trainer, "step 1", "step 0")
    assert updates.published(manifest)
    updates.rollback("step 1")
    with pytest.raises(
        VersionConflict
    ):  # the version that it expects is current again, and still it is a replay
        updates.begin(manifest, "step 0")
    assert not updates.published(update_of(trainer, "step 2"))
    assert not updates.published(msgspec.structs.replace(manifest, tied={}, parent=WeightVersion("x")))


def test_messages_out_of_order_are_refused(loop: EngineLoop, updates: Updates, trainer: Any) -> None:
    state = checkpoint_state(trainer)
    (first, *others) = state
    update = updates.begin(update_of(trainer, "step 1"), "step 0")
    for early in (update.verify, update.commit, update.publish):
        with pytest.raises(OutOfOrder):
            early()
    update.push(first, state[first])
    with pytest.raises(OutOfOrder):
        update.push(first, state[first])
    for name in reversed(others):
        update.push(name, state[name])
    update.verify()
    for late in (update.verify, lambda: update.push(first, state[first]), update.publish):
        with pytest.raises(OutOfOrder):
            late()
    update.commit()
    update.publish()
    for late in (update.verify, update.commit, update.publish, update.abort):
        with pytest.raises(OutOfOrder):
            late()


def _nan(model: Any) -> None:
    model.lm_head.weight[3, 0] = torch.nan


def _overflow(model: Any) -> None:
    model.model.norm.weight.fill_(3e38)
    model.lm_head.weight.fill_(3e38)


@pytest.mark.parametrize("damage", [_nan, _overflow])
def test_weights_that_are_what_was_promised_and_no_use_are_refused(
    loop: EngineLoop, updates: Updates, trainer: Any, damage: Callable[[Any], None]
) -> None:
    before, version = bits(loop), updates.current
    with torch.no_grad():
        damage(trainer)
    update = pushed(updates, trainer, "step 1", "step 0")
    with pytest.raises(NonFinite):
        update.verify()
    assert update.stage is Stage.ABORTED
    assert (updates.current, loop.engine.version, bits(loop)) == (version, version, before)
    with pytest.raises(OutOfOrder):
        update.commit()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (lambda tensor: tensor + 1, DigestMismatch),
        (lambda tensor: -tensor, DigestMismatch),
        (lambda tensor: tensor[:1], ModelError),
        (lambda tensor: tensor.double(), ModelError),
        (lambda tensor: tensor.to("meta"), ModelError),
        (lambda tensor: tensor.tolist(), ModelError),
        (lambda tensor: tensor.to_sparse(), ModelError),
    ],
)
def test_a_tensor_that_is_not_what_was_promised_is_named_and_may_come_again(
    loop: EngineLoop, updates: Updates, trainer: Any, given: Callable[[Any], Any], error: type[ZerodriftError]
) -> None:
    before, name = bits(loop), "lm_head.weight"
    update = updates.begin(update_of(trainer, "step 1"), "step 0")
    with pytest.raises(error) as refused:
        update.push(name, given(trainer.lm_head.weight.detach()))
    assert name in str(refused.value)
    for each, tensor in checkpoint_state(trainer).items():
        update.push(each, tensor)
    assert bits(loop) == before
    update.verify()
    update.abort()
    assert bits(loop) == before


def test_weights_for_another_model_are_refused_at_once(updates: Updates, trainer: Any) -> None:
    manifest = update_of(trainer, "step 1")
    fewer = msgspec.structs.replace(manifest.weights, tensors=manifest.weights.tensors[1:])
    with pytest.raises(ModelError):
        updates.begin(msgspec.structs.replace(manifest, weights=fewer), "step 0")
    trainer.model.rotary_emb.inv_freq.mul_(2)
    with pytest.raises(ModelError) as refused:
        updates.begin(update_of(trainer, "step 1"), "step 0")
    assert "model.rotary_emb.inv_freq" in str(refused.value)
    with pytest.raises(InvalidValue):
        updates.begin(manifest.weights, "step 0")  # type: ignore[arg-type]


def test_a_parent_was_committed_here(updates: Updates, trainer: Any) -> None:
    for parent in (WeightVersion("nobody"), WeightVersion("step 0", "0" * 64)):
        with pytest.raises(VersionConflict):
            updates.begin(update_of(trainer, "step 1", parent), "step 0")
    updates.begin(update_of(trainer, "step 1", updates.current), "step 0").abort()


def test_tied_heads_travel_once(tmp_path: Path) -> None:
    from zerodrift import models
    from zerodrift.engine.engine import Engine

    model = models.load("testbed:llama", dtype="float32")
    with EngineLoop(Engine("testbed:llama", num_blocks=32)) as loop, Updates(loop, tmp_path) as updates:
        manifest = update_of(model, "tied")
        assert dict(manifest.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in checkpoint_state(model)
        update = updates.begin(manifest, "initial")
        with pytest.raises(OutOfOrder):
            update.push("lm_head.weight", model.lm_head.weight)
        update.abort()
        assert publish(updates, model, "tied", "initial").digest == model_digest(model)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        with pytest.raises(ModelError) as refused:
            updates.begin(update_of(model, "untied"), "tied")
        assert "lm_head.weight" in str(refused.value)


def test_an_update_that_is_left_is_over(loop: EngineLoop, updates: Updates, trainer: Any) -> None:
    before, folder = bits(loop), loop.engine.version
    for until in ("push", "verify", "commit"):
        with pushed(updates, trainer, f"{until} 1", "step 0") as update:
            if until != "push":
                update.verify()
            if until == "commit":
                update.commit()
        assert update.stage is Stage.ABORTED
    assert (bits(loop), loop.engine.version) == (before, folder)
    assert [entry.kind for entry in updates.entries][2:] == [Kind.COMMITTED, Kind.ABORTED]
    assert len(updates.retained) == 1
    assert publish(updates, trainer, "commit 1", "step 0").label == "commit 1", "it can come again"


def test_an_update_whose_trainer_died_is_ended_by_another(
    loop: EngineLoop, updates: Updates, trainer: Any
) -> None:
    left = pushed(updates, trainer, "step 1", "step 0")
    updates.abort()
    assert left.stage is Stage.ABORTED
    with pytest.raises(OutOfOrder):
        left.verify()
    with pytest.raises(OutOfOrder):
        updates.abort()
    assert publish(updates, trainer, "step 1", "step 0").label == "step 1"


def test_what_is_asked_for_is_a_version(updates: Updates) -> None:
    for ask in (updates.weights_of, updates.published):
        with pytest.raises(InvalidValue):
            ask(5)  # type: ignore[arg-type]


def test_a_closed_registry_writes_to_nobody(updates: Updates, trainer: Any) -> None:
    update = pushed(updates, trainer, "step 1", "step 0")
    update.verify()
    updates.close()
    with pytest.raises(RecordError):
        update.commit()


def kept(directory: Path) -> int:
    return len(list((directory / "weights").iterdir()))


def test_so_many_are_kept(loop: EngineLoop, tiny: Any, tmp_path: Path) -> None:
    with Updates(loop, tmp_path, retain=2) as updates:
        models = {f"step {number}": trained(tiny, 1 + number / 8) for number in range(1, 5)}
        for number, (label, model) in enumerate(models.items()):
            publish(updates, model, label, f"step {number}")
            assert kept(tmp_path) == len(updates.retained) == 2
        assert [version.label for version in updates.retained] == ["step 3", "step 4"]
        with pytest.raises(NotRetained):
            updates.rollback("step 4", to="step 2")
        updates.rollback("step 4")
        publish(updates, trained(tiny, 3.0), "step 5", "step 3")
        assert {version.label for version in updates.retained} == {"step 3", "step 5"}
    with pytest.raises(InvalidValue):
        Updates(loop, tmp_path, retain=1)


def restarted(engine_of: Make, directory: Path, version: str = "step 0") -> tuple[EngineLoop, Updates]:
    loop = EngineLoop(engine_of(version=version))
    return loop, Updates(loop, directory)


def test_a_restart_serves_what_was_published_last(engine_of: Make, trainer: Any, tmp_path: Path) -> None:
    loop, updates = restarted(engine_of, tmp_path)
    old, first = bits(loop), updates.current
    publish(updates, trainer, "step 1", "step 0")
    new, second = bits(loop), updates.current
    update = pushed(updates, trained(trainer, 2.0), "step 2", "step 1")
    update.verify()
    update.commit()
    assert kept(tmp_path) == 3
    updates.close()
    loop.stop()
    (tmp_path / "weights" / f".{update._session.update.identity}.tmp").mkdir()
    loop, updates = restarted(engine_of, tmp_path)
    assert (updates.current, loop.engine.version, bits(loop)) == (second, second, new)
    assert updates.retained == (first, second)
    assert kept(tmp_path) == 2
    assert updates.entries[-1].kind is Kind.ABORTED
    updates.rollback("step 1")
    updates.close()
    loop.stop()
    loop, updates = restarted(engine_of, tmp_path, version="whatever")
    assert (updates.current, bits(loop)) == (first, old)
    updates.close()
    loop.stop()


def test_weights_that_were_exchanged_on_the_disk_are_not_used(
    loop: EngineLoop, trainer: Any, tmp_path: Path
) -> None:
    updates = Updates(loop, tmp_path)
    publish(updates, trainer, "step 1", "step 0")
    new = bits(loop)
    first, second = (tmp_path / "weights" / entry.manifest for entry in updates.entries[1::2])
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(DigestMismatch):
        updates.rollback("step 1")
    shutil.rmtree(first)
    with pytest.raises(ModelError):
        updates.rollback("step 1")
    assert (updates.current.label, bits(loop)) == ("step 1", new)
    updates.close()


def test_a_directory_that_was_begun_with_other_weights_is_refused(
    engine_of: Make, loop: EngineLoop, tmp_path: Path
) -> None:
    registry = Registry(tmp_path)
    registry.append(Kind.COMMITTED, WeightVersion("step 0", "0" * 64), "m")
    registry.close()
    for _ in range(2):  # and the directory is let go of
        with pytest.raises(VersionConflict):
            Updates(loop, tmp_path)


def test_a_second_engine_over_one_directory_is_refused(
    loop: EngineLoop, updates: Updates, tmp_path: Path
) -> None:
    with pytest.raises(ArchiveLocked):
        Updates(loop, tmp_path / "weights")


def test_a_full_disk_refuses_the_update_and_nothing_else(
    loop: EngineLoop, updates: Updates, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bits(loop)

    def full(*_: Any, **__: Any) -> None:
        raise ArchiveFull("no room")

    for act in ("commit", "publish"):
        update = pushed(updates, trainer, f"{act} 1", "step 0")
        update.verify()
        if act == "publish":
            update.commit()
        with monkeypatch.context() as patch:
            patch.setattr(Registry, "append", full)
            with pytest.raises(ArchiveFull):
                getattr(update, act)()
        assert (updates.current.label, loop.engine.version.label, bits(loop)) == ("step 0", "step 0", before)
        update.abort()
    assert publish(updates, trainer, "step 3", "step 0").label == "step 3"


@pytest.mark.parametrize("kv", ["recompute", "keep", "drain"])
def test_what_becomes_of_requests_in_flight(
    loop: EngineLoop, updates: Updates, trainer: Any, kv: str
) -> None:
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    started = threading.Event()
    running = loop.submit(PROMPT, params, on_update=lambda _: started.set())
    assert started.wait(60)
    loop.pause()
    # While it is paused nothing ends, so that a drain has something to wait for.
    worker = threading.Thread(target=publish, args=(updates, trainer, "step 1", "step 0", kv))
    worker.start()
    if kv == "drain":
        while not loop._when_empty:
            worker.join(0.01)
    else:
        worker.join()
    late = loop.submit(PROMPT, params)
    loop.resume()
    worker.join()
    (first,), (second,) = running.result(), late.result()
    labels = [[span.version.label for span in output.versions] for output in (first, second)]
    assert labels == [["step 0"] if kv == "drain" else ["step 0", "step 1"], ["step 1"]]
    kinds = {segment.version.label for segment in first.lineage}
    assert kinds == {"recompute": {"step 1"}, "keep": {"step 0", "step 1"}, "drain": {"step 0"}}[kv]
    assert updates.entries[-1].kv == kv


def test_a_policy_that_does_not_exist_ends_nothing(updates: Updates, trainer: Any) -> None:
    update = pushed(updates, trainer, "step 1", "step 0")
    update.verify()
    update.commit()
    with pytest.raises(InvalidValue):
        update.publish("drop")
    assert update.publish().label == "step 1"
