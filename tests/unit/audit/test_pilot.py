"""Speeds to numbers, and a run that keeps them."""

from typing import Any

import msgspec
import pytest

from zerodrift.audit import session as sessions
from zerodrift.audit.pilot import BESIDE, SEQUENCES, SHARE, WARM, Speed, fitted, measure_speed
from zerodrift.audit.progress import Silent
from zerodrift.audit.prompts import assorted
from zerodrift.audit.session import Session
from zerodrift.config.load import load
from zerodrift.config.run import RunConfig
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.errors import ConfigError, RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records import directory as files
from zerodrift.records.codec import read_lines
from zerodrift.records.rollout import Rollout


def test_numbers_follow_from_speed_and_time():
    speed = Speed(engine=0.4, reference=0.2)
    small, large = (fitted(ValidationConfig(), speed, seconds) for seconds in (120.0, 1200.0))
    assert small.equivalence_trials == int(SHARE * 120 / 1.0) - BESIDE
    assert large.equivalence_trials == int(SHARE * 1200 / 1.0) - BESIDE
    assert (small.num_prompts, large.num_prompts) == (small.equivalence_trials // 2, 256)
    unchanged = {"num_prompts": 32, "equivalence_trials": 64}
    assert msgspec.structs.replace(small, **unchanged) == ValidationConfig()


def test_position_probes_are_prompts_too():
    validation = ValidationConfig(position_probes=(0.5, 1.0), num_prompts=8)
    planned = fitted(validation, Speed(0.4, 0.2), 120.0)
    assert planned.num_prompts == planned.equivalence_trials // 2 - 2


def test_a_task_keeps_its_prompts():
    planned = fitted(ValidationConfig(task="sums", num_prompts=20), Speed(0.1, 0.1), 120.0)
    assert (planned.num_prompts, planned.equivalence_trials > 100) == (20, True)


def test_too_little_time_is_refused_before_anything_is_asked():
    with pytest.raises(ConfigError):
        fitted(ValidationConfig(), Speed(engine=10.0, reference=10.0), 600.0)


class Counting(FaultyBackend):
    """Remembers how many samples it was asked for."""

    asked = 0

    def generate(self, requests: Any) -> Any:
        self.asked += sum(request.sampling.n for request in requests)
        return super().generate(requests)


def test_a_pilot_is_a_few_sequences(llama):
    engine = Counting(llama)
    sampling = SamplingParams(max_tokens=4)
    prompts = assorted(llama.tokenizer, llama.facts.vocab_size, 40, 4, 16, 0)
    speed = measure_speed(engine, llama, prompts, sampling, seeded=False)
    assert speed.engine > 0
    assert speed.reference > 0
    assert engine.asked == SEQUENCES + WARM


def run_config(**validation: Any) -> RunConfig:
    values = {
        "model": {"path": "testbed:llama"},
        "engine": {"name": "reference"},
        "validation": {"max_tokens": 4, **validation},
    }
    return msgspec.convert(values, RunConfig)


def test_a_resumed_run_asks_what_its_pilot_wrote(tmp_path, monkeypatch):
    """The machine is ten times as fast by then, and the plan stays."""
    speeds = iter([Speed(0.5, 0.1)])
    monkeypatch.setattr(sessions, "measure_speed", lambda *_, **__: next(speeds))
    session = Session(config=run_config(), directory=tmp_path / "run", budget=70.0)
    session.run(Silent())
    written = load(tmp_path / "run" / files.CONFIG).validation
    assert (written.num_prompts, written.equivalence_trials) == (11, 22)
    rollouts = tmp_path / "run" / files.ROLLOUTS
    assert len(list(read_lines(rollouts, Rollout))) == 22
    lines = rollouts.read_bytes().splitlines(keepends=True)
    rollouts.write_bytes(b"".join(lines[:10]))
    (tmp_path / "run" / files.VERDICT).unlink()
    session.run(Silent())
    assert load(tmp_path / "run" / files.CONFIG).validation == written
    # The tenth is the first of two samples of one request, which is asked again whole: in other company, where vanilla
    # transformers may round otherwise, and does on an Intel with AMX.
    assert rollouts.read_bytes().splitlines(keepends=True)[:9] == lines[:9]
    assert len(list(read_lines(rollouts, Rollout))) == 22
    # Anything else that changed is another run.
    (tmp_path / "run" / files.VERDICT).unlink()
    with pytest.raises(RecordError):
        Session(config=run_config(seed=5), directory=tmp_path / "run", budget=70.0).run(Silent())


def test_a_refused_budget_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "measure_speed", lambda *_, **__: Speed(100.0, 100.0))
    with pytest.raises(ConfigError):
        Session(config=run_config(), directory=tmp_path / "run", budget=70.0).run(Silent())
    assert not (tmp_path / "run").exists()
