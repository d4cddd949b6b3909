"""Who takes part: our engine, exact and over ops that nothing constrains, and vLLM's offline `LLM` in its own environment.

vLLM is driven over a pipe and keeps its own clock, around `generate` alone: reading requests and writing answers is not
counted. Between its turns it is stopped, because an idle vLLM spins.
"""

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zerodrift.backends.launch import LaunchedProcess
from zerodrift.backends.vllm_launch import environment
from zerodrift.bench.throughput import EXACT, LONGEST, Job, Run, Served
from zerodrift.core.errors import BadAnswer, EngineError
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.exact.preparation import prepare, restore

PLAIN_OPS = {
    "unconstrained": frozenset({"attention", "activation"}),
    "unconstrained, F.linear": frozenset({"attention", "activation", "linear"}),
}
"""What an engine may use that promises nothing. Which is faster depends on the machine, so both take part."""
WORKER = Path(__file__).with_name("vllm_worker.py")


class EngineContender:
    """An engine, its prefix cache off: from the second round on it would hold every prompt."""

    def __init__(self, name: str, model: Any) -> None:
        """`name` is `exact` or one of PLAIN_OPS. `model` is copied by the engine, and comes back as it was."""
        self.name = name
        if name == EXACT:
            self.setting = "as it comes"
            self._engine = Engine(model, enable_prefix_caching=False)
            return
        self.setting = f"plain {', '.join(sorted(PLAIN_OPS[name]))}"
        # Plain ops make no promise that a check could hold.
        plain = prepare(model, plain=PLAIN_OPS[name])
        self._engine = Engine(plain, enable_prefix_caching=False, logprob_check_interval=0)
        restore(model)

    def run(self, jobs: Sequence[Job]) -> Run:
        """Sampled at temperature 1, each request with a seed of its own."""
        prompts = [list(job.prompt) for job in jobs]
        params = [
            SamplingParams(max_tokens=job.num_tokens, ignore_eos=True, seed=number)
            for number, job in enumerate(jobs)
        ]
        begin, processor = time.perf_counter(), time.process_time()
        outputs = self._engine.generate(prompts, params)
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        return Run(seconds, processor, [Served(output.token_ids, output.logprobs) for output in outputs])

    def close(self) -> None:
        """Nothing outlives the object."""


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


class VllmContender:
    """A process that is started once and serves every round."""

    name = "vllm"

    def __init__(
        self, python: str | Path, model: Path, log_path: Path, *, threads: int, eager: bool = False
    ) -> None:
        """What the process prints goes to `log_path`; `eager` is ready after 50 s where compiling took two minutes."""
        mode = "eager" if eager else "compiled"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log_path.open("wb") as log:
                self._pipe = subprocess.Popen(
                    [str(python), str(WORKER), str(model), str(2 * LONGEST), mode],
                    env=environment({"OMP_NUM_THREADS": str(threads)}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(
                f"{python} cannot be started ({error}); give the interpreter of an environment with vLLM, such as the "
                "one that engines/install makes"
            ) from error
        self._process = LaunchedProcess(self._pipe, log_path)
        try:
            self.setting = f"vLLM {self._read(Ready).version}, offline, {mode}"
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
        served = [Served(*pair) for pair in zip(answers.token_ids, answers.logprobs, strict=True)]
        return Run(answers.seconds, answers.processor_seconds, served)

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
