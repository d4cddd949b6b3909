"""A real TRL training whose rollouts come from a real vLLM server: docs/trl_vllm_run.py, under watch.

TRL and vLLM live in environments of their own, and TRL's holds this test: make long LANE=trl-vllm
"""

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerodrift.backends import vllm_update
from zerodrift.integrations.metrics import LEVELS
from zerodrift.monitor.decision import State
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.directory import read_verdict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="TRL is not installed: make long LANE=trl-vllm")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.trl,
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
STEPS = 25


@pytest.fixture(scope="module")
def script() -> ModuleType:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    spec = importlib.util.spec_from_file_location("trl_vllm_run", ROOT / "docs" / "trl_vllm_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A server that reports logprobs of this kind."""
    if not (ROOT / ".engines" / "vllm-0.32.0" / "bin" / "python").exists():
        pytest.skip("vLLM 0.32.0 is not installed: engines/install vllm-0.32.0")
    monkeypatch.chdir(ROOT)
    return lambda logprobs_mode: script.server(tmp_path / "server", logprobs_mode)


class LabelAlone:
    """An engine that gets the first weights, and of all that follow the version alone."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sent = engine, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_weights(self, directory: Path, version: Any) -> None:
        if self._sent:
            self._engine._http.post(vllm_update.LABEL, {"new_version": version.label})
        else:
            self._engine.load_weights(directory, version)
            self._sent = True


def logged(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "zerodrift/state" in entry]


def states(trainer: Any) -> list[State]:
    levels = {level: state for state, level in LEVELS.items()}
    return [levels[int(entry["zerodrift/state"])] for entry in logged(trainer)]


def test_a_server_that_reports_what_it_drew_from_is_trained_with(
    script: ModuleType, serve: Callable[[str], Any], tmp_path: Path
) -> None:
    with serve("processed_logprobs") as engine:
        trainer = script.run(engine, tmp_path / "quiet", STEPS)
        assert trainer.state.global_step == STEPS
        assert not {State.QUARANTINE, State.HALT} & {*states(trainer)}
        assert all(0 < entry["zerodrift/mismatch/mean_abs"] < 1e-5 for entry in logged(trainer))
        assert all(entry["zerodrift/lag/max"] == 0 for entry in logged(trainer))
        assert engine._version().label == str(STEPS - 1), (
            "the last generation had the weights of the last step"
        )

        # The control: what keeps it quiet is that weights arrive, not that a label does.
        trainer = script.run(LabelAlone(engine), tmp_path / "stale", STEPS)
        assert states(trainer) == [State.OK, State.QUARANTINE, State.QUARANTINE, State.HALT]


def test_vllms_default_is_kept_back_from_the_first_batch_on_and_blame_names_it(
    script: ModuleType, serve: Callable[[str], Any], tmp_path: Path
) -> None:
    with serve("raw_logprobs") as engine:
        trainer = script.run(engine, tmp_path, STEPS)
    assert states(trainer) == [State.QUARANTINE, State.QUARANTINE, State.HALT]
    assert all(entry["grad_norm"] == 0 for entry in logged(trainer))
    with ArchiveReader(tmp_path / "archive") as reader:
        assert [reader.read(entry).step for entry in reader.entries()] == [0, 1, 2]
    command = [sys.executable, "-m", "zerodrift.cli.main", "blame", str(tmp_path / "archive")]
    command += ["--model", script.MODEL, "--engine", "vllm", "--out", str(tmp_path / "blame")]
    assert subprocess.run(command, check=False).returncode == 1
    assert [cause.cause for cause in read_verdict(tmp_path / "blame").causes] == ["semantic/raw-logprobs"]
