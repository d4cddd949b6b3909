import math
from pathlib import Path
from typing import Any

import pytest

from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.archive.index import Query
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans
from zerodrift.records.dump import Dump, DumpReader
from zerodrift.records.dump_formats import DumpFormat

FIELDS: dict[str, Any] = {
    "id": "a",
    "prompt_token_ids": (1, 2),
    "token_ids": (3, 4, 5),
    "behavior_logprobs": (-0.1, -0.2, -0.3),
    "old_logprobs": (-0.11, -0.21, -0.31),
}


@pytest.fixture
def write(tmp_path):
    """An archive with a batch for each step, of rollouts with these fields."""

    def written(*steps, state=BatchState.QUARANTINE, trainer=None, **fields):
        rollout = ArchivedRollout(**{**FIELDS, **fields})
        with Archive(tmp_path / "archive", ArchiveSettings(healthy_one_in=1)) as archive:
            for step in steps:
                archive.append(
                    ArchivedBatch(step=step, state=state, trainer_version=trainer, rollouts=(rollout,))
                )
        return tmp_path / "archive"

    return written


def read(directory: Path, **how: Any) -> Dump:
    return DumpReader(**how).read(directory)


def test_an_archive_is_read_by_step_with_both_sides(write):
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    dump = read(
        write(
            12,
            3,
            versions=version_spans([4, 4, 5]),
            sampling=sampling,
            stated=("temperature",),
            kind=LogprobKind.RAW,
            finish_reason=FinishReason.LENGTH,
        )
    )
    assert (dump.format, dump.lines) == (DumpFormat.ARCHIVE, 2)
    assert [rollout.step for rollout in dump.rollouts] == [3, 12]
    first = dump.rollouts[0]
    assert (first.prompt, first.output) == ((1, 2), (3, 4, 5))
    assert (first.logprobs, first.trainer_logprobs) == ((-0.1, -0.2, -0.3), (-0.11, -0.21, -0.31))
    assert (first.version, first.kind, first.finish_reason) == ("4+5", LogprobKind.RAW, FinishReason.LENGTH)
    # Only what is stated holds: nobody vouches for the rest.
    assert (first.sampling.temperature, first.sampling.top_p, first.stated) == (0.7, 1.0, {"temperature"})


def test_what_is_not_stated_is_the_readers(write):
    (rollout,) = read(
        write(1), default=SamplingParams(temperature=0.5), given=frozenset({"temperature"})
    ).rollouts
    assert (rollout.sampling.temperature, rollout.stated) == (0.5, {"temperature"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, -0.11),
        ({"rescored_logprobs": (-0.5,) * 3}, -0.5),
        ({"versions": version_spans([4] * 3)}, -0.11),
        ({"versions": version_spans([4] * 3), "trainer": "4"}, -0.11),
        # Another version's numbers are no evidence against the trainer.
        ({"versions": version_spans([3] * 3), "trainer": "4"}, None),
        ({"versions": version_spans([3, 4, 4]), "trainer": "4"}, None),
        ({"versions": version_spans([3] * 3), "trainer": "4", "rescored_logprobs": (-0.5,) * 3}, -0.5),
        ({"old_logprobs": None, "current_logprobs": (-0.9,) * 3}, None),
    ],
)
def test_which_numbers_are_the_trainers(write, fields, expected):
    (rollout,) = read(write(1, **fields)).rollouts
    assert (rollout.trainer_logprobs and rollout.trainer_logprobs[0]) == expected


def test_turns_are_rollouts_of_their_own(write):
    one, two = read(write(1, mask=(True, False, True))).rollouts
    assert (one.prompt, one.output, one.logprobs) == ((1, 2), (3,), (-0.1,))
    assert (two.prompt, two.output, two.trainer_logprobs) == ((1, 2, 3, 4), (5,), (-0.31,))


def test_a_mask_that_drops_everything_leaves_nothing_to_judge(write):
    directory = write(1, mask=(False,) * 3)
    with pytest.raises(RecordError):
        read(directory)
    write(2)
    assert len(read(directory).empty) == 1


@pytest.mark.parametrize(
    "fields",
    [{"behavior_logprobs": (-0.1, math.nan, -0.3)}, {"prompt_token_ids": ()}, {"token_ids": (3, 4, 99)}],
)
def test_what_cannot_be_judged_is_refused_or_listed_by_batch(write, fields):
    write(1)
    directory = write(2, **fields)
    with pytest.raises(RecordError):
        read(directory, vocab_size=50)
    dump = read(directory, vocab_size=50, skip_bad=True)
    assert [rollout.step for rollout in dump.rollouts] == [1]
    (bad,) = dump.bad
    assert bad.source.startswith("batch ")


def test_a_damaged_segment_is_refused_or_listed(write):
    write(1)
    directory = write(2)
    path = directory / "segments" / "suspect-000002.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RecordError):
        read(directory)
    dump = read(directory, skip_bad=True)
    assert [rollout.step for rollout in dump.rollouts] == [1]
    assert [bad.code for bad in dump.bad] == ["record/digest"]
    assert [rollout.step for rollout in read(directory, batches=Query(last=1)).rollouts] == [1]


def test_batches_are_chosen_before_they_are_read(write):
    write(1, 2, state=BatchState.OK)
    directory = write(3)
    chosen = read(directory, batches=Query(state=BatchState.OK, first=2))
    assert [rollout.step for rollout in chosen.rollouts] == [2]
    with pytest.raises(RecordError):
        read(directory, batches=Query(state=BatchState.HALT))


@pytest.mark.parametrize("how", [{"batches": Query(state=BatchState.OK)}, {"format": DumpFormat.ARCHIVE}])
def test_a_file_has_no_states(tmp_path, how):
    path = tmp_path / "dump.jsonl"
    path.write_text('{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1.0]}\n')
    assert len(read(path).rollouts) == 1
    with pytest.raises(RecordError):
        read(path, **how)


def test_an_archive_is_no_file_of_lines(write):
    with pytest.raises(RecordError):
        read(write(1), format=DumpFormat.PLAIN)
