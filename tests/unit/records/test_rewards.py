from pathlib import Path

import pytest

from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.records.rewards import Rewards, append, read_history

LINE = '{"task": "sums", "mean": 0.9, "std": 0.1, "n": 100, "when": "2026-11-15"}'


def rewards(**changed: object) -> Rewards:
    return Rewards(**{"task": "sums", "mean": 0.9, "std": 0.1, "n": 100, "when": "2026-11-15", **changed})  # type: ignore[arg-type]


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert append(path, rewards())
    assert append(path, rewards(mean=0.8))
    assert read_history(path) == (rewards(), rewards(mean=0.8))


def test_a_line_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "h").write_text(f"{LINE}\n")
    assert read_history(tmp_path / "h") == (rewards(),)


def test_the_same_run_is_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert append(path, rewards())
    assert not append(path, rewards())
    assert append(path, rewards(when="2026-11-16"))
    assert len(read_history(path)) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no history .*leave --history out this once"),
        ("", "is empty, and a run cannot be compared with nothing"),
        (f"{LINE}\n{{}}\n", "line 2: Object missing required field"),
        (f"{LINE}\n{LINE}\n[1]\n", "line 3: Expected `object`, got `array`"),
        (f"{LINE}\nnot json\n", "line 2: JSON is malformed"),
        (LINE, "line 1: the line is torn"),
        (LINE.replace("0.9", "null") + "\n", "line 1: Expected `float`, got `null`"),
        (LINE.replace("0.9", "1e999") + "\n", "line 1: "),
        (LINE.replace("0.1", "-0.1") + "\n", "line 1: std is -0.1; it lies between 0 and"),
        (LINE.replace("100", "1") + "\n", "line 1: n is 1; it counts prompts"),
        (LINE.replace("sums", "") + "\n", "line 1: task is an empty string"),
        (LINE.replace('"when"', '"whem"') + "\n", "line 1: Object contains unknown field `whem`"),
    ],
)
def test_a_bad_history_is_refused_by_its_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "history.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecordError, match=says):
        read_history(path)


@pytest.mark.parametrize(("name", "value"), [("mean", float("nan")), ("mean", 1e101), ("std", float("inf"))])
def test_numbers_that_no_run_has(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is"):
        rewards(**{name: value})
