"""What does each cause do to the gradient? One table, from one command:

    python tests/reliability/gap_table.py            # every cause
    python tests/reliability/gap_table.py DIR        # also an archive of them, one batch each, for `zerodrift archive gradient`

Rollouts are drawn from a built-in model at temperature 0.7, 8 prompts of four environments with 6 samples of 16 tokens each, and
rewarded for even token ids. Every cause reports other logprobs of the same tokens; no token is another.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from zerodrift.audit.gradient.compare import compare
from zerodrift.core.request import SamplingParams
from zerodrift.models.loading import load
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState
from zerodrift.records.gradient import GradientRecord
from zerodrift.stats.kl import k3

MODEL = "testbed:qwen3"
TEMPERATURE = 0.7
PROMPTS, SAMPLES, LENGTH, ENVIRONMENTS = 8, 6, 16, 4
FEW = 0.02
"""Share of numbers that the fault with tails moves."""


class Rollout(NamedTuple):
    """One sample, and logprobs of it by several forwards."""

    group: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def reward(self) -> float:
        return sum(token % 2 == 0 for token in self.output) / len(self.output)


Numbers = list[np.ndarray]
"""Of each rollout, one per token."""


@cache
def model(dtype: str = "float32"):
    return load(MODEL, dtype)


@torch.no_grad()
def logits(module, ids: list[list[int]]) -> torch.Tensor:
    return module(input_ids=torch.tensor(ids)).logits.float()


@cache
def rollouts() -> tuple[Rollout, ...]:
    """All samples at once: every prompt has three tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [(5 + group, 40, 7) for group in range(PROMPTS) for _ in range(SAMPLES)]
    ids = [list(prompt) for prompt in prompts]
    for _ in range(LENGTH):
        p = torch.softmax(logits(model(), ids)[:, -1] / TEMPERATURE, -1)
        for row, token in zip(ids, torch.multinomial(p, 1, generator=generator)[:, 0].tolist(), strict=True):
            row.append(token)
    return tuple(Rollout(place // SAMPLES, tuple(row[:3]), tuple(row[3:])) for place, row in enumerate(ids))


@cache
def rows(dtype: str = "float32") -> torch.Tensor:
    """[rollout, token, vocabulary]: logits of every place."""
    return rows_of(model(dtype))


def rows_of(module) -> torch.Tensor:
    return logits(module, [[*each.prompt, *each.output] for each in rollouts()])[:, 2:-1]


def numbers(rows_RTV: torch.Tensor, temperature: float = TEMPERATURE) -> Numbers:
    ids = torch.tensor([each.output for each in rollouts()])
    found = torch.log_softmax(rows_RTV / temperature, -1).gather(2, ids[..., None])[..., 0]
    return list(found.double().numpy())


def changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Numbers:
    """By a copy of the model whose matrices are others."""
    other = load(MODEL, "float32")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(change(name, parameter))
    return numbers(rows_of(other))


def rounded(bits: int) -> Numbers:
    """Weights in so many bits, a scale for each row."""
    most = 2 ** (bits - 1) - 1

    def change(_: str, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.abs().amax(dim=1, keepdim=True) / most
        return torch.round(weight / scale) * scale

    return changed(change)


def stale() -> Numbers:
    """Weights that are a percent off, as after some updates that did not arrive."""
    generator = torch.Generator().manual_seed(1)
    return changed(
        lambda _, weight: weight + 0.01 * weight.std() * torch.randn(weight.shape, generator=generator)
    )


def each(change: Callable[[np.ndarray], np.ndarray]) -> Numbers:
    return [change(values) for values in numbers(rows())]


def one_environment() -> Numbers:
    right, raw = numbers(rows()), numbers(rows(), 1.0)
    return [
        raw[place] if rollout.group % ENVIRONMENTS == 0 else right[place]
        for place, rollout in enumerate(rollouts())
    ]


def likeliest() -> Numbers:
    return list(torch.log_softmax(rows() / TEMPERATURE, -1).amax(-1).double().numpy())


def tails() -> Numbers:
    rng = np.random.default_rng(2)
    return each(lambda values: values - 3.0 * (rng.random(values.shape) < FEW))


CAUSES: dict[str, Callable[[], Numbers]] = {
    "none: the same numbers": lambda: numbers(rows()),
    "healthy: the whole model in bf16": lambda: numbers(rows("bfloat16")),
    "bias of 0.002 nats": lambda: each(lambda values: values - 0.002),
    "bias of 0.1 nats": lambda: each(lambda values: values - 0.1),
    "8-bit weights (`path/weight-quantisation`)": lambda: rounded(8),
    "4-bit weights (`path/weight-quantisation`)": lambda: rounded(4),
    "weights 1 % off (`weights/stale`)": stale,
    "one token in 50 off by 3 nats": tails,
    "temperature 0.75 for 0.7 (`semantic/temperature`)": lambda: numbers(rows(), 0.75),
    "raw logprobs in one environment of four": one_environment,
    "raw logprobs at 0.7 (`semantic/raw-logprobs`)": lambda: numbers(rows(), 1.0),
    "shifted by one (`semantic/off-by-one`)": lambda: each(lambda values: np.roll(values, 1)),
    "of the likeliest token (`semantic/wrong-token`)": likeliest,
}


def batch(step: int, reported: Numbers, message: str) -> ArchivedBatch:
    return ArchivedBatch(
        step=step,
        state=BatchState.QUARANTINE,
        reasons=(message,),
        rollouts=tuple(
            ArchivedRollout(
                id=str(place), prompt_token_ids=rollout.prompt, token_ids=rollout.output,
                behavior_logprobs=tuple(values.tolist()), reward=rollout.reward, group=str(rollout.group),
                environment=str(rollout.group % ENVIRONMENTS), sampling=SamplingParams(temperature=TEMPERATURE),
                stated=("temperature",),
            )
            for place, (rollout, values) in enumerate(zip(rollouts(), reported, strict=True))
        ),
    )  # fmt: skip


def measured(name: str) -> GradientRecord:
    return compare(batch(0, CAUSES[name](), name), model(), by_part=False)


def table() -> Iterator[str]:
    yield "| cause | mean abs Δ | k3 | cosine | length | clipped otherwise | moved by | chance |"
    yield "|---|---|---|---|---|---|---|---|"
    true = np.concatenate(numbers(rows()))
    for name, report in CAUSES.items():
        found = measured(name)
        whole, distance = found.whole, k3(true - np.concatenate(report())).mean()
        cosine = "–" if whole.cosine is None else f"{whole.cosine:.4f}"
        length = "–" if whole.norm_ratio is None else f"{whole.norm_ratio:.3f}"
        yield (
            f"| {name} | {whole.mean_abs:.2g} | {distance:.2g} | {cosine} | {length} | {100 * whole.clip_changed:.1f} % | "
            f"{found.error:.2g} | {found.noise:.2g} |"
        )


def write(directory: Path) -> None:
    with Archive(directory, ArchiveSettings(healthy_one_in=1)) as archive:
        for step, (name, report) in enumerate(CAUSES.items()):
            archive.append(batch(step, report(), name))


def main(words: list[str]) -> None:
    if words:
        write(Path(words[0]))
        return
    for line in table():
        print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main(sys.argv[1:])
