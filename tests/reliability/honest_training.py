"""Honest trainings under the monitor, whose rollouts are not exact: what a false alarm is measured on.

    python tests/reliability/honest_training.py qwen3-bf16 [--steps 1000] [--out runs/honest] [--device cuda]
    python tests/reliability/honest_training.py summary           # of every training in --out
    python tests/reliability/honest_training.py judge [NAME]      # recorded batches again, under the monitor as it is now
    python tests/reliability/honest_training.py baselines [NAME] [--every 100]  # the same from every so many steps on

GRPO on a built-in model: samples of each prompt, advantages within a prompt, AdamW. The reward is the share of wanted tokens
among as many as an output may have, so entropy falls, outputs grow, and the policy leaves its reference. The engine draws by
its own arithmetic; the trainer scores whole outputs by another. A batch that is not `train` is left out.

Goes on where it stopped: weights, moments of AdamW and the monitor's state are kept every fifty steps, a step's randomness
is its number's. A line of JSON for each step, and the numbers of every token in `record-*.npz`.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from honest_rollouts import Engine, Honest, Rollouts, engine_of, prompts_of
from safetensors.torch import load_file, save_file

import zerodrift as zd
from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.monitor.decision import Decision
from zerodrift.monitor.monitor import Monitor

REPLICAS = 4
WANTED = 4
"""Every id that is 1 beyond a multiple of it is wanted."""
KEPT_EVERY = 50
REFERENCE_EVERY = 10
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

TRAININGS = {
    "qwen3-bf16": Honest("testbed:qwen3"),
    "llama-bf16-fp32": Honest("testbed:llama", trainer_dtype="float32"),
    "gemma3-bf16": Honest("testbed:gemma3"),
    "moe-bf16": Honest("testbed:qwen3-moe"),
    "qwen2-bf16-lag2": Honest("testbed:qwen2", lag=2),
    "vllm-bf16": Honest("testbed:qwen3", "vllm", prompts=4, samples=4, limit=32),
    "vllm-fp32": Honest(
        "testbed:qwen3", "vllm", "float32", "float32", precision="fp32", prompts=4, samples=4, limit=32
    ),
}  # fmt: skip


def autocast(asked: Honest) -> Any:
    return torch.autocast(asked.device, dtype=torch.bfloat16, enabled=asked.trainer_dtype == "bfloat16")


def scored(model: Any, made: Rollouts, asked: Honest) -> torch.Tensor:
    """The trainer's forward over whole outputs, in the dtype that it trains in."""
    with autocast(asked):
        logits = model(made.ids[:, :-1]).logits[:, made.prompt - 1 :]
    return logits.float().log_softmax(dim=-1).gather(-1, made.ids[:, made.prompt :, None])[..., 0]


def numbers(values: torch.Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def rewards_of(made: Rollouts, limit: int) -> np.ndarray:
    drawn = made.ids[:, made.prompt :].cpu().numpy()
    within = np.arange(drawn.shape[1]) < made.lengths[:, None]
    return ((drawn % WANTED == 1) & within).sum(axis=1) / limit


def arguments(asked: Honest, step: int, flat: dict[str, np.ndarray]) -> dict[str, Any]:
    """Of `observe`, out of what is recorded."""
    places = range(len(flat["lengths"]))
    given = {
        "behavior_logprobs": flat["behavior"], "old_logprobs": flat["old"], "lengths": flat["lengths"],
        "versions": int(flat["version"]), "trainer_version": step, "rewards": flat["rewards"], "step": step,
        "groups": {
            "prompt": [place // asked.samples for place in places],
            "environment": [("chat", "plain")[place // asked.samples % 2] for place in places],
            "replica": [place % REPLICAS for place in places],
        },
    }  # fmt: skip
    return {**given, "rescored_logprobs": flat["rescored"]} if asked.lag else given


def monitor_of(asked: Honest, level: float, path: Path | None = None) -> Monitor:
    """Built-in models have large logits, and so more rounding than the gates of real ones allow: see docs/attribution.md."""
    config = (
        MonitoringConfig() if asked.precision == "fp32" else MonitoringConfig(kl_threshold=(2 * level) ** 2)
    )
    return Monitor(config, precision=asked.precision, path=path)


def line_of(decision: Decision, monitor: Monitor) -> dict[str, Any]:
    scores = {
        f"{key} {name}": chart.cusum.score
        for key, track in monitor.remembered.tracks.items()
        for name, chart in zip(("up", "down", "scale"), track.charts, strict=True)
    }
    highest = max(scores, key=scores.__getitem__, default="")
    return {
        "step": decision.step, "state": str(decision.state), "gap": decision.gap and str(decision.gap),
        "codes": [f"{'warn ' * (not each.bad)}{each.code} {each.where}".strip() for each in decision.reasons],
        "says": [each.message for each in decision.reasons],
        "tokens": decision.tokens, "mean_abs": getattr(decision.mismatch, "mean_abs", None),
        "bias": getattr(decision.mismatch, "bias", None), "growth": getattr(decision.baseline, "growth", None),
        "entropy": decision.entropy, "highest_chart": scores.get(highest, 0.0), "highest_where": highest,
    }  # fmt: skip


class Training:
    """Model, optimizer and monitor, and how to keep them."""

    def __init__(self, asked: Honest, directory: Path) -> None:
        self.asked, self.directory = asked, directory
        directory.mkdir(parents=True, exist_ok=True)
        self.model, self.reference, self.before = (
            zd.models.load(asked.model).to(asked.device) for _ in range(3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=asked.rate, weight_decay=0.0)
        self.lines = directory / "steps.jsonl"
        self.step, self._version, self._records = 0, -1, dict[str, np.ndarray]()
        self._resume()
        self.monitor: Monitor | None = None

    def run_step(self, engine: Engine) -> dict[str, Any]:
        """Draw, judge, learn."""
        asked, step, since = self.asked, self.step, time.monotonic()
        made = engine.draw(self.model, prompts_of(asked, step), step)
        within = np.arange(made.behavior.shape[1]) < made.lengths[:, None]
        current = scored(self.model, made, asked)
        rewards = rewards_of(made, asked.limit)
        flat = {
            "behavior": made.behavior[within].astype(np.float32), "old": numbers(current)[within], "lengths": made.lengths,
            "version": np.array(made.version), "rewards": rewards,
        }  # fmt: skip
        if asked.lag:
            flat["rescored"] = self._rescored(made, step)[within]
        if self.monitor is None:
            self.monitor = self._monitor(flat)
        decision = self.monitor.observe(**arguments(asked, step, flat))
        line = line_of(decision, self.monitor)
        line |= {"length": float(made.lengths.mean()), "reward": float(rewards.mean())}
        if step % REFERENCE_EVERY == 0:
            line["reference_k3"] = self._reference_k3(current, made, within)
        if decision.train:
            self._learn(current, torch.tensor(within, device=asked.device), rewards)
        self._records |= {f"{step}.{name}": values for name, values in flat.items()}
        self.step += 1
        return {**line, "seconds": round(time.monotonic() - since, 3)}

    def _monitor(self, flat: dict[str, np.ndarray]) -> Monitor:
        level = self.directory / "level.json"
        if not level.exists():
            apart = np.abs(flat.get("rescored", flat["old"]) - flat["behavior"]).mean()
            level.write_text(json.dumps(float(apart)))
        return monitor_of(self.asked, json.loads(level.read_text()), self.directory / "monitor.json")

    @torch.no_grad()
    def _rescored(self, made: Rollouts, step: int) -> np.ndarray:
        """Under the weights that drew."""
        if made.version != self._version:
            assert made.version == step
            self.before.load_state_dict(self.model.state_dict())
            self._version = step
        return numbers(scored(self.before, made, self.asked))

    def _learn(self, current: torch.Tensor, within: torch.Tensor, rewards: np.ndarray) -> None:
        grouped = torch.tensor(rewards, device=current.device).view(self.asked.prompts, self.asked.samples)
        spread = grouped.std(dim=1, keepdim=True) + 1e-4
        advantage = ((grouped - grouped.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        # The ratio of an on-policy step is 1, and its gradient that of the logprob.
        loss = -(torch.exp(current - current.detach()) * advantage * within).sum() / within.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def _reference_k3(self, current: torch.Tensor, made: Rollouts, within: np.ndarray) -> float:
        theirs = numbers(scored(self.reference, made, self.asked))[within].astype(np.float64)
        apart = theirs - numbers(current)[within]
        return float((np.expm1(apart) - apart).mean())

    # --- kept and found again ------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Everything under the number of its step; what a kill leaves half-written has no `done`."""
        np.savez_compressed(self.directory / f"record-{self.step}.npz", **self._records)
        self._records = {}
        at = self.directory / f"kept-{self.step}"
        at.mkdir(exist_ok=True)
        tensors = {f"model.{name}": value.contiguous() for name, value in self.model.named_parameters()}
        names = {value: name for name, value in self.model.named_parameters()}
        for value, moments in self.optimizer.state.items():
            tensors |= {f"{moment}.{names[value]}": moments[moment] for moment in MOMENTS}
        save_file(tensors, at / "training.safetensors")
        shutil.copy(self.directory / "monitor.json", at / "monitor.json")
        (at / "done").touch()
        for older in self.directory.glob("kept-*"):
            if older != at:
                shutil.rmtree(older)

    def _resume(self) -> None:
        done = [path.parent for path in self.directory.glob("kept-*/done")]
        self.step = max(map(number_of, done), default=0)
        (self.directory / "monitor.json").unlink(missing_ok=True)
        for record in self.directory.glob("record-*.npz"):
            if number_of(record) > self.step:
                record.unlink()
        if not done:
            self.lines.unlink(missing_ok=True)
            return
        at = self.directory / f"kept-{self.step}"
        tensors = load_file(at / "training.safetensors")
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(tensors[f"model.{name}"])
                if f"step.{name}" in tensors:
                    self.optimizer.state[value] = {
                        each: tensors[f"{each}.{name}"].to(value.device if each != "step" else "cpu") for each in MOMENTS
                    }  # fmt: skip
        shutil.copy(at / "monitor.json", self.directory / "monitor.json")
        lines = self.lines.read_text().splitlines(keepends=True)[: self.step]
        self.lines.write_text("".join(lines))


def number_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def train(name: str, out: Path, steps: int, device: str) -> None:
    """All steps that are left."""
    torch.set_num_threads(1)
    directory = out / name
    training = Training(replace(TRAININGS[name], device=device), directory)
    with engine_of(training.asked, directory) as engine:
        while training.step < steps:
            line = training.run_step(engine)
            with training.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")
            halted = line["state"] == "HALT"
            if halted or training.step % KEPT_EVERY == 0 or training.step == steps:
                training.keep()
            _bar(name, training.step, steps, line)
            if halted:
                break
    sys.stderr.write("\n")


def _bar(name: str, done: int, of: int, line: dict[str, Any]) -> None:
    if sys.stderr.isatty() or done % 20 == 0 or line["state"] != "OK":
        filled = 30 * done // of
        sys.stderr.write(
            f"{name} [{'#' * filled}{'.' * (30 - filled)}] {done}/{of} {line['state']} {line['codes']} |Δ| {line['mean_abs']:.3g} "
            f"entropy {line['entropy']:.2f} length {line['length']:.0f} {line['seconds']:.2f} s"
            + ("\r" if sys.stderr.isatty() else "\n")
        )


# --- what came of it ----------------------------------------------------------------------------------------------------


def recorded(directory: Path) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Every step that was kept, in order."""
    for path in sorted(directory.glob("record-*.npz"), key=number_of):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        for step in sorted({int(name.partition(".")[0]) for name in arrays}):
            start = f"{step}."
            yield step, {key.removeprefix(start): arrays[key] for key in arrays if key.startswith(start)}


def judged(name: str, out: Path, since: int = 0) -> list[dict[str, Any]]:
    """The recorded batches from a step on under the monitor as it is now, which takes its baseline from the first of them."""
    asked, directory = TRAININGS[name], out / name
    monitor = monitor_of(asked, json.loads((directory / "level.json").read_text()))
    lines = []
    for step, flat in recorded(directory):
        if step < since:
            continue
        line = line_of(monitor.observe(**arguments(asked, step, flat)), monitor)
        lines.append(
            {**line, "length": float(flat["lengths"].mean()), "reward": float(flat["rewards"].mean())}
        )
    return lines


def baselines(name: str, out: Path, every: int) -> dict[str, Any]:
    """States over monitors that began at different steps, each for as long as the training went on."""
    last = max(map(number_of, (out / name).glob("record-*.npz")))
    runs = [judged(name, out, since) for since in range(0, last - every, every)]
    states = [Counter(line["state"] for line in lines) for lines in runs]
    return {
        "training": name, "baselines": len(runs), "steps": sum(map(len, runs)), "states": dict(sum(states, Counter())),
        "highest_chart": [round(max(line["highest_chart"] for line in lines), 1) for lines in runs],
        "bad": [(line["step"], line["codes"]) for lines in runs for line in lines if line["state"] in {"QUARANTINE", "HALT"}],
    }  # fmt: skip


def summary(name: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First and last fifty steps beside each other, and every state and code."""
    states = Counter(line["state"] for line in lines)
    ends = {
        key: [float(f"{np.mean(found):.4g}") for part in (lines[:50], lines[-50:])
              if (found := [line[key] for line in part if line.get(key) is not None])]
        for key in ("entropy", "length", "reward", "mean_abs", "bias", "reference_k3")
    }  # fmt: skip
    bad = states["QUARANTINE"] + states["HALT"]
    return {
        "training": name, "steps": len(lines), "tokens": sum(line["tokens"] for line in lines), "states": dict(states),
        "first_bad": next((line["step"] for line in lines if line["state"] in {"QUARANTINE", "HALT"}), None),
        "codes": dict(Counter(code for line in lines for code in line["codes"])), **ends, "growth": lines[-1]["growth"],
        "highest_chart": round(max(line["highest_chart"] for line in lines), 2),
        # None in n steps: below 3/n, with a confidence of 95 %.
        "bad_rate": bad / len(lines), "bad_rate_below": None if bad else 3 / len(lines),
        "seconds_per_step": float(np.median([line.get("seconds", 0.0) for line in lines])),
    }  # fmt: skip


def _told(word: str, name: str, out: Path, every: int) -> dict[str, Any]:
    if word == "baselines":
        return baselines(name, out, every)
    if word == "judge":
        return summary(name, judged(name, out))
    lines = (out / name / "steps.jsonl").read_text().splitlines()
    return summary(name, [json.loads(line) for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("training", choices=(*TRAININGS, "summary", "judge", "baselines"))
    parser.add_argument("name", nargs="?", choices=tuple(TRAININGS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/honest"))
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.training in TRAININGS:
        train(given.training, given.out, given.steps, given.device)
        return
    found = []
    for path in sorted(given.out.glob("*/steps.jsonl")):
        name = path.parent.name
        if given.name in {None, name}:
            found.append(_told(given.training, name, given.out, given.every))
            sys.stdout.write(json.dumps(found[-1]) + "\n")
    (given.out / f"{given.training}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
