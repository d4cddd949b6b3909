"""VllmBackend against the real vLLM on CPU: the wire format is what we think it is, and so are its faults.

One server for each release: it takes about half a minute to start. Where releases differ, vllm_releases.toml says how.
What every backend promises is asked in test_backend.py.
"""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import asking
import opened
import pytest
from asking import one, only
from opened import RELEASES, vllm_python

from zerodrift import models
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import launch_vllm
from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import EngineError, EngineRefused, InvalidPrompt, NonFinite
from zerodrift.core.version import WeightVersion

pytestmark = pytest.mark.engines

LONG = tuple(4 + i % 200 for i in range(300))
"""Two blocks of 128 tokens, and a rest."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Directories of one architecture: A, B with a changed layer, and N with one row of NaN in its head."""
    safetensors = pytest.importorskip("safetensors.torch")
    root = tmp_path_factory.mktemp("weights")
    for name in "ABN":
        models.materialise("testbed:qwen3", root / name)
    # A sampling default that nobody asked for, and that leaves no doubt when it is applied.
    (root / "A" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 1}))
    for name, tensor in (("B", "model.layers.1.mlp.down_proj.weight"), ("N", "lm_head.weight")):
        path = root / name / "model.safetensors"
        tensors = safetensors.load_file(path)
        changed = tensors[tensor].clone()
        changed[7] = float("nan") if name == "N" else changed[7] * -50
        path.unlink()
        safetensors.save_file(tensors | {tensor: changed}, path, metadata={"format": "pt"})
    return root


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=marks) for name, marks in opened.MARKS.items()]
)
def release(request):
    """The name of an engine that is installed."""
    vllm_python(request.param)
    return request.param


@pytest.fixture(scope="module")
def server(release, weights, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    with opened.vllm_server(release, weights / "A", log) as server:
        yield server


@pytest.fixture(scope="module")
def backend(server):
    with contextlib.closing(VllmBackend(server.url, explicit=True, timeout_s=120)) as backend:
        yield backend


@pytest.fixture
def restored(backend, weights):
    """The test may load any weights; A is back afterwards."""
    yield
    backend.load_weights(weights / "A", WeightVersion("A"))
    backend.reset_cache()


ask = partial(asking.ask, max_tokens=4, seed=1)


def test_settings_in_force_are_shown(backend):
    facts = backend.fingerprint()

    assert facts.semantic["logprobs_mode"] == "processed_logprobs"
    assert facts.semantic["generation_config"] == "auto"
    assert facts.semantic["model"] == "tiny"
    assert facts.numeric["dtype"] == "float32"
    assert facts.numeric["head_dtype"] == "model"
    assert facts.numeric["kv_cache_dtype"] == "auto"
    assert facts.numeric["VLLM_CPU_ATTN_SPLIT_KV"] == "false"
    assert facts.numeric["threads"] == "1"
    assert facts.numeric["torch"].startswith("2.13.0")
    assert {"enforce_eager", "attention_backend", "cpu", "vllm"} <= set(facts.numeric)
    assert facts.deployment["max_num_seqs"].isdecimal()


def test_a_stream_is_refused_like_any_call(backend):
    """Although it is refused after status 200, by an event."""
    with pytest.raises(EngineRefused) as whole:
        backend.generate([ask(10**7)])
    with pytest.raises(EngineRefused) as streamed:
        backend.stream([ask(10**7)])
    assert str(streamed.value) == str(whole.value)


def test_scores_are_those_of_transformers(backend, weights):
    """To within three times what transformers itself misses in fp32: kernels differ, and processors do."""
    torch = pytest.importorskip("torch")
    ids = torch.tensor([LONG])

    def scored(model):
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].double()

    single, exact = scored(models.load(weights / "A")), scored(models.load(weights / "A").double())

    [scores] = backend.score([LONG])

    missed = (torch.tensor(scores, dtype=torch.float64) - exact).abs()
    assert missed.max() < 3 * (single - exact).abs().max()
    assert missed.mean() < 3 * (single - exact).abs().mean()


def test_processed_logprobs_are_those_of_the_temperature(backend):
    raw = only(backend, ask(5, 6, max_tokens=1, logprobs=1, temperature=0.0)).top_logprobs[0][0]
    hot = only(backend, ask(5, 6, max_tokens=1, logprobs=1, temperature=2.0)).top_logprobs[0][0]

    assert raw.token_id == hot.token_id
    assert hot.logprob < raw.logprob


def test_truncation_leaves_fewer_alternatives(backend):
    truncated = only(backend, ask(5, 6, logprobs=5, top_k=2))

    assert {len(top) for top in truncated.top_logprobs} == {2}


def test_what_is_not_sent_is_filled_in_from_the_models_own_defaults(backend, server):
    with contextlib.closing(VllmBackend(server.url)) as implicit:
        filled_in = only(implicit, ask(5, 6))
    stated = only(backend, ask(5, 6))

    # top_k = 1 leaves one token, of probability 1.
    assert set(filled_in.logprobs) == {0.0}
    assert max(stated.logprobs) < -1e-3


def test_samples_share_noise_with_the_next_seed(backend):
    first, second = backend.generate([ask(5, seed=3, n=2), ask(5, seed=4)])

    # vLLM seeds sample i with seed + i: consecutive seeds and n > 1 do not mix.
    assert second.completions[0].token_ids == first.completions[1].token_ids


def test_a_stop_token_comes_with_its_own_logprob(backend):
    completion = only(backend, ask(5, 6, logit_bias={1: 100.0}))

    assert completion.token_ids == (1,)
    assert completion.logprobs[0] == pytest.approx(0, abs=1e-4)
    assert completion.finish_reason is FinishReason.STOP


def test_the_prefix_cache_is_seen_salted_and_reset(backend):
    backend.reset_cache()

    def cached(**options):
        return only(backend, ask(*LONG, **options)).cached_tokens

    assert [cached(), cached(), cached(salt="other"), cached(salt="other")] == [0, 256, 0, 256]
    backend.reset_cache()
    assert cached() == 0


@pytest.mark.usefixtures("restored")
def test_new_weights_arrive_and_an_old_prefix_outlives_them(backend, weights):
    backend.load_weights(weights / "A", WeightVersion("A"))
    backend.reset_cache()
    before = only(backend, ask(*LONG))
    assert before.versions[0].version.label == "A"

    backend.load_weights(weights / "B", WeightVersion("B"))
    stale = only(backend, ask(*LONG))
    salted = only(backend, ask(*LONG, salt="B"))
    backend.reset_cache()
    fresh = only(backend, ask(*LONG))

    assert stale.versions[0].version.label == fresh.versions[0].version.label == "B"
    assert (stale.cached_tokens, salted.cached_tokens, fresh.cached_tokens) == (256, 0, 0)
    assert salted.logprobs == fresh.logprobs
    assert stale.logprobs not in (fresh.logprobs, before.logprobs)
    assert fresh.logprobs != before.logprobs

    backend.load_weights(weights / "A", WeightVersion("A again"))
    backend.reset_cache()
    assert only(backend, ask(*LONG)).logprobs == before.logprobs


@pytest.mark.usefixtures("restored")
def test_nan_in_the_weights_is_named(backend, weights):
    backend.load_weights(weights / "N", WeightVersion("N"))
    backend.reset_cache()

    [answer] = backend.generate([ask(5, 6, n=2)])

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == [NonFinite.code] * 2
    with pytest.raises(NonFinite):
        backend.score([(5, 6)])


def test_the_server_tokenizes_as_the_tokenizer_does(backend, weights):
    tokenizer = models.tokenizer(weights / "A")
    messages = [{"role": "user", "content": "2 + 2?"}]

    assert backend.tokenize("hello") == tuple(tokenizer("hello")["input_ids"])
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert backend.render_chat(messages) == tuple(rendered["input_ids"])


def test_refusals_carry_the_servers_words(backend):
    # Not 512, the first that the model does not have: what becomes of that is asked last.
    with pytest.raises(EngineRefused):
        backend.generate([ask(600)])
    with pytest.raises(EngineRefused):
        backend.generate([ask(5, logprobs=21)])
    with pytest.raises(InvalidPrompt):
        backend.generate([ask(*range(4, 400), max_tokens=1000)])
    assert len(backend.score([(5,) * 1023])[0]) == 1022


def reset_repeatedly(backend):
    for _ in range(100):
        time.sleep(0.05)
        backend.reset_cache()


def test_a_reset_under_load_is_not_believed(backend):
    """Asked again and again: one reset may fall between two requests, and then it is honest."""
    done = threading.Event()

    def load():
        while not done.is_set():
            assert one(backend, ask(*LONG, n=8, max_tokens=700, ignore_eos=True)).problems == ()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load)
        try:
            with pytest.raises(EngineError, match="success=false"):
                reset_repeatedly(backend)
        finally:
            done.set()
        running.result()


def test_a_server_that_cannot_start_says_why(release, weights, tmp_path):
    with pytest.raises(EngineError, match="no-such-flag"):
        launch_vllm(
            vllm_python(release),
            weights / "A",
            ["--no-such-flag"],
            {},
            tmp_path / "log",
            timeout_s=opened.STARTUP_S,
        )


def test_releases_have_the_routes_that_are_listed(release, backend):
    expected = RELEASES[release]["routes"]
    assert {path: backend._http.exchange("GET", path).status for path in expected} == expected
    # All that the first of these needs, and nothing of what the other does.
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    expected = RELEASES[release]["scale_out"]
    assert {path: backend._http.exchange("POST", path, body).status for path in expected} == expected


def test_the_first_id_that_the_model_does_not_have(release, backend):
    """Last in the file: no server is left on a release that dies of it."""
    if RELEASES[release]["first_unknown_id"] == "is refused":
        with pytest.raises(EngineRefused):
            backend.generate([ask(512)])
        assert only(backend, ask(5)).token_ids
        return
    assert RELEASES[release]["first_unknown_id"] == "kills the engine"
    with pytest.raises(EngineError):
        backend.generate([ask(512)])
    with pytest.raises(EngineError):
        backend.generate([ask(5)])
