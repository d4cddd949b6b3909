import pytest

from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.records.rewards import Rewards, append, read_history

LINE = '{"task": "sums", "mean": 0.9, "std": 0.1, "n": 100, "when": "2026-11-15"}'


def rewards(**changed: object) -> Rewards:
    return Rewards(**{"task": "sums", "mean": 0.9, "std": 0.1, "n": 100, "when": "2026-11-15", **changed})


def test_what_is_appended_is_read(tmp_path):
    path = tmp_path / "history.jsonl"
    assert append(path, rewards())
    assert append(path, rewards(mean=0.8))
    assert read_history(path) == (rewards(), rewards(mean=0.8))


def test_a_line_by_hand_is_read(tmp_path):
    (tmp_path / "h").write_text(f"{LINE}\n")
    assert read_history(tmp_path / "h") == (rewards(),)


def test_the_same_run_is_recorded_once(tmp_path):
    path = tmp_path / "history.jsonl"
    assert append(path, rewards())
    assert not append(path, rewards())
    assert append(path, rewards(when="2026-11-16"))
    assert len(read_history(path)) == 2


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (None, "history.jsonl"),
        ("", "history.jsonl"),
        (f"{LINE}\n{{}}\n", "line 2: "),
        (f"{LINE}\n{LINE}\n[1]\n", "line 3: "),
        (f"{LINE}\nnot json\n", "line 2: "),
        (LINE, "line 1: "),
        (LINE.replace("0.9", "null") + "\n", "line 1: "),
        (LINE.replace("0.9", "1e999") + "\n", "line 1: "),
        (LINE.replace("0.1", "-0.1") + "\n", "line 1: std"),
        (LINE.replace("100", "1") + "\n", "line 1: n"),
        (LINE.replace("sums", "") + "\n", "line 1: task"),
        (LINE.replace('"when"', '"whem"') + "\n", "line 1: "),
    ],
)
def test_a_bad_history_is_refused_by_its_line(tmp_path, content, place):
    path = tmp_path / "history.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecordError, match=place):
        read_history(path)


@pytest.mark.parametrize(("name", "value"), [("mean", float("nan")), ("mean", 1e101), ("std", float("inf"))])
def test_numbers_that_no_run_has(name, value):
    with pytest.raises(InvalidValue, match=f"{name} is"):
        rewards(**{name: value})
