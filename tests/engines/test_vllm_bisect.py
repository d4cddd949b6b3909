"""A search among the flags of a real vLLM: which of them changed what its logprobs mean?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.long]

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".engines" / "vllm-0.32.0"
MENDS = "--logprobs-mode processed_logprobs"


def test_the_flag_that_changed_what_logprobs_mean_is_named(tmp_path):
    if not INSTALLED.exists():
        pytest.skip("vLLM is not installed: engines/install vllm-0.32.0")
    # Two that change nothing, one on either side of the one that does.
    lines = ["--flags", "", "--flags", f"--max-num-seqs 64 {MENDS} --max-logprobs 5"]
    command = [sys.executable, "-m", "zerodrift.cli.main", "bisect", "--release", "0.32.0", *lines]
    command += ["--environment", f"0.32.0={INSTALLED}", "--out", str(tmp_path / "search"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["kind"], found["before"], found["after"]) == ("semantics", "--max-num-seqs 64", MENDS)
    [meaning] = [each["says"] for each in found["findings"] if each["kind"] == "semantics"]
    assert meaning == f"--max-num-seqs 64: semantic/raw-logprobs, {MENDS}: processed logprobs"
    assert (found["skipped"], found["unlike"]) == ([], [])
    assert INSTALLED.exists(), "an environment that was given is left"
