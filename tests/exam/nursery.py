"""Runs in vLLM's own environment: imports it once, then forks a server for each line of stdin, as driver.py does.

A line is JSON: `argv`, `fault` (or null), `log`. The answer is the pid of the server, which has a session of its own.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback

import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen3
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.entrypoints.launchers.api_server.entry import main


def serve(argv: list[str], fault: str | None, log: str) -> None:
    """In the child; never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(nothing, 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if fault is not None:
            os.environ["EXAM_FAULT"] = fault
        sys.argv = ["api_server", *argv]
        real = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: real("fork" if method == "spawn" else method)
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries servers that ended
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(asked["argv"], asked["fault"], asked["log"])
        answers.write(f"{pid}\n")
        answers.flush()
