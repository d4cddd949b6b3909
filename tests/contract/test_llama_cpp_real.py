"""LlamaCppBackend against the real llama.cpp: its dialect is what we think it is, and so are its oddities.

One server for the whole module; it takes a second to start. What every backend promises is asked in test_backend.py.
"""

import contextlib
import math
from functools import partial

import asking
import msgspec
import opened
import pytest
from asking import only
from transformers import AutoTokenizer

from zerodrift.backends.base import Capability
from zerodrift.backends.llama_cpp import LlamaCppBackend
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import EngineError, EngineUnreachable, InvalidCompletion

pytestmark = [pytest.mark.engines, pytest.mark.smollm2]

CAPITAL = (504, 3575, 282)
"""The capital of"""
FACES = (10813, 38887, 10813, 243, 221) * 3 + (10813, 38887)
"""Seven emoji; a token ends inside each of them."""


@pytest.fixture(scope="module")
def model():
    return opened.llama_cpp_model()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with opened.llama_cpp_server(
        model, tmp_path_factory.mktemp("log") / "log", enable_prefix_caching=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def backend(server):
    with contextlib.closing(LlamaCppBackend(server.url, timeout_s=120)) as backend:
        yield backend


@pytest.fixture(scope="module")
def raw(server):
    options = {"kind": LogprobKind.RAW, "timeout_s": 120.0}
    with contextlib.closing(LlamaCppBackend(server.url, **options)) as backend:
        yield backend


ask = partial(asking.ask, max_tokens=4, seed=1)


def test_what_is_streamed_is_what_comes_whole(raw):
    """Of the other kind than the suite over every backend looks at."""
    for seed in range(3):
        request = ask(*CAPITAL, seed=10 * seed, n=2, logprobs=2, max_tokens=8)
        [whole], [streamed] = raw.generate([request]), raw.stream([request])
        assert streamed.problems == ()
        assert [_uncached(each) for each in streamed.completions] == [
            _uncached(each) for each in whole.completions
        ]
        assert streamed.stream_deltas > 2


def _uncached(completion: Completion) -> Completion:
    return msgspec.structs.replace(completion, cached_tokens=None)


def test_what_it_can_do(backend):
    assert backend.capabilities == {
        Capability.TOP_LOGPROBS,
        Capability.SEED,
        Capability.TOKENIZE,
        Capability.CACHED_TOKENS,
        Capability.EFFECTIVE_CONFIG,
        Capability.STREAM,
    }
    assert backend.max_model_len == 256


def test_settings_in_force_are_shown(backend):
    facts = backend.fingerprint()

    assert facts.numeric["quantization"] == "Q4_1"
    assert (facts.semantic["top_k"], facts.semantic["top_p"], facts.semantic["min_p"]) == ("0", "1.0", "0.0")
    assert facts.deployment["max_num_seqs"] == "4"


def test_raw_and_processed_are_one_distribution_at_two_temperatures(backend, raw):
    """The same tokens: ratios of processed probabilities are those of raw ones, to the power of 1 / T."""
    request = ask(*CAPITAL, temperature=0.5, logprobs=4, max_tokens=1)
    cooled, own = only(backend, request), only(raw, request)

    assert cooled.token_ids == own.token_ids
    assert (cooled.kind, own.kind) == (LogprobKind.PROCESSED, LogprobKind.RAW)
    [processed], [model] = cooled.top_logprobs, own.top_logprobs
    assert [each.token_id for each in processed] == [each.token_id for each in model]
    for likelier, rarer in ((0, 1), (1, 2), (2, 3)):
        step = processed[likelier].logprob - processed[rarer].logprob
        assert step == pytest.approx((model[likelier].logprob - model[rarer].logprob) / 0.5, abs=1e-4)


def test_greedy_reports_the_models_own(backend, raw):
    request = ask(*CAPITAL, temperature=0, seed=None)

    assert only(backend, request).logprobs == only(raw, request).logprobs
    assert only(backend, request).logprobs[0] < -0.1


def test_truncation_is_in_the_processed_numbers(backend):
    completion = only(backend, ask(*CAPITAL, top_k=2, logprobs=4, max_tokens=8))

    for alternatives in completion.top_logprobs:
        assert len(alternatives) == 2
        assert sum(math.exp(each.logprob) for each in alternatives) == pytest.approx(1, abs=1e-5)


def test_the_prefix_cache_is_seen(backend):
    request = ask(*(1000 + number for number in range(40)))

    assert only(backend, request).cached_tokens == 0
    assert (only(backend, request).cached_tokens or 0) > 0


def test_a_stop_token_is_kept_with_its_logprob(backend):
    ids = backend.render_chat([{"role": "user", "content": "Say hi."}])
    completion = only(backend, ask(*ids, temperature=0, seed=None, max_tokens=64))

    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] == 2
    assert completion.logprobs[-1] < 0


def test_half_a_character_has_no_logprob_and_says_so(backend):
    [answer] = backend.generate([ask(*FACES, temperature=0, seed=None, max_tokens=8)])

    [problem] = answer.problems
    assert problem.code == InvalidCompletion.code
    assert "8 tokens carry 2 logprobs" in problem.message
    assert "inside a character" in problem.message


def test_a_stream_leaves_out_ids_that_end_inside_a_character(backend):
    """Six of eight, with their logprobs: were it not for the count, nothing would look lost."""
    [answer] = backend.stream([ask(*FACES, temperature=0, seed=None, max_tokens=8)])

    [problem] = answer.problems
    assert problem.code == InvalidCompletion.code
    assert "made 8 tokens and sent 2" in problem.message


def test_streams_may_follow_each_other_at_once(backend):
    """It promises to keep the connection, and closes it."""
    for seed in range(12):
        [answer] = backend.stream([ask(*CAPITAL, seed=seed)])
        assert answer.problems == ()


def test_it_tokenises_as_the_trainer_does(backend):
    tokenizer = AutoTokenizer.from_pretrained(opened.SMOLLM2, local_files_only=True)
    for text in ("Hello, world", "3 + 4 = 7", "a  1", "请用一句话", "🙂🙃"):
        assert backend.tokenize(text) == tuple(tokenizer(text)["input_ids"]), text
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert backend.render_chat(messages) == tuple(rendered["input_ids"])


def test_a_server_that_goes_away(model, tmp_path):
    with (
        opened.llama_cpp_server(model, tmp_path / "log") as server,
        contextlib.closing(LlamaCppBackend(server.url, timeout_s=20)) as backend,
    ):
        only(backend, ask(*CAPITAL))
        server.stop()
        with pytest.raises(EngineUnreachable):
            backend.generate([ask(*CAPITAL)])
        assert server.exited()


def test_a_file_that_is_no_model_and_a_setting_that_does_not_exist(model, tmp_path):
    (tmp_path / "text.gguf").write_text("Once upon a time")
    with pytest.raises(EngineError, match="failed to load model"):
        opened.llama_cpp_server(tmp_path / "text.gguf", tmp_path / "log")
    with pytest.raises(EngineError, match="'n_context'"):
        opened.llama_cpp_server(model, tmp_path / "log", args=("n_context=5",))
