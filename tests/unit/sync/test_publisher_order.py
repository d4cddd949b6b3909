"""Who may publish over what: one trainer after another, and none over one that it has not seen."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.unit.sync.test_publisher import TOKEN, model_of

from zerodrift.core.errors import InvalidValue, ModelError, VersionConflict
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.gloo import GlooPeers
from zerodrift.sync.http import HttpTarget, WeightServer
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[Updates]:
    engine = Engine(model_of(0), num_blocks=16, block_size=4, version="v0")
    with EngineLoop(engine) as loop, Updates(loop, tmp_path / "w") as made:
        yield made


@pytest.fixture
def server(updates: Updates) -> Iterator[WeightServer]:
    made = WeightServer(updates, TOKEN)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["here", "http"])
def test_a_trainer_that_slept_does_not_publish_over_another(
    updates: Updates, server: WeightServer, way: str
) -> None:
    def target(name: str) -> Any:
        return InProcess(updates) if way == "here" else HttpTarget(server.address, TOKEN, name=name)

    fast, slow = (WeightPublisher(model_of(n), [target(f"t{n}")]) for n in (1, 2))
    for number in range(3):
        fast._model.lm_head.weight.data.mul_(1.1)
        fast.publish(f"fast {number}")
    with pytest.raises(VersionConflict, match="'v0' was expected"):
        slow.publish("slow")
    assert updates.current.label == "fast 2"
    # Started anew it has seen what serves.
    WeightPublisher(model_of(2), [target("again")]).publish("slow")
    assert updates.current.label == "slow"


def test_other_rotary_frequencies_are_not_published(updates: Updates) -> None:
    model = copy.deepcopy(model_of(1))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(ModelError, match="inv_freq"):
        WeightPublisher(model, [InProcess(updates)]).publish("turned")
    assert updates.current.label == "v0"


def test_peers_need_a_place_to_look_for_decisions(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        peers = GlooPeers(dist.group.WORLD)
        with pytest.raises(InvalidValue, match="Decisions"):
            WeightPublisher(model_of(1), [peers])
        WeightPublisher(model_of(1), [peers], decisions=Decisions(tmp_path / "d"))
    finally:
        dist.destroy_process_group()
