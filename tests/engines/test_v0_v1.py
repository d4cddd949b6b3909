"""vLLM 0.8.5 (V0) beside 0.18.1 (V1), which spoilt an RL run in 2026: what each reports, and what the audit calls it.

docs/v0-v1.md shows the same audits as commands. One server at a time, in an environment of its own (engines/install).
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from rich.console import Console

from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.config.load import load
from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.comparison import compare_runs
from zerodrift.view.tables import explain
from zerodrift.view.text import print_verdict

pytestmark = [pytest.mark.engines, pytest.mark.long]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "v0-v1.yaml"
V0, V1 = "vllm-0.8.5", "vllm-0.18.1"
FEW = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")
RAW = "engine.logprobs_mode=raw_logprobs"


class Setup(NamedTuple):
    """One audit: which release, which checkpoint, and what is changed in docs/v0-v1.yaml."""

    release: str
    model: str = "qwen3"
    changes: tuple[str, ...] = ()
    keeps_cache: bool = False
    """The weights are updated, and the cache is not reset."""


OLD = Setup(V0)
AS_IT_COMES = Setup(V1, changes=(RAW,))
MENDED = Setup(V1)
NEW_CONFIG = Setup(V0, "qwen3-new-config")
STALE = Setup(V1, keeps_cache=True)

Run = Callable[[Setup], Path]


@pytest.fixture(scope="module")
def run(script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The directory of an audit; each is run once, and printed, so that pytest shows it where a test fails."""
    checkpoints: dict[str, Path] = script("older_checkpoint").write(tmp_path_factory.mktemp("models"))
    root = tmp_path_factory.mktemp("runs")
    done: dict[Setup, Path] = {}

    def audit(setup: Setup) -> Path:
        if setup in done:
            return done[setup]
        python = ROOT / ".engines" / setup.release / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{setup.release} is not installed: engines/install {setup.release}")
        where = (f"engine.python={python}", f"model.path={checkpoints[setup.model]}")
        session = Session(
            config=load(CONFIG, (*FEW, *where, *setup.changes)),
            directory=root / f"run-{len(done)}",
            sync=setup.keeps_cache,
            resets_cache=not setup.keeps_cache,
        )
        with contextlib.chdir(ROOT):
            record = session.run(Silent()).record
        print_verdict(record, Console(highlight=False, width=110), None)
        done[setup] = session.directory
        return session.directory

    return audit


def probe(record: VerdictRecord, name: str) -> ProbeRecord:
    [found] = [probe for probe in record.probes if probe.name == name]
    return found


def principal(record: VerdictRecord) -> CauseFound:
    """Of a failed audit: what it blames."""
    assert (record.verdict, record.guilty) == (Outcome.FAIL, "engine")
    assert record.causes[0].gating
    return record.causes[0]


def assert_the_same_policy(record: VerdictRecord) -> None:
    assert record.verdict is Outcome.PASS
    assert not [cause.cause for cause in record.causes if cause.gating]
    assert record.metrics["mean"] <= 1e-5


def test_v0_reports_what_it_sampled_from(run: Run) -> None:
    """It has no flag for that, and shows neither its settings nor ids of its prompts: what was not seen is said."""
    record = read_verdict(run(OLD))

    assert_the_same_policy(record)
    assert record.engine.numeric == {"vllm": "0.8.5"}
    assert "token_ids" in record.engine.deployment
    assert "logprobs_mode" not in record.engine.semantic
    assert probe(record, "cache").status is Outcome.INCONCLUSIVE
    assert probe(record, "stream").status is Outcome.PASS


def test_v1_as_it_comes_reports_something_else(run: Run) -> None:
    record = read_verdict(run(AS_IT_COMES))

    cause = principal(record)
    assert (cause.cause, cause.fix) == ("semantic/raw-logprobs", "--logprobs-mode processed_logprobs")
    assert cause.explained > 0.99
    assert record.metrics["mean"] > 0.1
    assert probe(record, "sampling").status is Outcome.PASS
    assert record.engine.semantic["logprobs_mode"] == "raw_logprobs"


def test_v1_with_that_flag_is_the_same_policy(run: Run) -> None:
    record = read_verdict(run(MENDED))

    assert_the_same_policy(record)
    assert record.engine.numeric["vllm"].startswith("0.18.1")
    assert record.engine.numeric["enable_prefix_caching"] == "true", "the default that V0 did not have"


def test_the_difference_is_told_by_what_was_proved(run: Run) -> None:
    """Not by the number of the release, and not by the weights, which are the same."""
    worse = compare_runs(run(OLD), run(AS_IT_COMES))
    assert worse.worse
    assert [each.name for each in worse.causes if each.after == "fails"] == ["semantic/raw-logprobs"]
    assert "semantic/raw-logprobs" in explain(worse)
    assert "look at the weights" not in explain(worse)

    mended = compare_runs(run(OLD), run(MENDED))
    assert not mended.worse
    assert not [each for each in mended.causes if "fails" in (each.before, each.after)]
    assert mended.answers is not None
    assert mended.answers.largest < 1e-4


def test_a_cache_that_v0_did_not_have_outlives_an_update(run: Run) -> None:
    assert principal(read_verdict(run(STALE))).cause == "weights/stale-prefix-cache"


def test_a_config_that_v0_half_reads_is_named_by_what_it_lost(run: Run) -> None:
    cause = principal(read_verdict(run(NEW_CONFIG)))

    assert cause.cause == "path/rope"
    assert cause.explained > 0.99
