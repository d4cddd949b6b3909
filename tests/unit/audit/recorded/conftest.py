from collections.abc import Callable
from typing import Any

import pytest

from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import RecordedRollout


@pytest.fixture
def rollout() -> Callable[..., RecordedRollout]:
    """A rollout of three tokens, with whatever is asked for."""

    def make(**fields: Any) -> RecordedRollout:
        values = {"source": "d", "line": 1, "prompt": (1,), "output": (2, 3, 4), "sampling": SamplingParams()}
        output = fields.get("output", values["output"])
        return RecordedRollout(**{**values, "logprobs": (-1.0,) * len(output), **fields})

    return make
