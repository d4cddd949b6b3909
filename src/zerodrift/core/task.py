"""The two things that a user brings: a way to score tokens as the trainer does, and a task with rewards."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt


@runtime_checkable
class Scorer(Protocol):
    """The trainer's own forward, behind one method.

    `score([ids, …])` returns, for each sequence, the raw logprob of every token but the first, under the weights
    that the trainer would differentiate: `len(result[i]) == len(ids[i]) - 1`.
    """

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence."""
        ...


@runtime_checkable
class Task(Protocol):
    """Prompts with a verifiable reward."""

    name: str

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """The first `count` prompts of the stream that `seed` names."""
        ...

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """A finite number; higher is better."""
        ...
