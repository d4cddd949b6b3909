import numpy as np

from zerodrift.view import plots


def test_few_points_are_all_drawn() -> None:
    assert plots.choose_points(np.zeros(2000)).tolist() == list(range(2000))
    assert plots.points_message(2000, 2000, "tokens") == "All 2,000 tokens are drawn."


def test_of_many_the_largest_are_kept_and_the_rest_is_a_sample() -> None:
    sizes = np.random.default_rng(1).exponential(size=50_000)
    chosen = plots.choose_points(sizes)
    assert chosen.size == plots.MOST_POINTS == np.unique(chosen).size
    assert set(np.argsort(-sizes)[: plots.KEPT_LARGEST]) <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all()
    others = np.setdiff1d(chosen, np.argsort(-sizes)[: plots.KEPT_LARGEST])
    assert abs(sizes[others].mean() - sizes.mean()) < 0.1
    assert plots.points_message(chosen.size, sizes.size, "tokens") == (
        "Drawn: the 200 largest of 50,000 tokens and 1,800 of the others at random (seed 0)."
    )


def test_the_same_run_draws_the_same_points() -> None:
    sizes = np.random.default_rng(1).exponential(size=5000)
    assert plots.choose_points(sizes).tolist() == plots.choose_points(sizes.copy()).tolist()
