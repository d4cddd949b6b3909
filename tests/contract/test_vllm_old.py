"""VllmBackend against a pretended server without return_token_ids, as 0.8.5 is: see docs/v0-v1.md for the real one."""

import sys

import pytest
from asking import ask, one
from pretend import Completions

from zerodrift.backends.base import Capability
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import flags, transfer_flags
from zerodrift.backends.vllm_release import read_release
from zerodrift.backends.vllm_update import FLAGS
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import TokenAlternative
from zerodrift.core.errors import ConfigError, EngineError, ZerodriftError
from zerodrift.core.version import VersionSpan, WeightVersion


class Old(Completions):
    """It names ids in its logprobs alone, and knows neither salts nor labels, nor how to show its settings."""

    knows_ids = False

    def __init__(self, loopback):
        super().__init__(loopback)
        self.reads = self.reads - {"cache_salt"}
        self.without("/weight_info", "/update_weight_version", "/collective_rpc")
        self.info = {"vllm_config": "model='tiny', dtype=torch.float32"}
        self.routes["GET /version"] = lambda *_: (200, {"version": "0.8.5"})
        self.routes["POST /reset_prefix_cache"] = lambda *_: (200, b"")

    def answer(self, body, prompt, samples):
        whole = super().answer(body, prompt, samples)
        whole["usage"]["completion_tokens"] = body["max_tokens"] * len(samples)
        for sample in samples:
            if sample["prompt_logprobs"] is not None:
                first, *others = sample["prompt_logprobs"]
                own = zip(prompt[1:], others, strict=True)
                sample["prompt_logprobs"] = [first, *({str(token): each[str(token)]} for token, each in own)]
            if not body.get("stream"):
                self.forget(sample)
        return whole

    def chunks(self, samples, answer):
        for chunk in super().chunks(samples, answer):
            if isinstance(chunk, dict):
                for piece in chunk["choices"]:
                    self.forget(piece)
            yield chunk

    def forget(self, sample):
        if not self.knows_ids:
            del sample["token_ids"]
            sample.pop("prompt_token_ids", None)


@pytest.fixture
def old(loopback):
    return Old(loopback)


@pytest.fixture
def connect(old, closing):
    return lambda: closing(VllmBackend(old.url))


def test_ids_are_those_that_the_logprobs_name(old, connect):
    backend = connect()

    assert frozenset(Capability) - backend.capabilities == {
        Capability.CACHE_SALT,
        Capability.LOAD_WEIGHTS,
        Capability.WEIGHT_VERSION,
        Capability.EFFECTIVE_CONFIG,
    }
    for ask_it in (backend.generate, backend.stream):
        [answer] = ask_it([ask(4, 5, n=2, logprobs=1)])
        assert [each.token_ids for each in answer.completions] == [(5, 6), (15, 16)]
        assert answer.completions[0].prompt_token_ids == (4, 5)
        assert answer.completions[0].versions == (VersionSpan(WeightVersion("unknown"), 0, 2),)
        assert answer.completions[0].top_logprobs[0] == (TokenAlternative(500, -0.1),)
    assert backend.score([(3, 4, 5), (6,)]) == [[-4.0, -5.0], []]
    with pytest.raises(EngineError):
        backend.reset_cache()


def test_a_count_that_is_left_out_where_it_is_zero_is_zero(old, connect):
    """0.18.1 mentions cached tokens only where there are some."""
    old.spoil_answer = lambda answer: answer["usage"].update(prompt_tokens_details=None)
    assert Capability.CACHED_TOKENS not in connect().capabilities
    old.spoil_answer = lambda answer: answer["usage"].update(
        prompt_tokens_details={"cached_tokens": 32} if answer["usage"]["prompt_tokens"] > 32 else None
    )

    backend = connect()

    assert Capability.CACHED_TOKENS in backend.capabilities
    assert one(backend, ask(4, 5)).completions[0].cached_tokens == 0
    assert one(backend, ask(*range(4, 40))).completions[0].cached_tokens == 32


@pytest.mark.parametrize("forgets", [True, False])
def test_a_reset_that_says_nothing_is_looked_at(old, connect, forgets):
    seen = set()

    def count(answer):
        asked = answer["usage"]["prompt_tokens"]
        known = asked in seen
        seen.add(asked)
        answer["usage"].update(prompt_tokens_details={"cached_tokens": 32} if known and asked > 32 else None)

    def reset(*_):
        if forgets:
            seen.clear()
        return 200, b""

    old.spoil_answer = count
    old.routes["POST /reset_prefix_cache"] = reset
    backend = connect()

    if forgets:
        backend.reset_cache()
    else:
        with pytest.raises(EngineError):
            backend.reset_cache()


@pytest.mark.parametrize("release", ["0.8.5", "0.8.6.dev3+fork", "17"])
def test_the_number_of_a_release_is_a_fact_and_decides_nothing(old, connect, release):
    old.routes["GET /version"] = lambda *_: (200, {"version": release})
    backend = connect()

    facts = backend.fingerprint()
    assert (facts.semantic, facts.numeric) == ({"model": "tiny"}, {"vllm": release})
    assert "token_ids" in facts.deployment
    assert one(backend, ask(4)).completions[0].fingerprint == facts.digest
    old.knows_ids = True
    assert "token_ids" not in connect().fingerprint().deployment


@pytest.mark.parametrize(
    "spoil",
    [
        # A logprob that is left out leaves no id behind: the count tells.
        lambda answer: [values.pop() for values in answer["choices"][0]["logprobs"].values()],
        lambda answer: answer["choices"][0]["logprobs"].update(tokens=["a", "b"]),
        lambda answer: answer["choices"][0].update(logprobs=None),
        lambda answer: answer["usage"].update(prompt_tokens=3),
        lambda answer: answer.update(usage=None),
    ],
)
def test_ids_that_nobody_names_are_a_problem(old, connect, spoil):
    backend = connect()
    old.spoil_answer = spoil

    assert len(one(backend, ask(4, 5)).problems) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda choice: choice["prompt_logprobs"][1].update({"9": {"logprob": -1.0}}),
        lambda choice: choice["prompt_logprobs"].pop(),
        lambda choice: choice["prompt_logprobs"].append({"7": {"logprob": -1.0}}),
        lambda choice: choice["prompt_logprobs"].__setitem__(1, None),
        lambda choice: choice["prompt_logprobs"].__setitem__(1, {"7": {"logprob": -1.0}}),
        lambda choice: choice["prompt_logprobs"].__setitem__(1, {"x": {"logprob": -1.0}}),
    ],
)
def test_scores_of_ids_that_nobody_names_raise(old, connect, spoil):
    backend = connect()
    old.spoil_answer = lambda answer: spoil(answer["choices"][0])

    with pytest.raises(ZerodriftError):
        backend.score([(3, 4, 5)])


@pytest.mark.parametrize(
    ("arguments", "worker", "unknown", "env"),
    [
        ("logprobs_mode: str", '== "nobind"', frozenset(), {}),
        ("seed: int", 'omp_cpuids == "all"', {"logprobs_mode"}, {"VLLM_CPU_OMP_THREADS_BIND": "all"}),
        (None, None, frozenset(), {}),
    ],
    ids=["new", "old", "elsewhere"],
)
def test_a_release_is_started_with_what_it_knows(tmp_path, arguments, worker, unknown, env):
    for name, source in (("engine/arg_utils.py", arguments), ("worker/cpu_worker.py", worker)):
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if source is not None:
            file.write_text(source)
    (tmp_path / "vllm" / "__init__.py").touch()
    where = {"PYTHONPATH": str(tmp_path)}

    release = read_release(EngineConfig(name="vllm"), sys.executable, where)

    assert (release.unknown_fields, release.env) == (unknown, env)
    assert (
        "--logprobs-mode" in flags(EngineConfig(name="vllm"), "auto", release.unknown_fields)
    ) is not bool(unknown)
    if unknown:
        with pytest.raises(ConfigError):
            read_release(EngineConfig(name="vllm", logprobs_mode="raw_logprobs"), sys.executable, where)


def test_a_word_is_known_wherever_a_release_keeps_it(tmp_path):
    """0.28 took the binding of threads out of its worker, which is there still."""
    for name, source in (("v1/worker/cpu_worker.py", "pass"), ("utils/ompmultiprocessing.py", '== "nobind"')):
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True)
        file.write_text(source)
    (tmp_path / "vllm" / "__init__.py").touch()

    assert read_release(EngineConfig(name="vllm"), sys.executable, {"PYTHONPATH": str(tmp_path)}).nobind


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ('Literal["nccl", "ipc"] | str = "nccl"', list(FLAGS)),
        ('Literal["nccl", "ipc"] = "nccl"', []),
        (None, []),
    ],
    ids=["any engine", "its own alone, as 0.18.1", "none, as 0.8.5"],
)
def test_our_transfer_engine_is_named_to_a_release_that_takes_it(tmp_path, backend, given):
    (tmp_path / "vllm" / "config").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    if backend is not None:
        (tmp_path / "vllm" / "distributed" / "weight_transfer").mkdir(parents=True)
        (tmp_path / "vllm" / "config" / "weight_transfer.py").write_text(f"backend: {backend}\n")
    plugin = tmp_path / "plugin-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nzerodrift = plugin:register\n")

    assert transfer_flags(sys.executable, {"PYTHONPATH": str(tmp_path)}) == given
