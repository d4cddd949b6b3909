"""Tokens of the same model, of another one, and of the same with other weights, seen with the reference's logits."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from zerodrift.audit.counterfactual.same_model import UNRELATED, find_unrelated, lead_left
from zerodrift.audit.measure import Measurement, Observed, measure
from zerodrift.audit.perturb import perturbed
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Teacher
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.damage import Damaged
from zerodrift.faults.registry import resolve

REQUESTED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)


def observed(engine: Backend, sampling: SamplingParams = REQUESTED) -> list[Observed]:
    rng = np.random.default_rng(0)
    requests = [
        Request(Prompt((0, *rng.integers(4, 500, 8).tolist())), msgspec.structs.replace(sampling, seed=row))
        for row in range(16)
    ]
    return [Observed(answer.completions[0], sampling) for answer in engine.generate(requests)]


@pytest.fixture
def look(llama):
    def run(engine):
        seen = observed(engine)
        stops = llama.facts.eos_token_ids
        measurements: list[Measurement] = measure(llama.teacher, seen, stops)
        return lead_left(llama.teacher, seen, stops), find_unrelated(llama.teacher, measurements, stops)

    return run


def test_the_same_model(llama, look):
    share, says = look(llama)
    assert share == pytest.approx(1, abs=0.15)
    assert says is None


def test_another_architecture_with_the_same_tokens(look):
    share, says = look(ReferenceBackend("testbed:mistral"))
    assert share == pytest.approx(0, abs=0.15)
    assert says is not None
    assert "which no rounding does" in says


def test_the_same_architecture_with_other_weights(llama, look):
    share, says = look(resolve("weights/other-model:another-seed").inject(llama))
    assert share is not None
    assert share < 0.2
    assert says is not None


def with_model(engine: ReferenceBackend, change: Callable[[torch.nn.Module], torch.nn.Module]) -> Backend:
    import copy

    other = copy.copy(engine)
    other.model = change(engine.model)
    other.teacher = Teacher(other.model)
    return other


def one_step(model: torch.nn.Module) -> torch.nn.Module:
    """A step of Adam is the size of its learning rate in every weight."""
    import copy

    generator = torch.Generator().manual_seed(0)
    stepped = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in stepped.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.add_(1e-6 * sign)
    return stepped


@pytest.mark.parametrize("change", [one_step, lambda model: perturbed(model, 0).new], ids=["step", "noise"])
def test_weights_of_an_earlier_step_are_no_other_model(llama, look, change):
    share, says = look(with_model(llama, change))
    assert share is not None
    assert share > 0.8
    assert says is None


@pytest.mark.parametrize("fault", ["path/rope:theta-of-another-family", "semantic/misbound-output:rotated"])
def test_the_right_weights_used_wrongly_are_no_other_model(llama, look, fault):
    share, says = look(resolve(fault).inject(llama))
    assert share is not None
    assert share > 0.5
    assert says is None


def rolled(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: torch.roll(logits, 1, -1))


def lost(model: Any) -> None:
    """The head sees nothing of what the layers computed: any token is as good."""
    model.base_model.norm.register_forward_hook(lambda _, __, hidden: hidden * 0.02)


@pytest.mark.parametrize("damage", [rolled, lost])
def test_bugs_that_leave_no_kinship_are_no_other_model(llama, look, damage):
    share, told = look(Damaged(llama, damage))
    assert share is not None
    assert share < UNRELATED
    assert told is None


def test_numbers_alone_say_nothing(llama, look):
    """Kinship looks at tokens: what is reported for them may be anything that is as open as they are."""
    assert look(resolve("semantic/wrong-token:likeliest").inject(llama)) == look(llama)


def test_a_model_that_ignores_its_context_has_no_kin(llama):
    class Flat:
        """Every token after every other, alike."""

        def logits(self, sequences, starts):
            return [torch.zeros(len(ids) - start, 512) for ids, start in zip(sequences, starts, strict=True)]

    assert lead_left(Flat(), observed(llama), ()) is None
