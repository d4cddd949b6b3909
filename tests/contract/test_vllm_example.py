"""The RL example over HTTP that vLLM ships with its source, against `zerodrift serve` (docs/vllm_example_run.py)."""

import ast
import hashlib
import io
import os
import re
import runpy
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from zerodrift import models
from zerodrift.backends.launch import free_port
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "vllm_example_run.py"
PYTHON = ROOT / ".engines" / "vllm-0.32.0" / "bin" / "python"
SMOLLM2 = ROOT / ".cache" / "smollm2"
SOURCE = "vllm-0.32.0.tar.gz"
EXAMPLE = "vllm-0.32.0/examples/rl/rlhf_http_nccl.py"
TOKEN = "a-token-of-tests-alone"


def example(directory: Path) -> Path:
    """Out of vLLM's source distribution, whose digest the index has."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
    with urllib.request.urlopen(index, timeout=60) as answer:
        page = answer.read().decode()
    [(address, digest)] = re.findall(rf'href="([^"#]*/{re.escape(SOURCE)})#sha256=([0-9a-f]{{64}})"', page)
    with urllib.request.urlopen(urllib.parse.urljoin(index, address), timeout=300) as answer:
        content = answer.read()
    assert hashlib.sha256(content).hexdigest() == digest
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        file = archive.extractfile(EXAMPLE)
        assert file is not None
        path = directory / "rlhf_http_nccl.py"
        path.write_bytes(file.read())
    return path


@pytest.mark.engines
@pytest.mark.long
def test_vllms_own_example_runs_against_serve(tmp_path: Path) -> None:
    """Gibberish before; afterwards, token by token, what the trainer's weights say."""
    if not PYTHON.exists():
        pytest.skip("vllm-0.32.0 is not in .engines")
    before = models.load(str(SMOLLM2))
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    with torch.no_grad():
        for weight in before.parameters():
            weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(weight.numel()))
    before.save_pretrained(tmp_path / "dummy")
    tokenizer.save_pretrained(tmp_path / "dummy")
    (tmp_path / "exchange").mkdir()
    token, port = tmp_path / "token", free_port()
    token.write_text(TOKEN)
    token.chmod(0o600)
    serve = [sys.executable, "-m", "zerodrift.cli.main", "serve", tmp_path / "dummy", "--port", port]
    options = [
        "--weight-root",
        tmp_path / "exchange",
        "--admin-token-file",
        token,
        "--served-model-name",
        SMOLLM2,
    ]
    address = f"http://zd:{TOKEN}@127.0.0.1:{port}"
    given = [example(tmp_path), SMOLLM2, address, tmp_path / "exchange", "--", *serve, *options]
    ran = subprocess.run(
        [PYTHON, PROGRAM, *map(str, given)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = re.findall(r"^Prompt: (['\"].*['\"])\nGenerated text: (.*)$", ran.stdout, re.MULTILINE)
    assert len(told) == 8, ran.stdout
    with torch.no_grad():
        after = models.load(str(SMOLLM2))
        for weight in after.parameters():
            weight.copy_(weight.bfloat16())
    engine = Engine(after)
    for prompt, text in told[4:]:
        [output] = engine.generate(
            [tokenizer(ast.literal_eval(prompt))["input_ids"]], SamplingParams(temperature=0, max_tokens=32)
        )
        assert repr(tokenizer.decode(output.token_ids, skip_special_tokens=True)) == text
    assert not set(told[:4]) & set(told[4:])
    assert list((tmp_path / "exchange").iterdir()) == []


def test_a_file_that_is_not_that_example_is_refused() -> None:
    program = runpy.run_path(str(PROGRAM))
    with pytest.raises(program["Unlike"], match="serve_args"):
        program["changed"]("MODEL_NAME = 'x'", "model", "http://x", "exchange", ["serve"])
