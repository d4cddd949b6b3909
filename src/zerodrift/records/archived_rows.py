"""A trainer's arrays as an archived batch: tensors, arrays or lists; one row per rollout, or flat with lengths.

    Rows(prompts=prompt_ids, outputs=completion_ids, behavior_logprobs=sampled).batch(step=12, state=BatchState.QUARANTINE)

Rows may be padded on the right. What is padding is told by `lengths`, or, where outputs come without any, by theirs.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans

LOGPROBS = ("behavior_logprobs", "old_logprobs", "current_logprobs", "rescored_logprobs")
PER_TOKEN = (*LOGPROBS, "versions", "mask")
LABELS = {"environments": "environment", "replicas": "replica", "groups": "group"}


class Rows(NamedTuple):
    """Columns of a batch; those that are None are not known. Each has one entry, or one row, per rollout."""

    prompts: Any
    outputs: Any
    behavior_logprobs: Any
    """A number that is missing may be None in a list; it is kept as NaN."""
    old_logprobs: Any = None
    current_logprobs: Any = None
    rescored_logprobs: Any = None
    versions: Any = None
    """A label for each token, or one for each rollout."""
    mask: Any = None
    rewards: Any = None
    lengths: Any = None
    """Tokens of each output, where outputs are padded, or all rollouts stand in flat arrays one after the other."""
    ids: Sequence[str] | None = None
    """Their places in the batch where nobody gave them names."""
    environments: Sequence[str] | None = None
    replicas: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    sampling: SamplingParams = SamplingParams()
    stated: tuple[str, ...] = ()

    def batch(
        self,
        *,
        step: int,
        state: BatchState,
        reasons: tuple[str, ...] = (),
        trainer_version: str | int | None = None,
    ) -> ArchivedBatch:
        """The batch; rows that do not fit beside their output are refused."""
        lengths = None if self.lengths is None else [int(each) for each in plain(self.lengths)]
        padded = _lists("outputs", self._rows("outputs", None if lengths is None else len(lengths), lengths))
        longest = max(map(len, padded), default=0)
        if any(
            not 0 <= length <= len(row) for row, length in zip(padded, lengths or (), strict=bool(lengths))
        ):
            raise InvalidValue(
                f"lengths are {lengths} for outputs of {longest} tokens at most; they count tokens"
            )
        outputs = [row[:length] for row, length in zip(padded, lengths or map(len, padded), strict=True)]
        names = (*PER_TOKEN, "prompts", "rewards", "ids", *LABELS)
        columns = {name: self._rows(name, len(outputs), lengths) for name in names}
        _lists("prompts", columns["prompts"])
        rollouts = tuple(
            self._rollout(
                number, output, longest, {name: rows and rows[number] for name, rows in columns.items()}
            )
            for number, output in enumerate(outputs)
        )
        label = None if trainer_version is None else str(trainer_version)
        return ArchivedBatch(
            step=step, state=state, reasons=reasons, trainer_version=label, rollouts=rollouts
        )

    def _rows(self, name: str, count: int | None, lengths: list[int] | None) -> list[Any] | None:
        if (given := getattr(self, name)) is None:
            return None
        rows = plain(given)
        if not isinstance(rows, list):
            raise InvalidValue(f"{name} are a {type(rows).__name__}; give one row per rollout")
        rows = [plain(row) for row in rows]
        flat = name in ("outputs", *PER_TOKEN) and not any(isinstance(row, list) for row in rows)
        if lengths is not None and flat and len(rows) == sum(lengths):
            ends = list(accumulate(lengths))
            rows = [rows[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        if count is not None and len(rows) != count:
            raise InvalidValue(f"{name} have {len(rows)} rows for {count} rollouts; give one for each")
        return rows

    def _rollout(self, number: int, output: list[int], longest: int, row: dict[str, Any]) -> ArchivedRollout:
        cut = {
            name: _beside(name, row[name], len(output), longest)
            for name in (*LOGPROBS, "mask")
            if row[name] is not None
        }
        mask = cut.pop("mask", None)
        numbers: dict[str, Any] = {name: tuple(map(_number, values)) for name, values in cut.items()}
        return ArchivedRollout(
            id=str(number) if row["ids"] is None else row["ids"],
            prompt_token_ids=tuple(row["prompts"]),
            token_ids=tuple(output),
            versions=_versions(row["versions"], len(output), longest),
            mask=None if mask is None else tuple(map(bool, mask)),
            reward=row["rewards"],
            sampling=self.sampling,
            stated=self.stated,
            **{field: row[name] for name, field in LABELS.items()},
            **numbers,
        )


def plain(value: Any) -> Any:
    """Python's own numbers and lists out of a tensor or an array of any framework."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return list(listed) if isinstance(listed, tuple) else listed


def _lists(name: str, rows: list[Any] | None) -> list[Any]:
    if rows is None or not all(isinstance(row, list) for row in rows):
        raise InvalidValue(f"{name} are not one list of token ids per rollout; flat ones need lengths=")
    return rows


def _beside(name: str, row: Any, length: int, longest: int) -> list[Any]:
    """The entries of the output's tokens: a row is as long as its output, or as the longest of the batch."""
    if not isinstance(row, list) or len(row) not in (length, longest):
        found = f"{len(row)} entries" if isinstance(row, list) else f"a {type(row).__name__}"
        raise InvalidCompletion(
            f"{name} have {found} for an output of {length} tokens; pad to {longest}, or not at all"
        )
    return row[:length]


def _versions(row: Any, length: int, longest: int) -> tuple[VersionSpan, ...]:
    if row is None:
        return ()
    labels = _beside("versions", row, length, longest) if isinstance(row, list) else [row] * length
    # A tensor of floats says 3.0 where the trainer says 3.
    return version_spans(
        [int(each) if isinstance(each, float) and each.is_integer() else each for each in labels]
    )


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidCompletion(f"a logprob is {value!r}; it is a number, or None where it is missing")
    return float(value)
