"""What is a historical bug here: what is known of it (bugs.toml), and how it is planted and looked for.

A re-enactment is code of its own: it shares none with the injectors of `zerodrift.faults` beyond the wrapper of an
engine, and none at all with the auditor.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from zerodrift.core.request import Prompt

UNEXPLAINED = frozenset({"unexplained"})
KNOWN: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())

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
    """One public bug."""

    reported: str
    """`project#number`."""
    repository: str
    """As GitHub spells it."""
    happened: str
    """In one sentence."""
    causes: frozenset[str] = frozenset()
    plant: Plant | None = None
    """None where it is not run."""
    asked: Asked = Asked.ENGINE
    temperature: float = 0.7
    models: tuple[str, ...] = ("testbed:qwen3",)
    prompts: Prompts | None = None
    """None takes the auditor's own."""
    checkpoint: Callable[[str, Path], Path] | None = None
    """(built-in model, where) to a directory with what the bug needs in its files; None takes the model as it is."""
    resets_cache: bool = True
    """Whether the trainer of the time reset the prefix cache after an update."""
    unseen: str = ""
    """Why an audit does not see it; empty where it should be caught."""
    unnamed: str = "not looked into yet"
    """What the auditor lacks where it catches the bug and does not name it."""

    @property
    def url(self) -> str:
        """Issues redirect to pull requests where the number is one."""
        return f"https://github.com/{self.repository}/issues/{self.reported.partition('#')[2]}"


def reenacted(reported: str, plant: Plant | None, **more: Any) -> Bug:
    """What is known of a bug, with how it is planted."""
    known = {**KNOWN[reported], **more}
    for name, kind in {"causes": frozenset, "models": tuple, "asked": Asked}.items():
        if name in known:
            known[name] = kind(known[name])
    return Bug(reported=reported, plant=plant, **known)
