"""The benchmark's worker inside a real vLLM: it does the work that it is asked for, and its logprobs are the model's."""

import os
from pathlib import Path

import pytest
import torch

from zerodrift import models
from zerodrift.bench.contenders import VllmContender
from zerodrift.bench.throughput import check, mixed

pytestmark = pytest.mark.engines
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / os.environ.get("ZERODRIFT_TEST_ENGINE", "vllm-0.32.0") / "bin" / "python"


def test_the_worker_serves(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing; run `make engines`")
    directory = models.materialise("testbed:llama", tmp_path / "model")
    model = models.load(directory)
    jobs = mixed(3, model.config.vocab_size, model.config.max_position_embeddings)
    contender = VllmContender(PYTHON, directory, tmp_path / "vllm.log", threads=1, eager=True)
    try:
        first, second = contender.run(jobs), contender.run(jobs)
    finally:
        contender.close()
    for run in (first, second):
        check("vllm", jobs, run)
        assert run.processor_seconds > 0
    for job, served in zip(jobs, first.served, strict=True):
        ids = torch.tensor([[*job.prompt, *served.token_ids]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(job.prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(served.token_ids)[:, None])[:, 0]
        # Another framework's fp32 is 3e-6 off on average here (docs/vllm.md), and more on unlikely tokens.
        torch.testing.assert_close(torch.tensor(served.logprobs), expected, atol=1e-3, rtol=0)
