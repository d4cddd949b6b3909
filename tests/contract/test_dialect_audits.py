"""Whole audits through the dialects, by name as the command line opens them, and what happens where none is possible."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang_server

from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.registry import IMPOSSIBLE, OPENERS, STARTED_BY_HAND, ServedModel, open_engine
from zerodrift.config.engine import EngineConfig
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import CapabilityMissing, ConfigError
from zerodrift.records.verdict import Outcome, VerdictRecord

MODEL = "testbed:qwen3"


def audit(directory: Path, engine: dict[str, Any], sync: bool = False, **validation: Any) -> VerdictRecord:
    values = {
        "model": {"path": MODEL, "max_model_len": 96},
        "engine": engine,
        "sampling_defaults": {"temperature": 0.7},
        "validation": {"num_prompts": 26, "equivalence_trials": 28, "max_tokens": 8} | validation,
    }
    session = Session(config=msgspec.convert(values, RunConfig), directory=directory, sync=sync)
    return session.run(Silent()).record


def outcomes(record: VerdictRecord) -> dict[str, Outcome]:
    return {probe.name: probe.status for probe in record.probes}


def test_a_healthy_sglang_passes_and_takes_an_update(tmp_path: Path) -> None:
    with sglang_server.serve(MODEL, deterministic=True) as url:
        record = audit(tmp_path / "run", {"name": "sglang", "url": url}, sync=True)

    assert (record.verdict, record.precision) == (Outcome.PASS, "fp32"), record.says
    told = outcomes(record)
    assert told.pop("cache") is Outcome.INCONCLUSIVE, "the peer knows no salts"
    assert told.pop("tokenizer") is Outcome.INCONCLUSIVE, "the peer turns no text into ids"
    assert set(told.values()) == {Outcome.PASS}
    assert {"contract", "parity", "sampling", "repeat", "batch", "given-tokens", "weight-sync"} <= set(told)


def test_an_sglang_that_leaves_the_temperature_out_is_named(tmp_path: Path) -> None:
    """SGLANG_RETURN_ORIGINAL_LOGPROB, of which nothing in its answers tells."""
    with sglang_server.serve(MODEL, deterministic=True, original=True) as url:
        record = audit(tmp_path / "run", {"name": "sglang", "url": url})

    assert (record.verdict, record.causes[0].cause) == (Outcome.FAIL, "semantic/raw-logprobs")
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in record.causes[0].fix


def test_an_sglang_without_seeds_is_judged_by_what_it_samples(tmp_path: Path) -> None:
    with sglang_server.serve(MODEL) as url:
        record = audit(tmp_path / "run", {"name": "sglang", "url": url})

    told = outcomes(record)
    assert record.verdict is Outcome.PASS, record.says
    assert (told["repeat"], told["batch"], told["prefill-decode"]) == (
        Outcome.INCONCLUSIVE,
        Outcome.INCONCLUSIVE,
        Outcome.PASS,
    )


@pytest.mark.parametrize("name", STARTED_BY_HAND)
def test_an_engine_that_is_audited_where_it_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"start it \\({STARTED_BY_HAND[name][:12]}.*--url http://"):
        open_engine(EngineConfig(name=name, python="python"), ServedModel(MODEL, "auto"), tmp_path)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_engine_that_no_adapter_could_be_honest_about(name: str, tmp_path: Path) -> None:
    assert name not in OPENERS
    with pytest.raises(CapabilityMissing):
        open_engine(EngineConfig(name=name, url="http://127.0.0.1:9"), ServedModel(MODEL, "auto"), tmp_path)
