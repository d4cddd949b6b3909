import pytest

from zerodrift.config.precision import PROFILES, Precision
from zerodrift.config.validation import GateConfig, ValidationConfig
from zerodrift.core.errors import InvalidValue


@pytest.mark.parametrize("precision", Precision)
def test_gates_come_from_the_precision(precision: Precision) -> None:
    assert ValidationConfig().gate_for(precision) == PROFILES[precision].gate


def test_gates_of_ones_own_replace_those_of_the_precision_one_by_one() -> None:
    gate = ValidationConfig(gates=GateConfig(mean_abs=0.02, p90_abs=0.1)).gate_for(Precision.BF16)
    assert (gate.mean_abs, gate.p90_abs) == (0.02, 0.1)
    assert gate.k3 == PROFILES[Precision.BF16].gate.k3


@pytest.mark.parametrize("loose", [{"mean_abs": 0.5}, {"p90_abs": 0.9}])
def test_a_gate_of_ones_own_that_would_never_decide_is_refused(loose: dict[str, float]) -> None:
    """With the profile's k3 in force, a run with half of that |Δ| would fail by k3, whatever was set."""
    with pytest.raises(InvalidValue):
        ValidationConfig(gates=GateConfig(**loose)).gate_for(Precision.BF16)
    gate = ValidationConfig(gates=GateConfig(**loose, k3=0.5)).gate_for(Precision.BF16)
    assert gate.k3 == 0.5


@pytest.mark.parametrize(("tolerance", "k3"), [(1e-3, 1e-3), (1.0, 2e-3), (None, 2e-3)])
def test_tolerance_only_tightens(tolerance: float | None, k3: float) -> None:
    assert ValidationConfig(tolerance=tolerance).gate_for(Precision.BF16).k3 == k3


def test_tolerance_caps_a_gate_of_ones_own_too() -> None:
    assert ValidationConfig(tolerance=1e-4, gates=GateConfig(k3=1.0)).gate_for(Precision.BF16).k3 == 1e-4


@pytest.mark.parametrize(
    "bad",
    [
        {"reference_model": ""},
        {"prompts": ""},
        {"task": ""},
        {"num_prompts": 0},
        {"equivalence_trials": 31},
        {"max_tokens": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"position_probes": (1.0, 0.0)},
        {"position_probes": (float("nan"),)},
        {"tolerance": 0.0},
        {"tolerance": float("inf")},
    ],
)
def test_an_audit_without_evidence_or_gates_is_refused(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(InvalidValue, match=name):
        ValidationConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GateConfig.__struct_fields__)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_gates_are_positive(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        GateConfig(**{name: value})


def test_a_task_brings_its_own_prompts() -> None:
    assert ValidationConfig(task="sums").task == "sums"
    with pytest.raises(InvalidValue, match=r"--prompts.*--task"):
        ValidationConfig(task="sums", prompts="mine.jsonl")
    with pytest.raises(InvalidValue, match=r"--set validation.*position_probes=\[\]"):
        ValidationConfig(task="sums", position_probes=(0.5,))
