"""Sits one half of the exam: a real vLLM per fault, one audit through the command line, all of it kept. README.md has the rules.

    python tests/exam/sit.py --half A --jobs 1 --out runs/exam-A     # goes on where it stopped
    python tests/exam/sit.py --half A --first 10 --out runs/exam-A   # controls and ten faults by hash; without --first, the rest
    python tests/exam/score.py --half A --out runs/exam-A            # what came of it

A folder per fault under --out: outcome.json (written last: what has one is not sat again), terminal.txt, server.log and
run/, the run directory of the audit. A fault whose server never starts, or dies, has an outcome that says so.
"""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from score import KEYS, Sitting, half, read_key

ROOT = Path(__file__).parents[2]
EXAM = Path(__file__).parent
ENGINE = ROOT / ".engines" / "vllm-0.32.0" / "bin" / "python"
SERVER_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # an update, and the server's own settings, are behind it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SERVER_ARGS = [
    *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--max-num-batched-tokens", "8192", "--enable-prompt-tokens-details"),
    *("--host", "127.0.0.1"),
]
AUDIT_ARGS = ["--engine", "vllm", "--temperature", "0.7"]
"""README's own command; a fault is not asked in the way that would show it best, because a user does not know it."""
START_S = 900
AUDIT_S = 3600
STOP_S = 20


class Stopped(Exception):
    """Somebody asked the driver to stop; what it was at is sat again from its beginning."""


class Forked:
    """A server of the nursery, in as much of Popen as is needed; it is not our child, so its status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            self.returncode = -1
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (60 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("server", timeout or 60)
            time.sleep(0.1)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


Process = Forked | subprocess.Popen  # type: ignore[type-arg]


class Nursery:
    """The process that forks servers; started when the first is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, argv: list[str], fault: str | None, log: Path) -> Forked:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [ENGINE, EXAM / "nursery.py"], env=server_environment(None), text=True, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps({"argv": argv, "fault": fault, "log": str(log)}) + "\n")
            stdin.flush()
            return Forked(int(stdout.readline()))

    def close(self) -> None:
        if self._process is not None:
            end(self._process)


class Driver:
    """Starts and stops processes; every wait ends when `stop` is set."""

    def __init__(self, out: Path, src: Path, models: Path) -> None:
        self.out, self.src, self.models = out, src, models
        self.stop = threading.Event()
        self.nursery = Nursery()

    def sit(self, sitting: Sitting) -> None:
        """One server, one audit, one outcome."""
        folder = self.out / sitting.name
        if self.stop.is_set() or (folder / "outcome.json").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = self._outcome(sitting, folder)
        partial = folder / "outcome.json.partial"
        partial.write_text(json.dumps(outcome, indent=1) + "\n")
        partial.rename(folder / "outcome.json")
        sys.stdout.write(f"{datetime.datetime.now().astimezone():%H:%M:%S} {sitting.name} {json.dumps(outcome)}\n")
        sys.stdout.flush()

    def _outcome(self, sitting: Sitting, folder: Path) -> dict[str, object]:
        began = time.monotonic()
        port = free_port()
        server = self._server(sitting, folder, port)
        try:
            if not self._answers(server, port):
                return {"server": "never started", "start_s": round(time.monotonic() - began, 1)}
            started = time.monotonic()
            code = self._audit(sitting, folder, port)
            return {
                "server": "ran" if server.poll() is None else f"died with {server.returncode}",
                "forked": sitting.forked,
                "exit": code,
                "seconds": round(time.monotonic() - started, 1),
                "start_s": round(started - began, 1),
            }
        finally:
            end(server)

    def _server(self, sitting: Sitting, folder: Path, port: int) -> Process:
        argv = ["--model", str(self.models / sitting.model), "--port", str(port), *SERVER_ARGS]
        log = folder / "server.log"
        if sitting.forked:
            return self.nursery.start(argv, sitting.fault, log)
        with log.open("w") as written:
            return subprocess.Popen(
                [ENGINE, "-m", "vllm.entrypoints.openai.api_server", *argv],
                env=server_environment(sitting.fault), stdout=written, stderr=written, start_new_session=True,
            )

    def _answers(self, server: Process, port: int) -> bool:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return True
            except (urllib.error.URLError, OSError):
                if self.stop.wait(0.5):
                    raise Stopped from None
        return False

    def _audit(self, sitting: Sitting, folder: Path, port: int) -> int | None:
        """The exit code; None where the audit had to be ended."""
        command = [sys.executable, "-m", "zerodrift.cli.main", "audit", self.models / sitting.model, *AUDIT_ARGS]
        command += ["--url", f"http://127.0.0.1:{port}", "--out", folder / "run"] + ["--sync"] * sitting.sync
        env = dict(os.environ, PYTHONPATH=str(self.src), OMP_NUM_THREADS="1", COLUMNS="120")
        with (folder / "terminal.txt").open("w") as text:
            audit = subprocess.Popen(command, env=env, stdout=text, stderr=subprocess.STDOUT, start_new_session=True)
            deadline = time.monotonic() + AUDIT_S
            try:
                while audit.poll() is None:
                    if self.stop.wait(0.2):
                        raise Stopped
                    if time.monotonic() > deadline:
                        return None
                return audit.returncode
            finally:
                end(audit)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(fault: str | None) -> dict[str, str]:
    """Ours without what vLLM or Python would read from it, and the fault."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "EXAM_"))}
    planted = {} if fault is None else {"EXAM_FAULT": fault}
    return ours | SERVER_ENV | {"PYTHONPATH": str(EXAM)} | planted


def end(process: Process) -> None:
    """A process that this driver started, and the session that it made for it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived their server


def materialise(models: Path, src: Path) -> None:
    """The two built-in models as checkpoints on disk, where they are not there yet."""
    for name in ("qwen3", "llama"):
        target = models / f"model-{name}"
        if not (target / "model.safetensors").exists():
            code = f"from zerodrift import models; models.materialise('testbed:{name}', {str(target)!r})"
            subprocess.run([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=str(src)), check=True)


def sit_all(driver: Driver, sittings: list[Sitting], jobs: int, until: datetime.datetime | None) -> None:
    def one(sitting: Sitting) -> None:
        if until is not None and datetime.datetime.now().astimezone() >= until:
            return
        with contextlib.suppress(Stopped):
            driver.sit(sitting)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, sittings))


def first(sittings: list[Sitting], count: int) -> list[Sitting]:
    """The controls and the first faults of a half: a part that nobody chose, which score.py can say of it."""
    faults = [each for each in sittings if each.fault]
    return [*(each for each in sittings if not each.fault), *faults[:count]]


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=sorted(KEYS), required=True)
    parser.add_argument("--jobs", type=int, default=1, help="servers at a time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="the auditor")
    parser.add_argument("--models", type=Path, default=ROOT / ".cache" / "exam", help="made where they are missing")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", help="names with commas between them; unknown ones are refused")
    some.add_argument("--first", type=positive, help="the healthy controls and so many faults, in the order of their hashes")
    parser.add_argument("--until", help="HH:MM of today: nothing is begun after it")
    asked = parser.parse_args()
    until = None
    if asked.until:
        clock = datetime.time.fromisoformat(asked.until)
        until = datetime.datetime.combine(datetime.datetime.now().astimezone(), clock).astimezone()
    sittings = half(read_key(EXAM / KEYS[asked.half]), asked.half)
    if asked.first:
        sittings = first(sittings, asked.first)
    if asked.only:
        only = asked.only.split(",")
        if unknown := set(only) - {each.name for each in sittings}:
            parser.error(f"not in half {asked.half}: {', '.join(sorted(unknown))}")
        sittings = sorted((each for each in sittings if each.name in only), key=lambda each: only.index(each.name))
    driver = Driver(asked.out.resolve(), asked.src.resolve(), asked.models.resolve())

    def stop(_signal: int, _frame: FrameType | None) -> None:
        driver.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    materialise(driver.models, driver.src)
    try:
        sit_all(driver, sittings, asked.jobs, until)
    finally:
        driver.nursery.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
