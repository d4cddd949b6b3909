import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.archive.journal import encode
from zerodrift.records.archive.segment import open_segment, read_described, segment_of, sha256_of
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState

TEXTS = st.none() | st.text(max_size=5)


@st.composite
def rollouts(draw: st.DrawFn, name: str) -> ArchivedRollout:
    length = draw(st.integers(0, 6))
    ids = st.integers(0, 2**31 - 1)
    numbers = st.lists(st.floats(), min_size=length, max_size=length).map(tuple)
    cut = draw(st.integers(0, length))
    spans = [(0, cut, None), (cut, length, "d")]
    return ArchivedRollout(
        id=name,
        prompt_token_ids=tuple(draw(st.lists(ids, max_size=3))),
        token_ids=tuple(draw(st.lists(ids, min_size=length, max_size=length))),
        behavior_logprobs=draw(numbers),
        old_logprobs=draw(st.none() | numbers),
        current_logprobs=draw(st.none() | numbers),
        rescored_logprobs=draw(st.none() | numbers),
        versions=tuple(
            VersionSpan(WeightVersion(str(at), digest), at, end) for at, end, digest in spans if at < end
        ),
        mask=draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length).map(tuple)),
        reward=draw(st.none() | st.floats()),
        environment=draw(TEXTS),
        replica=draw(TEXTS),
        group=draw(TEXTS),
        sampling=SamplingParams(
            temperature=draw(st.sampled_from([1, 0.7])),
            logit_bias=draw(st.dictionaries(st.integers(0, 9), st.integers(-3, 3))),
        ),
        stated=tuple(draw(st.lists(st.sampled_from(SHAPING)))),
        kind=draw(st.none() | st.sampled_from(LogprobKind)),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
    )


@st.composite
def batches(draw: st.DrawFn) -> ArchivedBatch:
    return ArchivedBatch(
        step=draw(st.integers(0, 2**63 - 1)),
        state=draw(st.sampled_from(BatchState)),
        reasons=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
        trainer_version=draw(TEXTS),
        rollouts=tuple(draw(rollouts(str(number))) for number in range(draw(st.integers(1, 3)))),
    )


@settings(max_examples=60)
@given(st.lists(batches(), min_size=1, max_size=3))
def test_every_bit_comes_back(given_batches):
    """Compared as bytes, for NaN is not equal to itself."""
    content = segment_of(
        (f"name {number}", 5.0 + number, batch) for number, batch in enumerate(given_batches)
    )
    file = open_segment(pyarrow.BufferReader(content))
    assert file.num_row_groups == len(given_batches)
    for place, batch in enumerate(given_batches):
        name, archived_at, read = read_described(file, Path("x"), place)
        assert (name, archived_at) == (f"name {place}", 5.0 + place)
        assert encode(read) == encode(batch)


def test_any_data_tool_reads_it(made, tmp_path):
    path = tmp_path / "s.parquet"
    path.write_bytes(segment_of([("name", 1.0, made(3, behavior_logprobs=(-1.0, math.nan, -2.0)))]))
    table = pyarrow.parquet.read_table(path)
    assert table.column("step").to_pylist() == [3, 3]
    assert table.column("token_ids").to_pylist()[0] == [10, 11, 12]
    assert table.column("old_logprobs").to_pylist() == [None, None]
    assert table.column("behavior_logprobs").null_count == 0


def test_what_is_no_segment_is_refused(tmp_path, made):
    path = tmp_path / "s.parquet"
    content = segment_of([("name", 1.0, made())])
    path.write_bytes(content[:-9])
    with pytest.raises(RecordError):
        open_segment(path)
    pyarrow.parquet.write_table(pyarrow.table({"step": [1]}), path)
    with pytest.raises(SchemaMismatch):
        open_segment(path)
    path.write_bytes(content)
    with pytest.raises(RecordError):
        read_described(open_segment(path), path, 1)
    assert sha256_of(path) != sha256_of(Path(__file__))
