"""Bugs that a run's own rollouts show: each makes the lines of a dump, for `zerodrift blame`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from history.bug import reenacted
from zerodrift import models
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import Request

STEPS = 8
Row = dict[str, Any]


class Recorded(NamedTuple):
    """Lines of a dump, and the checkpoints that whoever asks has at hand."""

    rows: list[Row]
    checkpoint: str | Path
    previous: Path | None = None


def _sampled(engine: ReferenceBackend, requests: Sequence[Request]) -> list[Row]:
    answers = engine.generate(requests)
    return [
        {
            "step": STEPS * number // len(requests),
            "prompt_ids": list(request.prompt.token_ids),
            "completion_ids": list(answer.completions[0].token_ids),
            "logprobs": list(answer.completions[0].logprobs),
            "temperature": request.sampling.temperature,
        }
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def temperature_forgotten(spec: str, requests: Sequence[Request], _: Path) -> Recorded:
    """The loss takes the softmax of logits as they are."""
    rows = _sampled(ReferenceBackend(spec, dtype="float32"), requests)
    trainer = ReferenceBackend(spec, dtype="float32")
    scores = trainer.score([[*row["prompt_ids"], *row["completion_ids"]] for row in rows])
    for row, score in zip(rows, scores, strict=True):
        row["trainer_logprobs"] = score[len(row["prompt_ids"]) - 1 :]
    return Recorded(rows, spec)


def labelled_on_return(spec: str, requests: Sequence[Request], scratch: Path) -> Recorded:
    """An update lands while the first half is in flight: its label is read when it returns, and is that of after."""
    before = models.materialise(spec, scratch / "before")
    after = _one_step_later(before, scratch / "after")
    half = len(requests) // 2
    rows = _sampled(ReferenceBackend(before, dtype="float32"), requests)[:half]
    rows += _sampled(ReferenceBackend(after, dtype="float32"), requests)[half:]
    for row in rows:
        row["version"] = 2
    return Recorded(rows, after, previous=before)


def _one_step_later(before: Path, after: Path) -> Path:
    """A large step of an optimizer, in every tensor."""
    shutil.copytree(before, after)
    generator = torch.Generator().manual_seed(2)
    for file in after.glob("*.safetensors"):
        tensors = {
            name: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return after


RECORDED = (
    reenacted("NeMo-RL#316", temperature_forgotten),
    reenacted("AReaL#1569", labelled_on_return),
)
