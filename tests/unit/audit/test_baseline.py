"""A recording is bound to weights, prompts and parameters, and resumes from whatever a kill left behind."""

from collections.abc import Sequence

import msgspec
import pytest

from zerodrift.audit import baseline as recording
from zerodrift.audit.baseline import record
from zerodrift.core.completion import Answer, Completion, EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.errors import (
    ContractViolation,
    DigestMismatch,
    InvalidPrompt,
    InvalidSampling,
    RecordError,
    SchemaMismatch,
)
from zerodrift.core.request import MAX_SEED, Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.baseline import BaselineHeader, read_header, read_rows
from zerodrift.records.codec import LineWriter

PROMPTS = [Prompt(tuple(range(1, 2 + number % 4))) for number in range(11)]
SAMPLING = SamplingParams(seed=100, max_tokens=3)


class Facts:
    vocab_size = 512


class Pretender:
    """Has what `record` needs of a reference; its numbers are functions of seed and position."""

    max_model_len = 1024

    spec = "testbed:none"
    facts = Facts()
    kind = LogprobKind.PROCESSED

    def __init__(self, weights: str = "aa") -> None:
        self.version = WeightVersion("initial", weights)
        self.asked: list[Request] = []

    def fingerprint(self) -> EngineFingerprint:
        return EngineFingerprint(engine="reference", semantic={"é": "ü"}, numeric={}, deployment={})

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self.asked += requests
        return [
            Answer(
                (
                    Completion(
                        prompt_token_ids=request.prompt.token_ids,
                        token_ids=((request.sampling.seed or 0) % 500, 7),
                        logprobs=(-0.5, -((request.sampling.seed or 0) % 7) / 3),
                        kind=self.kind,
                        sampling=request.sampling,
                        finish_reason=FinishReason.STOP,
                        versions=(VersionSpan(self.version, 0, 2),),
                        fingerprint="f",
                    ),
                )
            )
            for request in requests
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-float(position) for position in range(1, len(ids))] for ids in sequences]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(recording, "BATCH", 4)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "base.jsonl"
    assert record(Pretender(), PROMPTS, SAMPLING, path) == 11
    return path


def test_every_prompt_becomes_a_row_of_its_own_seed(tmp_path):
    reference, path, steps = Pretender(), tmp_path / "deep" / "down" / "base.jsonl", []
    assert record(reference, PROMPTS, SAMPLING, path, lambda done, total: steps.append((done, total))) == 11
    rows = list(read_rows(path))
    assert [row.index for row in rows] == list(range(11))
    assert [row.prompt for row in rows] == [prompt.token_ids for prompt in PROMPTS]
    assert [request.sampling.seed for request in reference.asked] == [100 + number for number in range(11)]
    assert [row.output for row in rows] == [(100 + number, 7) for number in range(11)]
    # Scores begin at the second token; those of the output begin where the prompt ends.
    assert [row.raw_logprobs for row in rows] == [(-len(p.token_ids), -len(p.token_ids) - 1) for p in PROMPTS]
    assert steps == [(4, 11), (8, 11), (11, 11)]
    assert read_header(path).sampling == SAMPLING


def test_a_finished_recording_is_left_alone(path):
    content, reference = path.read_bytes(), Pretender()
    assert record(reference, PROMPTS, SAMPLING, path) == 0
    assert reference.asked == []
    assert path.read_bytes() == content


def test_a_kill_at_any_byte_is_made_good(path):
    """Also within the header, which is the first thing to be written."""
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    ends = [end + 1 for end, byte in enumerate(whole) if byte == 10]
    cuts = {
        0,
        1,
        header // 2,
        *range(0, len(whole), 97),
        *(end + near for end in ends for near in (-1, 0, 1)),
    }
    for cut in sorted(cut for cut in cuts if cut <= len(whole)):
        path.write_bytes(whole[:cut])
        kept = max(whole[:cut].count(b"\n") - 1, 0)
        reference = Pretender()
        assert record(reference, PROMPTS, SAMPLING, path) == 11 - kept
        # Whole blocks of four, so that every row has the neighbours that it would have had.
        assert [request.prompt for request in reference.asked] == (
            PROMPTS[kept // 4 * 4 :] if kept < 11 else []
        )
        assert path.read_bytes() == whole, cut


@pytest.mark.parametrize(
    ("reference", "prompts", "sampling", "says"),
    [
        (
            Pretender("bb"),
            PROMPTS,
            SAMPLING,
            r"was recorded with other weights \(aa\) than asked for now \(bb\)",
        ),
        (Pretender(), PROMPTS[:-1], SAMPLING, "was recorded with other prompts"),
        (Pretender(), PROMPTS[::-1], SAMPLING, "was recorded with other prompts"),
        (
            Pretender(),
            PROMPTS,
            msgspec.structs.replace(SAMPLING, temperature=0.5),
            "was recorded with other sampling .* choose another file, or repeat the options",
        ),
    ],
)
def test_two_recordings_never_share_a_file(path, reference, prompts, sampling, says):
    content = path.read_bytes() + b'{"torn'
    path.write_bytes(content)
    with pytest.raises(DigestMismatch, match=says) as caught:
        record(reference, prompts, sampling, path)
    assert caught.value.code == "record/digest"
    assert reference.asked == []
    assert path.read_bytes() == content, "a file that is not ours was changed"


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "hello"}\n{"prompt": "no newline at the end"}',
        b'{"prompt": "hello"}',
        b"precious text",
        b"\x00\x01\x02\xff",
        b"\n",
        b"{}\n",
    ],
)
def test_a_file_that_is_no_baseline_is_not_touched(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"prompts.jsonl.*baseline"):
        record(Pretender(), PROMPTS, SAMPLING, path)
    assert path.read_bytes() == content


def test_another_schema_is_not_touched(path):
    content = path.read_bytes().replace(b"zerodrift.baseline/1", b"zerodrift.baseline/2")
    path.write_bytes(content)
    with pytest.raises(SchemaMismatch):
        record(Pretender(), PROMPTS, SAMPLING, path)
    assert path.read_bytes() == content


def test_a_bad_row_in_the_middle_is_refused_by_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"{}\n", *lines[6:]]))
    with pytest.raises(RecordError, match=r"base.jsonl, line 6: "):
        record(Pretender(), PROMPTS, SAMPLING, path)


def test_rows_that_lie_in_another_order_are_known_all_the_same(path):
    header, *rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *rows[::-1]]))
    assert record(Pretender(), PROMPTS, SAMPLING, path) == 0


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "base.jsonl"):
        with pytest.raises(RecordError, match=r"cannot be written .*; choose another --out"):
            record(Pretender(), PROMPTS, SAMPLING, path)


def test_seeds_go_round_at_the_end_of_their_range(tmp_path):
    reference = Pretender()
    sampling = msgspec.structs.replace(SAMPLING, seed=MAX_SEED - 3)
    record(reference, PROMPTS, sampling, tmp_path / "base.jsonl")
    assert len({request.sampling.seed for request in reference.asked}) == 11
    assert record(Pretender(), PROMPTS, sampling, tmp_path / "base.jsonl") == 0


def test_refused_before_any_work(tmp_path):
    path = tmp_path / "base.jsonl"
    raw = Pretender()
    raw.kind = LogprobKind.RAW
    with pytest.raises(
        ContractViolation, match="a baseline keeps processed logprobs, and this reference reports raw"
    ):
        record(raw, PROMPTS, SAMPLING, path)
    with pytest.raises(InvalidSampling, match="n is 2; a baseline keeps one sample of each prompt"):
        record(Pretender(), PROMPTS, msgspec.structs.replace(SAMPLING, n=2), path)
    with pytest.raises(InvalidPrompt, match=r"prompt\[0\] is 512, but the model has 512 tokens"):
        record(Pretender(), [*PROMPTS, Prompt((512,))], SAMPLING, path)
    with pytest.raises(InvalidPrompt, match="there is no prompt to record"):
        record(Pretender(), [], SAMPLING, path)
    assert not path.exists()


def test_a_header_alone_is_a_beginning(tmp_path, path):
    other = tmp_path / "other.jsonl"
    with LineWriter[BaselineHeader](other) as writer:
        writer.write(read_header(path))
    assert record(Pretender(), PROMPTS, SAMPLING, other) == 11
    assert other.read_bytes() == path.read_bytes()


def test_a_prompt_that_does_not_fit_is_refused_before_the_file_is_made(tmp_path):
    path = tmp_path / "base.jsonl"
    long = Prompt((1,) * 1024)
    with pytest.raises(InvalidPrompt, match=r"prompt 1 has 1024 tokens, .* a context of 1024"):
        record(Pretender(), [PROMPTS[0], long], SAMPLING, path)
    assert not path.exists()
    with pytest.raises(InvalidSampling, match="the seed is None"):
        record(Pretender(), PROMPTS, msgspec.structs.replace(SAMPLING, seed=None), path)
    assert not path.exists()
