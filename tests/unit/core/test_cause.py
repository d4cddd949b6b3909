"""The vocabulary itself is looked over in tests/meta/test_causes.py; this is how a cause behaves."""

import pytest

from zerodrift.core.cause import ANY_ENGINE, Cause, Layer


def test_the_layer_is_the_first_word() -> None:
    assert Cause("path/rope", "Positions.", {ANY_ENGINE: "fix"}).layer is Layer.PATH
    assert Cause("unexplained", "Who knows.", {ANY_ENGINE: "fix"}).layer is Layer.NONE


def test_a_layer_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="weather"):
        _ = Cause("weather/rain", "Wet.", {ANY_ENGINE: "coat"}).layer


def test_a_fix_falls_back_to_the_one_for_every_engine() -> None:
    cause = Cause("path/rope", "Positions.", {ANY_ENGINE: "fix", "vllm": "--flag"})
    assert (cause.fix("vllm"), cause.fix("other")) == ("--flag", "fix")
