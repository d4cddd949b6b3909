"""The figures of the tree are counted, not guessed."""

import pytest


@pytest.fixture
def tree_figures(script):
    return script("tree_figures")


def test_a_small_tree(tree_figures, tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    return 1\n\n\ndef g(): ...\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.py").write_text("with raises(E, match='x'):\n    pass\n\n" + "x = 1\n" * 4)
    assert tree_figures.figures(tmp_path) == {
        "lines": 12,
        "files": 2,
        "median file": 6,
        "largest file": 7,
        "functions": 2,
        "p99 function": 2,
        "match=": 1,
        "repeated passages": 0,
    }


def test_a_passage_that_is_written_twice_is_counted_once(tree_figures):
    body = [f"x{number} = {number}" for number in range(12)]
    one = "import a\n" + "\n".join(body)
    other = "import b\n\nif a:\n    # indented\n" + "\n".join(f"    {line}" for line in body)
    assert tree_figures.repeated_passages([one, other]) == 1
    assert tree_figures.repeated_passages([one, other, one]) == 2
    broken = "\n".join([*body[:7], "y = 0", *body[7:]])
    assert tree_figures.repeated_passages([one, broken]) == 0


def test_the_percentile_is_one_of_the_values(tree_figures):
    assert tree_figures.percentile(range(1, 101), 0.99) == 99
    assert tree_figures.percentile([7], 0.99) == 7
    assert tree_figures.percentile([], 0.99) == 0


def test_packages_of_two_trees_stand_beside_each_other(tree_figures, tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    for root, sizes in ((before, {"audit": 3, "gone": 2}), (now, {"audit": 1, "monitor": 4})):
        (root / "tests" / "unit").mkdir(parents=True)
        for package, lines in sizes.items():
            folder = root / "src" / "zerodrift" / package
            folder.mkdir(parents=True)
            (folder / "one.py").write_text("x = 1\n" * lines)
    # Left out, wherever it stands below tests.
    (now / "tests" / "exam").mkdir()
    (now / "tests" / "exam" / "one.py").write_text("x = 1\n" * 99)
    told = list(tree_figures.comparison(before, now))
    assert [line for line in told if line.startswith("| lines |")] == [
        "| lines | 5 | 5 | +0 |",
        "| lines | 0 | 0 | +0 |",
    ]
    begin = told.index("| lines of package | before | now | change |") + 2
    assert told[begin : begin + 3] == [
        "| monitor | 0 | 4 | +4 |",
        "| audit | 3 | 1 | -2 |",
        "| gone | 2 | 0 | -2 |",
    ]
