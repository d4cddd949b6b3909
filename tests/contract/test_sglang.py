"""The adapter of SGLang against a server that follows the engine's documentation (sglang_peer.md).

What the adapter says is compared with the model itself, computed here: nothing of the peer's arithmetic, and nothing of
the adapter's, is on the right of a comparison. What every backend promises is asked in test_backend.py.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang_peer
import torch
from asking import only

from zerodrift import models
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.base import Capability
from zerodrift.backends.http import Reply
from zerodrift.backends.sglang import STREAMING, SglangBackend
from zerodrift.config.run import RunConfig
from zerodrift.core.completion import Answer, Completion, FinishReason, LogprobKind
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    InvalidCompletion,
    InvalidPrompt,
    InvalidSampling,
    ModelNotFound,
    NonFinite,
)
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.sampler.processing import histories, processed_logprobs

MODEL = "testbed:qwen3"
IDS = tuple(models.tokenizer(MODEL)("Hello world,")["input_ids"])
CLOSE = 2e-5
"""fp32 in two orders of summation."""
PROCESSED, RAW = LogprobKind.PROCESSED, LogprobKind.RAW
WHOLE = frozenset(Capability) - {Capability.TOKENIZE, Capability.CACHE_SALT}
"""The peer ignores salts, as releases did that only knew `extra_key`."""


def ask(**sampling: Any) -> Request:
    return Request(Prompt(IDS), SamplingParams(**({"max_tokens": 4} | sampling)))


def connected(**switches: bool) -> Iterator[SglangBackend]:
    with sglang_peer.serve(MODEL, **switches) as url, contextlib.closing(SglangBackend(url)) as backend:
        yield backend


@pytest.fixture(scope="module")
def sglang():
    yield from connected(deterministic=True)


@pytest.fixture(scope="module")
def incremental():
    yield from connected(deterministic=True, incremental=True)


@pytest.fixture(scope="module")
def model():
    return models.load(MODEL)


def truth(model: Any, completion: Completion, sampling: SamplingParams) -> torch.Tensor:
    """All logprobs at each output token under `sampling`, from the whole sequence at once."""
    with torch.inference_mode():
        rows = model(torch.tensor([completion.sequence])).logits[0]
    past = histories(completion.prompt_token_ids, completion.token_ids)
    stops = [models.tokenizer(MODEL).eos_token_id]
    return processed_logprobs(rows[len(completion.prompt_token_ids) - 1 : -1], sampling, past, stops)


def own(rows: torch.Tensor, completion: Completion) -> list[float]:
    return rows[torch.arange(len(rows)), torch.tensor(completion.token_ids)].tolist()


# What it can do, and shows


def test_capabilities_are_what_was_seen(sglang):
    facts = sglang.fingerprint()

    assert sglang.capabilities == WHOLE
    assert set(sglang.hints) == set(Capability)
    assert facts.semantic["logprobs_mode"] == "processed_logprobs"
    assert (facts.numeric["dtype"], facts.numeric["enable_deterministic_inference"]) == ("float32", "true")
    assert sglang.max_model_len == 1024 - 6


def test_without_its_flag_it_takes_no_seed():
    for unseeded in connected():
        assert unseeded.capabilities == WHOLE - {Capability.SEED}
        with pytest.raises(CapabilityMissing, match="--enable-deterministic-inference"):
            unseeded.generate([ask(seed=1)])
        # Nothing fixes what is drawn, an end token neither.
        assert len(only(unseeded, ask(ignore_eos=True)).token_ids) == 4


@pytest.mark.parametrize(
    ("draw", "honoured"),
    [
        (lambda seed, call: [seed] * 8, True),
        (lambda seed, call: [seed // 2] * 8, True),
        (lambda seed, call: [call] * 8, False),
        (lambda seed, call: [3] * 8, False),
        (lambda seed, call: [2], False),
        (lambda seed, call: [seed // 4] * 8, False),
        (lambda seed, call: [int(call > 2)] * 8, False),
    ],
    ids=["own", "two alike", "ignored", "peaked", "ends at once", "mostly alike", "peaked and ignored"],
)
def test_seeds_count_where_the_same_draws_the_same_and_others_others(sglang, monkeypatch, draw, honoured):
    calls: list[Request] = []

    def complete(request):
        calls.append(request)
        return {"output_ids": draw(request.sampling.seed, len(calls))}

    monkeypatch.setattr(sglang, "complete", complete)
    assert sglang._honours_seeds() is honoured


def test_a_release_that_reads_salts(sglang, monkeypatch):
    salted = Request(Prompt(IDS, cache_salt="s"))
    with pytest.raises(CapabilityMissing):
        sglang.generate([salted])
    assert sglang.body(salted)["cache_salt"] == "s"
    exchange = sglang._http.exchange

    def strict(method, path, body=None, *headers):
        wrong = isinstance(body, dict) and not isinstance(body.get("cache_salt", ""), str)
        return Reply(400, b"{}", None) if wrong else exchange(method, path, body, *headers)

    monkeypatch.setattr(sglang._http, "exchange", strict)
    assert sglang._probe()[Capability.CACHE_SALT]


# What it answers


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({}, PROCESSED),
        ({"temperature": 0.7}, PROCESSED),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.8}, PROCESSED),
        ({"logit_bias": {7: 4.0, 9: -3.0}}, PROCESSED),
        ({"min_tokens": 3, "logit_bias": {2: 20.0}}, PROCESSED),
        ({"temperature": 0}, PROCESSED),
        # Truncation alone is not in the numbers: they are the model's own, and called so.
        ({"top_k": 3}, RAW),
    ],
)
def test_logprobs_are_of_the_kind_that_is_claimed(sglang, model, shape, kind):
    completion = only(sglang, ask(**shape, seed=2, max_tokens=6))
    rows = truth(model, completion, SamplingParams(**shape) if kind is PROCESSED else SamplingParams())

    assert completion.kind is kind
    assert completion.prompt_token_ids == IDS
    assert completion.logprobs == pytest.approx(own(rows, completion), abs=CLOSE)
    other = own(truth(model, completion, SamplingParams(temperature=0.5)), completion)
    assert completion.logprobs != pytest.approx(other, abs=CLOSE), "the comparison can fail"
    possible = 1 if shape.get("temperature") == 0 else shape.get("top_k", rows.shape[-1])
    kept = rows.topk(possible).indices
    assert all(token in row for token, row in zip(completion.token_ids, kept.tolist(), strict=True))


def test_alternatives(sglang, model):
    completion = only(sglang, ask(seed=1, logprobs=2))
    likeliest = truth(model, completion, SamplingParams()).topk(2)

    for found, ids, values in zip(
        completion.top_logprobs, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
    ):
        assert [each.token_id for each in found] == ids
        assert [each.logprob for each in found] == pytest.approx(values, abs=CLOSE)


def test_samples_follow_their_seeds(sglang):
    """Sample i has seed + i, asked for alone or not; samples of one request differ."""
    twice, first, second = sglang.generate([ask(seed=5, n=2), ask(seed=5), ask(seed=6)])
    drawn = [completion.token_ids for completion in twice.completions]

    assert [completion.sample_index for completion in twice.completions] == [0, 1]
    assert drawn == [first.completions[0].token_ids, second.completions[0].token_ids]
    assert drawn[0] != drawn[1]


def test_a_longest_sequence_comes_whole(sglang):
    """SGLang cuts outputs down in silence beyond what it keeps free."""
    length = sglang.max_model_len - 2
    completion = only(sglang, Request(Prompt((5,) * length), SamplingParams(max_tokens=2, ignore_eos=True)))
    assert (len(completion.token_ids), completion.finish_reason) == (2, FinishReason.LENGTH)


def test_what_is_streamed_in_differences_is_what_comes_whole(incremental, monkeypatch):
    """As everything so far is asked in test_backend.py. One taken for the other is found out."""
    asked = [ask(seed=3, n=2, logprobs=2), ask(seed=9, max_tokens=6)]
    whole, streamed = incremental.generate(asked), incremental.stream(asked)

    assert [uncached(answer) for answer in streamed] == [uncached(answer) for answer in whole]
    assert [answer.stream_deltas for answer in streamed] == [8, 6]
    monkeypatch.setattr(incremental, "streaming", STREAMING)
    with pytest.raises(BadAnswer):
        incremental.stream(asked)


def uncached(answer: Answer) -> list[Completion]:
    """The second time, more of the prompt is cached."""
    assert answer.problems == ()
    return [msgspec.structs.replace(each, cached_tokens=None) for each in answer.completions]


def test_scores(sglang, model):
    """Of the last id of the vocabulary too, which it writes as 0."""
    sequences = [[1, 2, 511, 40], [5, 6]]
    for sequence, scores in zip(sequences, sglang.score(sequences), strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([sequence])).logits[0, :-1], -1)
        assert scores == pytest.approx([rows[i, t].item() for i, t in enumerate(sequence[1:])], abs=CLOSE)
    with pytest.raises(InvalidPrompt):
        sglang.score([[1] * 1018])


# What is refused


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"min_p": 0.1}, CapabilityMissing),
        ({"repetition_penalty": 1.1}, CapabilityMissing),
        ({"prompt_logprobs": 0}, CapabilityMissing),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, CapabilityMissing),
        ({"top_p": 0.9, "temperature": 0.7}, CapabilityMissing),
        ({"top_k": 5, "presence_penalty": 0.5}, CapabilityMissing),
        ({"logprobs": None}, InvalidSampling),
        ({"seed": 2**63 - 1, "n": 2}, InvalidSampling),
    ],
)
def test_what_would_mean_something_else(sglang, sampling, error):
    with pytest.raises(error) as caught:
        sglang.generate([ask(**sampling)])
    assert any(name in str(caught.value) for name in sampling)


def test_raw_logprobs_cannot_be_had():
    with pytest.raises(CapabilityMissing):
        SglangBackend("http://127.0.0.1:9", kind=RAW)


def about(answer: Any) -> Any:
    return answer["meta_info"]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda a: a.pop("output_ids"), BadAnswer),
        (lambda a: about(a).pop("output_token_logprobs"), InvalidCompletion),
        (lambda a: a["output_ids"].reverse(), InvalidCompletion),
        (lambda a: about(a).update(prompt_tokens=9), InvalidCompletion),
        (lambda a: about(a).update(finish_reason=None), BadAnswer),
        (lambda a: about(a).update(finish_reason={"type": "?"}), BadAnswer),
        (lambda a: about(a)["output_token_logprobs"][0].__setitem__(0, None), NonFinite),
        (lambda a: about(a).update(completion_tokens=3), InvalidCompletion),
        (lambda a: about(a).update(completion_tokens="4"), BadAnswer),
        (lambda a: about(a).pop("output_top_logprobs"), BadAnswer),
        (lambda a: about(a)["output_top_logprobs"].pop(), InvalidCompletion),
        (lambda a: about(a)["output_top_logprobs"][0].pop(), None),
        # A server that writes null does not say how many it made.
        (lambda a: about(a).update(completion_tokens=None), None),
    ],
)
def test_a_sample_that_cannot_be_believed_is_a_problem(sglang, monkeypatch, spoil, error):
    answer = copy.deepcopy(sglang.complete(ask(seed=1, logprobs=2)))
    spoil(answer)
    monkeypatch.setattr(sglang, "complete", lambda _: answer)
    [told] = sglang.generate([ask(seed=1, logprobs=2)])

    assert [problem.code for problem in told.problems] == ([] if error is None else [error.code])
    assert len(told.completions) == (error is None)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda told: told.pop(), BadAnswer),
        (lambda told: told[1].__setitem__(1, 9), BadAnswer),
        (lambda told: told[1].__setitem__(0, None), NonFinite),
        (lambda told: told[1].__setitem__(0, 0.5), InvalidCompletion),
    ],
)
def test_scores_that_cannot_be_believed(sglang, monkeypatch, spoil, error):
    told = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    spoil(told)
    monkeypatch.setattr(sglang._http, "post", lambda *_: {"meta_info": {"input_token_logprobs": told}})
    with pytest.raises(error):
        sglang.score([[1, 2, 3]])


def test_what_the_server_refuses_or_fails_on(sglang, monkeypatch, tmp_path):
    with pytest.raises(EngineError) as caught:
        sglang.generate([Request(Prompt((9999,)))])
    assert (type(caught.value), caught.value.exit_code) == (EngineError, 3)
    directory = models.materialise(MODEL, tmp_path / "model")
    for status, error in (
        (400, EngineRefused),
        (429, EngineRefused),
        (500, EngineError),
        (503, EngineUnreachable),
    ):
        reply = Reply(status, b"busy", None)
        monkeypatch.setattr(sglang._http, "exchange", lambda *_, reply=reply: reply)
        with pytest.raises(EngineError) as caught:
            sglang.reset_cache()
        assert type(caught.value) is error
    monkeypatch.setattr(sglang._http, "post", lambda *_: {"success": False})
    with pytest.raises(EngineError, match="was not loaded"):
        sglang.load_weights(directory, WeightVersion("x"))


# Weights


def test_other_weights_are_taken_and_labelled(checkpoints, tmp_path):
    for backend in connected(deterministic=True):
        before = only(backend, ask(seed=1))
        backend.load_weights(checkpoints.changed, WeightVersion("step-7"))
        stale = only(backend, ask(seed=1))
        backend.reset_cache()
        after = only(backend, ask(seed=1))
        with pytest.raises(ModelNotFound):
            backend.load_weights(tmp_path / "nowhere", WeightVersion("x"))
        with pytest.raises(EngineRefused):
            backend.load_weights(checkpoints.narrow, WeightVersion("x"))

    labels = [each.versions[0].version.label for each in (before, stale, after)]
    assert labels == ["default", "step-7", "step-7"]
    assert (before.cached_tokens, stale.cached_tokens, after.cached_tokens) == (0, len(IDS) - 1, 0)
    assert after.logprobs[0] != pytest.approx(before.logprobs[0], abs=1e-3)


def test_a_label_that_moved_in_between_belongs_to_nobody_knows_which_token(sglang, monkeypatch):
    monkeypatch.setattr(sglang, "_version", lambda: WeightVersion("older"))
    assert only(sglang, ask(seed=1)).versions[0].version.label == "unknown"


# Whole audits


def audit(directory: Path, url: str, *, sync: bool = False) -> VerdictRecord:
    values = {
        "model": {"path": MODEL, "max_model_len": 96},
        "engine": {"name": "sglang", "url": url},
        "sampling_defaults": {"temperature": 0.7},
        "validation": {"num_prompts": 26, "equivalence_trials": 28, "max_tokens": 8},
    }
    session = Session(config=msgspec.convert(values, RunConfig), directory=directory, sync=sync)
    return session.run(Silent()).record


@pytest.mark.long
def test_a_healthy_server_passes_and_takes_an_update(tmp_path):
    with sglang_peer.serve(MODEL, deterministic=True) as url:
        record = audit(tmp_path / "run", url, sync=True)

    assert (record.verdict, record.precision) == (Outcome.PASS, "fp32"), record.message
    told = {probe.name: probe.status for probe in record.probes}
    assert told.pop("cache") is Outcome.INCONCLUSIVE, "the peer knows no salts"
    assert told.pop("tokenizer") is Outcome.INCONCLUSIVE, "the peer turns no text into ids"
    assert told.pop("template") is Outcome.INCONCLUSIVE, "nor conversations"
    assert told.pop("return") is Outcome.INCONCLUSIVE, "without salts the second answers come from the cache"
    assert set(told.values()) == {Outcome.PASS}
    assert {"contract", "parity", "sampling", "repeat", "batch", "given-tokens", "weight-sync"} <= set(told)


def test_one_that_leaves_the_temperature_out_is_named(tmp_path):
    """SGLANG_RETURN_ORIGINAL_LOGPROB, of which nothing in its answers tells."""
    with sglang_peer.serve(MODEL, deterministic=True, original=True) as url:
        record = audit(tmp_path / "run", url)

    found = [cause.cause for cause in record.causes if cause.gating]
    assert (record.verdict, found) == (Outcome.FAIL, ["semantic/raw-logprobs"]), record.message
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in record.causes[0].fix


@pytest.mark.long
def test_one_without_seeds_is_judged_by_what_it_samples(tmp_path):
    with sglang_peer.serve(MODEL) as url:
        record = audit(tmp_path / "run", url)

    told = {probe.name: probe.status for probe in record.probes}
    assert record.verdict is Outcome.PASS, record.message
    assert {told[name] for name in ("repeat", "batch")} == {Outcome.INCONCLUSIVE}
    assert told["prefill-decode"] is Outcome.PASS
