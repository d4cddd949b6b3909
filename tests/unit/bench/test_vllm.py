"""The worker and the pipe to it, with a module called vllm that computes nothing."""

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerodrift.bench.contender import check
from zerodrift.bench.vllm import Mode, Start, VllmContender
from zerodrift.bench.workload import mixed
from zerodrift.core.errors import BadAnswer, EngineError

JOBS = mixed(3, 61, 512)
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
            print("loading", model)
            if model.endswith("broken"): raise RuntimeError("no such weights")
        def generate(self, prompts, params, use_tqdm):
            print("so many requests:", len(prompts))
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


@pytest.fixture
def start(tmp_path: Path) -> Make:
    """A contender whose interpreter finds the module above."""
    (tmp_path / "vllm.py").write_text(textwrap.dedent(MODULE))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return lambda model="model": VllmContender(
        Start(python, tmp_path / model, 1, Mode.EAGER), tmp_path / "logs" / "vllm.log"
    )


def test_jobs_go_in_and_answers_come_out(start: Make, tmp_path: Path) -> None:
    contender = start()
    try:
        assert contender.setting == "vLLM 0.fake, offline, eager"
        for _ in range(2):
            run = contender.run(JOBS)
            check("vllm", JOBS, run)
            assert [served.token_ids[0] for served in run.served] == [job.prompt[0] for job in JOBS]
            assert run.time.clock > 0
            assert run.time.processor > 0.05, "it adds up ten million numbers"
        assert stops(contender._process.pid), "an idle engine must not compute beside the others"
    finally:
        contender.close()
    log = (tmp_path / "logs" / "vllm.log").read_text()
    assert "engines print what they like" in log
    assert "so many requests: 3" in log
    with pytest.raises(ProcessLookupError):
        os.kill(contender._process.pid, 0)


def stops(pid: int) -> bool:
    """Whether the process is stopped within the seconds that a busy machine may need."""
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_does_not_start_says_why(start: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such weights"):
        start("broken")
    with pytest.raises(EngineError, match="cannot be started"):
        VllmContender(Start(tmp_path / "nothing", tmp_path, 1, Mode.COMPILED), tmp_path / "vllm.log")


def test_a_worker_that_dies_or_babbles(start: Make) -> None:
    contender = start()
    with pytest.raises(EngineError, match="the vLLM worker ended"):
        contender.run(JOBS[:1])
    with pytest.raises(EngineError, match="the vLLM worker ended"):
        contender.run(JOBS)
    contender.close()
    contender = start()
    with pytest.raises(BadAnswer):
        contender.run(JOBS[:2])
    contender.close()
    contender.close()
