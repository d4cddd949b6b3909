"""VllmBackend, beyond what adapters promise alike (test_servers.py), against a pretended server."""

import shutil
import sys

import pytest
from asking import ask, one
from pretend import KINDS, Completions, Generate
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_facts import KEPT_BACK
from zerodrift.backends.vllm_launch import route_flags
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import FinishReason, LogprobKind, TokenAlternative
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    InvalidPrompt,
    ModelError,
    ModelNotFound,
    NonFinite,
    TruncatedWeights,
    UnsupportedModel,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

NAN_WORDS = "Out of range float values are not JSON compliant"


@pytest.fixture
def server(loopback):
    return Completions(loopback)


@pytest.fixture
def connect(server, closing):
    def connect(**options):
        backend = closing(VllmBackend(server.url, **options))
        server.calls.clear()
        return backend

    return connect


# What the server can do


def test_a_plain_server_has_what_it_shows(server, connect):
    server.without(
        "/server_info", "/weight_info", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache"
    )
    server.cached_tokens = None
    server.routes["POST /tokenize"] = lambda call, handler: (400, {"error": "no tokenizer"})

    backend = connect()

    assert backend.capabilities == {
        Capability.TOP_LOGPROBS,
        Capability.SCORE,
        Capability.SEED,
        Capability.CACHE_SALT,
        Capability.STREAM,
    }
    for call, flag in [
        (lambda: backend.tokenize("a"), "--skip-tokenizer-init"),
        (lambda: backend.render_chat([]), "--skip-tokenizer-init"),
        (backend.reset_cache, "VLLM_SERVER_DEV_MODE=1"),
        (lambda: backend.load_weights(None, WeightVersion("x")), "VLLM_SERVER_DEV_MODE=1"),
    ]:
        with pytest.raises(CapabilityMissing, match=flag):
            call()


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v1/models", 401, EngineRefused),
        ("/v1/models", 403, EngineRefused),
        ("/v1/models", 404, EngineRefused),
        ("/weight_info", 429, EngineRefused),
        ("/weight_info", 500, EngineError),
    ],
)
def test_a_route_that_fails_is_not_one_that_is_closed(server, connect, path, status, error):
    server.routes[f"GET {path}"] = lambda call, handler: handler.send(status, {}, retry_after="0")

    with pytest.raises(EngineError) as caught:
        connect()
    assert type(caught.value) is error


def test_nan_that_the_server_cannot_write_is_no_missing_capability(server, connect):
    server.answers(400, lambda body: "logprobs" in body or body.get("prompt_logprobs") == 0, words=NAN_WORDS)

    assert connect().capabilities == frozenset(Capability)


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_only_a_route_that_wants_another_method_is_there(server, connect, status):
    server.without("/collective_rpc", "/reset_prefix_cache")
    for path in ("/collective_rpc", "/reset_prefix_cache"):
        server.routes[f"GET {path}"] = lambda call, handler: (status, {"detail": "a gateway"})

    lost = {Capability.LOAD_WEIGHTS, Capability.RESET_CACHE}
    assert connect().capabilities == frozenset(Capability) - lost


@pytest.mark.parametrize("status", [302, 401, 403, 404])
def test_a_gateway_that_lets_only_v1_through_does_not_stop_the_audit(server, connect, status):
    for path in ("/server_info?config_format=json", "/weight_info"):
        server.routes[f"GET {path}"] = lambda call, handler: (status, {"detail": "a gateway"})

    backend = connect()

    assert backend.capabilities == frozenset(Capability) - {
        Capability.EFFECTIVE_CONFIG,
        Capability.WEIGHT_VERSION,
    }
    assert len(one(backend, ask(1)).completions) == 1
    facts = backend.fingerprint()
    assert facts.semantic == {"model": "tiny"}
    assert facts.deployment.get(KEPT_BACK) == (None if status == 404 else f"/server_info ({status})")


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_server_that_reports_logits_is_refused_with_the_flag(server, connect, mode):
    server.info["vllm_config"]["model_config"]["logprobs_mode"] = mode

    with pytest.raises(CapabilityMissing, match="--logprobs-mode processed_logprobs"):
        connect()


@pytest.mark.parametrize(
    ("wanted", "length"), [("a", 64), ("b", 32), ("of-a", 64), ("of-b", 32), ("of-nobody", 32)]
)
def test_a_model_is_as_long_as_its_own_card_says_or_its_bases(server, connect, wanted, length):
    adapters = [{"id": "of-a", "parent": "a"}, {"id": "of-b", "parent": "b"}, {"id": "of-nobody"}]
    server.models = [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 32}, *adapters]

    backend = connect(model=wanted)

    assert (backend.model, backend.max_model_len) == (wanted, length)
    with pytest.raises(EngineRefused):
        connect()


@pytest.mark.parametrize("models", [[], [{"id": "x"}], [{"name": "x"}]])
def test_a_server_that_does_not_say_how_long_is_no_vllm(server, connect, models):
    server.models = models

    with pytest.raises(BadAnswer):
        connect()


# What is sent


@pytest.mark.parametrize("kind", ["completions", "generate"])
def test_explicit_leaves_nothing_to_the_server(loopback, closing, kind):
    server = KINDS[kind](loopback)
    one(closing(server.backend(server.url, explicit=True)), ask(1, logit_bias={4: 1.5}))

    [*_, body] = [call.body for call in server.calls if call.path == server.path]
    sent = server.asked(body)
    assert {*SamplingParams.__struct_fields__} - {"seed", "prompt_logprobs"} <= sent.keys()
    assert (sent["logprobs"], sent["logit_bias"], sent["top_k"]) == (0, {"4": 1.5}, 0)


# What comes back


def test_tokens_named_by_text_are_not_compared(server, connect):
    backend = connect()
    server.spoil_answer = lambda answer: answer["choices"][0]["logprobs"].update(tokens=["a", "b"])

    assert len(one(backend, ask(1)).completions) == 1


def test_a_stop_at_once_is_an_empty_completion(server, connect):
    backend = connect()
    empty = {"token_logprobs": [], "tokens": [], "top_logprobs": []}
    server.spoil_answer = lambda answer: answer["choices"][0].update(
        token_ids=[], logprobs=empty, finish_reason="abort"
    )

    [completion] = one(backend, ask(1)).completions

    assert (completion.token_ids, completion.versions) == ((), ())
    assert completion.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        # The sampled token 1 is one of the two likeliest, and comes first on the wire.
        ({"1": -0.9, "8": -0.6}, ((8, -0.6), (1, -0.9))),
        # It is not, and comes on top.
        ({"1": -3.0, "8": -0.6, "9": -0.9}, ((8, -0.6), (9, -0.9))),
        # Ties go by id.
        ({"9": -0.7, "8": -0.7}, ((8, -0.7), (9, -0.7))),
        # Truncation excluded the rest.
        ({"1": -0.0, "8": -9999.0}, ((1, -0.0),)),
    ],
)
def test_alternatives_are_the_likeliest_in_order(server, connect, entry, expected):
    backend = connect()
    named = {f"token_id:{token}": value for token, value in entry.items()}
    server.spoil_answer = lambda answer: answer["choices"][0]["logprobs"].update(top_logprobs=[named])

    [completion] = one(backend, ask(1, max_tokens=1, logprobs=2)).completions

    assert completion.top_logprobs == (tuple(TokenAlternative(*pair) for pair in expected),)


def test_nan_that_the_server_cannot_write_is_a_problem_of_every_sample(server, connect):
    backend = connect()
    server.answers(400, lambda body: body["prompt"] == [1], words=NAN_WORDS)

    sick, well = backend.generate([ask(1, n=2), ask(2)])

    assert [problem.code for problem in sick.problems] == [NonFinite.code] * 2
    assert sick.completions == ()
    assert len(well.completions) == 1
    with pytest.raises(NonFinite):
        backend.score([(1,)])


def test_the_version_is_unknown_where_it_moved_or_is_not_shown(server, connect):
    backend = connect()
    server.versions = ["v1", "v2"]
    [moved] = one(backend, ask(1)).completions
    [still] = one(backend, ask(1)).completions
    server.versions = [""]
    [nameless] = one(backend, ask(1)).completions
    server.without("/weight_info")
    [silent] = one(connect(), ask(1)).completions

    labels = [completion.versions[0].version.label for completion in (moved, still, nameless, silent)]
    assert labels == ["unknown", "v2", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("raw_logprobs", LogprobKind.RAW),
        ("processed_logprobs", LogprobKind.PROCESSED),
        (None, LogprobKind.PROCESSED),
    ],
)
def test_the_kind_is_what_the_server_claims(server, connect, mode, kind):
    server.info["vllm_config"]["model_config"]["logprobs_mode"] = mode

    [completion] = one(connect(), ask(1)).completions

    assert completion.kind is kind


# Scoring, tokens, weights, caches


def test_scores_are_those_of_the_tokens_after_the_first(server, connect):
    backend = connect()

    assert backend.score([(3, 4, 5), (6,), (1, 2)]) == [[-4.0, -5.0], [], [-2.0]]
    assert [call.body["prompt_logprobs"] for call in server.calls] == [0, 0, 0]
    with pytest.raises(InvalidPrompt):
        backend.score([()])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda choice: choice.update(prompt_token_ids=[3, 4, 6]), BadAnswer),
        (lambda choice: choice.update(prompt_token_ids=None), BadAnswer),
        (lambda choice: choice.update(prompt_token_ids=[3] * 60), BadAnswer),
        (lambda choice: choice.update(prompt_logprobs=None), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"].pop(), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"][1].clear(), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"][1]["4"].update(logprob=-9999.0), NonFinite),
        (lambda choice: choice["prompt_logprobs"][1]["4"].update(logprob=float("nan")), NonFinite),
        (lambda choice: choice.clear(), BadAnswer),
    ],
)
def test_scores_that_cannot_be_believed_raise(server, connect, spoil, error):
    backend = connect()
    server.spoil_answer = lambda answer: spoil(answer["choices"][0])

    with pytest.raises(error):
        backend.score([(3, 4, 5)])


@pytest.mark.parametrize("begins", [True, False])
def test_chat_is_rendered_with_the_prompt_to_generate_or_without(server, connect, begins):
    connect().render_chat([{"role": "user", "content": "c"}], generation_prompt=begins)
    assert server.calls[0].body["add_generation_prompt"] is begins


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.materialise("testbed:llama", tmp_path_factory.mktemp("weights") / "step-3")


@pytest.mark.parametrize("labelled", [True, False])
def test_weights_are_loaded_from_a_directory_and_then_labelled(server, connect, checkpoint, labelled):
    if not labelled:
        server.without("/update_weight_version")
        server.routes["POST /collective_rpc"] = lambda *_: (200, b"")
    connect().load_weights(checkpoint / "." / "x" / "..", WeightVersion("step-3"))

    body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint.resolve())}}
    label = [("/update_weight_version", {"new_version": "step-3"})] if labelled else []
    posts = [(call.path, call.body) for call in server.calls if call.method == "POST"]
    assert posts == [("/collective_rpc", body), *label]


def test_weights_that_would_kill_the_engine_are_not_sent(server, connect, checkpoint, tmp_path):
    backend = connect()

    with pytest.raises(ModelNotFound):
        backend.load_weights(tmp_path / "nowhere", WeightVersion("x"))
    with pytest.raises(UnsupportedModel):
        backend.load_weights(tmp_path, WeightVersion("x"))
    torn = tmp_path / "torn"
    shutil.copytree(checkpoint, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(TruncatedWeights):
        backend.load_weights(torn, WeightVersion("x"))
    assert server.calls == []


def test_tensors_that_do_not_fit_what_is_served_are_not_sent(server, connect, checkpoint, tmp_path):
    """vLLM 0.28 and 0.32 answer such an update with an error, and every request after it with a dead engine."""
    server.models = [{"id": "tiny", "max_model_len": 64, "root": str(checkpoint)}]
    backend = connect()
    narrow = models.materialise("testbed:llama", tmp_path / "narrow")
    tensors = load_file(narrow / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        backend.load_weights(narrow, WeightVersion("x"))
    assert server.calls == []
    backend.load_weights(checkpoint, WeightVersion("x"))
    assert "/collective_rpc" in [call.path for call in server.calls]


def test_a_failed_load_does_not_move_the_label(server, connect, checkpoint):
    server.routes["POST /collective_rpc"] = lambda call, handler: (500, {"error": {"message": "dead"}})

    with pytest.raises(EngineError, match="dead"):
        connect().load_weights(checkpoint, WeightVersion("x"))
    assert "/update_weight_version" not in [call.path for call in server.calls]


def test_a_reset_that_did_not_happen_raises(server, connect):
    backend = connect()
    backend.reset_cache()
    server.reset = False

    with pytest.raises(EngineError, match="success=false"):
        backend.reset_cache()


# The fingerprint


def test_facts_fall_into_three_parts(connect):
    facts = connect().fingerprint()

    assert facts.semantic == {
        "model": "tiny",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "auto",
        "hf_overrides": "{}",
    }
    assert facts.numeric == {
        "dtype": "float32",
        "head_dtype": "model",
        "quantization": "null",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": "true",
        "tensor_parallel_size": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "true",
        "torch": "2.13.0+cpu",
        "cpu": "Fast CPU",
        "threads": "2",
    }
    assert facts.deployment == {"max_model_len": "64", "max_num_seqs": "128", "route": "/v1/completions"}


@pytest.mark.parametrize(
    ("path", "value", "moved"),
    [
        (("vllm_config", "model_config", "hf_overrides"), {"head_dtype": "float32"}, "numeric"),
        (("vllm_config", "model_config", "hf_overrides"), {"rope_theta": 1}, "semantic"),
        (("vllm_config", "model_config", "logprobs_mode"), "raw_logprobs", "semantic"),
        (("vllm_config", "model_config", "generation_config"), "vllm", "semantic"),
        (("vllm_config", "model_config", "dtype"), "torch.bfloat16", "numeric"),
        (("vllm_env", "VLLM_CPU_ATTN_SPLIT_KV"), False, "numeric"),
        (("system_env", "env_vars"), "OMP_NUM_THREADS=1", "numeric"),
        (("vllm_config", "scheduler_config", "max_num_seqs"), 1, "deployment"),
        (("vllm_env", "VLLM_CACHE_ROOT"), "/elsewhere", None),
    ],
)
def test_a_setting_moves_its_own_digest_alone(server, connect, path, value, moved):
    before = connect().fingerprint().digests()
    target = server.info
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    after = connect().fingerprint().digests()

    assert [part for part in before if before[part] != after[part]] == ([moved] if moved else [])


@pytest.mark.parametrize(
    ("info", "semantic", "numeric"),
    [
        *((info, {}, {}) for info in ("a text", {"vllm_config": "VllmConfig(...)"}, None)),
        (
            {"vllm_config": {"model_config": {"hf_overrides": "<function>"}, "cache_config": None}},
            {"hf_overrides": "{}"},
            {"head_dtype": "model"},
        ),
    ],
)
def test_settings_that_cannot_be_read_are_no_settings(server, connect, info, semantic, numeric):
    server.info = info
    backend = connect()

    assert (Capability.EFFECTIVE_CONFIG in backend.capabilities) is bool(numeric)
    assert backend.fingerprint().semantic == {"model": "tiny", **semantic}
    assert backend.fingerprint().numeric == numeric


# A server that does not stay the same


@pytest.mark.parametrize("after", ["two", "one"])
def test_a_server_started_anew_with_the_same_settings_is_known_by_its_number(server, connect, after):
    server.info["vllm_config"]["instance_id"] = "one"
    backend = connect()
    before = backend.fingerprint()

    server.info["vllm_config"]["instance_id"] = after

    assert (backend.fingerprint().digest == before.digest) is (after == "one")
    assert connect().fingerprint() == before, "the number itself is no fact: it is another in every run"


# By the route for ids in and ids out


@pytest.fixture
def generate(loopback):
    return Generate(loopback)


@pytest.fixture
def by_generate(generate, closing):
    return lambda: closing(generate.backend(generate.url))


def test_only_this_route_is_asked_and_the_run_says_so(generate, by_generate):
    """Two runs by two routes are not the same run, and `audit diff` says why."""
    backend = by_generate()
    generate.calls.clear()
    backend.generate([ask(1)])
    backend.stream([ask(1)])
    assert backend.score([(4, 5, 6)]) == [[-5.0, -6.0]]
    assert {call.path for call in generate.calls} == {generate.path, "/weight_info"}
    assert backend.fingerprint().deployment["route"] == generate.path


def test_one_more_alternative_is_asked_for_because_the_list_is_cut_one_short(generate, by_generate):
    [completion] = one(by_generate(), ask(4, 5, salt="s", logprobs=2, prompt_logprobs=0)).completions

    [*_, body] = [call.body for call in generate.calls if call.path == generate.path]
    assert (body["cache_salt"], body["sampling_params"]["logprobs"]) == ("s", 3)
    # The sampled token was the first of the three that came, and is not among the two likeliest.
    assert completion.top_logprobs[0] == (TokenAlternative(500, -0.1), TokenAlternative(501, -0.2))
    assert completion.prompt_logprobs == (None, -5.0)


@pytest.mark.parametrize("status", [403, 404])
def test_a_route_that_is_closed_names_the_flag(generate, by_generate, status):
    generate.answers(status)
    with pytest.raises(EngineRefused, match="--enable-scale-out"):
        by_generate()


def test_an_older_release_names_tokens_and_does_not_repeat_the_prompt(generate, by_generate):
    generate.named = True
    generate.spoil = lambda samples: [sample.pop("weight_versions") for sample in samples]
    generate.spoil_answer = lambda answer: answer.update(prompt_token_ids=None)
    backend = by_generate()

    [completion] = one(backend, ask(4, 5, logprobs=1)).completions

    assert (completion.prompt_token_ids, completion.token_ids) == ((4, 5), (5, 6))
    assert completion.top_logprobs[0] == (TokenAlternative(500, -0.1),)
    # What /weight_info says, before and after.
    assert completion.versions == (VersionSpan(WeightVersion("v1"), 0, 2),)
    assert backend.score([(4, 5)]) == [[-5.0]]


def test_versions_are_spans_and_one_without_tokens_is_none(generate, by_generate):
    spans = [
        {"version": version, "start": start, "end": end}
        for version, start, end in (("a", 0, 1), ("b", 1, 1), ("", 1, 2))
    ]
    generate.spoil = lambda samples: samples[0].update(weight_versions=spans)
    [completion] = one(by_generate(), ask(4)).completions

    found = [(each.version.label, each.start, each.end) for each in completion.versions]
    assert found == [("a", 0, 1), ("unknown", 1, 2)]


def test_alternatives_that_truncation_excluded_are_left_out(generate, by_generate):
    backend = by_generate()
    generate.spoil = lambda samples: [
        entry["top_logprobs"][-1].update(logprob=-9999.0) for entry in samples[0]["logprobs"]["content"]
    ]
    [completion] = one(backend, ask(4, logprobs=2)).completions
    assert completion.top_logprobs[0] == (TokenAlternative(500, -0.1), TokenAlternative(4, -0.5))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": None, "usage": {"prompt_tokens": 7}},
        {"prompt_token_ids": None, "usage": None},
        {"prompt_token_ids": "4"},
    ],
)
def test_a_prompt_that_nobody_confirms_is_a_problem(generate, by_generate, change):
    backend = by_generate()
    generate.spoil_answer = lambda answer: answer.update(change)

    assert len(one(backend, ask(4)).problems) == 1
    with pytest.raises(BadAnswer):
        backend.score([(4, 5)])


def test_the_route_is_taken_from_the_configuration(generate, tmp_path):
    config = EngineConfig(name="vllm", route="generate", url=generate.url)
    with open_engine(config, ServedModel("testbed:llama", "auto"), tmp_path):
        assert "/v1/completions" not in {call.path for call in generate.calls}


@pytest.mark.parametrize(("source", "flags"), [("enable_scale_out: bool", ["--enable-scale-out"]), ("", [])])
def test_the_flag_is_given_to_a_release_that_knows_it(tmp_path, source, flags):
    arguments = tmp_path / "vllm" / "entrypoints" / "somewhere" / "cli_args.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(source)
    (tmp_path / "vllm" / "__init__.py").touch()
    env = {"PYTHONPATH": str(tmp_path)}
    config = EngineConfig(name="vllm", route="generate", python=sys.executable, env=env)

    assert route_flags(config) == flags
    assert route_flags(EngineConfig(name="vllm", python=sys.executable, env=env)) == []
