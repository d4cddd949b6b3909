import pytest

from zerodrift.records.verdict import Outcome


@pytest.mark.parametrize(("outcome", "code"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3)])
def test_every_outcome_has_its_exit_code(outcome: str, code: int) -> None:
    assert Outcome(outcome).exit_code == code


def test_there_are_no_others() -> None:
    assert len(Outcome) == 3
