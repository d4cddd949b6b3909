"""Engines for honest trainings: plain transformers with a cache, and a real vLLM server. Neither computes what the trainer does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

import zerodrift as zd
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.config.load import load
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion

ROOT = Path(__file__).parents[2]
ENDS = tuple(range(0, 512, 16))
"""Ids that end an output: one in sixteen, so that outputs have room to grow."""


@dataclass(frozen=True)
class Honest:
    """One training."""

    model: str
    engine: str = "transformers"
    """Or `vllm`."""
    engine_dtype: str = "bfloat16"
    trainer_dtype: str = "bfloat16"
    """Of the forward; the weights that AdamW moves are fp32."""
    precision: str = "bf16"
    prompts: int = 8
    samples: int = 4
    limit: int = 32
    rate: float = 1e-5
    lag: int = 0
    """Versions that the engine falls behind before it gets new weights; tokens are re-scored under their own."""
    device: str = "cpu"


class Rollouts(NamedTuple):
    """Ids with their prompts on the left, [sequence, prompt + tokens]; what the engine reported; how long each is."""

    ids: torch.Tensor
    behavior: np.ndarray
    lengths: np.ndarray
    prompt: int
    version: int
    """As the engine tells it."""


class Engine(Protocol):
    def draw(self, model: Any, prompts: torch.Tensor, step: int) -> Rollouts: ...


class Transformers:
    """Decodes with a cache, a batch at a time, in its own precision."""

    def __init__(self, asked: Honest) -> None:
        self._asked, self._version = asked, -1
        self._model = zd.models.load(asked.model, asked.engine_dtype).to(asked.device)

    @torch.no_grad()
    def draw(self, model: Any, prompts: torch.Tensor, step: int) -> Rollouts:
        asked = self._asked
        if self._version < 0 or step - self._version > asked.lag:
            for mine, theirs in zip(self._model.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
            self._version = step
        generator = torch.Generator(asked.device).manual_seed(step)
        ids, new, cache, reported = prompts, prompts, None, []
        done = torch.zeros(len(prompts), dtype=torch.bool, device=asked.device)
        ends = torch.tensor(ENDS, device=asked.device)
        for _ in range(asked.limit):
            output = self._model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logprobs = output.past_key_values, output.logits[:, -1].float().log_softmax(dim=-1)
            new = torch.multinomial(logprobs.exp(), 1, generator=generator)
            ids = torch.cat([ids, new], dim=1)
            reported.append(logprobs.gather(-1, new))
            done |= torch.isin(new[:, 0], ends)
            if done.all():
                break
        return cut(ids, torch.cat(reported, dim=1).cpu().numpy(), prompts.shape[1], self._version)


class Served:
    """A real server that gets the weights of every step before it draws."""

    def __init__(self, engine: Any, exchange: Path, limit: int) -> None:
        self._engine, self._exchange, self._limit = engine, exchange, limit

    def draw(self, model: Any, prompts: torch.Tensor, step: int) -> Rollouts:
        directory = self._exchange / f"step-{step}"
        model.save_pretrained(directory)
        self._engine.load_weights(directory, WeightVersion(str(step)))
        shutil.rmtree(directory)
        sampling = SamplingParams(max_tokens=self._limit, stop_token_ids=ENDS, ignore_eos=True)
        # Prefixes of old weights are told apart by their salt.
        requests = [Request(Prompt(tuple(row), cache_salt=str(step)), sampling) for row in prompts.tolist()]
        made = [answer.completions[0] for answer in self._engine.generate(requests)]
        assert all(span.version.label == str(step) for each in made for span in each.versions)
        longest = max(len(each.token_ids) for each in made)
        drawn = torch.tensor([[*each.token_ids, *[0] * (longest - len(each.token_ids))] for each in made])
        numbers = np.array([[*each.logprobs, *[0.0] * (longest - len(each.logprobs))] for each in made])
        return cut(torch.cat([prompts, drawn], dim=1), numbers, prompts.shape[1], step)


def cut(ids: torch.Tensor, reported: np.ndarray, prompt: int, version: int) -> Rollouts:
    """An output ends with its first end."""
    ends = np.isin(ids[:, prompt:].cpu().numpy(), ENDS)
    ends[:, -1] = True
    return Rollouts(ids, reported, ends.argmax(axis=1) + 1, prompt, version)


@contextmanager
def engine_of(asked: Honest, directory: Path) -> Iterator[Engine]:
    if asked.engine == "transformers":
        yield Transformers(asked)
        return
    model = directory / "model"
    if not model.exists():
        zd.models.materialise(asked.model, model)
    # One thread: the numbers are the same, and the trainer has the other core. With AMX vLLM's bf16 needs all of oneDNN.
    changed = ("engine.env.OMP_NUM_THREADS='1'", "engine.env.ONEDNN_MAX_CPU_ISA='ALL'")
    config = load(ROOT / "docs" / "vllm.yaml", changed).engine
    with open_engine(config, ServedModel(str(model), asked.engine_dtype), directory) as engine:
        exchange = directory / "exchange"
        exchange.mkdir(exist_ok=True)
        yield Served(engine, exchange.resolve(), asked.limit)


def prompts_of(asked: Honest, step: int) -> torch.Tensor:
    """[sequence, token]: two kinds of prompts, each as often as it has samples."""
    generator = torch.Generator().manual_seed(1_000_000 + step)
    rows = torch.randint(16, 512, (asked.prompts, 8), generator=generator)
    rows[::2, :4] = torch.arange(100, 104)
    return rows.repeat_interleave(asked.samples, dim=0).to(asked.device)
