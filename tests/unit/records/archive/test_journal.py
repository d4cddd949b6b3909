import math

import pytest

from zerodrift.core.errors import DigestMismatch, RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.archive.journal import (
    HEADER_BYTES,
    MAGIC,
    Broken,
    Frame,
    decode,
    encode,
    frame_of,
    read_frame,
    scan,
)


@pytest.fixture(scope="module")
def frames(made):
    return [frame_of(encode(made(step)), 100.0 + step) for step in range(3)]


def kinds(content: bytes) -> str:
    return "".join("f" if isinstance(found, Frame) else "L" if found.last else "b" for found in scan(content))


def test_what_is_written_is_read(frames, made):
    found = list(scan(b"".join(frames)))
    assert [decode(frame.payload, "here") for frame in found if isinstance(frame, Frame)] == [
        made(0),
        made(1),
        made(2),
    ]
    assert [frame.archived_at for frame in found if isinstance(frame, Frame)] == [100.0, 101.0, 102.0]
    assert kinds(b"") == ""


def test_the_same_batch_has_the_same_bytes(made):
    bias = SamplingParams(logit_bias={3: 1.0, 1: 2})
    batch = made(stated=("top_p", "top_k", "top_p"), sampling=bias)
    assert encode(decode(encode(batch).payload, "here")) == encode(batch)
    other = SamplingParams(logit_bias={1: 2.0, 3: 1})
    assert encode(made(stated=("top_k", "top_p"), sampling=other)) == encode(batch)
    assert encode(made(1)).digest != encode(made(2)).digest


def test_nan_stays_nan(made):
    batch = made(behavior_logprobs=(math.nan, -0.5, math.inf))
    first = decode(encode(batch).payload, "here").rollouts[0].behavior_logprobs
    assert math.isnan(first[0])
    assert first[1:] == (-0.5, math.inf)


def test_every_way_to_be_torn(frames):
    """Wherever the last write stopped, the frames before it are whole and the rest is one tail."""
    before, last = b"".join(frames[:2]), frames[2]
    for size in range(1, len(last)):
        assert kinds(before + last[:size]) == "ffL"


def test_a_damaged_frame_is_alone(frames):
    whole = b"".join(frames)
    for place in range(len(frames[0]), len(frames[0]) + len(frames[1])):
        changed = bytearray(whole)
        changed[place] ^= 0x40
        assert kinds(bytes(changed)) == "fbf"
    changed = bytearray(whole)
    changed[-1] ^= 1
    assert kinds(bytes(changed)) == "ffL"


def test_the_magic_inside_a_batch_is_no_frame(made):
    frame = frame_of(encode(made(environment=MAGIC.decode() * 9)), 1.0)
    assert kinds(frame + frame) == "ff"
    assert kinds(frame + frame[:-1]) == "fL"
    (tail,) = (found for found in scan(frame[:-1]) if isinstance(found, Broken))
    assert (tail.begin, tail.end) == (0, len(frame) - 1)


def test_one_frame_by_its_place(frames, tmp_path, made):
    path = tmp_path / "suspect-000001.journal"
    path.write_bytes(b"".join(frames))
    assert decode(read_frame(path, len(frames[0])).payload, "here") == made(1)
    for place in (3, sum(map(len, frames)), len(frames[0]) + HEADER_BYTES):
        with pytest.raises(DigestMismatch):
            read_frame(path, place)


def test_a_payload_of_another_kind():
    with pytest.raises(RecordError):
        decode(b"\x80", "here")
