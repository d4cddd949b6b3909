from typing import Any

import pytest

from zerodrift.records.verdict import Outcome
from zerodrift.view.verdict import Gauge, gauges, guilty, how_to, next_step


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("engine", "The engine (vllm)"),
        ("trainer", "The trainer"),
        ("none", "Neither side"),
        ("unknown", "Not known"),
        ("a later version's word", "a later version's word"),
    ],
)
def test_the_guilty_side_in_words(examples: Any, side: str, words: str) -> None:
    assert guilty(examples.verdict(Outcome.FAIL, guilty=side)) == words


def test_causes_to_fix_are_told_from_those_below_the_gate(examples: Any) -> None:
    names = ("path/batch-variance", "semantic/bos", "weights/stale")
    causes = tuple(examples.cause(name, 1.0, "") for name in names)
    assert examples.verdict(Outcome.FAIL, causes=causes).to_fix == causes[1:]


def test_each_statistic_stands_beside_its_own_floor_and_gate(examples: Any) -> None:
    metrics = {
        "mean": 0.06,
        "mean_low": 0.05,
        "mean_high": 0.07,
        "p90": 0.01,
        "k3": 0.002,
        "max": 3.0,
        "n": 9.0,
    }
    found = gauges(examples.verdict(Outcome.FAIL, metrics=metrics))
    assert found == (
        Gauge("mean |Δ|", 0.06, 0.0041, 0.03, (0.05, 0.07)),
        Gauge("p90 |Δ|", 0.01, 0.0102, 0.075),
        Gauge("k3", 0.002, None, 0.002),
        Gauge("max |Δ|", 3.0, None, 2.0),
    )
    assert [gauge.broken for gauge in found] == [True, False, False, True]
    assert found[0].of_gate == 2.0


def test_without_a_gate_nothing_is_broken_and_without_a_number_there_is_no_row(examples: Any) -> None:
    assert gauges(examples.verdict(Outcome.INCONCLUSIVE)) == ()
    (gauge,) = gauges(examples.verdict(Outcome.PASS, metrics={"mean": 5.0, "mean_low": 1.0}, gates={}))
    assert (gauge.broken, gauge.of_gate, gauge.interval) == (False, None, None)


@pytest.mark.parametrize(
    ("fix", "label"),
    [
        ("--logprobs-mode processed_logprobs", "type this"),
        ("TRITON_F32_DEFAULT=ieee (--dtype float32 is in force already)", "type this"),
        ("POST /reset_prefix_cache after every update", "type this"),
        ("deliver the update, and check it: compare logprobs after every sync", "do this"),
        ("record log-softmax values as they are", "do this"),
        ('set "top_p": 1 in every request, or --generation-config vllm', "do this"),
    ],
)
def test_only_what_can_be_typed_is_to_be_typed(fix: str, label: str) -> None:
    assert how_to(fix) == label


def test_what_to_do_first(examples: Any) -> None:
    causes = tuple(
        examples.cause(name, 1.0, "") for name in ("path/batch-variance", "weights/stale", "semantic/bos")
    )
    assert next_step(examples.verdict(Outcome.FAIL, causes=causes)) == (
        how_to(causes[1].fix),
        causes[1].fix,
    )
    again = next_step(examples.verdict(Outcome.INCONCLUSIVE, reproduce="zerodrift audit x"))
    assert again is not None
    assert again[1] == "zerodrift audit x"
    assert next_step(examples.verdict(Outcome.PASS, reproduce="zerodrift audit x")) is None
