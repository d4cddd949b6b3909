import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import zerodrift as zd
from zerodrift.audit import facade
from zerodrift.backends import registry
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.engine import EngineConfig
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core.completion import Answer, Problem
from zerodrift.core.errors import BadAnswer, ConfigError, DigestMismatch, InvalidValue, RecordError
from zerodrift.core.request import Prompt, Request, SamplingParams

SPEC = "testbed:llama"
PROMPTS = ["The capital of France is", (5, 6, 7, 8), Prompt((9, 10, 11))]
COOL = SamplingParams(temperature=0.7, max_tokens=16, seed=5)


@pytest.fixture(scope="module")
def reference():
    return ReferenceBackend(SPEC)


class Changed:
    """An engine that computes as `inner` does, and then changes its answers."""

    def __init__(self, inner: ReferenceBackend, change: Any) -> None:
        self.inner = inner
        self.change = change
        self.name, self.capabilities, self.max_model_len = inner.name, inner.capabilities, inner.max_model_len
        self.fingerprint, self.close = inner.fingerprint, inner.close
        self.batches: list[int] = []

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self.batches.append(len(requests))
        return [self.change(number, answer) for number, answer in enumerate(self.inner.generate(requests))]


@pytest.fixture(scope="module")
def engine():
    """The same model in fp32, as engines have it."""
    return ReferenceBackend(SPEC, dtype="float32")


def replaced(answer: Answer, **fields: Any) -> Answer:
    return Answer(tuple(msgspec.structs.replace(each, **fields) for each in answer.completions))


def test_a_baseline_is_recorded_completed_and_read(reference, tmp_path):
    path, steps = tmp_path / "deep" / "base.jsonl", []
    recorded = zd.ReferenceBaseline.record(
        reference, PROMPTS, path, sampling=COOL, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(3, 3)]
    assert recorded == zd.ReferenceBaseline.load(str(path))
    assert [row.index for row in recorded.rows] == [0, 1, 2]
    assert recorded.rows[0].prompt == reference.tokenize("The capital of France is")
    assert recorded.rows[2].prompt == (9, 10, 11)
    assert recorded.header.weights == reference.version.digest
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[3], lines[1]]))
    again = zd.ReferenceBaseline.record(reference, PROMPTS, path, sampling=COOL)
    assert again.rows == recorded.rows


def test_a_baseline_belongs_to_its_weights(reference, tmp_path):
    baseline = zd.ReferenceBaseline.record(reference, PROMPTS[:1], tmp_path / "b", sampling=COOL)
    baseline.check(reference)
    baseline.check(SPEC)
    with pytest.raises(DigestMismatch, match=f"recorded from weights {reference.version.digest}"):
        baseline.check("testbed:qwen2")


def test_what_is_no_baseline_is_refused(tmp_path):
    with pytest.raises(RecordError, match="there is no baseline"):
        zd.ReferenceBaseline.load(tmp_path / "nothing")


@pytest.mark.parametrize("prompts", ["one text", [], ()])
def test_prompts_are_a_list(reference, tmp_path, prompts):
    with pytest.raises(InvalidValue, match="give a list of at least one"):
        zd.ReferenceBaseline.record(reference, prompts, tmp_path / "b")


def test_a_healthy_engine_passes(reference, engine):
    validator = zd.EquivalenceValidator(engine, reference, sampling=COOL)
    report = validator.validate_batch(PROMPTS, n_trials=20)
    assert report.passed
    assert report.pass_rate == 1.0
    assert 0 < report.mean <= report.max < 1e-3
    assert report.gate >= PROFILES[Precision.FP32].gate.mean_abs
    assert 200 <= report.tokens <= 20 * 16
    assert report == validator.validate_batch(PROMPTS, n_trials=20)


def test_raw_logprobs_do_not_pass(reference):
    raw = EngineConfig(name="reference", logprobs_mode="raw_logprobs")
    with zd.EquivalenceValidator(raw, reference, sampling=COOL) as validator:
        report = validator.validate_batch(PROMPTS, n_trials=20)
    assert not report.passed
    assert report.pass_rate == 0
    assert report.mean > 0.01


def test_one_bad_sequence_lowers_the_pass_rate(reference, engine):
    def shift(number, answer):
        if number:
            return answer
        first, *rest = answer.completions
        wrong = msgspec.structs.replace(first, logprobs=tuple(value - 1e-3 for value in first.logprobs))
        return Answer((wrong, *rest))

    validator = zd.EquivalenceValidator(Changed(engine, shift), reference, sampling=COOL)
    report = validator.validate_batch(PROMPTS, n_trials=20)
    assert report.pass_rate == 0.95
    assert not report.passed
    assert report.max > 9e-4


@pytest.mark.parametrize(
    "change",
    [
        lambda number, answer: answer if number else Answer((), (Problem("value/non-finite", "NaN"),)),
        lambda number, answer: answer if number else replaced(
            answer, token_ids=(), logprobs=(), versions=(), lineage=()
        ),
        lambda number, answer: answer if number else Answer(()),
    ],
    ids=["unreadable", "no-tokens", "missing"],
)  # fmt: skip
def test_what_did_not_come_back_did_not_pass(reference, engine, change):
    validator = zd.EquivalenceValidator(Changed(engine, change), reference, sampling=COOL)
    report = validator.validate_batch(PROMPTS, n_trials=20)
    # The first request draws two samples, and both are lost.
    assert report.pass_rate == 0.9
    assert not report.passed


def test_an_answer_to_another_prompt_does_not_pass_however_right_its_numbers(reference, engine):
    class Prepends(Changed):
        def generate(self, requests):
            first, *rest = requests
            return super().generate([Request(Prompt((1, *first.prompt.token_ids)), first.sampling), *rest])

    doubled = Prepends(engine, lambda _, answer: answer)
    report = zd.EquivalenceValidator(doubled, reference, sampling=COOL).validate_batch(PROMPTS, n_trials=20)
    assert report.max < 1e-3
    assert report.pass_rate == 0.9
    assert not report.passed


def test_a_token_that_the_request_excludes_is_infinitely_far(reference, engine):
    """The engine ignores top_k: what it samples outside has no logprob at all."""

    class Ignores(Changed):
        def generate(self, requests):
            plain = [
                Request(each.prompt, msgspec.structs.replace(each.sampling, top_k=0)) for each in requests
            ]
            return super().generate(plain)

    sampling = SamplingParams(max_tokens=16, top_k=2)
    broken = Ignores(engine, lambda _, answer: answer)
    report = zd.EquivalenceValidator(broken, reference, sampling=sampling).validate_batch(
        PROMPTS, n_trials=20
    )
    assert (report.mean, report.max) == (math.inf, math.inf)
    assert not report.passed


def test_too_little_decides_nothing(reference, engine):
    validator = zd.EquivalenceValidator(engine, reference, sampling=COOL)
    with pytest.raises(InvalidValue, match="fewer than 200 decide nothing; raise n_trials"):
        validator.validate_batch(PROMPTS, n_trials=3)
    with pytest.raises(InvalidValue, match="n_trials is 2; sample each of the 3 prompts"):
        validator.validate_batch(PROMPTS, n_trials=2)
    with pytest.raises(InvalidValue, match="give a list"):
        validator.validate_batch([], n_trials=2)
    silent = Changed(engine, lambda *_: Answer(()))
    with pytest.raises(BadAnswer, match="none of 3 requests"):
        zd.EquivalenceValidator(silent, reference, sampling=COOL).validate_batch(PROMPTS, n_trials=4)


def test_requests_go_out_in_batches(reference, engine):
    counting = Changed(engine, lambda _, answer: answer)
    short = SamplingParams(max_tokens=6)
    zd.EquivalenceValidator(counting, reference, sampling=short).validate_batch(PROMPTS, n_trials=40)
    assert counting.batches == [32, 3]


def test_the_precision_picks_the_gate(reference, engine):
    validator = zd.EquivalenceValidator(engine, reference, sampling=COOL, precision=Precision.BF16)
    assert validator.validate_batch(PROMPTS, n_trials=20).gate >= PROFILES[Precision.BF16].gate.mean_abs


def test_an_engine_by_name_is_opened_and_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(facade.tempfile, "tempdir", str(tmp_path))
    with zd.EquivalenceValidator("reference", SPEC, sampling=COOL) as validator:
        assert isinstance(validator.engine, ReferenceBackend)
        assert validator.engine.fingerprint().numeric["dtype"] == "float32"
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
    validator.close()


def test_an_address_is_a_server_and_a_name_that_nobody_has_is_refused(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(facade.tempfile, "tempdir", str(tmp_path))
    assert facade._config("https://host:8000") == EngineConfig(name="vllm", url="https://host:8000")
    assert facade._config(config := EngineConfig(name="vllm")) is config
    with pytest.raises(ConfigError, match="did you mean 'reference'"):
        zd.EquivalenceValidator("referense", reference)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("url", "written"), [(None, True), ("http://127.0.0.1:1", False)])
def test_a_built_in_model_is_written_out_for_an_engine_that_is_started(reference, monkeypatch, url, written):
    served: list[str] = []

    @contextmanager
    def opener(_config, what, _logs):
        served.append(what.model)
        assert Path(what.model).is_dir() is written
        yield reference

    monkeypatch.setitem(registry.OPENERS, "vllm", opener)
    with zd.EquivalenceValidator(
        EngineConfig(name="vllm", url=url, python=None if url else "python"), reference
    ) as validator:
        assert validator.engine is reference
    assert (served == [SPEC]) is not written
    assert not Path(served[0]).exists()


def test_without_torch_the_missing_extra_is_named():
    code = """
        import sys
        sys.modules["torch"] = None
        import zerodrift
        try:
            zerodrift.EquivalenceValidator
        except Exception as error:
            print(type(error).__name__, error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("MissingExtra zerodrift.EquivalenceValidator needs torch")
    assert "pip install 'zerodrift[local]'" in run.stdout
