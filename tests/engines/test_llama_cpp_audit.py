"""The audit on the real llama.cpp with trained weights: what its file formats, kernels and defaults do to logprobs.

A test names what it changes in docs/llama-cpp.yaml; docs/llama-cpp.md shows the same audits as commands.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.requantise import requantise

from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.config.load import load
from zerodrift.models.smollm2 import COMPLETE, gguf_path
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord
from zerodrift.view.text import print_verdict

pytestmark = [pytest.mark.engines, pytest.mark.smollm2]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "llama-cpp.yaml"
SMOLLM2 = ROOT / ".cache" / "smollm2"
FEW = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")
"""Enough for Δ; the sampling test needs more."""

Audit = Callable[..., VerdictRecord]


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """GGUF files by the type of their matrices, all of the same model."""
    python = Path(load(CONFIG, ()).engine.python or "")
    if not (ROOT / python).exists():
        pytest.skip(f"{python.parts[1]} is not installed: engines/install {python.parts[1]}")
    if not (SMOLLM2 / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    shipped = gguf_path(SMOLLM2)
    found = {kind: shipped.with_name(f"smollm2-{kind.lower()}.gguf") for kind in ("Q4_0", "F32")}
    for kind, path in found.items():
        if not path.is_file():
            requantise(shipped, path, kind)
    return found | {"Q4_1": shipped}


@pytest.fixture(scope="module")
def audit(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audit]:
    """Audits a file; the verdict is printed, and shown by pytest where the test fails."""

    def run(kind: str, *changes: str) -> VerdictRecord:
        config = load(CONFIG, (*FEW, f"model.path={files[kind]}", *changes))
        session = Session(config=config, directory=tmp_path_factory.mktemp(kind))
        record = session.run(Silent()).record
        print_verdict(record, Console(highlight=False, width=110), None)
        return record

    with contextlib.chdir(ROOT):
        yield run


def principal(record: VerdictRecord) -> CauseFound:
    assert record.verdict is Outcome.FAIL
    assert record.guilty == "engine"
    assert record.causes[0].gating
    return record.causes[0]


def probe(record: VerdictRecord, name: str) -> Outcome:
    [found] = [probe.status for probe in record.probes if probe.name == name]
    return found


def test_unquantised_weights_are_the_same_policy(audit: Audit) -> None:
    """INCONCLUSIVE where llama.cpp lost a logprob, and PASS where it did not; never a cause."""
    record = audit("F32")

    assert record.verdict is not Outcome.FAIL
    assert not [cause.cause for cause in record.causes if cause.gating]
    assert record.metrics["mean"] <= 1e-5
    for name in ("parity", "sampling", "repeat", "batch", "stream"):
        assert probe(record, name) is Outcome.PASS, name


@pytest.mark.long
def test_the_kernels_share_is_a_tenth_of_what_q4_0_does(audit: Audit, q4_0: VerdictRecord) -> None:
    """Its own weights, exactly, in the reference: what is left is activations in eight bits."""
    record = audit("Q4_1")

    cause = principal(record)
    assert cause.cause == "path/body-precision"
    assert "--outtype f32" in cause.fix
    assert probe(record, "sampling") is Outcome.PASS
    assert 0.03 < record.metrics["mean"] < q4_0.metrics["mean"] / 5


@pytest.fixture(scope="module")
def q4_0(audit: Audit) -> VerdictRecord:
    return audit("Q4_0")


@pytest.mark.long
def test_four_bits_fail(q4_0: VerdictRecord) -> None:
    assert q4_0.verdict is Outcome.FAIL
    assert q4_0.metrics["mean"] > 0.3


@pytest.mark.long
def test_four_bits_are_named(q4_0: VerdictRecord) -> None:
    cause = principal(q4_0)
    assert cause.cause == "path/weight-quantisation"
    assert cause.explained > 0.8
    assert "Q4_0" in cause.evidence
