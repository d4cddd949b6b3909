"""Which questions does a healthy vLLM leave open? Those of inconclusive.toml: no more, and no fewer."""

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from zerodrift import models
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.vllm_launch import flags, launch_vllm
from zerodrift.config.load import load
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.text import print_verdict

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "vllm.yaml"
LISTED = tomllib.loads(Path(__file__).with_name("inconclusive.toml").read_text())
FEW = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = ROOT / (load(CONFIG).engine.python or "")
    if not python.exists():
        pytest.skip(f"{python.parents[1].name} is not installed: engines/install {python.parents[1].name}")
    return models.materialise("testbed:qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def audited(directory: Path, *changes: str) -> VerdictRecord:
    session = Session(config=load(CONFIG, (*FEW, *changes)), directory=directory, sync=True)
    record = session.run(Silent()).record
    print_verdict(record, Console(highlight=False, width=110), None)
    return record


def started_by_us(checkpoint: Path, scratch: Path) -> VerdictRecord:
    return audited(scratch / "run", f"model.path={checkpoint}")


def as_served(checkpoint: Path, scratch: Path) -> VerdictRecord:
    config = load(CONFIG, ("engine.env={VLLM_SERVER_DEV_MODE: '0'}",))
    arguments = flags(config.engine, config.model.dtype)
    arguments.remove("--enable-prompt-tokens-details")
    python, patience = config.engine.python or "", config.engine.startup_timeout_s
    with launch_vllm(
        python, checkpoint, arguments, config.engine.env, scratch / "vllm.log", patience
    ) as server:
        # Without dev mode a server does not show its dtype.
        where = (f"engine.url={server.url}", "engine.python=null", "validation.precision=fp32")
        return audited(scratch / "run", f"model.path={checkpoint}", *where)


AUDITS: dict[str, Callable[[Path, Path], VerdictRecord]] = {
    "started-by-us": started_by_us,
    "as-served": as_served,
}


def complaints(found: Mapping[str, str], listed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Where what the audit left open (probe to what it says) and the list differ."""
    return [
        *(f"{name} is not listed: {says}" for name, says in found.items() if name not in listed),
        *(f"{name} is answered now: take it off the list" for name in listed if name not in found),
        *(
            f"{name} says something else: {found[name]}"
            for name, entry in listed.items()
            if name in found and not re.search(entry["says"], found[name])
        ),
    ]


@pytest.mark.engines
@pytest.mark.parametrize("server", AUDITS)
def test_what_stays_inconclusive_is_what_is_listed(server: str, checkpoint: Path, tmp_path: Path) -> None:
    with contextlib.chdir(ROOT):
        record = AUDITS[server](checkpoint, tmp_path)
    found = {probe.name: probe.message for probe in record.probes if probe.status is Outcome.INCONCLUSIVE}
    assert not complaints(found, LISTED[server])
    assert not [probe for probe in record.probes if probe.status is Outcome.FAIL]
    assert record.verdict is (Outcome.INCONCLUSIVE if "weight-sync" in found else Outcome.PASS)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ({"cache": "does not offer: cached-tokens"}, None),
        ({"cache": "does not offer: cached-tokens", "batch": "no seed"}, "batch is not listed: no seed"),
        ({}, "cache is answered now: take it off the list"),
        ({"cache": "the engine died"}, "cache says something else: the engine died"),
    ],
)
def test_every_difference_is_seen(found: dict[str, str], complaint: str | None) -> None:
    listed = {"cache": LISTED["as-served"]["cache"]}
    assert complaints(found, listed) == ([complaint] if complaint else [])
