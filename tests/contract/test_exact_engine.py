"""Our own engine behind the auditor's protocol, beyond what every backend promises (test_backend.py)."""

from typing import Any

import pytest
from tests.tiny_models import written

from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.base import Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.config.engine import EngineConfig
from zerodrift.config.model import ModelConfig
from zerodrift.config.run import RunConfig
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.errors import BadAnswer, ConfigError, UnsupportedModel
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.verdict import Outcome


@pytest.fixture(scope="module")
def engine():
    return ExactBackend(
        "testbed:llama", config=EngineConfig(name="exact", enable_prefix_caching=True, block_size=8)
    )


def ask(prompt: tuple[int, ...] = (5, 6, 7, 8), **settings: Any) -> Request:
    return Request(Prompt(prompt), SamplingParams(**{"seed": 3, "max_tokens": 8, **settings}))


def test_a_stream_has_a_piece_for_each_token(engine):
    (alone,) = engine.stream([ask(seed=4)])
    assert alone.stream_deltas == 8


@pytest.mark.parametrize("call", [ExactBackend.generate, ExactBackend.stream])
def test_a_request_that_fails_is_a_problem_of_its_answer(engine, call):
    good, bad = call(engine, [ask(), ask((5, 9999))])
    assert good.completions
    assert not bad.completions
    assert bad.problems[0].code == "value/prompt"
    with pytest.raises(BadAnswer):
        call(engine, [ask(tuple([5] * 1020))])


def test_it_draws_what_the_reference_draws(engine):
    """Same noise, same order of processing: only rounding is between them, and a draw rarely falls into that gap."""
    requests = [ask((5, number), temperature=0.8, top_p=0.95, max_tokens=16) for number in range(8)]
    reference = ReferenceBackend("testbed:llama").generate(requests)
    equal = [
        one.completions[0].token_ids == other.completions[0].token_ids
        for one, other in zip(engine.generate(requests), reference, strict=True)
    ]
    assert sum(equal) >= 7


def test_a_sequence_as_long_as_the_context_is_scored(engine):
    (scores,) = engine.score([[5] * engine.max_model_len])
    assert len(scores) == engine.max_model_len - 1
    with pytest.raises(BadAnswer):
        engine.generate([ask(tuple([5] * 1020))])
    with pytest.raises(BadAnswer):
        engine.score([[5] * 1025])


def test_caches_are_warm_until_reset(engine):
    prompt = tuple(range(20, 45))
    engine.generate([ask(prompt)])
    assert engine.generate([ask(prompt)])[0].completions[0].cached_tokens == 24
    engine.reset_cache()
    assert engine.generate([ask(prompt)])[0].completions[0].cached_tokens == 0


def test_it_promises_everything(engine):
    assert engine.capabilities == frozenset(Capability)
    fingerprint = engine.fingerprint()
    assert fingerprint.engine == "exact"
    assert fingerprint.numeric["dtype"] == "float32"
    assert fingerprint.deployment["block_size"] == "8"


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://127.0.0.1:1"},
        {"served_model": "policy"},
        {"route": "generate"},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_what_it_cannot_obey_is_refused(settings, tmp_path):
    config = EngineConfig(name="exact", **settings)
    with pytest.raises(ConfigError), open_engine(config, ServedModel("testbed:llama", "auto"), tmp_path):
        pass


def test_a_model_that_it_cannot_run_is_refused_with_the_engines_that_can(tmp_path):
    with pytest.raises(UnsupportedModel) as refused:
        ExactBackend(written("mixtral", tmp_path))
    assert "--engine vllm" in str(refused.value)
    assert "--engine reference" in str(refused.value)


@pytest.mark.long
def test_an_audit_finds_every_bit_equal(tmp_path):
    session = Session(
        config=RunConfig(
            engine=EngineConfig(name="exact", enable_prefix_caching=True),
            model=ModelConfig(path="testbed:llama"),
            validation=ValidationConfig(num_prompts=8, max_tokens=16),
        ),
        directory=tmp_path,
    )
    record = session.run(Silent()).record
    status = {probe.name: probe for probe in record.probes}
    assert record.verdict is Outcome.PASS
    for name in ("repeat", "batch", "cache", "stream", "prefill-decode"):
        assert status[name].status is Outcome.PASS
        assert "every bit equal" in status[name].message
