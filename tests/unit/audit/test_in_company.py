"""Requests that are wrong in company, on engines that are numbers in a list."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zerodrift.audit.in_company import MOST_ASKED, only_in_company
from zerodrift.audit.observe import BATCH
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates

GATES = Gates(mean=1e-4, p90=2e-4, k3=1e-6, veto=2.0)
PLAN = [Request(Prompt((5, number)), SamplingParams(n=2 if number % 8 == 0 else 1)) for number in range(40)]
RIGHT, WRONG = 1e-6, 0.05
Fault = Callable[[list[int]], list[bool]]
"""Numbers of the requests in flight to which of them are wrong."""


class Counting:
    """Answers each sample with one size of Δ, and keeps what was asked."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.calls: list[list[Request]] = []

    def __call__(self, requests: list[Request]) -> Any:
        self.calls.append(requests)
        wrong = self.fault([request.prompt.token_ids[1] for request in requests])
        return [
            [SimpleNamespace(delta=np.full(4, WRONG if off else RIGHT))] * request.sampling.n
            for request, off in zip(requests, wrong, strict=True)
        ]

    def sizes(self) -> list[tuple[int, float]]:
        """Of the plan, as an audit asks it."""
        calls = [PLAN[begin : begin + BATCH] for begin in range(0, len(PLAN), BATCH)]
        measured = [each for call in calls for each in self(call)]
        self.calls.clear()
        return [(number, float(item.delta.mean())) for number, items in enumerate(measured) for item in items]


def asked(fault: Fault) -> tuple[str | None, Counting]:
    engine = Counting(fault)
    return only_in_company(engine, PLAN, engine.sizes(), GATES, "salt"), engine


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (lambda numbers: [len(numbers) >= 3 and place < 2 for place, _ in enumerate(numbers)], "2 and 2"),
        # More company than the probe of batches has.
        (lambda numbers: [len(numbers) >= 12 for _ in numbers], f"{MOST_ASKED} and {MOST_ASKED}"),
    ],
)
def test_what_only_company_makes_wrong_is_said_so(fault, wrong):
    told, engine = asked(fault)
    assert told is not None
    assert f"{wrong} wrong again in company of 31 others" in told
    alone = [call for call in engine.calls if len(call) == 1]
    assert all(call[0].sampling.n == 1 for call in alone)
    # No prompt is found in a cache that an earlier question filled.
    salts = [request.prompt.cache_salt for call in engine.calls for request in call[:1]]
    assert len(set(salts)) == 4


@pytest.mark.parametrize(
    "fault",
    [
        lambda numbers: [True for _ in numbers],
        lambda numbers: [number in (3, 4, 5) for number in numbers],
        lambda numbers: [False for _ in numbers],
        lambda numbers: [number == 7 and len(numbers) > 1 for number in numbers],
    ],
    ids=["always", "these requests, alone too", "healthy", "one request alone is no witness"],
)
def test_company_is_not_blamed_for_what_it_does_not_do(fault):
    assert asked(fault)[0] is None


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.3, 0.6])
def test_what_comes_and_goes_is_hardly_ever_company(rate):
    rng = np.random.default_rng(int(100 * rate))
    blamed = [
        asked(lambda numbers: (rng.random(len(numbers)) < rate).tolist())[0] is not None for _ in range(200)
    ]
    assert np.mean(blamed) <= 0.03
