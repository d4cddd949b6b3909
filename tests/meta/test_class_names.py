"""One public class name means one thing: whoever reads it, or looks for it, should not have to ask which."""

import ast
from collections import Counter

KNOWN = frozenset(
    {
        # Two sides of one word of the field, in packages that never meet: each is the plain name where it is used.
        *("Archive", "Decision", "Difference", "Outcome", "Output", "Part", "Query", "Rewards"),
        *("State", "Step", "Tokens"),
        # Small values of one file each, which nothing but that file's neighbours import.
        *("Drawn", "Draws", "Expected", "Layout", "Scored"),
    }
)
"""Names that stand for more than one class still. The list may only become shorter."""


def repeated(sources: dict[str, ast.Module]) -> set[str]:
    """Public classes, at the top of a module, that more than one module has."""
    names = Counter(
        node.name
        for tree in sources.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name for name, count in names.items() if count > 1}


def test_no_further_name_stands_for_two_classes(sources: dict[str, ast.Module]) -> None:
    assert repeated(sources) - KNOWN == set(), "give the newer one a name of its own"


def test_what_is_one_class_again_leaves_the_list(sources: dict[str, ast.Module]) -> None:
    assert KNOWN - repeated(sources) == set()


def test_a_planted_name_is_seen() -> None:
    one, other = (
        ast.parse("class Sample: ..."),
        ast.parse("class Sample: ...\nclass _Own: ...\nclass Other: ..."),
    )
    assert repeated({"a": one, "b": other, "c": ast.parse("class _Own: ...")}) == {"Sample"}
