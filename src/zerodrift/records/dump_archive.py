"""An archive of a training run as a dump: what blame judges, without the monitor that wrote it.

The numbers that count as the trainer's are those under the weights that made the token: re-scored ones, or the old policy's
where the trainer had the very weights of the tokens, or nobody said which it had.
"""

from collections.abc import Iterator
from pathlib import Path

from zerodrift.core.errors import RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.archive.index import Query
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout
from zerodrift.records.dump_fields import LinePlace, numbers_of, runs_of, sampling_of
from zerodrift.records.recorded import RecordedRollout


def archived_batches(directory: Path, query: Query) -> Iterator[tuple[str, ArchivedBatch | RecordError]]:
    """Each batch with its name, in the order of steps; where it cannot be read, why."""
    with ArchiveReader(directory) as reader:
        for entry in reader.entries(query):
            name = f"batch {entry.batch[:12]}"
            try:
                yield name, reader.read(entry)
            except RecordError as error:
                yield name, error


def read_archived(batch: ArchivedBatch, rollout: ArchivedRollout, place: LinePlace) -> list[RecordedRollout]:
    """One rollout for each run of sampled tokens: what stands between them is context of those that follow."""
    trainer = _of_the_trainer(batch, rollout)
    recorded = []
    for begin, end in runs_of(rollout.mask or (True,) * len(rollout.token_ids)):
        engine = numbers_of(rollout.behavior_logprobs[begin:end])
        recorded.append(
            RecordedRollout(
                source=place.source,
                line=place.line,
                step=batch.step,
                prompt=rollout.prompt_token_ids + rollout.token_ids[:begin],
                output=rollout.token_ids[begin:end],
                logprobs=engine.values,
                sign_turned=engine.sign_turned,
                kind=rollout.kind,
                sampling=_sampling(rollout, place.default),
                stated=place.given.union(rollout.stated),
                trainer_logprobs=None if trainer is None else trainer[begin:end],
                version=rollout.version,
                finish_reason=rollout.finish_reason if end == len(rollout.token_ids) else None,
            )
        )
    return recorded


def _sampling(rollout: ArchivedRollout, default: SamplingParams) -> SamplingParams:
    return sampling_of(default, {name: getattr(rollout.sampling, name) for name in rollout.stated})


def _of_the_trainer(batch: ArchivedBatch, rollout: ArchivedRollout) -> tuple[float, ...] | None:
    if rollout.rescored_logprobs is not None:
        return rollout.rescored_logprobs
    same = None in (rollout.version, batch.trainer_version) or rollout.version == batch.trainer_version
    return rollout.old_logprobs if same else None
