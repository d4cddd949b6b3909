import numpy as np
import pytest

from zerodrift.audit.recorded.told_precision import precision_of
from zerodrift.config.precision import Precision

NATS = np.ones(20)
FP32, BF16 = np.full(20, 2e-6), np.full(20, 1e-2)
FEW = np.where(np.arange(20) < 2, FP32, BF16)
ONE = np.where(np.arange(20) < 1, FP32, BF16)


@pytest.mark.parametrize(
    ("columns", "nats", "told"),
    [
        ([FP32], NATS, Precision.FP32),
        ([FEW], NATS, Precision.FP32),
        ([ONE], NATS, Precision.BF16),
        ([BF16], NATS, Precision.BF16),
        ([FP32, BF16], NATS, Precision.BF16),
        ([FP32, FEW], NATS, Precision.FP32),
        ([FP32], NATS / 100, Precision.BF16),
    ],
    ids=["all", "one in ten", "one", "none", "the trainer not", "both", "certain tokens only"],
)
def test_what_fits_tells(columns: list[np.ndarray], nats: np.ndarray, told: Precision) -> None:
    assert precision_of(None, columns, nats).precision is told


def test_what_is_said_holds() -> None:
    assert precision_of(Precision.FP8, [FP32], NATS).precision is Precision.FP8
