import json
import os
from pathlib import Path

import msgspec
import pytest
import torch

from zerodrift.cli.main import main
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.sync.judge import Arrival
from zerodrift.sync.key import read_key
from zerodrift.sync.ledger import LOG, ReceiptLedger
from zerodrift.sync.receipt import Receipt, ReceiptedRollout
from zerodrift.weights.files import write_update
from zerodrift.weights.folder import KEPT
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.registry import LOG as VERSIONS
from zerodrift.weights.registry import Kind, Registry
from zerodrift.weights.update import UpdateManifest


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(each) for each in arguments])
    return int(stop.value.code or 0)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    assert run("sync", "key", tmp_path / "key") == 0
    return tmp_path / "key"


@pytest.fixture
def ledger(tmp_path: Path, key: Path) -> ReceiptLedger:
    return ReceiptLedger(tmp_path / "receipts", read_key(key))


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    directory = tmp_path / "versions"
    registry = Registry(directory)
    for number, follows in enumerate((None, "step 0", "step 1")):
        state = {"a": torch.full((3,), float(number))}
        update = UpdateManifest(version=f"step {number}", weights=manifest_of(state))
        write_update(directory / KEPT, update.identity, update, state)
        registry.append(Kind.COMMITTED, update.weight_version, update.identity)
        registry.append(Kind.PUBLISHED, update.weight_version, update.identity, follows=follows)
    registry.close()
    return directory


def receipt(label: str, arrival: Arrival = Arrival.CONFIRMED) -> Receipt:
    return Receipt(
        version=WeightVersion(label),
        engine="vllm",
        replica="0",
        canary="c" * 64,
        tokens=512,
        sequences=32,
        arrival=arrival,
        cause="weights/stale" if arrival is Arrival.MISSED else None,
        message="slope 1.000",
        predicted=1e-3,
        error=1e-2,
        usual=1e-2,
        false_alarm=1e-4,
        at=0.0,
        seconds=1.0,
    )


def test_status_of_versions(versions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sync", "status", versions) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["kept", "step", "0"],
        ["kept", "step", "1"],
        ["serves", "step", "2"],
    ]
    assert run("sync", "status", versions, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["label"], each["serves"]) for each in told["versions"]][-1] == ("step 2", True)
    assert told["receipts"] == []


def test_status_of_receipts(
    ledger: ReceiptLedger, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.append(receipt("step 1"))
    assert run("sync", "status", tmp_path / "receipts", "--key", key) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("confirmed    step 1 on 0")
    ledger.append(receipt("step 2", Arrival.MISSED))
    assert run("sync", "status", tmp_path / "receipts", "--key", key) == 1


def test_verify(ledger: ReceiptLedger, key: Path, tmp_path: Path) -> None:
    ledger.append(receipt("step 1"))
    where = tmp_path / "receipts"
    assert run("sync", "verify", where, "--key", key) == 0
    made = Completion(
        prompt_token_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        kind=LogprobKind.RAW,
        sampling=SamplingParams(),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(WeightVersion("step 1"), 0, 1),),
        fingerprint="f",
    )
    for rollout, code in ((ledger.stamp([made], "0")[0], 0), (ReceiptedRollout(made, ()), 1)):
        (tmp_path / "batch.jsonl").write_bytes(msgspec.json.encode(rollout) + b"\n")
        assert run("sync", "verify", where, "--key", key, "--rollouts", tmp_path / "batch.jsonl") == code
    log = where / LOG
    log.write_bytes(log.read_bytes().replace(b"step 1", b"step 9"))
    assert run("sync", "verify", where, "--key", key) == 1


def test_rollback(versions: Path) -> None:
    assert run("sync", "rollback", versions, "--expected", "step 1") == 2
    assert run("sync", "rollback", versions, "--expected", "step 2", "--to", "step 7") == 2
    assert run("sync", "rollback", versions, "--expected", "step 2") == 0
    registry = Registry(versions)
    assert registry.versions.current == "step 1"
    # An engine that runs has the directory.
    assert run("sync", "rollback", versions, "--expected", "step 1") == 2
    registry.close()
    assert run("sync", "rollback", versions, "--expected", "step 1", "--to", "step 0") == 0


def test_a_version_whose_weights_were_damaged_is_not_rolled_back_to(versions: Path) -> None:
    """No engine would start over it."""
    registry = Registry(versions)
    weights = versions / KEPT / registry.versions.known["step 1"].manifest / "model.safetensors"
    registry.close()
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run("sync", "rollback", versions, "--expected", "step 2") == 2
    weights.unlink()
    assert run("sync", "rollback", versions, "--expected", "step 2") == 2
    assert run("sync", "rollback", versions, "--expected", "step 2", "--to", "step 0") == 0


@pytest.mark.parametrize("log", [LOG, VERSIONS])
def test_a_pipe_is_no_log(tmp_path: Path, key: Path, log: str) -> None:
    os.mkfifo(tmp_path / log)
    assert run("sync", "status", tmp_path, "--key", key) == 2


def test_what_is_not_there(tmp_path: Path, key: Path) -> None:
    assert run("sync", "status", tmp_path) == 2
    assert run("sync", "verify", tmp_path, "--key", key) == 2
    assert run("sync", "rollback", tmp_path, "--expected", "a") == 2
    key.chmod(0o644)
    assert run("sync", "status", tmp_path, "--key", key) == 2
    assert run("sync", "key", key) == 2
