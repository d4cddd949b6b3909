"""A batch that `observe` was given, as an archive keeps it: rollouts with their ids, so that blame can score them again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import SHAPING
from zerodrift.monitor.decision import Decision
from zerodrift.monitor.host import host
from zerodrift.monitor.intake import RESCORED
from zerodrift.monitor.rewards import BoundReward
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive as Directory
from zerodrift.records.archived import LARGEST_ID, ArchivedBatch, BatchState
from zerodrift.records.archived_rows import LOGPROBS, Rows, plain
from zerodrift.stats.arrays import Ids

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


def check_ids(given: Mapping[str, Any], widths: Ids | None) -> None:
    """Ids that do not fit beside their tokens are refused, of a healthy batch as of a bad one, before anything is decided.

    `widths`: logprobs of each sequence, padding included; None where none were given.
    """
    told = _lengths(given)
    lengths = None if told is None else [int(each) for each in plain(told)]
    outputs = _id_rows("completion_ids", given["completion_ids"], lengths)
    prompts = _id_rows("prompt_ids", given["prompt_ids"])
    rows = len(outputs) if widths is None else len(widths)
    for name, count in {"completion_ids": len(outputs), "prompt_ids": len(prompts)}.items():
        if count != rows:
            raise InvalidValue(f"{name} have {count} rows for {rows} sequences; give one for each")
    if lengths is not None and len(lengths) != rows:
        raise InvalidValue(f"{len(lengths)} lengths for {rows} sequences; give one for each")
    longest = max(map(len, outputs), default=0)
    for place, row in enumerate(outputs):
        length = len(row) if lengths is None else lengths[place]
        width = length if widths is None else int(widths[place])
        if length > len(row) or width not in (length, longest):
            raise InvalidValue(
                f"completion_ids[{place}] has {len(row)} entries beside {width} logprobs, of which {length} count; "
                "give ids for the same tokens, padded alike"
            )
        _check_range(f"completion_ids[{place}]", row[:length])
    for place, row in enumerate(prompts):
        _check_range(f"prompt_ids[{place}]", row)


def _id_rows(name: str, value: Any, lengths: list[int] | None = None) -> list[NDArray[Any]]:
    array = host(name, value)
    if array.ndim == 2:
        return list(array)
    if array.ndim == 1 and array.dtype == object:
        rows = [np.asarray(row) for row in array]
        if all(row.ndim == 1 for row in rows):
            return rows
    if lengths is not None and array.ndim == 1 and len(array) == sum(lengths):
        return np.split(array, np.cumsum(lengths)[:-1])
    raise InvalidValue(
        f"{name} have shape {array.shape}; give one list of token ids per sequence, or flat completion_ids with lengths="
    )


def _check_range(name: str, ids: NDArray[Any]) -> None:
    if not ids.size:
        return
    if ids.dtype.kind not in "iu":
        raise InvalidValue(f"{name} has type {ids.dtype}; token ids are whole numbers")
    if ids.min() < 0 or ids.max() > LARGEST_ID:
        raise InvalidValue(
            f"{name} reaches from {ids.min()} to {ids.max()}; a token id is from 0 to {LARGEST_ID}, and padding is left out"
        )


DOUBTFUL = ("versions", "outputs", "rewards", "groups", "mask")
"""What a batch may trip by, or what nobody looks at before, and an archive refuses: a batch is kept without rather than not at all."""


def keepable(
    step: int, decision: Decision, given: Mapping[str, Any]
) -> tuple[ArchivedBatch | None, str | None]:
    """The batch, as much of it as can be kept; and what could not, in words."""
    named = [name for name in DOUBTFUL if name in given]
    why = ""
    for left in [(), *((name,) for name in named), tuple(named)]:
        try:
            kept = {name: value for name, value in given.items() if name not in left}
            batch = rollouts_of(step, decision, kept)
        # Whatever it is, it must not stand in the way of what was decided.
        except Exception as error:
            why = why or str(error)
            continue
        return batch, f"the batch is archived without its {', '.join(left)}: {why}" if left else None
    return None, f"the batch is not archived: {why}"


def rollouts_of(step: int, decision: Decision, given: Mapping[str, Any]) -> ArchivedBatch:
    """What `observe` was given by name, with what was decided."""
    outputs = plain(given["completion_ids"])
    lengths = _lengths(given)
    groups = given.get("groups", {})
    columns: dict[str, Any] = {name: _rows(given[name], outputs) for name in LOGPROBS if name in given}
    columns |= {"mask": given["mask"]} if "mask" in given else {}
    if "rescored_mask" in given and not np.all(host("rescored_mask", given["rescored_mask"])):
        # Of a part only: blame scores all of it again anyway, and an archive has no place for half a rollout.
        columns.pop(RESCORED, None)
    if "behavior_logprobs" not in columns:
        columns["behavior_logprobs"] = _missing(outputs)
    columns |= {name: _texts(groups[kind]) for kind, name in LABELS.items() if kind in groups}
    if "sampling" in given:
        columns |= {"sampling": given["sampling"], "stated": SHAPING}
    if "outputs" in given:
        columns["ids"] = [each[0] for each in given["outputs"]]
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
        state=BatchState(decision.would_be.lower()),
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


def _texts(labels: Any) -> list[str | None]:
    """As they are judged: a replica may be a number."""
    return [None if each is None else str(each) for each in plain(labels)]


def _versions(versions: Any, count: int) -> Any:
    """One for each rollout where one was given for all."""
    value = plain(versions)
    if value is None or isinstance(value, list):
        return value
    known = isinstance(value, int | str) or (isinstance(value, float) and value.is_integer())
    if not known:
        raise InvalidValue(f"versions are {value!r}; a version is a whole number or a name")
    return [value] * count


def _rewards(rewards: Any) -> Any:
    if rewards is None:
        return None
    return [plain(each.value if isinstance(each, BoundReward) else each) for each in plain(rewards)]


def _rows(logprobs: Any, outputs: Sequence[Any]) -> Any:
    """Where a row is missing, as many missing numbers as its output has tokens."""
    if not isinstance(logprobs, list | tuple) or all(row is not None for row in logprobs):
        return logprobs
    if len(logprobs) != len(outputs):
        return logprobs
    return [empty if row is None else row for row, empty in zip(logprobs, _missing(outputs), strict=True)]


def _missing(outputs: Sequence[Any]) -> list[Any]:
    """An engine that sent no logprobs is why many a batch is here. Flat outputs have flat ones."""
    rows = [plain(row) for row in outputs]
    return [[None] * len(row) if isinstance(row, list) else None for row in rows]
