"""Recorded traces of a real model as streams for the monitor: a fault from step k on, and the steps until it is seen.

    python tests/reliability/monitor_traces.py

The engine is the built-in Qwen3 in bf16, decoding with a KV cache and a head in fp32; the trainer is the same model's
forward over whole sequences. Every trace is sampled and scored once; a step draws 20,000 tokens' worth of whole sequences
from them. The exact engine's traces are its own, scored by the exact trainer: not one bit differs.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import zerodrift as zd
from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.monitor.decision import Decision, Measured
from zerodrift.monitor.monitor import Monitor

MODEL = "testbed:qwen3"
SEQUENCES, LENGTH, PROMPT = 512, 48, 12
TOKENS, SINCE, UNTIL = 20_000, 30, 60


@dataclass(frozen=True)
class Traces:
    """Engine's and trainer's logprobs of the same tokens, [sequence, token]."""

    behavior: np.ndarray
    trainer: np.ndarray

    def step(self, rng: np.random.Generator) -> dict[str, Any]:
        chosen = rng.integers(len(self.behavior), size=TOKENS // self.behavior.shape[1])
        return {"behavior_logprobs": self.behavior[chosen], "old_logprobs": self.trainer[chosen]}


def head(model: Any, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logprobs with the head in this precision."""
    return (hidden.to(dtype) @ model.lm_head.weight.to(dtype).T).float().log_softmax(dim=-1)


@torch.no_grad()
def sampled(model: Any, head_dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Ids with their prompts, and the logprobs that the engine reports while it decodes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, model.config.vocab_size, (SEQUENCES, PROMPT), generator=generator)
    new, cache, reported = ids, None, []
    for _ in range(LENGTH):
        output = model.model(new, past_key_values=cache, use_cache=True)
        cache, logprobs = output.past_key_values, head(model, output.last_hidden_state[:, -1], head_dtype)
        new = torch.multinomial(logprobs.exp(), 1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
        reported.append(logprobs.gather(-1, new))
    return ids, torch.cat(reported, dim=1).numpy()


@torch.no_grad()
def scored(model: Any, ids: torch.Tensor) -> np.ndarray:
    """The trainer's forward, its head in fp32."""
    found = []
    for rows in ids.split(64):
        hidden = model.model(rows[:, :-1]).last_hidden_state[:, PROMPT - 1 :]
        logprobs = head(model, hidden, torch.float32)
        found.append(logprobs.gather(-1, rows[:, PROMPT:, None])[..., 0])
    return torch.cat(found).numpy()


def moved(model: Any, by: float) -> Any:
    """A trainer that has learnt: every weight by this share of its tensor's size, in some direction."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return model


def loaded() -> Any:
    return zd.models.load(MODEL).to(torch.bfloat16).eval()


def in_bf16() -> dict[str, Traces]:
    """Healthy traces and faulty ones."""
    engine = loaded()
    ids, reported = sampled(engine, torch.float32, seed=0)
    coarse_ids, coarse = sampled(engine, torch.bfloat16, seed=1)
    return {
        "healthy": Traces(reported, scored(engine, ids)),
        "head in bf16 (path/head-precision)": Traces(coarse, scored(engine, coarse_ids)),
        "stale weights, labelled fresh": Traces(reported, scored(moved(loaded(), 0.01), ids)),
        "temperature 0.95 on one side": Traces(reported, tempered(engine, ids, 0.95)),
    }


@torch.no_grad()
def tempered(model: Any, ids: torch.Tensor, temperature: float) -> np.ndarray:
    found = []
    for rows in ids.split(64):
        hidden = model.model(rows[:, :-1]).last_hidden_state[:, PROMPT - 1 :]
        logprobs = (head(model, hidden, torch.float32) / temperature).log_softmax(dim=-1)
        found.append(logprobs.gather(-1, rows[:, PROMPT:, None])[..., 0])
    return torch.cat(found).numpy()


def exact() -> Traces:
    """The exact engine's own rollouts, scored by the exact trainer."""
    engine = zd.Engine(MODEL)
    prompts = [[5 + (7 * place + 3 * each) % 400 for each in range(PROMPT)] for place in range(64)]
    outputs = engine.generate(prompts, zd.SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=0))
    model = zd.exact.prepare(zd.models.load(MODEL))
    with torch.no_grad():
        scores = zd.exact.token_logprobs(model, outputs)
    behavior = np.array([output.logprobs for output in outputs])
    return Traces(behavior, np.array([np.asarray(each.detach()) for each in scores]))


def first_bad(healthy: Traces, faulty: Traces, precision: str) -> Decision | None:
    """A monitor that knows the healthy ones, and the first step of the others that it keeps back."""
    rng = np.random.default_rng(0)
    # Built-in models have large logits, and so more rounding than the gates of real ones allow: see docs/attribution.md.
    level = float(np.abs(healthy.trainer - healthy.behavior).mean())
    gate = max((2 * level) ** 2, 1e-6)
    monitor = Monitor(MonitoringConfig(kl_threshold=gate), precision=precision)
    for step in range(UNTIL):
        given = (healthy if step < SINCE else faulty).step(rng)
        decision = monitor.observe(**given, versions=step, trainer_version=step, step=step)
        if not decision.train:
            assert step >= SINCE, decision.reasons
            return decision
    return None


def table() -> Iterator[tuple[str, Traces, Decision | None]]:
    """Each kind of trace, with what the monitor made of it."""
    traces = in_bf16()
    for name, faulty in traces.items():
        yield name, faulty, first_bad(traces["healthy"], faulty, "bf16")
    bitwise = exact()
    yield "exact engine", bitwise, first_bad(bitwise, bitwise, "fp32")
    wrong = Traces(bitwise.behavior, bitwise.trainer + np.where(bitwise.trainer < -1e-3, 2e-5, 0))
    yield "exact engine, 2e-5 nats off", wrong, first_bad(bitwise, wrong, "fp32")


def main() -> None:
    sys.stdout.write(
        "| traces from step k on | mean abs Δ | bias | steps until kept back | reasons |\n|---|---|---|---|---|\n"
    )
    for name, traces, found in table():
        delta = traces.trainer - traces.behavior
        seen = "never" if found is None else str(found.step - SINCE)
        assert found is None or isinstance(found.mismatch, Measured)
        codes = (
            ""
            if found is None
            else ", ".join(dict.fromkeys(f"`{each.code}`" for each in found.reasons if each.bad))
        )
        sys.stdout.write(
            f"| {name} | {np.abs(delta).mean():.3g} | {delta.mean():+.2g} | {seen} | {codes} |\n"
        )


if __name__ == "__main__":
    main()
