"""What holds of every fault, where each can be planted, and several at once.

That an audit detects and names each one is tests/faults/test_every_injector.py.
"""

import re

import pytest
import torch
from tests.tiny_models import tiny
from tests.unit.faults.support import NEW, Elsewhere, ask, by, outputs, told

from zerodrift.backends.base import Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.core.errors import CapabilityMissing, InvalidValue, UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.faults.damage import Damaged
from zerodrift.faults.fault import Need
from zerodrift.faults.kept_kv import IN_FLIGHT
from zerodrift.faults.registry import FAULTS, resolve
from zerodrift.faults.sampling import write_model_with_defaults
from zerodrift.faults.wrapper import FaultyBackend, clone, fact_of, host_in, innermost
from zerodrift.models.family.parts import ModelParts

WITHOUT_A_FAULT = {
    "unexplained",  # what nobody planted
    "path/preemption",  # and never preempts
    "path/spec-decode",  # nor guesses ahead
    "path/parallelism",  # and runs on one device
    "path/routing",  # no testbed is a mixture of experts
    "weights/lora",  # no backend takes adapters
    # An objective is no engine's: these are for a monitor to find, and nothing here can break one.
    "objective/staleness",
    "objective/sequence-ratio",
    "objective/reward-misbound",
}
OF_ENGINES = [spec for spec, fault in FAULTS.items() if fault.kind is not Layer.TRAINER]
SEQUENCES = [tuple(range(4, 84)), tuple(range(9, 90))]
"""Two: a fault that depends on the batch needs one. Longer than 64: another counts positions wrongly from there."""


def needing(*needs: Need) -> list[str]:
    return [spec for spec, fault in FAULTS.items() if set(needs) <= set(fault.needs)]


def test_every_cause_has_a_fault():
    in_dumps = {name for name, cause in CAUSES.items() if cause.of_record}
    assert {fault.cause for fault in FAULTS.values()} == set(CAUSES) - WITHOUT_A_FAULT - in_dumps
    assert len({fault.message for fault in FAULTS.values()}) == len(FAULTS)


@pytest.mark.parametrize("spec", FAULTS)
def test_a_fault_is_documented(spec):
    fault = FAULTS[spec]
    assert spec == fault.spec == f"{fault.cause}:{fault.variant}"
    assert re.fullmatch(r"[a-z0-9.-]+", fault.variant)
    assert re.fullmatch(r"[A-Z].+\.", fault.message)
    # Another model is there from the start, and no update brings it.
    updated = fault.kind is Layer.WEIGHTS and fault.cause != "weights/other-model"
    assert (Need.SYNC in fault.needs) is updated
    assert bool({Need.INSIDE, Need.REFERENCE} & set(fault.needs)) >= (fault.kind is Layer.PATH)


def test_a_cause_alone_is_its_first_variant():
    assert resolve("semantic/bos").variant == "doubled"
    assert resolve("semantic/raw-logprobs") is FAULTS["semantic/raw-logprobs:default"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("semantic/boss", "did you mean 'semantic/bos'"),
        ("semantic/boss:doubled", "did you mean 'semantic/bos'"),
        ("semantic/bos:tripled", "semantic/bos has the variants semantic/bos:doubled, semantic/bos:missing"),
        ("nothing like it", "--inject list"),
    ],
)
def test_unknown_faults_are_refused_with_a_suggestion(spec, message):
    with pytest.raises(InvalidValue) as refused:
        resolve(spec)
    assert message in str(refused.value)


@pytest.mark.parametrize("spec", OF_ENGINES)
def test_the_broken_engine_still_keeps_the_protocol(spec, host):
    fault = FAULTS[spec]
    engine = host(fault)
    requests = [*ask(20, 6, max_tokens=4, n=2, logprobs=2), *ask(9, max_tokens=4, logprobs=2)]
    before = engine.generate(requests)
    broken = fault.inject(engine)
    assert (broken.name, broken.fingerprint()) == (engine.name, engine.fingerprint())
    assert broken.capabilities >= engine.capabilities
    assert broken.max_model_len == engine.max_model_len - ("bos:doubled" in spec)
    answers = broken.generate(requests)
    assert [len(a.completions) + len(a.problems) for a in answers] == [2, 2, 1]
    for request, answer in zip(requests, answers, strict=True):
        for completion in answer.completions:
            assert completion.sampling == request.sampling
            if "visible" not in fault.variant:
                assert completion.prompt_token_ids == request.prompt.token_ids
            assert completion.fingerprint == engine.fingerprint().digest
            assert len(completion.top_logprobs) == len(completion.token_ids)
    assert [len(values) for values in broken.score([(1, 2, 3), (4, 5)])] == [2, 1]
    assert (broken.tokenize("a b") == engine.tokenize("a b")) is (fault.cause != "semantic/tokenizer")
    assert broken.render_chat([{"role": "user", "content": "hello"}])
    broken.reset_cache()
    assert told(engine.generate(requests)) == told(before), "the engine handed in was changed"
    broken.close()
    broken.close()


@pytest.mark.parametrize("spec", [spec for spec in needing(Need.SYNC) if spec != "weights/stale:nothing"])
def test_the_claim_after_an_update_is_that_all_went_well(spec, llama, updated, update):
    broken = resolve(spec).inject(ReferenceBackend("testbed:llama"))
    # Ten requests are more than there are replicas, and the longer ones fill a block of a cache.
    requests = ask(*range(9, 49, 4))
    assert [each.token_ids for each in told(broken.generate(requests))] == [
        each.token_ids for each in told(llama.generate(requests))
    ]
    broken.load_weights(update, NEW)
    assert broken.fingerprint() == updated.fingerprint()
    ours, theirs = told(broken.generate(requests)), told(updated.generate(requests))
    assert [each.versions[0].version for each in ours] == [each.versions[0].version for each in theirs]
    assert {each.fingerprint for each in ours} == {each.fingerprint for each in theirs}
    assert max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(ours, theirs, strict=True)) > 1e-4
    broken.close()


# Where a fault can be planted.


@pytest.mark.parametrize("spec", ["path/rope", "path/prefix-cache", "weights/partial", "semantic/bos"])
def test_an_engine_of_which_nothing_is_known(spec, llama):
    with pytest.raises(CapabilityMissing):
        resolve(spec).inject(Elsewhere(llama))


@pytest.mark.parametrize(
    ("spec", "capability"),
    [
        ("weights/stale", Capability.LOAD_WEIGHTS),
        ("semantic/raw-logprobs", Capability.SCORE),
        ("semantic/sampling-bias", Capability.SCORE),
        ("semantic/wrong-token", Capability.TOP_LOGPROBS),
        ("semantic/retokenised", Capability.TOKENIZE),
    ],
)
def test_a_capability_that_is_needed(spec, capability, llama):
    assert resolve(spec).inject(Elsewhere(llama)).name == "elsewhere"
    with pytest.raises(CapabilityMissing):
        resolve(spec).inject(Elsewhere(llama, capability))


def test_a_model_of_another_kind(llama, mistral):
    """No window, no sampling defaults, no tied head; and no rotary embedding, by the name of the part."""
    for spec, engine in (
        ("path/window", llama),
        ("semantic/generation-config", llama),
        ("weights/tied-head", mistral),
    ):
        with pytest.raises(InvalidValue):
            resolve(spec).inject(engine)
    with pytest.raises(UnsupportedModel):
        ModelParts(tiny("gpt2")).replace_rotary(torch.nn.Identity())


@pytest.mark.parametrize(
    "defaults", [{"temperature": 0.7}, {"max_new_tokens": 64}, {"top_p": 1.0, "temperature": 0.6}]
)
def test_defaults_that_no_request_leaves_out_cannot_be_filled_in(defaults, tmp_path):
    """Every client states its temperature: an audit of that fault would pass, and mean nothing."""
    engine = ReferenceBackend(write_model_with_defaults("testbed:llama", tmp_path / "chatty", defaults))
    with pytest.raises(InvalidValue, match="top_p"):
        resolve("semantic/generation-config").inject(engine)


def test_what_acts_on_requests_in_flight_is_refused_by_an_audit_and_not_by_a_training():
    fault = FAULTS["weights/torn:kv-kept"]
    with pytest.raises(
        InvalidValue, match=r"plant it in a training: zerodrift train --set train\.rollouts=reference"
    ):
        fault.check_visible(SamplingParams(), engine="reference", sync=True)
    fault.check_visible(SamplingParams(), engine="reference", sync=True, trains=True)


def test_sequences_in_flight_are_those_that_come_first_after_an_update(update, updated):
    """Prompt and first token are the old weights', and the rest looks back on what they wrote; later ones are whole."""
    broken = FAULTS["weights/torn:kv-kept"].inject(ReferenceBackend("testbed:llama"))
    old = told(ReferenceBackend("testbed:llama").generate(ask(9, n=IN_FLIGHT + 16)))
    broken.load_weights(update, NEW)
    ours, new = (told(engine.generate(ask(9, n=IN_FLIGHT + 16))) for engine in (broken, updated))
    assert [each.logprobs[0] for each in ours[:IN_FLIGHT]] == [each.logprobs[0] for each in old[:IN_FLIGHT]]
    assert any(a.logprobs[1:] != b.logprobs[1:] for a, b in zip(ours[:IN_FLIGHT], old, strict=False))
    assert outputs(ours[IN_FLIGHT:]) == outputs(new[IN_FLIGHT:])
    assert {each.versions[0].version for each in ours} == {each.versions[0].version for each in new}


def test_sides_are_not_confused(llama):
    with pytest.raises(InvalidValue):
        resolve("trainer/packing").inject(llama)
    with pytest.raises(InvalidValue):
        resolve("semantic/bos").scorer(llama.model)


# Inside one of our own engines.


def test_what_is_no_fault_changes_nothing(llama, exact):
    for plain in (FaultyBackend(llama), Damaged(llama, lambda model: None)):
        assert plain.generate(ask(9, 20)) == llama.generate(ask(9, 20))
        assert plain.score(SEQUENCES) == llama.score(SEQUENCES)
        assert plain.fingerprint() == llama.fingerprint()
    assert Damaged(exact, lambda model: None).score(SEQUENCES) == exact.score(SEQUENCES)


@pytest.mark.parametrize("spec", needing(Need.INSIDE))
def test_it_acts_inside_the_exact_engine_and_leaves_it_whole(spec, exact):
    sound = exact.score(SEQUENCES)
    broken = FAULTS[spec].inject(exact)
    assert broken.score(SEQUENCES) != sound
    assert exact.score(SEQUENCES) == sound
    assert broken.fingerprint() == exact.fingerprint(), "a fault does not announce itself"


@pytest.mark.parametrize("spec", needing(Need.REFERENCE))
def test_what_the_exact_engine_cannot_run_is_refused(spec, exact):
    with pytest.raises(CapabilityMissing):
        FAULTS[spec].inject(exact)


@pytest.mark.parametrize(
    "spec",
    [
        "path/head-precision",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("path/weight-quantisation", "path/rope")),
    ],
)
def test_it_outlives_an_update(spec, llama, exact, updated, update):
    for engine, healthy in ((llama, updated), (exact, ExactBackend(str(update)))):
        broken = resolve(spec).inject(engine)
        before = broken.score(SEQUENCES)
        broken.load_weights(update, NEW)
        assert broken.score(SEQUENCES) not in (before, healthy.score(SEQUENCES))
        assert broken.fingerprint().semantic["weights"] == healthy.fingerprint().semantic["weights"]
    assert llama.version.label == "initial", "the engine handed in was updated too"


def test_the_engine_beneath_is_found(llama):
    damaged = resolve("path/rope").inject(llama)
    assert isinstance(host_in(damaged), ReferenceBackend)
    wrapped = resolve("semantic/seed").inject(damaged)
    assert host_in(wrapped) is None
    with pytest.raises(CapabilityMissing):
        resolve("path/rope").inject(wrapped)
    stranger = Elsewhere(llama)
    assert innermost(resolve("semantic/seed").inject(stranger)) is stranger
    assert (fact_of(wrapped, "vocab_size"), fact_of(stranger, "vocab_size")) == (512, None)


def test_a_clone_shares_weights_and_nothing_that_changes(llama):
    damaged = resolve("path/rope").inject(llama)
    ours, theirs = host_in(damaged), host_in(clone(damaged))
    assert ours is not theirs
    assert isinstance(ours, ReferenceBackend)
    assert isinstance(theirs, ReferenceBackend)
    assert ours.model is theirs.model


def test_a_fault_is_planted_around_another(llama):
    requests = ask(12, 8, max_tokens=4)
    broken = resolve("semantic/off-by-one:shifted-left").inject(resolve("path/head-precision").inject(llama))
    head_only = by("path/head-precision", llama, requests)
    for both, one in zip(told(broken.generate(requests)), head_only, strict=True):
        assert both.token_ids == one.token_ids
        assert both.logprobs == one.logprobs[1:] + one.logprobs[:1]
    rope, precision = (resolve(name).inject for name in ("path/rope", "path/head-precision"))
    assert rope(precision(llama)).score(SEQUENCES) not in (
        rope(llama).score(SEQUENCES),
        precision(llama).score(SEQUENCES),
    )
