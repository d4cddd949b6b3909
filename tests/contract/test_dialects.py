"""Each dialect against a server that somebody else wrote from the engine's documentation (see peers/README.md).

What an adapter says is compared with the model itself, computed here: nothing of a peer's arithmetic, and nothing of
the adapter's, is on the right of a comparison. What every backend promises is asked in test_backend.py.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sglang_server
import torch

from zerodrift import models
from zerodrift.backends import openai_probe
from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect
from zerodrift.backends.dialects.sglang import SGLANG
from zerodrift.backends.http import Reply
from zerodrift.backends.openai import OpenAIBackend
from zerodrift.backends.openai_wire import Reader, read_scores, request_body
from zerodrift.core.completion import Answer, Completion, FinishReason, LogprobKind
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    InvalidCompletion,
    InvalidPrompt,
    ModelNotFound,
    NonFinite,
    ZerodriftError,
)
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.sampler.processing import histories, processed_logprobs

MODEL = "testbed:qwen3"
TEXT = "Hello world,"
CLOSE = 2e-5
"""fp32 in two orders of summation."""
PROCESSED, RAW = LogprobKind.PROCESSED, LogprobKind.RAW

Prompted = Callable[..., Request]


def connected(url: str, dialect: Dialect, **options: Any) -> Iterator[OpenAIBackend]:
    with contextlib.closing(OpenAIBackend(url, dialect, **options)) as backend:
        yield backend


@pytest.fixture(scope="module")
def sglang() -> Iterator[OpenAIBackend]:
    with sglang_server.serve(MODEL, deterministic=True) as url:
        yield from connected(url, SGLANG)


@pytest.fixture(scope="module")
def unseeded() -> Iterator[OpenAIBackend]:
    """SGLang as it is started without a flag."""
    with sglang_server.serve(MODEL) as url:
        yield from connected(url, SGLANG)


@pytest.fixture(params=["sglang"])
def engine(request: pytest.FixtureRequest) -> OpenAIBackend:
    backend: OpenAIBackend = request.getfixturevalue(request.param)
    return backend


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(MODEL)


@pytest.fixture(scope="module")
def ids() -> tuple[int, ...]:
    return tuple(models.tokenizer(MODEL)(TEXT)["input_ids"])


@pytest.fixture
def ask(ids: tuple[int, ...]) -> Prompted:
    """A prompt that every engine takes."""
    return lambda **sampling: Request(Prompt(ids, TEXT), SamplingParams(**({"max_tokens": 4} | sampling)))


def only(backend: OpenAIBackend, request: Request) -> Completion:
    [answer] = backend.generate([request])
    assert answer.problems == ()
    return answer.completions[0]


def logits(model: Any, completion: Completion) -> torch.Tensor:
    """Rows that predict the output, from the whole sequence at once."""
    with torch.inference_mode():
        rows = model(torch.tensor([completion.sequence])).logits[0]
    return rows[len(completion.prompt_token_ids) - 1 : -1]


def truth(model: Any, completion: Completion, sampling: SamplingParams | None = None) -> torch.Tensor:
    """All logprobs at each output token under `sampling`, the model's own by default."""
    past = histories(completion.prompt_token_ids, completion.token_ids)
    stops = [models.tokenizer(MODEL).eos_token_id]
    return processed_logprobs(logits(model, completion), sampling or SamplingParams(), past, stops)


def own(rows: torch.Tensor, completion: Completion) -> list[float]:
    return rows[torch.arange(len(rows)), torch.tensor(completion.token_ids)].tolist()


# What every engine does


WHOLE = {
    "sglang": {
        Capability.TOP_LOGPROBS,
        Capability.SCORE,
        Capability.SEED,
        Capability.CACHED_TOKENS,
        Capability.RESET_CACHE,
        Capability.LOAD_WEIGHTS,
        Capability.WEIGHT_VERSION,
        Capability.EFFECTIVE_CONFIG,
        Capability.STREAM,
    },
}


def test_capabilities_are_what_was_seen(engine: OpenAIBackend) -> None:
    assert engine.capabilities == WHOLE[engine.name]
    assert set(engine.dialect.hints) == set(Capability)


@pytest.fixture(scope="module")
def incremental() -> Iterator[OpenAIBackend]:
    """SGLang that streams differences."""
    with sglang_server.serve(MODEL, deterministic=True, incremental=True) as url:
        yield from connected(url, SGLANG)


def test_what_is_streamed_in_differences_is_what_comes_whole(
    incremental: OpenAIBackend, ask: Prompted
) -> None:
    """As every other way of streaming is asked in test_backend.py."""
    asked = [ask(seed=3, n=2, logprobs=2), ask(seed=9, max_tokens=6)]

    whole, streamed = incremental.generate(asked), incremental.stream(asked)

    assert [_uncached(answer) for answer in streamed] == [_uncached(answer) for answer in whole]
    assert [answer.stream_deltas for answer in streamed] == [8, 6]


def _uncached(answer: Answer) -> list[Completion]:
    """The second time, more of the prompt is cached."""
    assert answer.problems == ()
    return [msgspec.structs.replace(each, cached_tokens=None) for each in answer.completions]


def test_differences_taken_for_everything_so_far_are_found_out(
    incremental: OpenAIBackend, ask: Prompted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a server that does not show which of the two it does."""
    monkeypatch.setattr(incremental, "streaming", SGLANG.streaming)

    with pytest.raises(BadAnswer):
        incremental.stream([ask(seed=3)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_kind_that_is_claimed(
    engine: OpenAIBackend, model: Any, ask: Prompted, ids: tuple[int, ...], temperature: float
) -> None:
    completion = only(engine, ask(temperature=temperature, seed=3))

    assert completion.prompt_token_ids == ids
    assert (len(completion.token_ids), completion.finish_reason) == (4, FinishReason.LENGTH)
    assert completion.kind is PROCESSED
    meant = SamplingParams(temperature=temperature) if completion.kind is PROCESSED else None
    expected = own(truth(model, completion, meant), completion)
    assert completion.logprobs == pytest.approx(expected, abs=CLOSE)
    other = own(truth(model, completion, SamplingParams(temperature=0.5)), completion)
    assert completion.logprobs != pytest.approx(other, abs=CLOSE), "the comparison can fail"


def test_greedy_takes_the_likeliest_token(engine: OpenAIBackend, model: Any, ask: Prompted) -> None:
    completion = only(engine, ask(temperature=0))
    rows = truth(model, completion)

    assert list(completion.token_ids) == rows.argmax(-1).tolist()
    assert completion.logprobs == pytest.approx(own(rows, completion), abs=CLOSE)


def test_alternatives(engine: OpenAIBackend, model: Any, ask: Prompted) -> None:
    if Capability.TOP_LOGPROBS not in engine.capabilities:
        with pytest.raises(CapabilityMissing):
            engine.generate([ask(logprobs=2)])
        return
    completion = only(engine, ask(seed=1, logprobs=2))
    likeliest = truth(model, completion).topk(2)

    for found, ids, values in zip(
        completion.top_logprobs, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
    ):
        assert [each.token_id for each in found] == ids
        assert [each.logprob for each in found] == pytest.approx(values, abs=CLOSE)


def test_samples_follow_their_seeds(engine: OpenAIBackend, ask: Prompted) -> None:
    """Sample i has seed + i, asked for alone or not; samples of one request differ."""
    twice, first, second, other = engine.generate(
        [ask(seed=5, n=2), ask(seed=5), ask(seed=6), ask(seed=50, n=2)]
    )
    drawn = [completion.token_ids for completion in twice.completions]

    assert [completion.sample_index for completion in twice.completions] == [0, 1]
    assert drawn == [first.completions[0].token_ids, second.completions[0].token_ids]
    assert drawn[0] != drawn[1]
    assert other.completions[0].token_ids not in drawn


def test_a_longest_sequence_comes_whole(sglang: OpenAIBackend) -> None:
    """SGLang cuts outputs down in silence beyond what it keeps free."""
    length = sglang.max_model_len - 2
    completion = only(sglang, Request(Prompt((5,) * length), SamplingParams(max_tokens=2, ignore_eos=True)))
    assert len(completion.token_ids) == 2


REFUSED: dict[str, list[dict[str, Any]]] = {
    "sglang": [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"prompt_logprobs": 0},
        {"ignore_eos": True, "stop_token_ids": (3,)},
        {"top_p": 0.9, "temperature": 0.7},
        {"top_k": 5, "presence_penalty": 0.5},
    ],
}


def test_what_would_mean_something_else(engine: OpenAIBackend, ask: Prompted) -> None:
    for sampling in REFUSED[engine.name]:
        with pytest.raises(CapabilityMissing) as caught:
            engine.generate([ask(**sampling)])
        assert any(name in str(caught.value) for name in sampling)


def test_raw_logprobs_that_cannot_be_had() -> None:
    with pytest.raises(CapabilityMissing):
        OpenAIBackend("http://127.0.0.1:9", SGLANG, kind=RAW)


# SGLang


def test_sglang_shows_who_computes(sglang: OpenAIBackend) -> None:
    facts = sglang.fingerprint()

    assert facts.semantic["logprobs_mode"] == "processed_logprobs"
    assert (facts.numeric["dtype"], facts.numeric["enable_deterministic_inference"]) == ("float32", "true")
    assert sglang.max_model_len == 1024 - 6


def test_sglang_without_its_flag_takes_no_seed(unseeded: OpenAIBackend, ask: Prompted) -> None:
    assert unseeded.capabilities == WHOLE["sglang"] - {Capability.SEED}
    with pytest.raises(CapabilityMissing, match="--enable-deterministic-inference"):
        unseeded.generate([ask(seed=1)])
    assert len(only(unseeded, ask()).token_ids) == 4


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
def test_seeds_count_where_the_same_draws_the_same_and_others_others(
    sglang: OpenAIBackend, monkeypatch: pytest.MonkeyPatch, draw: Any, honoured: bool
) -> None:
    calls: list[Request] = []

    def complete(request: Request) -> object:
        calls.append(request)
        return {"output_ids": draw(request.sampling.seed, len(calls))}

    monkeypatch.setattr(sglang, "complete", complete)

    assert openai_probe._honours_seeds(sglang, sglang._http, Request(Prompt((0, 0)))) is honoured


@pytest.mark.parametrize(
    "shape",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.8},
        {"logit_bias": {7: 4.0, 9: -3.0}},
        {"min_tokens": 3, "logit_bias": {2: 20.0}},
    ],
)
def test_sglang_shapes_the_distribution_as_it_is_meant(
    sglang: OpenAIBackend, model: Any, ask: Prompted, shape: dict[str, Any]
) -> None:
    sampling = SamplingParams(**shape, max_tokens=6, seed=2)
    completion = only(sglang, ask(**shape, max_tokens=6, seed=2))

    expected = own(truth(model, completion, sampling), completion)
    assert completion.logprobs == pytest.approx(expected, abs=CLOSE)


def test_sglang_under_truncation_reports_the_models_own(
    sglang: OpenAIBackend, model: Any, ask: Prompted
) -> None:
    completion = only(sglang, ask(top_k=3, seed=2))
    rows = truth(model, completion)

    assert completion.kind is RAW
    assert completion.logprobs == pytest.approx(own(rows, completion), abs=CLOSE)
    kept = rows.topk(3).indices
    assert all(token in row for token, row in zip(completion.token_ids, kept.tolist(), strict=True))


def test_sglang_scores_given_tokens(sglang: OpenAIBackend, model: Any) -> None:
    """The last id of the vocabulary too, which it writes as 0."""
    sequences = [[1, 2, 511, 40], [5, 6]]
    for sequence, scores in zip(sequences, sglang.score(sequences), strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([sequence])).logits[0, :-1], -1)
        assert scores == pytest.approx([rows[i, t].item() for i, t in enumerate(sequence[1:])], abs=CLOSE)
    with pytest.raises(InvalidPrompt):
        sglang.score([[1] * 1018])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda told: told.pop(), BadAnswer),
        (lambda told: told[1].__setitem__(1, 9), BadAnswer),
        (lambda told: told[1].__setitem__(0, None), NonFinite),
        (lambda told: told[1].__setitem__(0, 0.5), InvalidCompletion),
    ],
)
def test_scores_that_cannot_be_believed(
    sglang: OpenAIBackend, monkeypatch: pytest.MonkeyPatch, spoil: Any, error: type[ZerodriftError]
) -> None:
    told = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    spoil(told)
    monkeypatch.setattr(sglang._http, "post", lambda *_: {"meta_info": {"input_token_logprobs": told}})
    with pytest.raises(error):
        sglang.score([[1, 2, 3]])


def test_sglang_takes_other_weights_and_says_which(tmp_path: Path, ask: Prompted) -> None:
    changed = models.load(MODEL)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight *= 1.5
    directory = models.materialise(MODEL, tmp_path / "changed")
    changed.save_pretrained(directory)
    with (
        sglang_server.serve(MODEL, deterministic=True) as url,
        contextlib.closing(OpenAIBackend(url, SGLANG)) as backend,
    ):
        before = only(backend, ask(seed=1))
        backend.load_weights(directory, WeightVersion("step-7"))
        stale = only(backend, ask(seed=1))
        backend.reset_cache()
        after = only(backend, ask(seed=1))
        with pytest.raises(ModelNotFound):
            backend.load_weights(tmp_path / "nowhere", WeightVersion("x"))
        with pytest.raises(EngineRefused):
            backend.load_weights(models.materialise("testbed:llama", tmp_path / "l"), WeightVersion("x"))

    labels = [each.versions[0].version.label for each in (before, stale, after)]
    assert labels == ["default", "step-7", "step-7"]
    assert (before.cached_tokens, stale.cached_tokens, after.cached_tokens) == (0, 7, 0)
    assert after.logprobs[0] != pytest.approx(before.logprobs[0], abs=1e-3)


def test_sglang_of_a_release_that_reads_salts(
    sglang: OpenAIBackend, monkeypatch: pytest.MonkeyPatch, ids: tuple[int, ...]
) -> None:
    """The peer ignores them, as releases did that only knew `extra_key`."""
    salted = Request(Prompt(ids, cache_salt="s"))
    with pytest.raises(CapabilityMissing):
        sglang.generate([salted])
    assert request_body(salted, "m", SGLANG, PROCESSED)["cache_salt"] == "s"
    exchange = sglang._http.exchange

    def strict(method: str, path: str, body: Any = None, *headers: Any) -> Reply:
        wrong = isinstance(body, dict) and not isinstance(body.get("cache_salt", ""), str)
        return Reply(400, b"{}", None) if wrong else exchange(method, path, body, *headers)

    monkeypatch.setattr(sglang._http, "exchange", strict)
    found = openai_probe.capabilities(sglang, sglang._http, openai_probe.shown(sglang._http, SGLANG.facts))
    assert found == WHOLE["sglang"] | {Capability.CACHE_SALT}


def test_sglang_that_refuses_what_it_is_told(
    sglang: OpenAIBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = models.materialise(MODEL, tmp_path / "model")
    monkeypatch.setattr(sglang._http, "exchange", lambda *_: Reply(400, b"Flush cache failed.", None))
    with pytest.raises(EngineRefused):
        sglang.reset_cache()
    assert not openai_probe._scores(sglang, Prompt((1, 2)))
    for status, error in ((429, EngineRefused), (500, EngineError), (503, EngineUnreachable)):
        busy = Reply(status, b"busy", None)
        monkeypatch.setattr(sglang._http, "exchange", lambda *_, busy=busy: busy)
        with pytest.raises(error, match="busy"):
            openai_probe._scores(sglang, Prompt((1, 2)))
    monkeypatch.setattr(sglang._http, "post", lambda *_: {"success": False})
    with pytest.raises(EngineError, match="was not loaded"):
        sglang.load_weights(directory, WeightVersion("x"))


def test_a_label_that_moved_in_between_belongs_to_nobody_knows_which_token(
    sglang: OpenAIBackend, ask: Prompted
) -> None:
    request = ask(seed=1)
    answer = sglang.complete(request)
    for said, label in (("default", "default"), ("older", "unknown")):
        reader = Reader(SGLANG, PROCESSED, "f", WeightVersion(said))
        [completion] = reader.answer([answer], request).completions
        assert completion.versions[0].version.label == label


# What goes wrong on the way


def test_refusals_are_the_servers(sglang: OpenAIBackend) -> None:
    with pytest.raises(EngineError) as caught:
        sglang.generate([Request(Prompt((9999,)))])
    assert (type(caught.value), caught.value.exit_code) == (EngineError, 3)


def spoiled(backend: OpenAIBackend, request: Request, spoil: Callable[[Any], object]) -> Answer:
    answer: Any = copy.deepcopy(backend.complete(request))
    spoil(answer)
    reader = Reader(backend.dialect, backend.kind, "f", WeightVersion("default"))
    return reader.answer([answer], request)


SPOILED: list[tuple[str, Callable[[Any], object], type[ZerodriftError]]] = [
    ("sglang", lambda a: a.pop("output_ids"), BadAnswer),
    ("sglang", lambda a: a["meta_info"].pop("output_token_logprobs"), InvalidCompletion),
    ("sglang", lambda a: a["output_ids"].reverse(), InvalidCompletion),
    ("sglang", lambda a: a["meta_info"].update(prompt_tokens=9), InvalidCompletion),
    ("sglang", lambda a: a["meta_info"].update(finish_reason=None), BadAnswer),
    ("sglang", lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, None), NonFinite),
    ("sglang", lambda a: a["meta_info"].update(completion_tokens=3), InvalidCompletion),
    ("sglang", lambda a: a["meta_info"].update(completion_tokens="4"), BadAnswer),
]


@pytest.mark.parametrize(("name", "spoil", "error"), SPOILED)
def test_a_sample_that_cannot_be_believed_is_a_problem(
    request: pytest.FixtureRequest, ask: Prompted, name: str, spoil: Any, error: type[ZerodriftError]
) -> None:
    answer = spoiled(request.getfixturevalue(name), ask(seed=1), spoil)

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == [error.code]


def test_a_count_of_null_says_nothing(sglang: OpenAIBackend, ask: Prompted) -> None:
    answer = spoiled(sglang, ask(seed=1), lambda a: a["meta_info"].update(completion_tokens=None))

    assert answer.problems == ()
    assert len(answer.completions[0].token_ids) == 4


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        ([[1, 2]] * 3, [[-1.0, -2.0]] * 4),
        ([[1, 2]] * 4, [[-1.0]] * 4),
        ([[1]] * 4, [[-1.0, -2.0]] * 4),
    ],
)
def test_alternatives_that_belong_to_nobody(
    sglang: OpenAIBackend, ask: Prompted, tokens: list[list[int]], values: list[list[float]]
) -> None:
    """Where a server tells ids and values apart, in lists of their own."""
    apart = msgspec.structs.replace(
        SGLANG.numbers[PROCESSED], alternative_ids="top/ids", alternative_values="top/values"
    )
    dialect = msgspec.structs.replace(SGLANG, numbers={PROCESSED: apart})
    request = ask(seed=1, logprobs=2)
    answer: Any = sglang.complete(request)
    answer["top"] = {"ids": tokens, "values": values}

    [problem] = Reader(dialect, PROCESSED, "f", WeightVersion("default")).answer([answer], request).problems

    assert problem.code == InvalidCompletion.code
    assert "top/ids and top/values" in problem.message


def test_scores_of_another_number_than_the_tokens() -> None:
    apart = msgspec.structs.replace(SGLANG.scoring, owners="ids", values="values")
    with pytest.raises(BadAnswer):
        read_scores({"ids": [1, 2, 3], "values": [None, -1.0]}, [1, 2, 3], apart, "/generate")


def test_samples_that_do_not_come_one_by_one(sglang: OpenAIBackend, ask: Prompted) -> None:
    answer: Any = sglang.complete(ask(seed=1))
    reader = Reader(SGLANG, PROCESSED, "f", WeightVersion("default"))
    with pytest.raises(BadAnswer):
        reader.answer([answer, [answer, answer]], ask(n=2))
