from collections.abc import Callable
from typing import Any

import pytest

from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.faults.registry import FAULTS, resolve


@pytest.mark.parametrize("spec", ["path/rope", "path/prefix-cache", "weights/partial", "semantic/bos"])
def test_an_engine_of_which_nothing_is_known(spec: str, elsewhere: Callable[..., Any]) -> None:
    with pytest.raises(CapabilityMissing):
        resolve(spec).inject(elsewhere())


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
def test_a_capability_that_is_needed(
    spec: str, capability: Capability, elsewhere: Callable[..., Any]
) -> None:
    assert resolve(spec).inject(elsewhere()).name == "elsewhere"
    with pytest.raises(CapabilityMissing):
        resolve(spec).inject(elsewhere(capability))


def test_a_model_of_another_kind(llama: ReferenceBackend, mistral: ReferenceBackend) -> None:
    """No window, no sampling defaults, no tied head."""
    for spec, engine in (
        ("path/window", llama),
        ("semantic/generation-config", llama),
        ("weights/tied-head", mistral),
    ):
        with pytest.raises(InvalidValue):
            resolve(spec).inject(engine)


def test_what_acts_inside_is_planted_before_what_wraps(llama: ReferenceBackend) -> None:
    wrapped = resolve("semantic/temperature").inject(llama)
    with pytest.raises(CapabilityMissing):
        resolve("path/rope").inject(wrapped)


def test_sides_are_not_confused(llama: ReferenceBackend) -> None:
    with pytest.raises(InvalidValue):
        resolve("trainer/packing").inject(llama)
    with pytest.raises(InvalidValue):
        resolve("semantic/bos").scorer(llama.model)


def test_faults_are_values() -> None:
    with pytest.raises(AttributeError):
        FAULTS["semantic/bos:doubled"].cause = "other"  # type: ignore[misc]
