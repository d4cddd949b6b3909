"""Engines that die, hang, lie or leave things out: never a PASS, never a traceback, and the verdict says what is open."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.plan import PROBE_REQUESTS
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion, EngineFingerprint, Problem
from zerodrift.core.errors import EngineError, EngineRefused, EngineUnreachable
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.codec import read_lines
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome, VerdictRecord

SPEC = "testbed:llama"
SMALL = ValidationConfig(num_prompts=16, equivalence_trials=20, max_tokens=16)
NOTHING = frozenset[Capability]()


@pytest.fixture(scope="module")
def healthy():
    return ReferenceBackend(SPEC, dtype="float32")


@pytest.fixture
def audit(matrix, reference, tmp_path):
    def run(engine, size=SMALL, **options):
        directory = options.pop("directory", tmp_path)
        record: VerdictRecord = matrix.judge(engine, reference(SPEC), directory, size, **options)
        # A verdict that cannot be written down is none.
        assert msgspec.json.decode(msgspec.json.encode(record), type=VerdictRecord) == record
        return record

    return run


def open_questions(record: VerdictRecord) -> dict[str, str]:
    """What could not be judged, and why."""
    return {probe.name: probe.message for probe in record.probes if probe.status is Outcome.INCONCLUSIVE}


# --- engines that stop ------------------------------------------------------------------------------------------


class Dying(FaultyBackend):
    """Every call from the k-th on fails."""

    def __init__(self, inner: Backend, call: int, error: EngineError) -> None:
        super().__init__(inner)
        self.left, self.error = call - 1, error

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self._call()
        return super().generate(requests)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._call()
        return super().score(sequences)

    def fingerprint(self) -> EngineFingerprint:
        if self.left < 0:
            raise self.error
        return super().fingerprint()


# Calls of an audit: one samples, then each request runs alone and half of them again, then all together, then scores.
BATCH = 2 + PROBE_REQUESTS + (PROBE_REQUESTS + 1) // 2


@pytest.mark.parametrize(
    ("call", "open_ones"),
    [
        (1, {"contract", "parity"}),
        (2, {"repeat", "batch", "prefill-decode"}),
        (BATCH, {"batch", "prefill-decode"}),
        (BATCH + 1, {"prefill-decode"}),
        (BATCH + 2, {"given-tokens"}),
    ],
)
def test_an_engine_that_dies_in_the_middle(audit, healthy, call, open_ones):
    record = audit(Dying(healthy, call, EngineUnreachable("the connection was reset")))
    assert record.verdict is Outcome.INCONCLUSIVE
    assert record.guilty == "unknown"
    left = open_questions(record)
    assert open_ones <= set(left)
    assert any("the connection was reset" in says for says in left.values())
    assert record.engine.engine == "reference"
    assert record.engine.numeric["dtype"] == "float32", "it was this engine before it died"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (0, EngineUnreachable("nothing answers")),
        (1, EngineUnreachable("no answer within 120 s")),
        (1, EngineRefused("400: logprobs are not supported")),
    ],
    ids=["is not there", "hangs", "refuses"],
)
def test_an_engine_that_never_answers(audit, healthy, call, error):
    record = audit(Dying(healthy, call, error))
    assert record.verdict is Outcome.INCONCLUSIVE
    assert record.engine.engine == "reference"
    assert call == 0 or str(error) in record.message


class Unloadable(FaultyBackend):
    """Does not survive an update."""

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        raise EngineUnreachable("the worker died while loading")


def test_an_engine_that_dies_of_an_update(audit, healthy, tmp_path):
    from zerodrift import models

    engine = Unloadable(healthy)
    engine.capabilities = frozenset({Capability.SEED, Capability.LOAD_WEIGHTS})
    record = audit(engine, checkpoint=models.materialise(SPEC, tmp_path / "model"))
    assert record.verdict is Outcome.INCONCLUSIVE
    assert "the worker died while loading" in open_questions(record)["weight-sync"]


def test_an_engine_that_can_do_nothing_but_generate(audit, healthy):
    record = audit(bare(healthy))
    assert record.verdict is Outcome.INCONCLUSIVE
    assert {"repeat", "batch", "cache", "prefill-decode"} <= set(open_questions(record))
    assert "self-consistency" in record.message


# --- engines that lie -------------------------------------------------------------------------------------------


def bare(engine: Backend) -> FaultyBackend:
    """Nothing but generate: what is wrong must be seen in the answers alone."""
    stripped = FaultyBackend(engine)
    stripped.capabilities = NOTHING
    return stripped


class Lying(FaultyBackend):
    """Answers are changed on their way out."""

    def __init__(self, inner: Backend, change: Callable[[Request, Answer], Answer]) -> None:
        super().__init__(inner)
        self.capabilities = NOTHING
        self.change = change

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        return [self.change(request, answer) for request, answer in zip(requests, answers, strict=True)]


def told(change: Callable[[np.ndarray], Any]) -> Callable[[Request, Answer], Answer]:
    """Logprobs are changed."""

    def apply(request: Request, answer: Answer) -> Answer:
        return Answer(
            tuple(
                msgspec.structs.replace(
                    each, logprobs=tuple(float(v) for v in change(np.array(each.logprobs)))
                )
                for each in answer.completions
            )
        )

    return apply


def shown(**changes: Callable[[Completion], tuple[int, ...]]) -> Callable[[Request, Answer], Answer]:
    """Ids are changed."""

    def apply(request: Request, answer: Answer) -> Answer:
        return Answer(
            tuple(
                msgspec.structs.replace(each, lineage=(), **{name: f(each) for name, f in changes.items()})
                for each in answer.completions
            )
        )

    return apply


FIRST: dict[str, Answer] = {}
"""What an engine says to everybody that says one thing."""


def unreadable(code: str, message: str) -> Callable[[Request, Answer], Answer]:
    """What adapters make of samples without usable logprobs."""
    return lambda request, answer: Answer((), tuple(Problem(code, message) for _ in answer.completions))


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (told(lambda v: np.full_like(v, -5000.0)), Outcome.FAIL, ""),
        (told(lambda v: np.full_like(v, v[0])), Outcome.FAIL, ""),
        (told(lambda v: v[::-1]), Outcome.FAIL, ""),
        (shown(token_ids=lambda c: tuple((t + 1) % 512 for t in c.token_ids)), Outcome.FAIL, ""),
        (shown(token_ids=lambda c: tuple(t + 9000 for t in c.token_ids)), Outcome.FAIL, "512 tokens"),
        (shown(prompt_token_ids=lambda c: (*c.prompt_token_ids[::-1], 9)), Outcome.FAIL, "prompt"),
        (shown(prompt_token_ids=lambda c: (99999,)), Outcome.INCONCLUSIVE, "512 tokens"),
        (
            unreadable("value/completion", "16 tokens carry 15 logprobs"),
            Outcome.INCONCLUSIVE,
            "carry 15 logprobs",
        ),
        (unreadable("value/non-finite", "logprobs[3] is null"), Outcome.FAIL, "logprobs[3] is null"),
        (lambda request, answer: Answer(()), Outcome.INCONCLUSIVE, "did not come back"),
        (lambda request, answer: Answer(answer.completions[:1]), Outcome.INCONCLUSIVE, "did not come back"),
        (lambda request, answer: FIRST.setdefault("answer", answer), Outcome.FAIL, ""),
    ],
    ids=[
        "absurd logprobs",
        "the first logprob for all",
        "logprobs reversed",
        "other output ids",
        "impossible output ids",
        "other prompt ids",
        "impossible prompt ids",
        "missing logprobs",
        "null logprobs",
        "no samples",
        "one sample of two",
        "one answer to all",
    ],
)
def test_an_engine_that_lies_or_leaves_out(audit, healthy, change, verdict, words):
    record = audit(Lying(healthy, change))
    assert record.verdict is verdict, (record.message, record.causes)
    said = [record.message, *(probe.message for probe in record.probes)]
    assert any(words in each for each in said), said


@pytest.mark.parametrize("keeps", [False, True], ids=["as its own", "with the other's prompt"])
def test_an_engine_that_answers_out_of_order(audit, healthy, keeps):
    class Reordered(FaultyBackend):
        capabilities = NOTHING

        def generate(self, requests):
            answers = super().generate(requests)[::-1]
            if keeps:
                return answers
            return [
                shown(prompt_token_ids=lambda c, r=request: r.prompt.token_ids)(request, answer)
                for request, answer in zip(requests, answers, strict=True)
            ]

    engine = Reordered(healthy)
    engine.capabilities = NOTHING
    record = audit(engine)
    assert record.verdict is Outcome.FAIL
    assert record.causes[0].cause == "semantic/misbound-output"


@pytest.mark.parametrize("count", [0, 1, 40])
def test_an_engine_that_gives_another_number_of_answers(audit, healthy, count):
    class Miscounting(FaultyBackend):
        def generate(self, requests):
            return [super().generate(requests[:1])[0]] * count

    record = audit(Miscounting(healthy))
    assert record.verdict is Outcome.INCONCLUSIVE
    assert f"{count} answers to" in record.message


def test_an_engine_whose_scores_are_no_numbers(audit, healthy):
    class Blank(FaultyBackend):
        def score(self, sequences):
            return [[float("nan")] * (len(ids) - 1) for ids in sequences]

    engine = Blank(healthy)
    engine.capabilities = frozenset({Capability.SCORE})
    record = audit(engine)
    assert record.verdict is Outcome.INCONCLUSIVE
    assert "finite" in open_questions(record)["prefill-decode"]


# --- a run that goes on -----------------------------------------------------------------------------------------

TWO_BATCHES = ValidationConfig(num_prompts=16, equivalence_trials=40, max_tokens=8)


def raw(healthy: ReferenceBackend) -> FaultyBackend:
    return bare(FAULTS["semantic/raw-logprobs:default"].inject(healthy))


def conclusion(record: VerdictRecord) -> tuple[object, ...]:
    causes = [(cause.cause, cause.gating) for cause in record.causes]
    return record.verdict, record.guilty, causes, [(p.name, p.status) for p in record.probes]


@pytest.fixture(scope="module")
def uninterrupted(matrix, reference, healthy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, matrix.judge(raw(healthy), reference(SPEC), directory, TWO_BATCHES)


@pytest.mark.parametrize("torn", [True, False])
def test_a_killed_run_goes_on_to_the_same_verdict(audit, healthy, uninterrupted, tmp_path, torn):
    """What a kill leaves behind: some whole lines, one of two samples of a request, and perhaps half a line."""
    directory, whole = uninterrupted
    lines = (directory / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    pairs = [number for number, line in enumerate(lines) if b'"sample_index":1' in line]
    assert pairs, "some requests draw two samples"
    left = b"".join(lines[: pairs[1]])
    (tmp_path / "rollouts.jsonl").write_bytes(left + lines[pairs[1]][: 90 if torn else 0])
    record = audit(raw(healthy), TWO_BATCHES)
    assert conclusion(record) == conclusion(whole)
    assert record.causes[0].cause == "semantic/raw-logprobs"
    assert record.metrics["tokens"] == whole.metrics["tokens"]
    # Batches form differently, so that the last bits may: no more than that.
    assert record.metrics["mean"] == pytest.approx(whole.metrics["mean"], rel=1e-4)
    again = list(read_lines(tmp_path / "rollouts.jsonl", Rollout))
    assert len(again) == len(lines)
    assert len({(r.index, r.completion.sample_index) for r in again if r.completion}) == len(lines)


def test_a_run_whose_engine_died_goes_on_where_it_was(audit, healthy, uninterrupted, tmp_path):
    first = audit(Dying(raw(healthy), 2, EngineUnreachable("gone")), TWO_BATCHES)
    assert first.verdict is Outcome.INCONCLUSIVE
    kept = len(list(read_lines(tmp_path / "rollouts.jsonl", Rollout)))
    assert kept > 20

    asked: list[Request] = []

    class Counting(FaultyBackend):
        def generate(self, requests):
            asked.extend(requests)
            return super().generate(requests)

    second = audit(Counting(raw(healthy)), TWO_BATCHES)
    assert conclusion(second) == conclusion(uninterrupted[1])
    assert sum(request.sampling.n for request in asked) == 40 - kept


# --- engines that are somebody else -----------------------------------------------------------------------------


def other_weights(healthy: ReferenceBackend, scratch: Path, share: float) -> Path:
    """The model's own checkpoint, with every tensor moved by noise of this share of its spread."""
    import torch

    from zerodrift import models
    from zerodrift.audit.perturb import write_checkpoint

    model = models.load(SPEC, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(share * parameter.std() * noise)
    return write_checkpoint(model, models.materialise(SPEC, scratch / "model"), scratch / f"other-{share:g}")


@pytest.mark.parametrize("model", ["testbed:qwen2", "testbed:mistral"])
def test_another_model_behind_the_address_is_said_so(audit, model):
    """Same vocabulary, same tokenizer: only what it says tells."""
    record = audit(ReferenceBackend(model, dtype="float32"))
    assert record.verdict is Outcome.FAIL
    assert [cause.cause for cause in record.causes if cause.gating] == ["weights/other-model"]
    assert "which no rounding does" in record.causes[0].evidence
    assert not any(cause.cause.startswith("semantic/") for cause in record.causes), (
        "no hint at what it is not"
    )


def test_another_checkpoint_of_the_model_is_no_rounding_and_no_other_model(audit, healthy, tmp_path):
    engine = ReferenceBackend(other_weights(healthy, tmp_path, 0.1), dtype="float32")
    record = audit(engine)
    assert record.verdict is Outcome.FAIL
    assert [cause.cause for cause in record.causes if cause.gating] == ["unexplained"]


@pytest.mark.parametrize("share", [1e-3, 0.1], ids=["a step", "fine-tuned"])
def test_an_update_tells_that_the_weights_were_others(audit, healthy, tmp_path, share):
    engine = ReferenceBackend(other_weights(healthy, tmp_path, share), dtype="float32")
    (tmp_path / "run").mkdir()
    record = audit(engine, checkpoint=tmp_path / "model", directory=tmp_path / "run")
    assert record.verdict is Outcome.FAIL
    assert [cause.cause for cause in record.causes if cause.gating] == ["weights/stale"]
    assert "ran others before" in record.causes[0].evidence
