"""The language model behind every peer server, and sampling from it written out by hand.

One sequence at a time, the whole prefix again for every token, fp32, no cache: there is nothing here that an engine
would do for speed, so a log-probability has one value and can be computed again beside it. How an engine shapes its
distribution (`Rule`) and what it reports is the business of each server; the steps they share are below.

A seed fixes the draws of this model. It does not reproduce the random numbers of the engine that a peer stands for.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from zerodrift import models

Floats = NDArray[np.float32]
DEFAULT_MODEL = "testbed:qwen3"
INCOMPLETE = "\ufffd"  # what a tokenizer writes for bytes that are not a whole character yet


class Policy:
    """A model with its tokenizer; never changed after loading, so that servers may share one."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.tokenizer: Any = models.tokenizer(spec)
        self._model: Any = models.load(spec)
        self._turn = threading.Lock()
        self.config: Any = self._model.config
        self.context = int(self.config.max_position_embeddings)
        self.vocabulary = int(self.config.vocab_size)
        self.end = int(self.tokenizer.eos_token_id)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    def logits(self, ids: Sequence[int]) -> Floats:
        """(position, token); row i belongs to the token after `ids[i]`."""
        with self._turn, torch.inference_mode():
            rows = self._model(torch.tensor([list(ids)])).logits[0]
        return cast("Floats", rows.float().numpy().copy())

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))


load = cache(Policy)


@dataclass(frozen=True)
class Distribution:
    """Drawn from on the left, reported on the right: engines differ in whether these are the same."""

    probabilities: NDArray[np.floating[Any]]
    reported: Floats


@dataclass(frozen=True)
class Step:
    token: int
    reported: Floats

    @property
    def logprob(self) -> float:
        return float(self.reported[self.token])


# (logits of the next token, prompt, output so far) -> what to draw from and what to say about it
Rule = Callable[[Floats, Sequence[int], Sequence[int]], Distribution]


def steps(
    policy: Policy, prompt: Sequence[int], rule: Rule, draws: np.random.Generator, limit: int
) -> Iterator[Step]:
    """At most `limit` tokens; whoever reads decides when to stop earlier."""
    output: list[int] = []
    for _ in range(limit):
        distribution = rule(policy.logits([*prompt, *output])[-1], prompt, output)
        token = draw(distribution.probabilities, draws)
        output.append(token)
        yield Step(token, distribution.reported)


def draw(probabilities: NDArray[np.floating[Any]], draws: np.random.Generator) -> int:
    """Inversion; a token of probability zero is never returned."""
    mass = np.cumsum(probabilities, dtype=np.float64)
    return int(np.searchsorted(mass, draws.random() * mass[-1], side="right"))


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return cast("Floats", shifted - np.log(np.exp(shifted).sum(dtype=np.float32)))


def softmax(logits: Floats) -> Floats:
    return cast("Floats", np.exp(log_softmax(logits)))


def only(logits: Floats, token: int | None = None) -> Floats:
    """All probability on one token: greedy decoding as a distribution."""
    certain = np.zeros_like(logits)
    certain[int(logits.argmax()) if token is None else token] = 1
    return certain


def counts(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(ids, dtype=np.int64), minlength=vocabulary)


def scale_seen(logits: Floats, seen: NDArray[np.bool_], penalty: float) -> Floats:
    """The repetition penalty of Keskar et al. 2019: towards zero for a positive logit, away from it for a negative."""
    scaled = np.where(logits < 0, logits * np.float32(penalty), logits / np.float32(penalty))
    return cast("Floats", np.where(seen, scaled, logits))


def subtract_seen(logits: Floats, count: NDArray[np.int64], presence: float, frequency: float) -> Floats:
    penalty = presence * (count > 0) + frequency * count
    return logits - penalty.astype(np.float32)


def top_k_mask(probabilities: Floats, k: int) -> NDArray[np.bool_]:
    """The k most probable; 0 means all. Ties go to the lower id."""
    kept = np.zeros(len(probabilities), dtype=bool)
    kept[np.argsort(-probabilities, kind="stable")[: k or None]] = True
    return kept


def nucleus_mask(probabilities: Floats, mass: float) -> NDArray[np.bool_]:
    """The fewest most probable tokens that together reach `mass`."""
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order].astype(np.float64)
    kept = np.zeros(len(probabilities), dtype=bool)
    kept[order[np.cumsum(ranked) - ranked < mass * ranked.sum()]] = True
    return kept


def min_p_mask(probabilities: Floats, share: float) -> NDArray[np.bool_]:
    return cast("NDArray[np.bool_]", probabilities >= share * probabilities.max())


def top(reported: Floats, n: int) -> list[int]:
    return [int(token) for token in np.argsort(-reported, kind="stable")[:n]]


class Pieces:
    """Text as it may be sent token by token: nothing while the last character is incomplete."""

    def __init__(self, policy: Policy, *, skip_special: bool = True) -> None:
        self._policy, self._skip_special = policy, skip_special
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._policy.decode(self._held, skip_special=self._skip_special)
        return "" if text.endswith(INCOMPLETE) else self.rest()

    def rest(self) -> str:
        """What was held back, complete or not."""
        text = self._policy.decode(self._held, skip_special=self._skip_special)
        self._held.clear()
        return text
