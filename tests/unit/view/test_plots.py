import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import plotly.graph_objects as go
import pytest

from zerodrift.view.plots import MOST_POINTS, Plot, plots
from zerodrift.view.run_directory import FinishedRun, Tokens, read


def drawn(run: FinishedRun) -> dict[str, Plot]:
    assert run.tokens is not None
    return {plot.key: plot for plot in plots(run.tokens, run.record)}


def trace(plot: Plot, name: str) -> dict[str, Any]:
    (found,) = [each for each in plot.figure["data"] if each["name"] == name]
    result: dict[str, Any] = found
    return result


@pytest.fixture(scope="module")
def failing(runs: dict[str, Path]) -> FinishedRun:
    return read(runs["failing"])


@pytest.fixture(scope="module")
def many(examples: Any, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """More tokens, and more sequences, than are drawn."""
    found = examples.draw(sequences=3000, length=9)
    found.columns["reported"][:100] = found.columns["contracted"][:100]
    record = examples.verdict("PASS", guilty="none", says="", metrics=examples.metrics(found))
    return read(examples.write(tmp_path_factory.mktemp("many"), record, found))


@pytest.mark.parametrize("name", ["passing", "failing", "hostile", "exact"])
def test_figures_are_valid_in_plotlys_own_schema(runs: dict[str, Path], name: str) -> None:
    for plot in drawn(read(runs[name])).values():
        figure = go.Figure(plot.figure)
        assert len(figure.data) == len(plot.figure["data"])
        json.dumps(plot.figure, allow_nan=False)


def test_a_wrong_figure_would_be_seen(failing: FinishedRun) -> None:
    figure = json.loads(json.dumps(drawn(failing)["position"].figure))
    figure["data"][0]["marker"]["colour"] = "red"
    with pytest.raises(ValueError, match="colour"):
        go.Figure(figure)


def test_there_are_four(failing: FinishedRun) -> None:
    assert list(drawn(failing)) == ["distribution", "position", "logprob", "sequence"]


def test_the_distribution_counts_every_token(failing: FinishedRun) -> None:
    assert failing.tokens is not None
    bars = trace(drawn(failing)["distribution"], "tokens")
    assert sum(held or 0 for held in bars["y"]) == failing.tokens.delta.size
    right = sum(held or 0 for held, x in zip(bars["y"], bars["x"], strict=True) if x > 0)
    assert right == pytest.approx((failing.tokens.delta > 0).sum(), abs=20)


def test_floor_and_gate_are_marked_everywhere(failing: FinishedRun) -> None:
    for key, plot in drawn(failing).items():
        sign = "± " if key == "distribution" else ""
        for name in ("floor 0.0041", "gate 0.03"):
            line = trace(plot, sign + name)
            if key == "distribution":
                low, high = plot.figure["layout"]["xaxis"]["range"]
                assert low < line["x"][0] < 0 < line["x"][-1] < high
            else:
                assert line["y"] == [float(name.split()[1])] * 2


def test_without_floor_and_gate_there_are_no_marks(failing: FinishedRun) -> None:
    assert failing.tokens is not None
    record = msgspec.structs.replace(failing.record, floor={}, gates={})
    names = [each["name"] for plot in plots(failing.tokens, record) for each in plot.figure["data"]]
    assert not [name for name in names if "floor" in name or "gate" in name]


def test_no_trace_has_more_than_two_thousand_points(many: FinishedRun) -> None:
    assert many.tokens is not None
    assert many.tokens.delta.size > MOST_POINTS
    for key, plot in drawn(many).items():
        sizes = [len(each["x"]) for each in plot.figure["data"]]
        assert max(sizes) <= MOST_POINTS
        if key != "distribution":
            assert sum(size for size in sizes if size > 40) >= 0.9 * MOST_POINTS
            assert "at random (seed 0)" in plot.message


def test_signs_are_told_apart(failing: FinishedRun) -> None:
    assert failing.tokens is not None
    plot = drawn(failing)["logprob"]
    for name, sign in (("engine reports less", 1), ("engine reports more", -1)):
        cloud = trace(plot, name)
        assert len(cloud["x"]) == len(cloud["customdata"])
        for (sequence, token), size in list(zip(cloud["customdata"], cloud["y"], strict=True))[:20]:
            rows = (failing.tokens.sequence == sequence) & (failing.tokens.token == token)
            assert np.isclose(sign * failing.tokens.delta[rows], size, rtol=1e-3).any()


def test_the_line_is_the_mean_over_all_tokens(many: FinishedRun) -> None:
    assert many.tokens is not None
    line = trace(drawn(many)["position"], "mean |Δ|")
    assert len(line["y"]) == 40
    assert np.mean(line["y"]) == pytest.approx(np.abs(many.tokens.delta).mean(), rel=0.01)


def test_zeros_are_counted_where_they_cannot_be_drawn(failing: FinishedRun) -> None:
    assert failing.tokens is not None
    tokens = failing.tokens.take(np.arange(300))
    reported = tokens.reported.copy()
    silent = tokens.sequence == 0
    reported[silent] = tokens.contracted[silent]
    run = failing._replace(tokens=replace(tokens, reported=reported))
    assert f"{silent.sum()} of these are exactly 0" in drawn(run)["position"].message
    assert "1 of these are exactly 0" in drawn(run)["sequence"].message
    assert f"{silent.sum()} of 300 tokens are equal to the last bit" in drawn(run)["distribution"].message
    assert 0 not in trace(drawn(run)["sequence"], "mean |Δ|")["x"]


def test_names_of_sequences_keep_their_digits(many: FinishedRun) -> None:
    assert many.tokens is not None
    far = replace(
        many.tokens, sequence=many.tokens.sequence + 1_234_567, position=many.tokens.position + 131_071
    )
    found = drawn(many._replace(tokens=far))
    assert max(trace(found["sequence"], "mean |Δ|")["x"]) > 1_234_567 + 2900
    assert all(x == int(x) for x in trace(found["position"], "engine reports less")["x"])
    assert len(set(trace(found["position"], "engine reports less")["x"])) > 40


def test_equal_tokens_leave_only_the_distribution(runs: dict[str, Path]) -> None:
    assert list(drawn(read(runs["exact"]))) == ["distribution"]


def test_impossible_tokens_are_in_no_figure(failing: FinishedRun) -> None:
    tokens: Tokens | None = failing.tokens
    assert tokens is not None
    contracted = tokens.contracted.copy()
    contracted[:5] = -np.inf
    found = drawn(failing._replace(tokens=replace(tokens, contracted=contracted)))
    assert sum(held or 0 for held in trace(found["distribution"], "tokens")["y"]) == tokens.delta.size - 5
    nothing = replace(tokens, contracted=np.full(tokens.delta.size, -np.inf))
    assert drawn(failing._replace(tokens=nothing)) == {}


def test_no_text_of_a_model_enters_a_figure(runs: dict[str, Path]) -> None:
    for plot in drawn(read(runs["hostile"])).values():
        text = json.dumps(plot.figure, ensure_ascii=False)
        assert "owned" not in text
        assert "AAAA" not in text
