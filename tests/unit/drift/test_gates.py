"""The gates in code, and what docs/attribution.md tells people of them."""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from zerodrift.config.precision import PROFILES, Magnitude, Precision
from zerodrift.drift import gates as code
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates, gates_for
from zerodrift.drift.sampling import SAMPLING_ALPHA, SAMPLING_DOUBT, TESTS, WAYS
from zerodrift.stats.kl import k3

DOCUMENT = Path(__file__).parents[3] / "docs" / "attribution.md"
WORDS = {"two": 2, "four": 4, "five": 5, "twenty": 20}


def test_gates_are_the_profile_or_a_multiple_of_the_floor():
    profile = Magnitude(mean_abs=1e-5, p90_abs=2.5e-5, k3=1e-6)
    low = Floor("float32", 8, 10, 1e-7, 2e-7, (0.0,), (1e-7,))
    assert gates_for(profile, low) == Gates(1e-5, 2.5e-5, 1e-6, 2.0)
    high = Floor("bfloat16", 8, 10, 0.01, 0.03, (0.0,), (0.01,))
    assert gates_for(profile, high) == Gates(0.02, 0.06, 1e-6, 2.0)
    higher = Floor("bfloat16", 8, 10, 0.03, 0.1, (0.0,), (0.01,))
    assert gates_for(profile, higher) == pytest.approx(Gates(0.06, 0.2, 1e-6, 4.0))
    single = Floor("float32", 8, 10, 1e-5, 2e-5, (0.0,), (1e-7,))
    assert gates_for(profile, single) == pytest.approx(Gates(5e-5, 1e-4, 1e-6, 2.0))


def test_a_gate_of_ones_own_is_not_moved_by_the_floor():
    own = Magnitude(mean_abs=1e-3, p90_abs=2e-3, k3=1e-6)
    floor = Floor("bfloat16", 8, 10, 0.01, 0.03, (0.0,), (0.01,))
    assert gates_for(own, floor, {"mean_abs"})[:2] == (1e-3, 0.06)
    assert gates_for(own, floor, {"p90_abs"})[:2] == (0.02, 2e-3)


def test_k3_moves_with_the_floor_as_the_others_do():
    """An 8B in bf16 on a GPU, healthy: mean |Δ| 0.156 at a floor of 0.160, and k3 0.021 where the profile has 0.002."""
    profile = PROFILES[Precision.BF16].gate
    floor = Floor("bfloat16", 8, 1000, 0.160, 0.4, (0.0,), (0.2,), k3=0.02)
    assert gates_for(profile, floor).k3 == pytest.approx(0.08)
    assert gates_for(profile, floor, {"k3"}).k3 == profile.k3
    assert gates_for(profile, floor, most_k3=0.01).k3 == 0.01
    single = Floor("float32", 8, 1000, 1e-6, 2e-6, (0.0,), (1e-6,), k3=1e-6)
    assert gates_for(PROFILES[Precision.FP32].gate, single).k3 == pytest.approx(25e-6)


@pytest.mark.parametrize("tail", [2.5, 3.0, 5.0, math.inf])
def test_no_healthy_tail_fails_by_k3_alone(tail):
    """Student's t with so many degrees of freedom, of which the floor sees an eighth of the sequences, eight times."""
    rng = np.random.default_rng(0)
    drawn = (lambda size: rng.normal(size=size)) if math.isinf(tail) else partial(rng.standard_t, tail)
    failed = 0
    for _ in range(300):
        seen, delta = (0.03 * drawn(size=size).clip(-30, 30) for size in (8 * 256, 2048))
        floor = Floor(
            "bfloat16",
            8,
            256,
            float(np.abs(seen).mean()),
            float(np.quantile(np.abs(seen), 0.9)),
            (0.0,),
            (0.03,),
            k3=float(k3(seen).mean()),
        )
        failed += float(k3(delta).mean()) > gates_for(PROFILES[Precision.BF16].gate, floor).k3
    assert failed == 0


def stated(pattern: str) -> tuple[str, ...]:
    """The one place of the document that says it."""
    text = " ".join(DOCUMENT.read_text().split())
    (found,) = re.findall(pattern, text)
    return found if isinstance(found, tuple) else (found,)


def test_the_document_states_the_gates_in_force():
    fp32, other = stated(r"profile's gate and (\w+) floors in fp32, (\w+) floors in any other precision")
    assert (WORDS[fp32], WORDS[other]) == (code.FLOOR_MULTIPLES["float32"], code.FLOOR_MULTIPLE)
    nats, per_p90 = stated(r"veto at (\w+) nats, or (\w+) times the gate of p90")
    assert (WORDS[nats], WORDS[per_p90]) == (code.VETO_NATS, code.VETO_PER_P90)
    assert code.FLOOR_MULTIPLES.keys() == {"float32"}
    stated("square of as many floors' k3")
    (k3_gate,) = stated(r"temperatures from 0.3 to 1.5, and the gate at (\d+)\.")
    assert int(k3_gate) == code.FLOOR_MULTIPLE**code.K3_POWER
    assert stated(r"Fewer than (\d+) tokens") == (str(code.LEAST_TOKENS),)


def test_the_document_states_the_levels_of_the_sampling_test():
    (tests,) = stated(r"least of the (\w+) p-values, times \w+, is one of two ways")
    ways, fails, doubts = stated(
        r"better of both ways, times (\w+), fails below 10⁻([⁰-⁹]); below 10⁻([⁰-⁹]) it is not judged"
    )
    assert (WORDS[tests], WORDS[ways]) == (TESTS, WAYS)
    digits = "⁰¹²³⁴⁵⁶⁷⁸⁹"
    for exponent, level in ((fails, SAMPLING_ALPHA), (doubts, SAMPLING_DOUBT)):
        assert 10.0 ** -digits.index(exponent) == pytest.approx(level)
