from typing import Any

from zerodrift.records.verdict import Outcome
from zerodrift.view.verdict import Gauge, gauges


def test_each_statistic_stands_beside_its_own_floor_and_gate(examples: Any) -> None:
    metrics = {
        "mean": 0.06,
        "mean_low": 0.05,
        "mean_high": 0.07,
        "p90": 0.01,
        "k3": 0.002,
        "max": 3.0,
        "tokens": 9.0,
    }
    record = examples.verdict(Outcome.FAIL, guilty="engine", says="", metrics=metrics)
    assert gauges(record) == (
        Gauge("mean |Δ|", 0.06, 0.0041, 0.03, (0.05, 0.07)),
        Gauge("p90 |Δ|", 0.01, 0.0102, 0.075),
        Gauge("k3", 0.002, None, 0.002),
        Gauge("max |Δ|", 3.0, None, 2.0),
    )
    assert [gauge.broken for gauge in gauges(record)] == [True, False, False, True]
    assert gauges(record)[0].of_gate == 2.0


def test_what_was_not_measured_has_no_row(examples: Any) -> None:
    assert gauges(examples.verdict(Outcome.INCONCLUSIVE, guilty="unknown", says="")) == ()


def test_without_a_gate_nothing_is_broken(examples: Any) -> None:
    record = examples.verdict(
        Outcome.PASS, guilty="none", says="", metrics={"mean": 5.0, "mean_low": 1.0}, gates={}
    )
    (gauge,) = gauges(record)
    assert not gauge.broken
    assert gauge.of_gate is None
    assert gauge.interval is None
