import gzip
import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from zerodrift.core.errors import RecordError
from zerodrift.records import codec
from zerodrift.records.dump import Dump, DumpReader, dump_files
from zerodrift.records.dump_formats import READERS, DumpFormat

GOOD: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "completion_ids": [3],
    "logprobs": [-0.5],
    "step": 0,
    "model": "a",
}


@pytest.fixture
def write(tmp_path):
    """A dump of these lines: bytes as they are, objects as JSON, each with its newline."""

    def make(*lines, name="dump.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return path

    return make


def skipped(path: Path, **how: Any) -> Dump:
    return DumpReader(skip_bad=True, **how).read(path)


def test_lines_in_order(write):
    dump = DumpReader().read(write({**GOOD, "step": 4}, b"\n", GOOD))
    assert dump.format is DumpFormat.PLAIN
    assert [(each.source, each.line, each.step) for each in dump.rollouts] == [
        ("dump.jsonl", 1, 4),
        ("dump.jsonl", 3, 0),
    ]
    assert dump.lines == 2
    assert dump.bad == ()


BAD: dict[str, bytes | dict[str, Any]] = {
    "torn": b'{"prompt_ids": [1, 2], "comple',
    "no JSON": b"hello\n",
    "no UTF-8": b'{"prompt_ids": "\xff"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "no object": b"[1, 2]\n",
    "NaN": {**GOOD, "logprobs": [float("nan")]},
    "-9999": {**GOOD, "logprobs": [-9999.0]},
    "overflow": b'{"prompt_ids":[1],"completion_ids":[3],"logprobs":[-1e999],"step":0}\n',
    "huge integer": {**GOOD, "logprobs": [-(10**400)]},
    "above zero": {**GOOD, "logprobs": [0.2]},
    "length": {**GOOD, "logprobs": [-0.5, -0.5]},
    "vocabulary": {**GOOD, "completion_ids": [99]},
    "finish reason": {**GOOD, "finish_reason": ["stop"]},
    "too long": {**GOOD, "prompt_ids": [1] * 9},
    "another model": {**GOOD, "model": "b"},
    "no step": {**GOOD, "step": None},
    "another format": {"prompt": "text"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_by_number(name, write):
    path = write(GOOD, BAD[name])
    with pytest.raises(RecordError, match=r"^dump\.jsonl, line 2: (.|\n)*--skip-bad"):
        DumpReader(vocab_size=50, context_length=9).read(path)
    dump = skipped(path, vocab_size=50, context_length=9)
    assert [(bad.line, bad.where) for bad in dump.bad] == [(2, "dump.jsonl, line 2")]
    assert len(dump.rollouts) == 1
    assert dump.lines == 2


def test_what_no_reader_foresaw_is_still_refused_by_line(write, monkeypatch):
    def hashes(fields, _):
        assert fields["step"] in {0}
        return []

    monkeypatch.setitem(READERS, DumpFormat.PLAIN, hashes)
    with pytest.raises(RecordError, match="line 2"):
        DumpReader().read(write(GOOD, {**GOOD, "step": [7]}))


def test_corrupt_numbers_are_told_from_damage(write):
    codes = {
        "NaN": "value/non-finite",
        "-9999": "value/non-finite",
        "no JSON": "record/invalid",
        "length": "value/completion",
        "huge integer": "record/invalid",
    }
    found = skipped(write(GOOD, *(BAD[name] for name in codes)))
    assert [bad.code for bad in found.bad] == list(codes.values())


def test_a_bad_first_line_does_not_decide_the_format(write):
    dump = skipped(write(b"junk\n", {"something": "else"}, GOOD))
    assert [bad.line for bad in dump.bad] == [1, 2]
    assert "no known format has these keys: something" in dump.bad[1].reason
    assert len(dump.rollouts) == 1


def test_one_step_model_and_format_for_all(write):
    with pytest.raises(RecordError):
        DumpReader().read(write({**GOOD, "step": None}, GOOD))
    with pytest.raises(RecordError, match="line 1: schema_version is None"):
        DumpReader(format=DumpFormat.PRIME_RL).read(write(GOOD))
    nameless = {**GOOD, "model": None}
    fits = DumpReader(context_length=3).read(write(nameless, GOOD, json.dumps(nameless).encode()))
    assert len(fits.rollouts) == 3, "the first named model counts; the last line may lack its newline"


def test_rollouts_without_a_token_are_listed_and_a_dump_of_nothing_is_none(write):
    dump = DumpReader().read(write(GOOD, {**GOOD, "completion_ids": [], "logprobs": []}))
    assert (dump.empty, len(dump.rollouts)) == (("dump.jsonl, line 2",), 1)
    for lines in ((), (b"junk\n",)):
        with pytest.raises(RecordError):
            skipped(write(*lines))


def prime_rl(step: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "step": step,
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "inference_logprobs": [0.0, -1.0, -2.0],
        "trainer_logprobs": [0.0, -1.1, -2.1],
    }


def test_prime_rl_exports_in_the_order_of_training(write, tmp_path):
    write(prime_rl(10), name="token_exports/step_10/rank_0.jsonl")
    silent = {**prime_rl(2), "loss_mask": [False] * 3}
    write(prime_rl(2), silent, name="token_exports/step_2/rank_10.jsonl")
    write(prime_rl(2), name="token_exports/step_2/rank_9.jsonl")
    dump = DumpReader().read(tmp_path)
    assert dump.format is DumpFormat.PRIME_RL
    assert [each.where for each in dump.rollouts] == [
        "step_2/rank_9.jsonl, line 1",
        "step_2/rank_10.jsonl, line 1",
        "step_10/rank_0.jsonl, line 1",
    ]
    assert dump.empty == ("step_2/rank_10.jsonl, line 2",)
    assert dump_files(tmp_path / "token_exports") == dump_files(tmp_path)


def test_what_a_place_stands_for(write, tmp_path):
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RecordError):
            dump_files(place)
    path = write(GOOD, name="rollouts.jsonl")
    assert dump_files(tmp_path) == [path]
    assert dump_files(Path("-")) == [Path("/dev/stdin")]


def test_a_pipe_is_read_as_it_comes(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = json.dumps(GOOD).encode() + b"\n" + b"junk\n"
    Thread(target=pipe.write_bytes, args=(lines,), daemon=True).start()
    dump = skipped(pipe)
    # Pipes have names like 63: the whole path says more.
    assert [each.where for each in dump.rollouts] == [f"{pipe}, line 1"]
    assert [each.where for each in dump.bad] == [f"{pipe}, line 2"]


@pytest.mark.parametrize("name", ["dump.jsonl.gz", "dump"])
def test_a_compressed_dump(name, write):
    packed = gzip.compress(json.dumps(GOOD).encode() + b"\n")
    dump = DumpReader().read(write(packed, packed, name=name))
    assert [each.where for each in dump.rollouts] == [f"{name}, line 1", f"{name}, line 2"]


def test_a_damaged_compressed_dump(write):
    packed = gzip.compress(json.dumps(GOOD).encode() + b"\n")
    for broken in (packed[:-12], packed[:-8] + bytes(8), packed[:10] + b"\xff" * 30):
        with pytest.raises(RecordError, match=r"d.gz.*line \d"):
            skipped(write(broken, name="d.gz"))


def test_a_line_without_end_is_no_dump(write, monkeypatch):
    monkeypatch.setattr(codec, "MAX_LINE_BYTES", 10)
    with pytest.raises(RecordError, match="line 1"):
        DumpReader().read(write(GOOD))


def test_the_sign_of_the_first_numbers_holds_for_the_dump(write):
    zero, above = {**GOOD, "logprobs": [0.0]}, {**GOOD, "logprobs": [0.5]}
    dump = DumpReader().read(write(zero, above, zero))
    assert [rollout.sign_turned for rollout in dump.rollouts] == [False, True, False]
    assert dump.rollouts[1].logprobs == (-0.5,)
    with pytest.raises(RecordError):
        DumpReader().read(write(zero, above, GOOD))
