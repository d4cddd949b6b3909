"""Rollouts that a training run left behind, read line by line: every line is judged, refused, or skipped by name.

The format is that of the first line that has one, and holds for the whole dump. So does the sign of its numbers. A bad line (torn,
not JSON, another model's, absurd numbers) is refused with its number; with `skip_bad` it is left out and listed with its reason, so that
nothing disappears. Torch-free: a dump can be checked inside any trainer's environment.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.core.errors import InvalidCompletion, InvalidValue, NonFinite, RecordError, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.records.archive.index import EVERYTHING, Query
from zerodrift.records.archive.layout import is_archive
from zerodrift.records.codec import numbered_lines
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.dump_archive import archived_batches, read_archived
from zerodrift.records.dump_fields import Fields, LinePlace
from zerodrift.records.dump_foreign import refuse_text
from zerodrift.records.dump_formats import READERS, DumpFormat, detect
from zerodrift.records.recorded import NO_LOGPROB, RecordedRollout

PIPED, STDIN = Path("-"), Path("/dev/stdin")
_NUMBER = re.compile(r"\d+")
EXPORTS: Mapping[str, Callable[[Path], Sequence[str]]] = {
    "step_*/rank_*.jsonl": lambda file: (file.parent.name, file.stem),
    "train_data_step*.jsonl": lambda file: (file.stem,),
}
"""Files of a directory that make one dump (of prime-rl, of NeMo-RL), and the parts of their names that are numbered."""


class BadLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line that cannot be judged, and why; `code` is that of the error it would raise."""

    source: str
    line: int
    code: str
    reason: str

    @property
    def where(self) -> str:
        """File and line, as messages name them."""
        return f"{self.source}, line {self.line}"


class Dump(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a dump, in the order it was written."""

    format: DumpFormat
    rollouts: tuple[RecordedRollout, ...]
    bad: tuple[BadLine, ...] = ()
    """Lines that were skipped; empty unless that was asked for."""
    empty: tuple[str, ...] = ()
    """Lines on which the policy sampled no token: there is nothing to judge in them."""
    lines: int
    """Lines that hold anything."""


class DumpReader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a dump is to be read."""

    format: DumpFormat | None = None
    """None detects it."""
    default: SamplingParams = SamplingParams()
    """What holds where the dump does not state a parameter."""
    given: frozenset[str] = frozenset()
    """Names of the defaults that somebody vouches for."""
    vocab_size: int | None = None
    """Ids at or above it are refused; None lets all pass."""
    context_length: int | None = None
    """Positions of the model: what is longer was not made by it, and would take minutes to score."""
    skip_bad: bool = False
    batches: Query = EVERYTHING
    """Of an archive, which batches are read at all."""

    def read(self, path: Path) -> Dump:
        """The dump at `path`: a file, a pipe, a run directory or an archive of ours, or a directory of prime-rl or NeMo-RL."""
        if is_archive(path):
            return self._read_archive(path)
        if self.batches.state is not None or self.format is DumpFormat.ARCHIVE:
            raise RecordError(
                f"{path} is no archive; leave out --state and --format archive, or name its directory"
            )
        state = _State(self)
        files = dump_files(path)
        for file in files:
            # Files of one dump share names (rank_0.jsonl); the directory tells them apart.
            source = file.name if len(files) == 1 else f"{file.parent.name}/{file.name}"
            if not file.is_file():
                source = str(file)  # a pipe, whose name alone is a number
            for number, line in numbered_lines(file):
                state.take(source, number, line)
        return state.finished(path)

    def _read_archive(self, path: Path) -> Dump:
        if self.format not in (None, DumpFormat.ARCHIVE):
            raise RecordError(f"{path} is an archive, and no {self.format}; leave --format out")
        state = _State(msgspec.structs.replace(self, format=DumpFormat.ARCHIVE))
        for name, batch in archived_batches(path, self.batches):
            if isinstance(batch, RecordError):
                state.refuse(name, 1, batch)
                continue
            for number, rollout in enumerate(batch.rollouts, 1):
                place = LinePlace(name, number, self.default, self.given)
                state.take_read(name, number, partial(read_archived, batch, rollout, place))
        return state.finished(path)


class _State:
    """What has been read so far, and what it obliges the next line to."""

    def __init__(self, reading: DumpReader) -> None:
        self._reading = reading
        self._format = reading.format
        self._first: RecordedRollout | None = None
        self._rollouts: list[RecordedRollout] = []
        self._bad: list[BadLine] = []
        self._empty: list[str] = []
        self._count = 0
        self._model: str | None = None
        self._sign_turned: bool | None = None

    def take(self, source: str, number: int, line: bytes) -> None:
        """Read one line, or put it down as bad."""
        if line.strip():
            place = LinePlace(source, number, self._reading.default, self._reading.given)
            self.take_read(source, number, lambda: self._read(line, place))

    def take_read(self, source: str, number: int, read: Callable[[], list[RecordedRollout]]) -> None:
        """What `read` gives, or why it does not."""
        self._count += 1
        try:
            rollouts = read()
            for rollout in rollouts:
                self._check(rollout)
        # Overflow: JSON has integers that no float can hold. Type: it has lists and objects where a reader looks a word up.
        except (ZerodriftError, msgspec.ValidationError, OverflowError, TypeError) as error:
            self.refuse(source, number, error)
            return
        for rollout in rollouts:
            self._first = self._first or rollout
            self._model = self._model or rollout.model
            self._sign_turned = _sign_turned(rollout) if self._sign_turned is None else self._sign_turned
        self._rollouts += [rollout for rollout in rollouts if rollout.output]
        silent = [rollout.where for rollout in rollouts if not rollout.output]
        self._empty += silent if rollouts else [f"{source}, line {number}"]

    def refuse(self, source: str, number: int, error: Exception) -> None:
        """Put it down as bad, where that was asked for."""
        code = error.code if isinstance(error, ZerodriftError) else RecordError.code
        typed = type(error) is TypeError
        reason = f"a value has another type than it can have ({error})" if typed else str(error)
        bad = BadLine(source, number, code, reason)
        if not self._reading.skip_bad:
            raise RecordError(
                f"{bad.where}: {reason}; repair the dump, or judge it without such lines (--skip-bad)"
            ) from error
        self._bad.append(bad)

    def finished(self, path: Path) -> Dump:
        """The dump, if there is one."""
        if self._format is None or not self._rollouts:
            why = (
                f"; the first problem is at {self._bad[0].where}: {self._bad[0].reason}" if self._bad else ""
            )
            raise RecordError(f"{path} holds no rollout that can be judged{why}")
        return Dump(
            format=self._format,
            rollouts=tuple(self._rollouts),
            bad=tuple(self._bad),
            empty=tuple(self._empty),
            lines=self._count,
        )

    def _read(self, line: bytes, place: LinePlace) -> list[RecordedRollout]:
        fields = _decode(line)
        found = self._format or detect(fields)
        if found is None:
            refuse_text(fields)
            shown = ", ".join(sorted(fields)[:8])
            raise RecordError(
                f"no known format has these keys: {shown}; plain lines need prompt_token_ids, token_ids and logprobs"
            )
        rollouts = READERS[found](fields, place)
        self._format = found
        return rollouts

    def _check(self, rollout: RecordedRollout) -> None:
        """What a line must have in common with the model and with the lines before it."""
        if self._reading.vocab_size is not None:
            rollout.check_vocabulary(self._reading.vocab_size)
        if self._reading.context_length is not None:
            rollout.check_length(self._reading.context_length)
        if None not in (rollout.model, self._model) and rollout.model != self._model:
            raise InvalidValue(
                f"it was made by {rollout.model!r} and the lines before it by {self._model!r}; "
                "judge the models one at a time"
            )
        if self._first is not None and (rollout.step is None) != (self._first.step is None):
            has, had = ("no step", "one") if rollout.step is None else ("a step", "none")
            raise InvalidValue(f"it has {has} and the lines before it have {had}; number all or none")
        if self._sign_turned not in (None, turned := _sign_turned(rollout)) and turned is not None:
            raise InvalidCompletion(
                f"its numbers lie {'above' if turned else 'below'} zero, and those of the lines before it do not; "
                "write logprobs throughout"
            )


def _sign_turned(rollout: RecordedRollout) -> bool | None:
    """Whether the line writes numbers above zero; None where all of them are zero, to rounding."""
    return None if max(map(abs, rollout.logprobs), default=0.0) <= NO_LOGPROB else rollout.sign_turned


def dump_files(path: Path) -> list[Path]:
    """The files that `path` stands for, in the order of training; `-` is what is piped in."""
    if path == PIPED:
        return [STDIN]
    if not path.exists():
        raise RecordError(f"there is no dump at {path}")
    if not path.is_dir():
        return [path]
    if (own := path / ROLLOUTS).is_file():
        return [own]
    below = path / "token_exports" if (path / "token_exports").is_dir() else path
    for pattern, named in EXPORTS.items():
        if exports := list(below.glob(pattern)):
            return sorted(exports, key=lambda file: [int(_NUMBER.findall(part)[-1]) for part in named(file)])
    raise RecordError(f"{path} holds none of {', '.join((ROLLOUTS, *EXPORTS))}; name the file itself")


def _decode(line: bytes) -> Fields:
    try:
        value: Any = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ZerodriftError):
            raise
        torn = "" if line.endswith(b"\n") else "the line is torn, as after a kill: "
        raise RecordError(f"{torn}it is not JSON ({error})") from error
    if not isinstance(value, dict):
        how = "; of one list of rollouts make lines by jq -c '.[]'" if isinstance(value, list) else ""
        raise RecordError(f"the line holds a {type(value).__name__}; a rollout is an object{how}")
    return value


def _no_number(word: str) -> Any:
    # Python writes NaN and Infinity where JSON has no word for them.
    raise NonFinite(f"the line holds {word}; a logprob is finite: the row it came from is corrupt")
