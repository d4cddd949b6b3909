"""Streams of batches for the monitor: a policy that sharpens, an engine that rounds, and faults from some step on.

Every token is drawn from the engine's own distribution over a small vocabulary, and the trainer's is the same logits with
rounding of its own. So the healthy mismatch has the properties of a real one, and nobody chose them: a bias of -σ²/2, a
size that depends on how likely the token is, heavy tails, and sequences of which some are worse throughout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

VOCABULARY = 12
REPLICAS = 8
ENVIRONMENTS = ("math", "code", "chat", "logic")


@dataclass(frozen=True)
class Training:
    """An honest training: entropy falls, lengths and rounding grow."""

    steps: int = 1000
    tokens: int = 20_000
    sharp: tuple[float, float] = (1.5, 3.5)
    """Spread of the logits, first and last step: entropy falls from 1.7 to 0.7 nats."""
    rounding: tuple[float, float] = (0.030, 0.045)
    """Of a logit, first and last step."""
    uneven: float = 0.2
    """Spread of the logarithm of the rounding between sequences: some are worse throughout."""
    length: tuple[int, int] = (80, 400)
    reward: tuple[float, float] = (0.3, 0.7)
    """Share of right answers, first and last step."""
    mood: float = 0.0
    """How much the rounding of whole batches differs, as a share: more than their sequences tell."""
    prompts: int = 0
    """Of each batch; 0: as many as `tokens` take."""
    samples: int = 8
    """Of a prompt, as a group of GRPO has them."""
    replicas: int = REPLICAS
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """One step's arguments of `observe`, flat."""

    step: int
    behavior: np.ndarray
    old: np.ndarray
    lengths: np.ndarray
    replica: np.ndarray
    environment: np.ndarray
    prompt: np.ndarray
    rewards: np.ndarray
    more: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {
            "behavior_logprobs": self.behavior,
            "old_logprobs": self.old,
            "lengths": self.lengths,
            "versions": self.step,
            "trainer_version": self.step,
            "groups": {
                "replica": [str(each) for each in self.replica],
                "environment": [ENVIRONMENTS[each] for each in self.environment],
                "prompt": [str(each) for each in self.prompt],
            },
            "rewards": self.rewards,
            "step": self.step,
            **self.more,
        }

    def of_tokens(self, per_sequence: np.ndarray) -> np.ndarray:
        return np.repeat(per_sequence, self.lengths)


Fault = Callable[[Batch], Batch]


def batches(training: Training) -> Iterator[Batch]:
    """The whole training."""
    rng = np.random.default_rng(training.seed)
    for step in range(training.steps):
        yield batch(training, step, rng)


def batch(training: Training, step: int, rng: np.random.Generator) -> Batch:
    done = step / max(1, training.steps - 1)
    mean_length = training.length[0] + done * (training.length[1] - training.length[0])
    lengths = []
    while (
        len(lengths) < training.prompts * training.samples
        if training.prompts
        else sum(lengths) < training.tokens
    ):
        lengths += np.maximum(1, rng.gamma(4, mean_length / 4, training.samples)).astype(int).tolist()
    lengths = np.array(lengths)
    sequences = len(lengths)
    prompt = np.arange(sequences) // training.samples
    hardness = np.repeat(rng.normal(1.0, 0.15, prompt.max() + 1), training.samples)
    sharp = training.sharp[0] + done * (training.sharp[1] - training.sharp[0])
    rounding = training.rounding[0] + done * (training.rounding[1] - training.rounding[0])
    rounding *= float(np.exp(rng.normal(0, training.mood))) if training.mood else 1.0
    per_sequence = rounding * np.exp(rng.normal(0, training.uneven, sequences))
    spread = np.repeat(sharp * np.maximum(0.3, hardness), lengths)
    tokens = int(lengths.sum())
    logits, noise = rng.standard_normal((2, tokens, VOCABULARY), dtype=np.float32)
    logits *= spread[:, None].astype(np.float32)
    coarse = np.where(
        rng.random(tokens) < 0.01, 5.0, 1.0
    )  # one token in a hundred is rounded five times as coarsely
    noise *= (np.repeat(per_sequence, lengths) * coarse)[:, None].astype(np.float32)
    engine, trainer = log_softmax(logits), log_softmax(logits + noise)
    mass = np.cumsum(np.exp(engine), axis=1)
    drawn = (mass < rng.random((tokens, 1), dtype=np.float32) * mass[:, -1:]).sum(axis=1)
    rows = np.arange(tokens)
    return Batch(
        step=step,
        behavior=np.minimum(engine[rows, drawn], 0),
        old=np.minimum(trainer[rows, drawn], 0),
        lengths=lengths,
        replica=np.arange(sequences) % training.replicas,
        environment=prompt % len(ENVIRONMENTS),
        prompt=prompt,
        rewards=(rng.random(sequences) < np.interp(done, (0, 1), training.reward)).astype(float),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits - logits.max(axis=1, keepdims=True)
    return top - np.log(np.exp(top).sum(axis=1, keepdims=True))


# --- faults -------------------------------------------------------------------------------------------------------


def biased(nats: float, chosen: Callable[[Batch], np.ndarray] | None = None) -> Fault:
    """The engine reports so many nats too little; on chosen sequences only."""

    def apply(given: Batch) -> Batch:
        hit = 1.0 if chosen is None else given.of_tokens(chosen(given)).astype(float)
        return replace(given, behavior=np.minimum(given.behavior - nats * hit, 0).astype(np.float32))

    return apply


def scaled(times: float, chosen: Callable[[Batch], np.ndarray] | None = None) -> Fault:
    """Every difference so many times as large."""

    def apply(given: Batch) -> Batch:
        hit = True if chosen is None else given.of_tokens(chosen(given))
        delta = given.old.astype(np.float64) - given.behavior
        larger = np.minimum(given.old - np.where(hit, times, 1.0) * delta, 0)
        return replace(given, behavior=larger.astype(np.float32))

    return apply


def noisy(
    nats: float, rng: np.random.Generator, chosen: Callable[[Batch], np.ndarray] | None = None
) -> Fault:
    """Noise of this mean size on every token, whatever it was: stale weights, a template."""

    def apply(given: Batch) -> Batch:
        hit = True if chosen is None else given.of_tokens(chosen(given))
        more = rng.normal(0, nats * np.sqrt(np.pi / 2), given.old.size)
        return replace(given, old=np.minimum(given.old + np.where(hit, more, 0), 0).astype(np.float32))

    return apply


def one_replica(given: Batch) -> np.ndarray:
    return given.replica == 3


def one_environment(given: Batch) -> np.ndarray:
    return given.environment == 1
