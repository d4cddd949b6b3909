"""What `observe` is given, made into flat arrays: tensors, arrays or lists; padded with a mask, or flat with lengths.

Arrays that do not speak of the same tokens are a bug in the caller and raise. Numbers that no healthy engine reports
(NaN, a missing logprob, one above 0) are a fault of the batch: they become trips, and the batch is never judged healthy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import Code, Reason
from zerodrift.monitor.groups import labels_of
from zerodrift.monitor.host import host, yes_or_no
from zerodrift.monitor.lookalikes import Pairs, handed_twice, padding
from zerodrift.stats.arrays import Bools, Ids, Reals

RESCORED = "rescored_logprobs"
LOGPROBS = ("behavior_logprobs", "old_logprobs", "current_logprobs", RESCORED)
HIGHEST = 1e-4
"""A softmax in fp32 may round to a hair above zero, as in `core.completion`."""
LOWEST = -9998.0
"""At and below it some engines mean NaN or -inf."""


@dataclass(frozen=True)
class Tokens:
    """One batch, flat: tokens of a sequence stand together."""

    logprobs: Mapping[str, Reals]
    """By name, those that were given."""
    counts: Ids
    """Tokens of each sequence, empty ones left out."""
    kept: Ids
    """Place of each of those among the sequences given."""
    given: int = 0
    """Sequences, empty ones included."""
    lag: Ids | None = None
    """Of each token; None where versions are unknown."""
    widths: Ids | None = None
    """Entries of each sequence given, padding included; None where no array was given."""
    handed_twice: Pairs = frozenset()
    """Which sets of logprobs are one array: nothing is seen by comparing it with itself."""
    padding: int = 0
    """Tokens that look like padding which nobody masked."""
    rescored: Bools | None = None
    """Which tokens have a re-scored logprob, if some have; the others have 0 there, which nobody reads."""
    trips: tuple[Reason, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label of each sequence, by kind."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.counts.sum())

    @property
    def fresh(self) -> Bools | None:
        """Which tokens the trainer's own weights made; None where all of them are. Only where versions are known."""
        assert self.lag is not None
        if not self.lag.strides[0]:
            return None if self.lag[0] == 0 else np.zeros(self.size, dtype=np.bool_)
        fresh = self.lag == 0
        return None if fresh.all() else fresh

    @property
    def lag_sum(self) -> float | None:
        """Over all tokens; None where versions are unknown."""
        if self.lag is None:
            return None
        return float(self.lag.sum()) if self.lag.strides[0] else float(self.lag[0]) * self.lag.size

    @property
    def lag_max(self) -> int | None:
        """Of the oldest token."""
        if self.lag is None:
            return None
        return int(self.lag.max()) if self.lag.strides[0] else int(self.lag[0])

    @property
    def starts(self) -> Ids:
        """Where each sequence begins."""
        starts: Ids = np.cumsum(self.counts) - self.counts
        return starts


def _is_rows(array: NDArray[Any]) -> bool:
    """One object for each sequence; the others are numbers, of which some may be missing."""
    return array.dtype == object and array.ndim == 1 and any(hasattr(row, "__len__") for row in array)


def _filled(arrays: Mapping[str, NDArray[Any]], lengths: Any) -> dict[str, NDArray[Any]]:
    """A row that is None, as a row of missing numbers: as long as it is in the other arrays, or as `lengths` say."""
    told = None if lengths is None else _whole("lengths", lengths)
    return {name: _without_holes(name, array, arrays, told) for name, array in arrays.items()}


def _without_holes(
    name: str, array: NDArray[Any], arrays: Mapping[str, NDArray[Any]], told: Ids | None
) -> NDArray[Any]:
    if array.dtype != object or array.ndim != 1:
        return array
    if not _is_rows(array):
        flat = told is not None and told.sum() == len(array) != len(told)
        if flat or any(row is not None for row in array):
            return array
    result = np.empty(len(array), dtype=object)
    for place, row in enumerate(array):
        if row is not None and np.ndim(row) != 1:
            raise InvalidValue(
                f"{name}[{place}] is {row!r:.40}; give one row of numbers per sequence, or None"
            )
        result[place] = np.full(_width(place, arrays, told), None) if row is None else row
    return result


def _width(place: int, arrays: Mapping[str, NDArray[Any]], told: Ids | None) -> int:
    """Entries of one sequence, by whoever knows; one that is missing where nobody does, so that it is counted."""
    for array in arrays.values():
        if array.ndim == 2 and place < len(array):
            return int(array.shape[1])
        if _is_rows(array) and place < len(array) and hasattr(array[place], "__len__"):
            return len(array[place])
    return 1 if told is None or place >= len(told) else int(told[place])


class Layout:
    """How many tokens each sequence has, and which entries of a padded array they are."""

    def __init__(self, first: NDArray[Any], mask: Any, lengths: Any) -> None:
        """From the first array that was given, with the mask and the lengths, if any."""
        self.shape = first.shape
        self.ragged = tuple(map(len, first)) if _is_rows(first) else None
        self.chosen: Bools | None = None
        told = None if lengths is None else _whole("lengths", lengths)
        if self.ragged is not None:
            given = np.array(self.ragged, dtype=np.int64)
            if told is not None and not np.array_equal(told, given):
                raise InvalidValue(
                    f"lengths {told.tolist()[:8]} are not those of the rows, {given.tolist()[:8]}; leave them out, or pad"
                )
        elif first.ndim == 2:
            given = np.full(first.shape[0], first.shape[1], dtype=np.int64)
            if told is not None:
                self._check(told, len(given))
                self.chosen = np.arange(first.shape[1]) < told[:, None]
        elif first.ndim == 1 and told is None and not first.size:
            given = np.zeros(0, dtype=np.int64)
        elif first.ndim == 1 and told is not None:
            if told.sum() != first.size or (told < 0).any():
                raise InvalidValue(
                    f"lengths add up to {told.sum()}, and {first.size} tokens were given; they must agree"
                )
            given = told
        else:
            raise InvalidValue(
                f"logprobs have shape {first.shape}; give one row per sequence, or a flat array with lengths= of the sequences"
            )
        self.given, self.counts = given, given
        if mask is not None:
            self._mask(mask)
        elif self.chosen is not None:
            self.counts = self.chosen.sum(axis=1)

    def _check(self, told: Ids, rows: int) -> None:
        if told.shape != (rows,) or (told < 0).any() or (told > self.shape[1]).any():
            raise InvalidValue(
                f"lengths {told.tolist()[:8]} do not fit {rows} rows of {self.shape[1]} tokens"
            )

    def _mask(self, mask: Any) -> None:
        chosen = yes_or_no("mask", self._flat("mask", host("mask", mask)))
        if self.chosen is not None:
            chosen &= self.chosen.ravel()
        rows = np.repeat(np.arange(len(self.given)), self.given)
        self.counts = np.bincount(rows[chosen], minlength=len(self.given))
        self.chosen = chosen

    def _flat(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        if self.ragged is not None:
            several = array.ndim == 2 or (array.dtype == object and array.ndim == 1)
            rows = [np.atleast_1d(host(name, row)) for row in array] if several else []
            if tuple(map(len, rows)) != self.ragged:
                raise InvalidValue(
                    f"{name} has rows of other lengths than the first array; they must have one entry per token"
                )
            return np.concatenate(rows) if rows else array
        if array.shape != self.shape:
            raise InvalidValue(
                f"{name} has shape {array.shape} and the first array {self.shape}; they must have one entry for each of the same tokens"
            )
        return array.ravel()

    def tokens(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """The entries of the tokens that count, flat."""
        flat = self._flat(name, array)
        return flat if self.chosen is None else flat[self.chosen.ravel()]

    def _whole_rows(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """A row that is None among rows of numbers, as a row of missing ones."""
        if not _is_rows(array) or all(row is not None for row in array):
            return array
        rows = _without_holes(name, array, {}, self.given)
        return rows if self.ragged is not None or len(set(map(len, rows))) > 1 else np.stack(list(rows))

    def per_token(self, name: str, value: Any) -> NDArray[Any]:
        """One number for all, one per sequence or one per token, as one per token."""
        array = self._whole_rows(name, host(name, value))
        if array.ndim == 0:
            return np.broadcast_to(array, (int(self.counts.sum()),))
        single = array.dtype != object or not any(hasattr(each, "__len__") for each in array)
        if array.shape == (len(self.given),) and single and (self.ragged or self.shape != array.shape):
            return np.repeat(array, self.counts)
        return self.tokens(name, array)


def _whole(name: str, value: Any) -> Ids:
    array = host(name, value)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InvalidValue(
            f"{name} has type {array.dtype} and shape {array.shape}; give one whole number per sequence"
        )
    return array.astype(np.int64, copy=False)


def tokens_of(  # noqa: PLR0913 - one per thing that is told of all tokens alike
    given: Mapping[str, Any],
    *,
    mask: Any,
    lengths: Any,
    versions: Any,
    trainer_version: int | None,
    groups: Any,
    rescored_mask: Any = None,
) -> Tokens:
    """The batch, with everything about it that trips by itself."""
    arrays = {name: host(name, value) for name, value in given.items() if value is not None}
    if not arrays:
        return Tokens({}, np.zeros(0, np.int64), np.zeros(0, np.int64), trips=(_missing(),))
    arrays = _filled(arrays, lengths)
    layout = Layout(next(iter(arrays.values())), mask, lengths)
    rescored = _rescored(layout, arrays, rescored_mask)
    unmasked = mask is None and lengths is None and layout.ragged is None
    flat, trips = {}, [] if "behavior_logprobs" in arrays else [_missing()]
    for name, array in arrays.items():
        given_values = layout.tokens(name, array)
        if name == RESCORED and rescored is not None:
            if not rescored.any():
                continue
            given_values = np.where(rescored, given_values, 0.0)
        values, told = _numbers(name, given_values)
        flat[name] = values
        trips += told
    lag, told = _lag(layout, versions, trainer_version)
    kept = np.flatnonzero(layout.counts)
    return Tokens(
        logprobs=flat,
        counts=layout.counts[kept],
        kept=kept,
        given=len(layout.given),
        widths=layout.given,
        lag=lag,
        handed_twice=handed_twice(given, arrays),
        padding=padding(list(arrays.values())) if unmasked else 0,
        rescored=rescored if rescored is not None and rescored.any() else None,
        trips=(*trips, *told),
        groups=labels_of(groups, len(layout.given), kept),
    )


def _rescored(layout: Layout, arrays: Mapping[str, Any], mask: Any) -> Bools | None:
    """Which tokens were scored again; None where all of them were, or nothing is said."""
    if mask is None:
        return None
    if RESCORED not in arrays:
        raise InvalidValue("rescored_mask was given without rescored_logprobs; it says which of those count")
    chosen = yes_or_no("rescored_mask", layout.per_token("rescored_mask", mask))
    return None if chosen.all() else chosen


def _missing() -> Reason:
    message = "no behavior_logprobs were given; request logprobs from the engine, a gap cannot be measured without them"
    return Reason(code=Code.MISSING_LOGPROBS, message=message)


def _numbers(name: str, values: NDArray[Any]) -> tuple[Reals, list[Reason]]:
    """Floating numbers, and what is wrong with them; a fault that is in padding was masked before."""
    if values.dtype.kind not in "fiuO":
        raise InvalidValue(f"{name} have type {values.dtype}; give real numbers, logs of probabilities")
    missing = sum(value is None for value in values) if values.dtype == object else 0
    try:
        numbers: Reals = values if values.dtype.kind == "f" else values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{name} cannot be read as numbers ({error})") from error
    trips = []
    if missing:
        message = f"{missing} of {name} are missing; the row that they came from has no logprobs"
        trips.append(Reason(code=Code.MISSING_LOGPROBS, message=message, value=float(missing)))
    if numbers.size:
        low, high = float(numbers.min()), float(numbers.max())
        if not (np.isfinite(low) and np.isfinite(high) and low > LOWEST):
            wrong = int((~np.isfinite(numbers) | (numbers <= LOWEST)).sum()) - missing
            if wrong:
                message = (
                    f"{wrong} of {name} are NaN, infinite or what engines write for it; the rows are corrupt"
                )
                trips.append(Reason(code=Code.NOT_FINITE, message=message, value=float(wrong)))
        elif high > HIGHEST:
            message = (
                f"{name} reach {high:.4g}, and no log-probability is above 0; report the log of a softmax"
            )
            trips.append(Reason(code=Code.NOT_A_LOGPROB, message=message, value=high, limit=0.0))
    return numbers, trips


def _lag(layout: Layout, versions: Any, trainer_version: int | None) -> tuple[Ids | None, list[Reason]]:
    """How many versions old each token is."""
    if versions is None:
        return None, []
    if trainer_version is None:
        raise InvalidValue("versions were given without trainer_version; a lag needs both")
    if not layout.counts.sum():
        # Of no token, and an empty list has no type.
        return np.zeros(0, dtype=np.int64), []
    array = layout.per_token("versions", versions)
    if array.dtype.kind not in "iu":
        message = f"versions have type {array.dtype}; a token whose weights are unknown cannot be placed: give whole numbers"
        return None, [Reason(code=Code.VERSION_UNKNOWN, message=message)]
    made = array.astype(np.int64, copy=False)
    trips = []
    # One number for all is an array of one entry with a stride of 0, and is not read a million times.
    ends = made[:1] if made.size and not made.strides[0] else made
    if made.size and (ends.max() > trainer_version or ends.min() < 0):
        message = f"versions reach from {ends.min()} to {ends.max()}, and the trainer is at {trainer_version}: no such weights"
        trips.append(
            Reason(
                code=Code.VERSION_UNKNOWN,
                message=message,
                value=float(ends.max()),
                limit=float(trainer_version),
            )
        )
    if trips:
        # Weights that there are none of have no age; and the difference of two such numbers may be no number of 64 bits.
        return None, trips
    if made.size and made.strides[0]:
        falls = np.diff(made) < 0
        falls[np.cumsum(layout.counts[layout.counts > 0])[:-1] - 1] = False
        if falls.any():
            message = f"{int(falls.sum())} tokens were made by older weights than the token before them; weights only move on"
            trips.append(Reason(code=Code.VERSION_BACKWARDS, message=message, value=float(falls.sum())))
    if made.size and not made.strides[0]:
        # One number for all: no array of millions is made of it.
        return np.broadcast_to(np.int64(trainer_version - int(made[0])), made.shape), trips
    return trainer_version - made, trips
