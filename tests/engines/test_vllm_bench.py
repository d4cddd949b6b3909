"""The benchmark beside a real vLLM: it does the work that it is asked for."""

import json
import os
from pathlib import Path

import pytest

from zerodrift import models
from zerodrift.cli.main import main

# One more server, for what tests/unit/bench shows with engines of our own and the audits with this one.
pytestmark = [pytest.mark.engines, pytest.mark.long]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / os.environ.get("ZERODRIFT_TEST_ENGINE", "vllm-0.32.0") / "bin" / "python"


def test_vllm_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing; run `make engines`")
    directory, out = models.materialise("testbed:llama", tmp_path / "model"), tmp_path / "it.json"
    monkeypatch.chdir(tmp_path)
    settings = [
        f"--set=engine.python={PYTHON}",
        "--set=engine.enforce_eager=true",
        "--set=engine.max_model_len=1024",
    ]
    options = ["--requests=4", "--rounds=2", "--shorten=8", f"--json={out}", *settings]
    with pytest.raises(SystemExit) as caught:
        main(["bench", str(directory), "--engine", "vllm", *options])
    assert caught.value.code == 0
    found = {each["name"]: each for each in json.loads(out.read_text())["standings"]}
    assert len(found["vllm"]["tokens_per_second"]) == 2
    assert found["vllm"]["ratio"]["median"] > 0
