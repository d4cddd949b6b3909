import numpy as np

from zerodrift.view import points


def test_few_points_are_all_drawn() -> None:
    assert points.choose(np.zeros(2000)).tolist() == list(range(2000))
    assert points.says(2000, 2000, "tokens") == "All 2,000 tokens are drawn."


def test_of_many_the_largest_are_kept_and_the_rest_is_a_sample() -> None:
    sizes = np.random.default_rng(1).exponential(size=50_000)
    chosen = points.choose(sizes)
    assert chosen.size == points.MOST_POINTS == np.unique(chosen).size
    assert set(np.argsort(-sizes)[: points.KEPT_LARGEST]) <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all()
    others = np.setdiff1d(chosen, np.argsort(-sizes)[: points.KEPT_LARGEST])
    assert abs(sizes[others].mean() - sizes.mean()) < 0.1
    assert points.says(chosen.size, sizes.size, "tokens") == (
        "Drawn: the 200 largest of 50,000 tokens and 1,800 of the others at random (seed 0)."
    )


def test_the_same_run_draws_the_same_points() -> None:
    sizes = np.random.default_rng(1).exponential(size=5000)
    assert points.choose(sizes).tolist() == points.choose(sizes.copy()).tolist()
