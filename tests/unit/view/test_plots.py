import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import plotly.graph_objects as go
import pytest

from zerodrift.view.plots import (
    KEPT_LARGEST,
    LOWEST_DECADE,
    MOST_POINTS,
    Plot,
    choose_points,
    plots,
    signed_log_bins,
)
from zerodrift.view.run_directory import FinishedRun, Tokens, read


def drawn(run: FinishedRun, **changed: Any) -> dict[str, Plot]:
    return {plot.key: plot for plot in plots(replace(tokens_of(run), **changed), run.record)}


def tokens_of(run: FinishedRun) -> Tokens:
    assert run.tokens is not None
    return run.tokens


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
    columns = examples.draw(sequences=3000, length=9)
    columns["reported"][:100] = columns["contracted"][:100]
    return read(examples.write(tmp_path_factory.mktemp("many"), examples.verdict("PASS"), columns))


@pytest.mark.parametrize("name", ["passing", "failing", "hostile", "exact"])
def test_figures_are_valid_in_plotlys_own_schema_and_hold_no_text_of_a_model(
    runs: dict[str, Path], name: str
) -> None:
    found = drawn(read(runs[name]))
    every = ["distribution", "position", "logprob", "sequence"]
    assert list(found) == (every[:1] if name == "exact" else every)
    for plot in found.values():
        assert len(go.Figure(plot.figure).data) == len(plot.figure["data"])
        text = json.dumps(plot.figure, allow_nan=False, ensure_ascii=False)
        assert "owned" not in text
        assert "AAAA" not in text


def test_a_wrong_figure_would_be_seen(failing: FinishedRun) -> None:
    figure = json.loads(json.dumps(drawn(failing)["position"].figure))
    figure["data"][0]["marker"]["colour"] = "red"
    with pytest.raises(ValueError, match="colour"):
        go.Figure(figure)


def test_the_distribution_counts_every_token_that_is_possible(failing: FinishedRun) -> None:
    tokens = tokens_of(failing)
    bars = trace(drawn(failing)["distribution"], "tokens")
    assert sum(held or 0 for held in bars["y"]) == tokens.delta.size
    right = sum(held or 0 for held, x in zip(bars["y"], bars["x"], strict=True) if x > 0)
    assert right == pytest.approx((tokens.delta > 0).sum(), abs=20)
    contracted = tokens.contracted.copy()
    contracted[:5] = -np.inf
    fewer = trace(drawn(failing, contracted=contracted)["distribution"], "tokens")
    assert sum(held or 0 for held in fewer["y"]) == tokens.delta.size - 5
    assert drawn(failing, contracted=np.full(tokens.delta.size, -np.inf)) == {}


def test_floor_and_gate_are_marked_where_they_are_known(failing: FinishedRun) -> None:
    for key, plot in drawn(failing).items():
        for name, value in (("floor 0.0041", 0.0041), ("gate 0.03", 0.03)):
            if key == "distribution":
                x, (low, high) = trace(plot, f"± {name}")["x"], plot.figure["layout"]["xaxis"]["range"]
                assert low < x[0] < 0 < x[-1] < high
            else:
                assert trace(plot, name)["y"] == [value] * 2
    record = msgspec.structs.replace(failing.record, floor={}, gates={})
    names = [each["name"] for plot in plots(tokens_of(failing), record) for each in plot.figure["data"]]
    assert not [name for name in names if "floor" in name or "gate" in name]


def test_no_trace_has_more_than_two_thousand_points(many: FinishedRun) -> None:
    assert tokens_of(many).delta.size > MOST_POINTS
    for key, plot in drawn(many).items():
        sizes = [len(each["x"]) for each in plot.figure["data"]]
        assert max(sizes) <= MOST_POINTS
        if key != "distribution":
            assert sum(size for size in sizes if size > 40) >= 0.9 * MOST_POINTS
            assert "at random (seed 0)" in plot.message


def test_signs_are_told_apart(failing: FinishedRun) -> None:
    tokens = tokens_of(failing)
    for name, sign in (("engine reports less", 1), ("engine reports more", -1)):
        cloud = trace(drawn(failing)["logprob"], name)
        assert len(cloud["x"]) == len(cloud["customdata"])
        for (sequence, token), size in list(zip(cloud["customdata"], cloud["y"], strict=True))[:20]:
            rows = (tokens.sequence == sequence) & (tokens.token == token)
            assert np.isclose(sign * tokens.delta[rows], size, rtol=1e-3).any()


def test_the_line_is_the_mean_over_all_tokens(many: FinishedRun) -> None:
    line = trace(drawn(many)["position"], "mean |Δ|")
    assert len(line["y"]) == 40
    assert np.mean(line["y"]) == pytest.approx(np.abs(tokens_of(many).delta).mean(), rel=0.01)


def test_zeros_are_counted_where_they_cannot_be_drawn(failing: FinishedRun) -> None:
    tokens = tokens_of(failing).take(np.arange(300))
    silent = tokens.sequence == 0
    reported = np.where(silent, tokens.contracted, tokens.reported)
    found = drawn(failing._replace(tokens=tokens), reported=reported)
    assert f"{silent.sum()} of these are exactly 0" in found["position"].message
    assert "1 of these are exactly 0" in found["sequence"].message
    assert f"{silent.sum()} of 300 tokens are equal to the last bit" in found["distribution"].message
    assert 0 not in trace(found["sequence"], "mean |Δ|")["x"]


def test_names_of_sequences_keep_their_digits(many: FinishedRun) -> None:
    tokens = tokens_of(many)
    found = drawn(many, sequence=tokens.sequence + 1_234_567, position=tokens.position + 131_071)
    assert max(trace(found["sequence"], "mean |Δ|")["x"]) > 1_234_567 + 2900
    assert len(set(trace(found["position"], "engine reports less")["x"])) > 40


def test_of_many_points_the_largest_are_kept_and_the_rest_is_a_sample() -> None:
    assert choose_points(np.zeros(2000)).tolist() == list(range(2000))
    sizes = np.random.default_rng(1).exponential(size=50_000)
    chosen = choose_points(sizes)
    assert chosen.size == MOST_POINTS == np.unique(chosen).size
    assert (np.diff(chosen) > 0).all()
    largest = np.argsort(-sizes)[:KEPT_LARGEST]
    assert set(largest) <= set(chosen.tolist())
    assert abs(sizes[np.setdiff1d(chosen, largest)].mean() - sizes.mean()) < 0.1
    assert chosen.tolist() == choose_points(sizes.copy()).tolist()


def test_every_token_is_counted_in_the_bin_whose_range_holds_it() -> None:
    rng = np.random.default_rng(0)
    delta = rng.choice([-1, 1], 5000) * 10 ** rng.uniform(-5, 1, 5000)
    delta[:7] = 0
    bins = signed_log_bins(delta)
    assert sum(bins.counts) == 5000
    for (low, high), held in zip(bins.ranges, bins.counts, strict=True):
        # Edges are rounded logarithms: a value on one may fall to either side.
        inner = int(((delta > low * (1 + 1e-12)) & (delta < high * (1 - 1e-12))).sum())
        assert abs(inner - held) <= 1


def test_signs_fall_on_their_own_side_where_the_marks_stand() -> None:
    bins = signed_log_bins(np.array([-0.5, -0.5, 0.002, 0.0]))
    held = {centre: count for centre, count in zip(bins.centres, bins.counts, strict=True) if count}
    assert bins.least == pytest.approx(1e-3)
    assert (held, bins.reach) == ({-27: 2, 0: 1, 4: 1}, 27)
    assert bins.place(0.0) == bins.place(bins.least / 2) == 0.0
    assert bins.place(bins.least) == 0.5
    assert bins.place(-0.01) == pytest.approx(-10.5)


def test_zeros_and_dust_are_in_the_middle_and_one_small_value_does_not_stretch_the_axis() -> None:
    assert signed_log_bins(np.zeros(3)).counts[10] == 3
    dust = signed_log_bins(np.array([1e-15, -1e-15, 1e-12]))
    assert (dust.lowest_decade, dust.counts[10], dust.reach) == (LOWEST_DECADE, 3, 0)
    bins = signed_log_bins(np.concatenate((np.full(1000, 1e-2), [1e-8])))
    assert (bins.lowest_decade, sum(bins.counts)) == (-2, 1001)
