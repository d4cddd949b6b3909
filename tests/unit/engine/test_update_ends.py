"""What comes after an update, and around it: room on the disk, callbacks, directories that hold other things too."""

import copy
import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engine.support import Make
from tests.unit.engine.update_history import broken_promises

from zerodrift.core.errors import ArchiveFull, ModelError, NotRetained, OutOfOrder, UnsafePath
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.of_model import update_of
from zerodrift.weights.registry import Kind, Registry
from zerodrift.weights.session import Stage


@pytest.fixture
def loop(engine_of: Make) -> Iterator[EngineLoop]:
    with EngineLoop(engine_of(version="step 0")) as made:
        yield made


def committed(updates: Updates, model: Any, number: int) -> WeightUpdate:
    further = copy.deepcopy(model)
    with torch.no_grad():
        for weight in further.parameters():
            weight.mul_(1 + number / 8)
    update = updates.begin(update_of(further, f"step {number}"), updates.current)
    for name, tensor in checkpoint_state(further).items():
        update.push(name, tensor)
    update.verify()
    update.commit()
    return update


def no_room(*_: Any, **__: Any) -> Any:
    raise ArchiveFull("no room")


def test_a_disk_with_no_room_to_forget_takes_nothing_back(
    loop: EngineLoop, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    real = Registry.append

    def full(self: Registry, kind: Kind, *what: Any, **more: Any) -> Any:
        if kind is Kind.FORGOTTEN:
            raise ArchiveFull("no room")
        return real(self, kind, *what, **more)

    with Updates(loop, tmp_path, retain=2) as updates:
        committed(updates, tiny, 1).publish()
        update = committed(updates, tiny, 2)
        with monkeypatch.context() as patch:
            patch.setattr(Registry, "append", full)
            assert update.publish().label == "step 2"
        assert update.stage is Stage.PUBLISHED
        assert (updates.current.label, loop.engine.version.label) == ("step 2", "step 2")
        assert len(updates.retained) == 3
        assert "one too many" in caplog.text
        committed(updates, tiny, 3).publish()
        assert [version.label for version in updates.retained] == ["step 2", "step 3"]


def test_an_engine_starts_where_there_is_no_room_to_say_what_a_kill_left(
    loop: EngineLoop, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with Updates(loop, tmp_path) as updates:
        committed(updates, tiny, 1)  # and its trainer, with the engine, is killed
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "append", no_room)
        with Updates(loop, tmp_path) as updates:
            assert (updates.current.label, loop.engine.version.label) == ("step 0", "step 0")
            assert "'step 1' is kept for now" in caplog.text
            with pytest.raises(NotRetained):
                updates.rollback("step 0", to="step 1")
    with Updates(loop, tmp_path) as updates:
        assert [version.label for version in updates.retained] == ["step 0"]
        assert broken_promises(loop, updates, tmp_path) == []


@pytest.mark.parametrize("act", ["publish", "rollback", "pause"])
def test_a_callback_cannot_wait_for_its_own_request_to_end(
    loop: EngineLoop, tiny: Any, tmp_path: Path, act: str
) -> None:
    told: list[Exception] = []
    with Updates(loop, tmp_path) as updates:
        committed(updates, tiny, 1).publish()
        update = committed(updates, tiny, 2) if act == "publish" else None

        def drains(_: Any) -> None:
            if told:
                return
            try:
                if update is not None:
                    update.publish("drain")
                elif act == "rollback":
                    updates.rollback("step 1", kv="drain")
                else:
                    loop.pause(in_flight="drain")
            except OutOfOrder as error:
                told.append(error)

        loop.submit(
            [5, 6, 7], SamplingParams(seed=3, max_tokens=3, ignore_eos=True), on_update=drains
        ).result()
        assert ["drain from another thread" in str(error) for error in told] == [True]
        assert (updates.current.label, loop.engine.version.label) == ("step 1", "step 1")
        assert len(updates.entries) == (4 if update is None else 5)
        if update is not None:
            assert update.publish("drain").label == loop.engine.version.label == "step 2"


def test_what_is_not_ours_is_left_alone(loop: EngineLoop, tmp_path: Path) -> None:
    """A directory `weights` with checkpoints of somebody's own, and what a file manager leaves."""
    own, digest = tmp_path / "weights", "a" * 64
    (own / "step-7-final").mkdir(parents=True)
    (own / digest).mkdir()
    (own / ".DS_Store").write_text("x")
    with Updates(loop, tmp_path):
        # Not even what is called as ours are, where no log of ours says so.
        assert (own / digest).is_dir()
    (own / f".{digest}.tmp").mkdir()
    (own / ("b" * 64)).symlink_to(own / "step-7-final")
    with Updates(loop, tmp_path) as again:
        names = {path.name for path in own.iterdir()}
        assert names == {"step-7-final", ".DS_Store", "b" * 64, again.entries[0].manifest}


@pytest.mark.parametrize("name", ["weights", "versions.jsonl"])
def test_links_in_the_directory_are_refused_and_not_followed(
    loop: EngineLoop, tmp_path: Path, name: str
) -> None:
    own, target = tmp_path / "own", tmp_path / "run"
    target.mkdir()
    if name == "weights":
        (own / ("a" * 64)).mkdir(parents=True)
    else:
        own.write_text("precious, without a newline")
    (target / name).symlink_to(own)
    with pytest.raises(UnsafePath, match=name):
        Updates(loop, target)
    assert (own / ("a" * 64)).is_dir() if own.is_dir() else own.read_text().startswith("precious")
    (target / name).unlink()
    Updates(loop, target).close()


def test_an_update_that_is_over_holds_no_weights(loop: EngineLoop, tiny: Any, tmp_path: Path) -> None:
    with Updates(loop, tmp_path) as updates:
        for number, act in enumerate((WeightUpdate.publish, WeightUpdate.abort), start=1):
            update = committed(updates, tiny, number)
            staged = [weakref.ref(tensor) for tensor in update._staging._tensors.values()]
            act(update)
            gc.collect()
            assert staged
            assert not any(each() is not None for each in staged)


def test_a_directory_of_another_model_is_refused_by_name(loop: EngineLoop, tiny: Any, tmp_path: Path) -> None:
    Updates(loop, tmp_path).close()
    turned, shorter = copy.deepcopy(tiny), copy.deepcopy(tiny)
    turned.model.rotary_emb.inv_freq.mul_(0.5)
    del shorter.model.layers[1:]
    shorter.config.num_hidden_layers, shorter.config.layer_types = 1, shorter.config.layer_types[:1]
    for other, named in ((turned, "inv_freq"), (shorter, r"layers\.1")):
        engine = Engine(other, num_blocks=16, block_size=4, version="step 0")
        with EngineLoop(engine) as its_loop, pytest.raises(ModelError, match=named):
            Updates(its_loop, tmp_path)
    Updates(loop, tmp_path).close()


def test_an_abort_does_not_wait_for_a_drain_that_never_ends(
    loop: EngineLoop, tiny: Any, tmp_path: Path
) -> None:
    with Updates(loop, tmp_path) as updates:
        update = committed(updates, tiny, 1)
        loop.pause()
        request = loop.submit([5, 6, 7], SamplingParams(seed=3, max_tokens=3, ignore_eos=True))
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(update.publish, "drain")
            deadline = time.monotonic() + 60
            while not loop._when_empty:
                assert time.monotonic() < deadline, "the drain never began"
                time.sleep(0.001)
            with pytest.raises(OutOfOrder, match="resume"):
                updates.abort()
            loop.resume()
            assert published.result(60).label == updates.current.label == "step 1"
        assert len(request.result()) == 1
