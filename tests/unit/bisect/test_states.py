import pytest

from zerodrift.bisect.states import ChangeKind, compare, not_judged
from zerodrift.core.errors import DigestMismatch, RecordError
from zerodrift.records.directory import read_verdict

NAMES = ("1.0", "2.0")
RAW = "semantic/raw-logprobs"


@pytest.fixture
def differing(tmp_path, write_audit):
    """Kinds in which two audits differ."""

    def compared(before, after):
        runs = [write_audit(tmp_path / name, **said) for name, said in (("a", before), ("b", after))]
        return [each.kind for each in compare(*runs, NAMES) if each.differs]

    return compared


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ({}, {}, []),
        # Rounding alone, and beyond it.
        ({}, {"shift": 8e-6}, []),
        ({}, {"shift": 2e-5}, [ChangeKind.NUMBERS]),
        # Numbers that mean something else are not compared.
        ({}, {"causes": [RAW], "mean": 0.4, "shift": 0.3}, [ChangeKind.SEMANTICS]),
        ({"causes": [RAW], "mean": 0.4}, {"causes": [RAW], "mean": 0.5}, []),
        ({"causes": [RAW]}, {"causes": [RAW], "shift": 0.1}, [ChangeKind.NUMBERS]),
        ({}, {"stream": 1}, [ChangeKind.SAMPLING]),
        ({}, {"stream": 1, "shift": 0.1}, [ChangeKind.NUMBERS, ChangeKind.SAMPLING]),
        ({}, {"causes": [RAW], "mean": 0.4, "stream": 1}, [ChangeKind.SEMANTICS, ChangeKind.SAMPLING]),
        # What a probe finds, or what has a cause below the numbers' meaning, is no other meaning.
        ({}, {"causes": ["path/rope"], "mean": 0.4, "shift": 0.1}, [ChangeKind.NUMBERS]),
        ({}, {"causes": ["semantic/streaming by stream"]}, []),
    ],
)
def test_in_what_two_engines_differ(differing, before, after, kinds):
    assert differing(before, after) == kinds


@pytest.mark.parametrize(("mean", "kinds"), [(9e-6, []), (2e-4, [ChangeKind.NUMBERS])])
def test_with_hardly_a_token_in_common_the_reference_decides(tmp_path, write_audit, mean, kinds):
    # Two tokens are shared by each of four requests, and sixteen are needed.
    one = write_audit(tmp_path / "a", requests=4)
    other = write_audit(tmp_path / "b", requests=4, stream=1, mean=mean)
    found = [each.kind for each in compare(one, other, NAMES) if each.differs]
    assert found == [*kinds, ChangeKind.SAMPLING]


def test_what_is_said_names_both(tmp_path, write_audit):
    one, other = write_audit(tmp_path / "a"), write_audit(tmp_path / "b", causes=[RAW])
    [meaning, _, sampling] = compare(one, other, NAMES)
    assert meaning.says == f"1.0: processed logprobs, 2.0: {RAW}"
    assert sampling.says.startswith("12 of 12 answers")


def test_an_audit_that_was_edited_is_not_compared(tmp_path, write_audit):
    one, other = write_audit(tmp_path / "a"), write_audit(tmp_path / "b")
    (other / "rollouts.jsonl").write_text("")
    with pytest.raises(DigestMismatch, match="rollouts"):
        compare(one, other, NAMES)


def test_a_model_that_was_trained_on_in_between(tmp_path, write_audit):
    one, other = write_audit(tmp_path / "a"), write_audit(tmp_path / "b", weights="other")
    with pytest.raises(RecordError, match="other weights"):
        compare(one, other, NAMES)


def test_an_audit_that_was_cut_off_says_nothing(tmp_path, write_audit):
    whole = read_verdict(write_audit(tmp_path / "a"))
    half = read_verdict(write_audit(tmp_path / "b", cut_off=True))
    assert not_judged(whole) == ""
    assert not_judged(half) == "so it is"
