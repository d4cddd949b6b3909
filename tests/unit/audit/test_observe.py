"""What is on disk is not asked again, and what a kill leaves behind is not taken for whole."""

from collections.abc import Sequence

import pytest

from zerodrift.audit import observe as observing
from zerodrift.audit.observe import observe
from zerodrift.core.completion import (
    Answer,
    Completion,
    EngineFingerprint,
    FinishReason,
    LogprobKind,
    Problem,
)
from zerodrift.core.errors import BadAnswer, EngineUnreachable, RecordError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.codec import read_lines
from zerodrift.records.rollout import Rollout


class Counting:
    """An engine whose answer is a function of the request, and that remembers what it was asked."""

    name = "counting"

    def __init__(self, dies_at: int | None = None, build: str = "1") -> None:
        self.asked: list[Request] = []
        self._dies_at = dies_at
        self._build = build

    def fingerprint(self) -> EngineFingerprint:
        return EngineFingerprint(engine=self.name, semantic={}, numeric={"build": self._build}, deployment={})

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if self._dies_at is not None and len(self.asked) >= self._dies_at:
            raise EngineUnreachable("gone")
        self.asked += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        seed, sampling = request.sampling.seed or 0, request.sampling
        completions = tuple(
            Completion(
                prompt_token_ids=request.prompt.token_ids,
                token_ids=(seed, index),
                logprobs=(-0.1 * seed, -1.0),
                kind=LogprobKind.PROCESSED,
                sampling=sampling,
                finish_reason=FinishReason.LENGTH,
                versions=(VersionSpan(WeightVersion("v"), 0, 2),),
                fingerprint=self.fingerprint().digest,
                sample_index=index,
            )
            for index in range(sampling.n)
        )
        if seed % 5 == 4:
            return Answer(completions[1:], (Problem("value/non-finite", "sample 0"),))
        return Answer(completions)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(observing, "BATCH", 3)


REQUESTS = [
    Request(Prompt((number,)), SamplingParams(seed=number, n=1 + number % 3, max_tokens=2))
    for number in range(11)
]


def test_every_answer_is_kept_in_order(tmp_path):
    engine, path, steps = Counting(), tmp_path / "rollouts.jsonl", []
    rollouts = observe(engine, REQUESTS, "parity", path, lambda done, total: steps.append((done, total)))
    assert engine.asked == REQUESTS
    assert [rollout.index for rollout in rollouts] == [
        i for i, r in enumerate(REQUESTS) for _ in range(r.sampling.n)
    ]
    assert all(rollout.request == REQUESTS[rollout.index] for rollout in rollouts)
    assert {rollout.index for rollout in rollouts if rollout.problem} == {4, 9}
    assert list(read_lines(path, Rollout)) == rollouts
    assert steps == [(3, 11), (6, 11), (9, 11), (11, 11)]


def test_a_finished_run_asks_nothing(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    first = observe(Counting(), REQUESTS, "parity", path)
    content, engine = path.read_bytes(), Counting()
    assert observe(engine, REQUESTS, "parity", path) == first
    assert engine.asked == []
    assert path.read_bytes() == content


def test_a_kill_at_any_byte_is_made_good(tmp_path):
    """Also between two samples of one request: the file then ends with a whole line."""
    path = tmp_path / "rollouts.jsonl"
    expected = observe(Counting(), REQUESTS, "parity", path)
    whole = path.read_bytes()
    ends = [end + 1 for end, byte in enumerate(whole) if byte == 10]
    cuts = sorted({0, 1, *range(0, len(whole), 701), *(end + near for end in ends for near in (-1, 0, 1))})
    for cut in cuts:
        if cut > len(whole):
            continue
        path.write_bytes(whole[:cut])
        engine = Counting()
        assert observe(engine, REQUESTS, "parity", path) == expected, cut
        assert path.read_bytes() == whole, cut
        complete = [
            i for i in range(11) if sum(r.sampling.n for r in REQUESTS[: i + 1]) <= whole[:cut].count(b"\n")
        ]
        assert engine.asked == REQUESTS[len(complete) :], cut


def test_an_engine_that_dies_leaves_what_it_answered(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with pytest.raises(EngineUnreachable):
        observe(Counting(dies_at=6), REQUESTS, "parity", path)
    engine = Counting()
    rollouts = observe(engine, REQUESTS, "parity", path)
    assert engine.asked == REQUESTS[6:]
    assert rollouts == observe(Counting(), REQUESTS, "parity", tmp_path / "other.jsonl")


def test_groups_share_a_file_and_nothing_else(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    first = observe(Counting(), REQUESTS, "one", path)
    second = observe(Counting(), REQUESTS[:4], "two", path)
    assert {rollout.group for rollout in second} == {"two"}
    again = Counting()
    assert observe(again, REQUESTS, "one", path) == first
    assert observe(again, REQUESTS[:4], "two", path) == second
    assert again.asked == []


def test_a_tail_of_another_group_is_made_good_by_that_group(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    first = observe(Counting(), REQUESTS, "one", path)
    second = observe(Counting(), REQUESTS, "two", path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert observe(Counting(), REQUESTS, "one", path) == first
    assert observe(Counting(), REQUESTS, "two", path) == second
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize("plan", [REQUESTS[::-1], REQUESTS[:3]])
def test_another_plan_is_refused(tmp_path, plan):
    path = tmp_path / "rollouts.jsonl"
    observe(Counting(), REQUESTS, "parity", path)
    with pytest.raises(
        RecordError, match=r"holds rollouts of another plan \(request \d+ differs\); resume with"
    ):
        observe(Counting(), plan, "parity", path)


def test_a_damaged_file_is_refused_by_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    observe(Counting(), REQUESTS, "parity", path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[4:]]))
    with pytest.raises(RecordError, match=r"rollouts.jsonl, line 4: "):
        observe(Counting(), REQUESTS, "parity", path)


@pytest.mark.parametrize(
    "content", [b'{"prompt": "precious"}', b'{"prompt": 1}\n{"prompt": 2}', b"\xff", b"\n"]
)
def test_a_file_of_somebody_else_is_not_touched(tmp_path, content):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"rollouts.jsonl holds no rollouts of ours; choose another --out"):
        observe(Counting(), REQUESTS, "parity", path)
    assert path.read_bytes() == content


def test_an_engine_that_answers_too_little_is_not_believed(tmp_path):
    class Short(Counting):
        def generate(self, requests):
            return super().generate(requests)[:-1]

    with pytest.raises(BadAnswer, match="counting gave 2 answers to 3 requests"):
        observe(Short(), REQUESTS, "parity", tmp_path / "rollouts.jsonl")
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b""


def test_who_sampled_is_written_down(tmp_path):
    rollouts = observe(Counting(), REQUESTS, "g", tmp_path / "r.jsonl", source="reference")
    assert {rollout.source for rollout in rollouts} == {"reference"}
    assert any(rollout.problem is not None for rollout in rollouts)


def test_answers_of_another_build_are_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    observe(Counting(), REQUESTS[:4], "parity", path)
    with pytest.raises(RecordError, match=r"fingerprint .* resume with the engine as it was"):
        observe(Counting(build="2"), REQUESTS, "parity", path)


def test_rollouts_share_ids_and_prompts_fresh_or_read(tmp_path):
    """An id that is read is an object of 32 bytes, and a prompt of 512 ids would stand there three times."""
    path = tmp_path / "rollouts.jsonl"
    requests = [
        Request(Prompt(tuple(range(1000, 1009))), SamplingParams(seed=1000 + number % 2, max_tokens=2))
        for number in range(4)
    ]
    for _ in ("fresh", "read"):
        rollouts = observe(Counting(), requests, "parity", path)
        for rollout, request in zip(rollouts, requests, strict=True):
            assert rollout.completion is not None
            assert rollout.request is request
            assert rollout.completion.prompt_token_ids is request.prompt.token_ids
        assert len({id(rollout.completion.token_ids[0]) for rollout in rollouts if rollout.completion}) == 2


def test_another_prompt_than_was_sent_is_kept(tmp_path):
    class Prefixes(Counting):
        def _answer(self, request):
            moved = Request(Prompt((0, *request.prompt.token_ids)), request.sampling)
            return super()._answer(moved)

    rollouts = observe(Prefixes(), REQUESTS[:2], "parity", tmp_path / "rollouts.jsonl")
    assert [each.completion.prompt_token_ids for each in rollouts if each.completion] == [
        (0, 0),
        (0, 1),
        (0, 1),
    ]
