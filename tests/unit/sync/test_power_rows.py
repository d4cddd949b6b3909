"""The script that measures receipts must itself see what is wrong: lines of engines that are known to be right and wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zerodrift.core.errors import ConfigError

TOKENS = 1024


@pytest.fixture
def rows(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("reliability/power_rows")


def line(rows: ModuleType, *, slope: float = 1.0, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    old, moved = rng.normal(-5, 1, TOKENS), rng.normal(0, 1e-3, TOKENS)

    def off() -> Any:
        return rng.normal(0, noise, TOKENS)

    before = rows.Moment(old, old + off(), old + off(), 1.0, 2.0)
    now = rows.Moment(old + moved, old + slope * moved + off(), old + slope * moved + off(), 1.0, 2.0)
    told: dict[str, Any] = rows.Sums(before).line(now)
    return {"run": {"engine": "e"}, "lr": 1e-6, "number": 1, **told}


@pytest.mark.parametrize(("slope", "honest"), [(1.0, "confirmed"), (0.0, "missed"), (0.5, "missed")])
def test_what_an_engine_took_is_what_the_line_says(rows: ModuleType, slope: float, honest: str) -> None:
    of = line(rows, slope=slope)["of"]["1024"]
    assert (of["honest"], of["lost"]) == (honest, "missed")
    assert of["slope"] == pytest.approx(slope)


def test_under_noise_a_line_says_how_many_tokens_would_do(rows: ModuleType) -> None:
    of = line(rows, noise=0.01)["of"]["1024"]
    assert of["honest"] == "inconclusive"
    assert of["needed"] > TOKENS


def test_an_engine_that_changed_under_an_update_of_nothing_is_a_false_alarm(rows: ModuleType) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(-5, 1, TOKENS)
    usual = old + rng.normal(0, 1e-3, TOKENS)
    calm = rows.Moment(old, usual, usual, 1.0, 1.0)
    worse = rows.Moment(old, usual, old + rng.normal(0, 1e-2, TOKENS), 1.0, 1.0)
    assert rows.Sums(calm).line(calm)["of"]["1024"]["nothing"] != "missed"
    assert rows.Sums(calm).line(worse)["of"]["1024"]["nothing"] == "missed"


def test_the_table_counts_what_the_lines_say(rows: ModuleType) -> None:
    lines = [line(rows, seed=seed) for seed in range(3)] + [line(rows, slope=0.0)]
    [_, *rest] = rows.table(lines).splitlines()
    assert len([row for row in rest if row.startswith("e  ")]) == 3 + 2
    whole = rest[2].split("|")
    assert whole[1].split() == ["4", "of", "4", "47.29%"]
    assert whole[2].split() == ["3", "of", "4", "3"]
    assert whole[3].split() == ["1", "of", "4", "1", "0"]


def test_a_line_that_was_cut_is_not_there_and_another_that_is_no_json_is_an_error(
    rows: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    assert list(rows.read(path)) == []
    path.write_text(json.dumps({"a": 1}) + '\n{"b": ')
    assert list(rows.read(path)) == [{"a": 1}]
    path.write_text('{"b": \n' + json.dumps({"a": 1}) + "\n")
    with pytest.raises(ConfigError, match="not JSON"):
        list(rows.read(path))
