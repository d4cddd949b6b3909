"""Our engine on a tiny model, and the pipe to a worker with a module called vllm that computes nothing."""

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zerodrift import models
from zerodrift.bench.contenders import PLAIN_OPS, EngineContender, VllmContender
from zerodrift.bench.throughput import check, mixed
from zerodrift.core.errors import BadAnswer, EngineError

JOBS = mixed(3, 512, 512, 8)
MODULE = """
    import os
    from types import SimpleNamespace as N
    print("engines print what they like")
    __version__ = "0.fake"
    SamplingParams = N
    class LLM:
        def __init__(self, model, **settings):
            assert settings["enable_prefix_caching"] is False
            assert settings["enforce_eager"] is True
            if model.endswith("broken"): raise RuntimeError("no such weights")
        def generate(self, prompts, params, use_tqdm):
            if len(prompts) == 1: os._exit(7)
            if len(prompts) == 2: os.write(ANSWERS, b"no json\\n")
            sum(range(10**7))
            return [
                N(outputs=[N(token_ids=[p["prompt_token_ids"][0]] * s.max_tokens,
                             logprobs=[{p["prompt_token_ids"][0]: N(logprob=-0.5)}] * s.max_tokens)])
                for p, s in zip(prompts, params)
            ]
    # The worker has put the real standard output aside under the lowest free number.
    ANSWERS = max(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
                  and "pipe" in os.readlink(f"/proc/self/fd/{fd}"))
"""
Make = Callable[..., VllmContender]


def test_our_engine_does_the_work_exactly_or_over_plain_ops() -> None:
    model = models.load("testbed:llama")
    for name in ("exact", *PLAIN_OPS):
        contender = EngineContender(name, model)
        for _ in range(2):
            run = contender.run(JOBS)
            check(name, JOBS, run)
        assert min(run.seconds, run.processor_seconds) > 0
        for job, each in zip(JOBS, run.served, strict=True):
            ids = torch.tensor([[*job.prompt, *each.token_ids]])
            with torch.no_grad():
                rows = model(ids).logits[0, len(job.prompt) - 1 : -1].log_softmax(-1)
            expected = rows.gather(-1, torch.tensor(each.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.logprobs), expected, atol=1e-4, rtol=0)
        assert contender._engine.metrics().prefix_hit_rate == 0, "a second round finds nothing of the first"
        plain = contender._engine.fingerprint().numeric["attention"] == "sdpa"
        assert plain is (name != "exact")
        assert type(model.lm_head) is torch.nn.Linear, "the vanilla model came back as it was"
        contender.close()


@pytest.fixture
def start(tmp_path: Path) -> Make:
    """A contender whose interpreter finds the module above."""
    (tmp_path / "vllm.py").write_text(textwrap.dedent(MODULE))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return lambda model="model": VllmContender(
        python, tmp_path / model, tmp_path / "logs" / "vllm.log", threads=1, eager=True
    )


def test_jobs_go_in_and_answers_come_out(start: Make, tmp_path: Path) -> None:
    contender = start()
    try:
        assert contender.setting == "vLLM 0.fake, offline, eager"
        for _ in range(2):
            run = contender.run(JOBS)
            check("vllm", JOBS, run)
            assert [served.token_ids[0] for served in run.served] == [job.prompt[0] for job in JOBS]
            assert run.processor_seconds > 0.05, "it adds up ten million numbers"
        assert stops(contender._process.pid), "an idle engine must not compute beside the others"
    finally:
        contender.close()
    assert "engines print what they like" in (tmp_path / "logs" / "vllm.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(contender._process.pid, 0)


def stops(pid: int) -> bool:
    """Whether the process is stopped within the seconds that a busy machine may need."""
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_does_not_start_dies_or_babbles(start: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such weights"):
        start("broken")
    with pytest.raises(EngineError):
        VllmContender(tmp_path / "nothing", tmp_path, tmp_path / "vllm.log", threads=1)
    contender = start()
    for jobs in (JOBS[:1], JOBS):
        with pytest.raises(EngineError):
            contender.run(jobs)
    contender.close()
    contender = start()
    with pytest.raises(BadAnswer):
        contender.run(JOBS[:2])
    contender.close()
    contender.close()
