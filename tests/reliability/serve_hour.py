"""An hour of `zerodrift serve` as it is used: `serve_hour.py [--minutes 60] [--clients 16]`.

A server in a process of its own is asked in ten ways at once, some of them rude; every ten seconds its weights change, by every
call and every KV policy that trainers use, now and then behind an update that is refused or beside an adapter that comes and
goes. Every token is computed again by the weights that its answer names. The server's memory and files are looked at every
five seconds.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import peft
import torch
from hour_checking import Checker, Published, Wrong
from hour_traffic import MODEL, MOST_WAITING, Asker, Client, Told, logprobs_of, spans_of
from serving_process import TOKEN, served

from zerodrift import models
from zerodrift.core.errors import ZerodriftError

UPDATE_S, LOOK_S, HEALTH_S = 10.0, 5.0, 0.5
TOLD_EVERY = 12
CHECKPOINTS = 6
WARM = 0.25
"""Of the run, that is not judged: every block of KV is touched once, and every branch has run."""
SHAPES = range(20, 560)
"""Tokens of a step, asked for before the hour begins: oneDNN keeps up to 1,024 kernels, one for each shape of a product, and they
were 570 MiB that came for as long as new lengths did (LOG.md)."""
FLAT = 0.03
"""Of the memory, in an hour, and three standard errors of the slope are inside it: what cannot be told from a leak is not flat, so that
a run of a few minutes says so."""
WINDOWS = 9


class Looked(NamedTuple):
    """At the server's process."""

    at_s: float
    rss_mib: float
    files: int
    threads: int


class Ran(NamedTuple):
    """What a run was."""

    looks: list[Looked]
    health_ms: list[float]
    counts: Counter[str]
    checker: Checker
    metrics: dict[str, float]
    """The server's own, at the end."""
    problems: list[str]
    """All that went wrong, in its order."""


def save_checkpoints(root: Path) -> list[Path]:
    """The first is what the server starts with; adapters lie beside them."""
    paths = []
    for number in range(CHECKPOINTS):
        model = models.load(MODEL)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            for weight in model.parameters():
                weight.mul_(1 + 0.02 * number * torch.randn_like(weight))
        paths.append(root / f"step-{number}")
        model.save_pretrained(paths[-1])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(models.load(MODEL), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
    adapted.save_pretrained(root / "adapter")
    spoilt = root / "spoilt"
    shutil.copytree(paths[1], spoilt)
    file = spoilt / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return paths


class Trainer(threading.Thread):
    """Publishes a version every ten seconds, each time by another call; versions go to the checker before tokens of them can."""

    def __init__(
        self,
        url: str,
        checkpoints: list[Path],
        checker: Checker,
        counts: Counter[str],
        over: threading.Event,
        problems: list[str],
    ) -> None:
        super().__init__(daemon=True)
        self._client, self._checkpoints, self._checker = Client(url, TOKEN), checkpoints, checker
        self._counts, self._over, self._problems = counts, over, problems
        self.adapted: SimpleQueue[Told] = SimpleQueue()
        self.labels: list[str] = []
        """Of all versions so far."""
        self._ask("/init_weight_transfer_engine", {"init_info": {}})
        self._tell(self._ask("/weight_info", method="GET"), "recompute")

    def run(self) -> None:
        begin, number = time.monotonic(), 0
        while not self._over.wait(max(0.0, begin + (number + 1) * UPDATE_S - time.monotonic())):
            number += 1
            try:
                self._update(number)
            except Exception as error:  # the hour goes on, and ends with all that went wrong
                self._problems.append(f"update {number}: {error!r}")

    def _update(self, number: int) -> None:
        if number % 7 == 3:
            self._refused()
        (self._plain, self._keep, self._recompute, self._drain)[number % 4](number)
        self._counts["updates"] += 1
        if number % 6 == 5:
            self._with_adapter(number)

    def _ask(self, path: str, body: Any = None, *, method: str = "POST", status: int = 200) -> Any:
        found, answer, _ = self._client.ask(path, body, method=method)
        assert found == status, (path, found, answer)
        return answer

    def _directory(self, number: int) -> str:
        return str(self._checkpoints[number % len(self._checkpoints)])

    def _tell(self, answer: dict[str, Any], kv: str) -> None:
        self._checker.publish(Published(answer["weight_version"], answer["digest"], kv))
        self.labels.append(answer["weight_version"])

    def _plain(self, number: int) -> None:
        """vLLM's own client: no pause."""
        self._in_parts(number, "recompute")

    def _keep(self, number: int) -> None:
        """prime-rl."""
        self._ask("/pause?mode=keep&clear_cache=false")
        self._tell(self._ask("/update_weights", {"weight_dir": self._directory(number)}), "keep")
        self._ask("/resume")

    def _recompute(self, number: int) -> None:
        """TRL."""
        self._ask("/pause?mode=keep")
        self._in_parts(number, "recompute")
        self._ask("/resume")

    def _drain(self, number: int) -> None:
        self._ask("/pause?mode=wait")
        self._in_parts(number, "drain")
        self._ask("/resume")

    def _in_parts(self, number: int, kv: str) -> None:
        self._ask("/start_weight_update", {"expect": self.labels[-1]})
        self._ask("/update_weights", {"update_info": {"directory": self._directory(number)}})
        self._tell(self._ask("/finish_weight_update", {"weight_version": f"step {number}"}), kv)

    def _refused(self) -> None:
        """A file that is cut, and a trainer that was too late: nothing of either is served."""
        self._ask("/start_weight_update", {})
        self._ask(
            "/update_weights",
            {"update_info": {"directory": str(self._checkpoints[0].parent / "spoilt")}},
            status=422,
        )
        self._ask("/finish_weight_update", {}, status=409)
        self._ask("/start_weight_update", {"expect": "a version of before"}, status=409)
        self._counts["updates refused"] += 1

    def _with_adapter(self, number: int) -> None:
        """The base is not updated beside one, so it goes again before the next update."""
        name = f"policy-v{number}"
        self._ask(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(self._checkpoints[0].parent / "adapter")},
        )
        prompt, sampling = [5, 17, number % 500], {"seed": number, "max_tokens": 12, "ignore_eos": True}
        body = {"model": name, "prompt": prompt, "logprobs": 0, "return_token_ids": True, **sampling}
        [choice] = self._ask("/v1/completions", body)["choices"]
        self._ask("/v1/unload_lora_adapter", {"lora_name": name})
        told = Told("adapter", prompt, choice["token_ids"], logprobs_of(choice), spans_of(choice), sampling)
        self.adapted.put(told._replace(adapter=choice["adapter"]))
        self._counts["adapter"] += 1


class Watcher(threading.Thread):
    """Looks at the server's process, and asks whether it is ready."""

    def __init__(self, url: str, pid: int, over: threading.Event, problems: list[str]) -> None:
        super().__init__(daemon=True)
        self._client, self._process, self._over = Client(url), Path(f"/proc/{pid}"), over
        self._problems = problems
        self.looks: list[Looked] = []
        self.health_ms: list[float] = []

    def run(self) -> None:
        begin = time.monotonic()
        while not self._over.wait(HEALTH_S):
            asked = time.monotonic()
            try:
                status, answer, _ = self._client.ask("/health", method="GET")
            except OSError as error:
                status, answer = 0, repr(error)
            if status != 200:
                self._problems.append(f"/health: {status} {answer}")
            self.health_ms.append(1e3 * (time.monotonic() - asked))
            if not self.looks or asked - begin - self.looks[-1].at_s >= LOOK_S:
                self.looks.append(look := self._look(asked - begin))
                if len(self.looks) % TOLD_EVERY == 0:
                    sys.stderr.write(
                        f"{look.at_s / 60:.1f} min: {look.rss_mib:.1f} MiB, {look.files} files, {len(self._problems)} problems\n"
                    )

    def _look(self, at_s: float) -> Looked:
        lines = (self._process / "status").read_text(encoding="ascii").splitlines()
        told = {
            name: value.split()[0] for name, value in (line.split(":", 1) for line in lines) if value.split()
        }
        files = sum(1 for _ in (self._process / "fd").iterdir())
        return Looked(at_s, int(told["VmRSS"]) / 1024, files, int(told["Threads"]))


def run(root: Path, minutes: float, clients: int) -> Ran:
    """Serve, ask and check until the time is over and all that came is checked."""
    checkpoints = save_checkpoints(root)
    checker, counts, problems = Checker(checkpoints), Counter[str](), list[str]()
    options = ("--max-model-len", "256", "--max-num-seqs", "8", "--max-waiting", str(MOST_WAITING))
    with served(root, *options, model=MODEL, log=root / "server.log") as server:
        over, told = threading.Event(), SimpleQueue[Told]()
        warm_up(Client(server.url))
        trainer = Trainer(server.url, checkpoints, checker, counts, over, problems)
        watcher = Watcher(server.url, server.process.pid, over, problems)
        labels = lambda: list(trainer.labels)  # noqa: E731
        askers = [
            Asker(server.url, number, told, counts, labels, over, problems) for number in range(clients)
        ]
        threads = [trainer, watcher, *askers]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60 * minutes
        while not over.is_set() or any(thread.is_alive() for thread in threads) or not told.empty():
            if time.monotonic() > end:
                over.set()
            try:
                check_next(checker, told, trainer.adapted, root / "adapter")
            except (Wrong, ValueError, ZerodriftError) as error:
                problems.append(f"{type(error).__name__}: {error}")
        metrics = settled(Client(server.url, TOKEN))
    return Ran(watcher.looks, watcher.health_ms, counts, checker, metrics, problems)


def check_next(
    checker: Checker, told: "SimpleQueue[Told]", adapted: "SimpleQueue[Told]", adapter: Path
) -> None:
    """One that an adapter was beside, and one that came from a client."""
    with suppress(Empty):
        checker.check_adapted(adapted.get_nowait(), adapter)
    # To wait for both made a backlog of minutes beside others' work.
    with suppress(Empty):
        checker.check(told.get(timeout=0.1))


def settled(client: Client) -> dict[str, float]:
    """The server's figures, when nothing is in flight any more."""
    deadline = time.monotonic() + 30
    while True:
        _, page, _ = client.ask("/metrics", method="GET")
        rows = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        figures = {name: float(value) for name, value in rows}
        if not figures["zerodrift_requests_in_flight"] or time.monotonic() > deadline:
            return figures
        time.sleep(0.1)


def warm_up(client: Client) -> None:
    """A step of every size: two prompts that come together are computed together."""
    draw = random.Random(0)
    for size in SHAPES:
        halves = [[draw.randrange(4, 500) for _ in range(part)] for part in (size // 2, size - size // 2)]
        body = {"prompt": [half[:250] for half in halves], "max_tokens": 1, "ignore_eos": True}
        status, answer, _ = client.ask("/v1/completions", body)
        if status != 200:
            raise Wrong(f"warm-up: {status} {answer}")


class Slope(NamedTuple):
    """Of memory, over what is judged of a run."""

    mib_per_hour: float
    error: float
    """Standard error, from how far the medians of the windows lie from the line."""
    first: float
    last: float
    """Medians of the first and the last window, MiB."""

    @property
    def problem(self) -> str | None:
        """Why memory was not seen to be flat."""
        most, some = FLAT * self.first, self.mib_per_hour - 3 * self.error
        # Both: nine windows of a few minutes went down steeply enough by chance, once in twenty runs of noise.
        if max(self.mib_per_hour, 0) + 3 * self.error < most:
            return None
        what = "memory grows" if some > 0 else "too short or too noisy to tell whether memory grows"
        return f"{what}: {self.mib_per_hour:+.2f} ± {self.error:.2f} MiB/h, and flat is below {most:.1f} with three errors"


def slope_of(looks: list[Looked]) -> Slope:
    """A line through the medians of nine windows after the warm-up."""
    judged = [look for look in looks if look.at_s >= WARM * looks[-1].at_s]
    size = len(judged) // WINDOWS
    windows = [judged[at * size : (at + 1) * size] for at in range(WINDOWS)]
    hours = [statistics.fmean(look.at_s for look in window) / 3600 for window in windows]
    mib = [statistics.median(look.rss_mib for look in window) for window in windows]
    found = statistics.linear_regression(hours, mib)
    rest = [y - found.intercept - found.slope * x for x, y in zip(hours, mib, strict=True)]
    spread = sum((x - statistics.fmean(hours)) ** 2 for x in hours)
    error = (sum(each**2 for each in rest) / (WINDOWS - 2) / spread) ** 0.5
    return Slope(found.slope, error, mib[0], mib[-1])


def report(ran: Ran, minutes: float) -> str:
    checker, slope = ran.checker, slope_of(ran.looks)
    judged = [look for look in ran.looks if look.at_s >= WARM * ran.looks[-1].at_s]
    files = [look.files for look in judged]
    canaries = {
        name: value for name, value in ran.metrics.items() if name.startswith("zerodrift_canaries_total")
    }
    quick, slow = statistics.median(ran.health_ms), statistics.quantiles(ran.health_ms, n=100)[-1]
    return "\n".join(
        [
            f"{minutes:g} minutes, {ran.counts['updates']} updates, {ran.counts['updates refused']} refused",
            f"answers: {json.dumps(dict(sorted(ran.counts.items())))}",
            (
                f"checked: {checker.samples} samples, {checker.tokens} tokens, every bit; {checker.replayed} samples drawn again; "
                f"{checker.mixed} of more than one version, {checker.kept} over KV that was kept"
            ),
            (
                f"memory: {slope.first:.1f} MiB, at the end {slope.last:.1f}; {slope.mib_per_hour:+.2f} ± {slope.error:.2f} MiB/h "
                f"after the first {100 * WARM:.0f} %; at most {max(look.rss_mib for look in ran.looks):.1f}"
            ),
            (
                f"files: {min(files)} to {max(files)}, median {statistics.median(files):g}; threads: at most "
                f"{max(look.threads for look in judged)}"
            ),
            f"/health: median {quick:.1f} ms, p99 {slow:.1f} ms of {len(ran.health_ms)}",
            f"{len(ran.problems)} problems; in flight at the end: {ran.metrics['zerodrift_requests_in_flight']:g}; {canaries}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="serve-hour-") as directory:
        ran = run(Path(directory), options.minutes, options.clients)
    if problem := slope_of(ran.looks).problem:
        ran.problems.append(problem)
    sys.stdout.write(report(ran, options.minutes) + "\n")
    sys.stdout.writelines(f"WRONG {problem}\n" for problem in ran.problems)
    return int(bool(ran.problems))


if __name__ == "__main__":
    sys.exit(main())
