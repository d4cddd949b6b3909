from pathlib import Path
from typing import Any

import pytest
import torch

from zerodrift.bench import load
from zerodrift.core.errors import InvalidValue


def test_cost_of_a_token_at_each_load(tiny: Any) -> None:
    seen: list[tuple[int, int]] = []
    costs = load.measure_costs(tiny, 2, lambda *step: seen.append(step), loads=(1, 4, 16))
    assert [cost.concurrent for cost in costs] == [1, 4, 16]
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)
    assert min(cost.times_the_cheapest for cost in costs) == 1
    assert min(cost.processor_times_the_cheapest for cost in costs) == 1
    # A step of a model this small costs about the same for one request as for sixteen.
    assert costs[0].processor_times_the_cheapest > 4
    for cost in costs:
        assert cost.milliseconds_per_token.low <= cost.milliseconds_per_token.median
        assert 0 < cost.bookkeeping < 1
    with pytest.raises(InvalidValue):
        load.measure_costs(tiny, 0, lambda *_: None)


def test_kv_takes_the_memory_that_arithmetic_says(tiny: Any) -> None:
    # What a long-lived process freed and still holds: without a trim, these tensors came from there and it did not grow.
    torch.ones(30 << 18)  # freed at once; from here on glibc keeps blocks of up to 30 MiB
    freed = [torch.ones(16 << 18) for _ in range(16)]
    pin = torch.ones(16 << 18)  # above them, so that the heap cannot shrink
    del freed
    found = load.measure_kv(tiny, num_blocks=65536)
    # K and V, one layer, one head of 16, 4 bytes, 16 tokens a block.
    assert found.arithmetic_bytes == 2 * 1 * 1 * 16 * 4 * 16 * 65536
    if found.measured_bytes is not None:
        assert found.measured_bytes == pytest.approx(found.arithmetic_bytes, rel=load.MOST_KV_ERROR)
    del pin


def test_a_system_that_does_not_tell(tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "RESIDENT", tmp_path / "none")
    assert load.measure_kv(tiny, num_blocks=4).measured_bytes is None
