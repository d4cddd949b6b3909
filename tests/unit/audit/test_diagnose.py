"""What attribution makes of an engine that is the reference with one thing changed."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.measure import Observed, measure
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams

REQUESTED = SamplingParams(temperature=0.7, max_tokens=16)


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(5)
    return [
        Request(
            Prompt((0, *rng.integers(4, 500, 30).tolist())), msgspec.structs.replace(REQUESTED, seed=number)
        )
        for number in range(16)
    ]


@pytest.fixture
def explain(llama, floor, gates):
    def run(completions, facts=llama.facts):
        observed = [Observed(completion, REQUESTED) for completion in completions]
        measurements = list(measure(llama.teacher, observed, llama.facts.eos_token_ids))
        suspect = Suspect(llama.model, llama.tokenizer, facts)
        return diagnose(suspect, measurements, floor, gates, np.random.default_rng(0))

    return run


def say(engine: ReferenceBackend, asked: Sequence[Request], **sampling: Any) -> list[Completion]:
    requests = [Request(each.prompt, msgspec.structs.replace(each.sampling, **sampling)) for each in asked]
    return [answer.completions[0] for answer in engine.generate(requests)]


def test_meaning_is_enough_for_a_fault_of_meaning(explain, llama, asked):
    attribution = explain(say(llama, asked, temperature=0.63))
    assert [finding.cause for finding in attribution.selected] == ["semantic/temperature"]
    assert attribution.explained_to_floor


def test_the_checkpoints_defaults_with_a_limit_on_length(explain, llama, asked):
    """Many generation_config.json hold max_new_tokens, which no sampler takes."""
    defaults = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 2048}
    facts = msgspec.structs.replace(llama.facts, generation_defaults=defaults)
    attribution = explain(say(llama, asked, temperature=0.6, top_p=0.95), facts)
    assert [finding.cause for finding in attribution.selected] == ["semantic/generation-config"]
