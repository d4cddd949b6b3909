"""A batch that `observe` was given, as an archive keeps it: rollouts with their ids, so that blame can score them again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import SHAPING
from zerodrift.monitor.decision import Decision
from zerodrift.monitor.intake import RESCORED, host
from zerodrift.monitor.rewards import BoundReward
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive as Directory
from zerodrift.records.archived import ArchivedBatch, BatchState
from zerodrift.records.archived_rows import LOGPROBS, Rows, plain

IDS = ("prompt_ids", "completion_ids")
LABELS = {"environment": "environments", "replica": "replicas", "prompt": "groups"}
"""Groups of `observe` that an archive has a place for."""


class Archive(Protocol):
    """Anything that keeps batches."""

    def append(self, batch: ArchivedBatch) -> None:
        """Return once the batch is durable; raise where it cannot be."""


def opened(archive: Archive | str | Path | None) -> Archive | None:
    """A directory is opened to be written. Which healthy batches go there, the monitor has chosen: it keeps what it is given."""
    if isinstance(archive, str | Path):
        return Directory(Path(archive), ArchiveSettings(healthy_one_in=1))
    return archive


def require_ids(given: Mapping[str, Any]) -> None:
    """Before a batch is judged: without ids nobody could score it again."""
    if missing := [name for name in IDS if name not in given]:
        raise InvalidValue(
            f"an archive keeps rollouts that blame can score again: give observe {' and '.join(missing)} too"
        )


def rollouts_of(step: int, decision: Decision, given: Mapping[str, Any]) -> ArchivedBatch:
    """What `observe` was given by name, with what was decided."""
    outputs = plain(given["completion_ids"])
    lengths = _lengths(given)
    groups = given.get("groups", {})
    columns: dict[str, Any] = {name: given[name] for name in (*LOGPROBS, "mask") if name in given}
    if "rescored_mask" in given and not np.all(host("rescored_mask", given["rescored_mask"])):
        # Of a part only: blame scores all of it again anyway, and an archive has no place for half a rollout.
        columns.pop(RESCORED, None)
    columns.setdefault("behavior_logprobs", _missing(outputs))
    columns |= {name: list(plain(groups[kind])) for kind, name in LABELS.items() if kind in groups}
    if "sampling" in given:
        columns |= {"sampling": given["sampling"], "stated": SHAPING}
    if "outputs" in given:
        columns["ids"] = [each.id for each in given["outputs"]]
    rows = Rows(
        prompts=given["prompt_ids"],
        outputs=outputs,
        versions=_versions(given.get("versions"), len(outputs) if lengths is None else len(lengths)),
        rewards=_rewards(given.get("rewards")),
        lengths=lengths,
        **columns,
    )
    return rows.batch(
        step=step,
        state=BatchState(decision.state.lower()),
        reasons=tuple(reason.message for reason in decision.reasons),
        trainer_version=given.get("trainer_version"),
    )


def _lengths(given: Mapping[str, Any]) -> Sequence[int] | None:
    """Tokens of each output: as told, or up to the last that the mask of a padded array counts."""
    if "lengths" in given or "mask" not in given:
        told: Sequence[int] | None = given.get("lengths")
        return told
    mask = host("mask", given["mask"])
    if mask.ndim != 2:
        return None
    places = np.where(mask.astype(bool), np.arange(1, mask.shape[1] + 1), 0)
    lengths: list[int] = places.max(axis=1, initial=0).tolist()
    return lengths


def _versions(versions: Any, count: int) -> Any:
    """One for each rollout where one was given for all."""
    return [versions] * count if isinstance(versions, int | str) else versions


def _rewards(rewards: Any) -> Any:
    if rewards is None:
        return None
    return [each.value if isinstance(each, BoundReward) else each for each in plain(rewards)]


def _missing(outputs: Sequence[Any]) -> list[list[None]]:
    """An engine that sent no logprobs is why many a batch is here."""
    return [[None] * len(plain(row)) for row in outputs]
