"""vLLM 0.28 beside 0.32: the adapter finds the same in both without a look at the version, and the audit says what changed."""

import contextlib
from pathlib import Path

import pytest
from rich.console import Console

from zerodrift import models
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.base import Capability
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import flags, launch_vllm
from zerodrift.config.load import load
from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import Comparison, Part, compare_runs
from zerodrift.view.tables import print_comparison

pytestmark = [pytest.mark.engines, pytest.mark.long]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "vllm.yaml"
RELEASES = ("vllm-0.28.0", "vllm-0.32.0")
FEW = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.materialise("testbed:qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def upgrade(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The same audit of both releases, one server after the other."""
    root = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(ROOT):
        for release in RELEASES:
            python = ROOT / ".engines" / release / "bin" / "python"
            if not python.exists():
                pytest.skip(f"{release} is not installed: engines/install {release}")
            config = load(CONFIG)
            arguments = flags(config.engine, config.model.dtype)
            log = root / f"{release}.log"
            patience = config.engine.startup_timeout_s
            with launch_vllm(python, checkpoint, arguments, config.engine.env, log, patience) as server:
                with contextlib.closing(VllmBackend(server.url)) as backend:
                    assert backend.capabilities == frozenset(Capability), release
                where = (f"engine.url={server.url}", "engine.python=null", f"model.path={checkpoint}")
                session = Session(config=load(CONFIG, (*FEW, *where)), directory=root / release)
                session.run(Silent())
    comparison = compare_runs(*(root / release for release in RELEASES))
    print_comparison(comparison, Console(highlight=False, width=110))
    return comparison


def test_both_pass(upgrade: Comparison) -> None:
    assert (upgrade.verdict_before, upgrade.verdict_after) == (Outcome.PASS, Outcome.PASS)
    assert not upgrade.causes
    assert not upgrade.probes


def test_the_release_is_the_only_fact_that_changed(upgrade: Comparison) -> None:
    [release] = [fact for fact in upgrade.facts if fact.part is not Part.DEPLOYMENT]
    assert (release.name, release.before, release.after) == ("vllm", "0.28.0", "0.32.0")


def test_seeds_draw_other_tokens_and_the_same_tokens_have_the_same_logprobs(upgrade: Comparison) -> None:
    answers = upgrade.answers
    assert answers is not None
    assert answers.samples == 24
    assert answers.same_tokens < 6
    assert answers.shared_tokens > 0
    assert answers.differing == 0
