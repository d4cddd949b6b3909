import re
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.tiny_models import tiny

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import InvalidValue, UnsupportedModel
from zerodrift.core.request import Request
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS, inject_all, resolve
from zerodrift.models.family.parts import ModelParts

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]

WITHOUT_A_FAULT = {
    "unexplained",  # what nobody planted
    "path/chunked-prefill",  # the reference prefills in one piece
    "path/preemption",  # and never preempts
    "path/spec-decode",  # nor guesses ahead
    "path/parallelism",  # and runs on one device
    "path/routing",  # no testbed is a mixture of experts
    "weights/torn",  # one process answers or updates, never both at once
    "weights/lora",  # no backend takes adapters
    # An objective is no engine's: these are for a monitor to find, and nothing here can break one.
    "objective/staleness",
    "objective/sequence-ratio",
    "objective/reward-misbound",
}


def test_every_cause_has_a_fault() -> None:
    assert {fault.cause for fault in FAULTS.values()} == set(CAUSES) - WITHOUT_A_FAULT


@pytest.mark.parametrize("spec", FAULTS)
def test_a_fault_is_documented(spec: str) -> None:
    fault = FAULTS[spec]
    assert spec == fault.spec == f"{fault.cause}:{fault.variant}"
    assert re.fullmatch(r"[a-z0-9.-]+", fault.variant)
    assert re.fullmatch(r"[A-Z].+\.", fault.message)
    assert fault.kind in {Layer.SEMANTIC, Layer.PATH, Layer.WEIGHTS, Layer.TRAINER}
    # Another model is there from the start, and no update brings it.
    updated = fault.kind is Layer.WEIGHTS and fault.cause != "weights/other-model"
    assert (Need.SYNC in fault.needs) is updated
    assert bool({Need.INSIDE, Need.REFERENCE} & set(fault.needs)) >= (fault.kind is Layer.PATH)


def test_no_two_faults_say_the_same() -> None:
    assert len({fault.message for fault in FAULTS.values()}) == len(FAULTS)


def test_a_cause_alone_is_its_first_variant() -> None:
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
def test_unknown_faults_are_refused_with_a_suggestion(spec: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        resolve(spec)


def test_the_broken_engine_still_keeps_the_protocol(
    fault: Fault, host: Callable[[Fault], Backend], ask: Ask, tell: Tell
) -> None:
    engine = host(fault)
    requests = [*ask(20, 6, max_tokens=4, n=2, logprobs=2), *ask(9, max_tokens=4, logprobs=2)]
    before = engine.generate(requests)
    broken = fault.inject(engine)
    assert (broken.name, broken.fingerprint()) == (engine.name, engine.fingerprint())
    assert broken.capabilities >= engine.capabilities
    assert broken.max_model_len in (engine.max_model_len, engine.max_model_len - 1)
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
    same = broken.tokenize("a b") == engine.tokenize("a b")
    assert same is (fault.cause != "semantic/tokenizer")
    assert broken.render_chat([{"role": "user", "content": "hello"}])
    broken.reset_cache()
    assert tell(engine.generate(requests)) == tell(before), "the engine handed in was changed"
    broken.close()
    broken.close()


def test_several_faults_are_planted_from_the_inside_out(
    llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(12, 8, max_tokens=4)
    broken = inject_all(llama, ["semantic/off-by-one:shifted-left", "path/head-precision"])
    head_only = resolve("path/head-precision").inject(llama)
    for both, one in zip(tell(broken.generate(requests)), tell(head_only.generate(requests)), strict=True):
        assert both.token_ids == one.token_ids
        assert both.logprobs == one.logprobs[1:] + one.logprobs[:1]
    assert inject_all(llama, []) is llama


def test_two_faults_inside_add_up(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    sequence = [tell(llama.generate(ask(20)))[0].sequence]
    scores = [
        inject_all(llama, specs).score(sequence)[0]
        for specs in (["path/rope"], ["path/head-precision"], ["path/head-precision", "path/rope"])
    ]
    assert scores[2] not in scores[:2]


def test_models_of_another_build_are_refused() -> None:
    """By the name of the part that they do not have, and before anything is changed."""
    model = tiny("gpt2")
    with pytest.raises(UnsupportedModel, match="GPT-2 shows no rotary embedding"):
        ModelParts(model).replace_rotary(torch.nn.Identity())
