from collections.abc import Callable, Sequence

import numpy as np
import pytest

from zerodrift.audit.probes.parity import samples
from zerodrift.drift import sampling
from zerodrift.drift.sampling import Sampling
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.verdict import Outcome

Table = Callable[[Sequence[np.ndarray]], TokenTable]


@pytest.mark.parametrize(
    ("tested", "option", "told"),
    [
        (Sampling(Outcome.INCONCLUSIVE, "in doubt"), "--trials", "in doubt (--trials)"),
        (Sampling(Outcome.INCONCLUSIVE, "in doubt"), "", "in doubt"),
        (Sampling(Outcome.INCONCLUSIVE, "no draws", vacuous=True), "--trials", "no draws"),
        (Sampling(Outcome.PASS, "fine"), "--trials", "fine"),
    ],
    ids=["an audit", "a dump, which has no such option", "nothing to draw more of", "no doubt"],
)
def test_more_samples_are_asked_for_by_whoever_can(
    tested: Sampling, option: str, told: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "fidelity", lambda _: tested)
    assert samples(table([np.zeros(2)]), greedy=False, to_have_more=option).message == told
