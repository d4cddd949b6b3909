"""A trainer that is stopped (SIGSTOP) in the middle of an update by HTTP: the engine serves on, and is held up by nobody."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.engine.update_history import broken_promises

from zerodrift.core.errors import VersionConflict
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.sync.http import WeightServer
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess

PROGRAM = Path(__file__).with_name("stopped_trainer.py")
TOKEN = bytes(range(32))
PARAMS = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)


@pytest.fixture
def updates(tmp_path: Path, script: Callable[[str], ModuleType]) -> Iterator[Updates]:
    engine = Engine(script("reliability/updating").model_of("v0"), num_blocks=16, block_size=4, version="v0")
    with EngineLoop(engine) as loop, Updates(loop, tmp_path / "versions") as made:
        yield made
        assert broken_promises(loop, made, tmp_path / "versions") == []


@pytest.fixture
def trainer(updates: Updates) -> Iterator[subprocess.Popen[str]]:
    """Stopped, with three tensors sent."""
    server = WeightServer(updates, TOKEN)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), server.address, TOKEN.hex(), "3"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    yield process
    process.kill()
    process.communicate()
    server.close()


def said(trainer: subprocess.Popen[str]) -> str:
    trainer.send_signal(signal.SIGCONT)
    assert trainer.stdout is not None
    return trainer.stdout.readline().strip()


def test_it_goes_on_where_it_was(updates: Updates, trainer: subprocess.Popen[str]) -> None:
    (output,) = updates._loop.submit([5, 6, 7], PARAMS).result()
    assert {span.version.label for span in output.versions} == {"v0"}
    assert said(trainer) == "published"
    assert updates.current.label == "v1"


def test_another_takes_its_place_and_it_is_refused(
    updates: Updates, trainer: subprocess.Popen[str], script: Callable[[str], ModuleType]
) -> None:
    other = WeightPublisher(script("reliability/updating").model_of("v2"), [InProcess(updates)])
    with pytest.raises(VersionConflict):
        other.publish("v2")
    updates.abort()
    other.publish("v2")
    assert said(trainer) == "update/out-of-order"
    assert updates.current.label == "v2"
