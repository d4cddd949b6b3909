from collections.abc import Callable
from typing import Any

import pytest

from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.faults.registry import FAULTS, resolve


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("path/rope", "acts inside the exact or the reference engine"),
        ("path/prefix-cache", "acts inside the reference engine"),
        ("weights/partial", "does not say which checkpoint"),
        ("semantic/bos", "does not know a BOS token"),
    ],
)
def test_an_engine_of_which_nothing_is_known(spec: str, message: str, elsewhere: Callable[..., Any]) -> None:
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


@pytest.mark.parametrize(
    ("spec", "message"),
    [("path/window", "no sliding window"), ("semantic/generation-config", "no sampling defaults")],
)
def test_a_model_of_another_kind(spec: str, message: str, llama: ReferenceBackend) -> None:
    with pytest.raises(InvalidValue, match=message):
        resolve(spec).inject(llama)


def test_an_untied_head_cannot_be_left_behind(mistral: ReferenceBackend) -> None:
    with pytest.raises(InvalidValue):
        resolve("weights/tied-head").inject(mistral)


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
