"""vLLM as a contender: its offline `LLM`, in its own environment, driven over a pipe.

It keeps its own clock, around `generate` alone: reading requests and writing answers is not counted. Between its turns
it is stopped, because an idle vLLM spins.
"""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from zerodrift.backends.launch import LaunchedProcess
from zerodrift.backends.vllm_launch import environment
from zerodrift.bench.contender import Run, Served, Time
from zerodrift.bench.workload import LONGEST, Job
from zerodrift.core.errors import BadAnswer, EngineError

NAME = "vllm"
WORKER = Path(__file__).with_name("vllm_worker.py")


class Ready(msgspec.Struct, frozen=True):
    """What the worker says first."""

    version: str


class Answers(msgspec.Struct, frozen=True):
    """What it says to each line of jobs."""

    seconds: float
    processor_seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


Said = TypeVar("Said", Ready, Answers)


class Mode(StrEnum):
    """How vLLM runs the model."""

    COMPILED = "compiled"
    """Its default; compiling takes minutes at every start."""
    EAGER = "eager"
    """Op by op: ready after 50 s where compiling took more than two minutes."""


class Start(NamedTuple):
    """What to start."""

    python: str | Path
    """Interpreter of an environment with vLLM."""
    model: Path
    threads: int
    mode: Mode


class VllmContender:
    """A process that is started once and serves every round."""

    name = NAME

    def __init__(self, start: Start, log_path: Path) -> None:
        """What the process prints goes to `log_path`."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [str(start.python), str(WORKER), str(start.model), str(2 * LONGEST), start.mode]
        try:
            with log_path.open("wb") as log:
                self._pipe = subprocess.Popen(
                    command,
                    env=environment({"OMP_NUM_THREADS": str(start.threads)}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(
                f"{start.python} cannot be started ({error}); give the interpreter of an environment with vLLM, such as the "
                "one that engines/install makes"
            ) from error
        self._process = LaunchedProcess(self._pipe, log_path)
        try:
            self.setting = f"vLLM {self._read(Ready).version}, offline, {start.mode}"
            self._process.pause()
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Job]) -> Run:
        """All jobs in one call of its `generate`."""
        assert self._pipe.stdin is not None, "opened as a pipe"
        self._process.resume()
        try:
            self._pipe.stdin.write(msgspec.json.encode(jobs) + b"\n")
            self._pipe.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        answers = self._read(Answers)
        self._process.pause()
        pairs = zip(answers.token_ids, answers.logprobs, strict=True)
        return Run(Time(answers.seconds, answers.processor_seconds), [Served(*pair) for pair in pairs])

    def close(self) -> None:
        """End the process and whatever it started."""
        self._process.resume()
        self._process.stop()
        for pipe in (self._pipe.stdin, self._pipe.stdout):
            if pipe is not None:
                # What the process never read cannot be delivered any more.
                with suppress(OSError):
                    pipe.close()

    def _read(self, kind: type[Said]) -> Said:
        assert self._pipe.stdout is not None, "opened as a pipe"
        line = self._pipe.stdout.readline()
        if not line:
            raise self._ended()
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise BadAnswer(f"the vLLM worker said {line[:80]!r}, which is no answer ({error})") from error

    def _ended(self) -> EngineError:
        return EngineError(
            f"the vLLM worker ended; the end of {self._process.log_path}:\n{self._process.last_lines()}"
        )
