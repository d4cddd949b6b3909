"""What is a historical bug here: where it was reported, what happened, its true names, and how it is looked for.

`causes` was settled from the sentences in `core.cause` alone, before the first run: the causes whose sentence is true
of the bug, and `unexplained` where none is. A re-enactment is code of its own: it shares none with the injectors of
`zerodrift.faults` beyond the wrapper of an engine, and none at all with the auditor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from zerodrift.core.request import Prompt

UNEXPLAINED = frozenset({"unexplained"})
QWEN3, QWEN2, LLAMA = "testbed:qwen3", "testbed:qwen2", "testbed:llama"

Plant = Callable[[Any], Any]
"""A healthy reference engine to one with the bug; for a bug of the trainer, a model to a scorer with it."""
Prompts = Callable[[Any, int, int], list[Prompt]]
"""(tokenizer, how many, seed) to prompts of the kind that the bug needs."""


class Asked(StrEnum):
    """How the auditor gets to see the bug."""

    ENGINE = "audit"
    """Of the engine as it stands."""
    SYNC = "audit --sync"
    """Of the engine, with a weight update."""
    TRAINER = "audit --trainer"
    """Of a healthy engine, with the trainer's forward as a third side."""
    DUMP = "blame"
    """Of rollouts that a run left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One public bug, re-enacted on a tiny model."""

    reported: str
    """`project#number`."""
    repository: str
    """As GitHub spells it."""
    happened: str
    """In one sentence."""
    causes: frozenset[str]
    plant: Plant
    asked: Asked = Asked.ENGINE
    temperature: float = 0.7
    models: tuple[str, ...] = (QWEN3,)
    prompts: Prompts | None = None
    """None takes the auditor's own."""
    checkpoint: Callable[[str, Path], Path] | None = None
    """(built-in model, where) to a directory with what the bug needs in its files; None takes the model as it is."""
    resets_cache: bool = True
    """Whether the trainer of the time reset the prefix cache after an update."""
    unseen: str = ""
    """Why an audit is expected not to see it; empty where it should be caught."""

    @property
    def number(self) -> str:
        """What comes after the project."""
        return self.reported.partition("#")[2]

    @property
    def url(self) -> str:
        """Issues redirect to pull requests where the number is one."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A bug that no comparison of logprobs can show, or that no testbed model has the part for: listed, and not run."""

    reported: str
    repository: str
    happened: str
    unseen: str

    @property
    def url(self) -> str:
        """As that of a bug."""
        return f"https://github.com/{self.repository}/issues/{self.reported.partition('#')[2]}"
