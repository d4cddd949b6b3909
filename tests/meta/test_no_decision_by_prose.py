"""Sentences are for people: no decision of an audit hangs on what one says, for whoever mends a sentence would change it."""

import ast
from collections.abc import Iterator

import pytest

PROSE = frozenset({"evidence", "message", "says", "fix"})
"""Attributes that hold a sentence. Evidence of a probe is a struct under the same name: `is None` and fields are fine."""
QUESTIONS = frozenset({"startswith", "endswith", "find", "index", "count"})
PATTERNS = frozenset({"search", "match", "fullmatch", "findall"})
COMPARISONS = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
ALLOWED: dict[str, str] = {}
"""Expressions that ask a sentence, with the reason; none is known."""


def prose(node: ast.expr) -> bool:
    """Whether this is one of those attributes, itself or in a format or a call on it (`.evidence.lower()`)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return prose(node.func.value)
    return isinstance(node, ast.Attribute) and node.attr in PROSE


def asked(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that compare a sentence, look into it or match it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(isinstance(each, COMPARISONS) for each in node.ops) and any(map(prose, sides)):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            told = any(map(prose, node.args))
            if (node.func.attr in QUESTIONS and prose(node.func.value)) or (
                node.func.attr in PATTERNS and told
            ):
                yield node


def test_no_decision_asks_a_sentence(sources: dict[str, ast.Module]) -> None:
    audit = {path: tree for path, tree in sources.items() if path.startswith("zerodrift/audit/")}
    assert len(audit) > 50
    found = {
        f"{path}: {ast.unparse(node)}" for path, tree in audit.items() for node in asked(tree)
    } - ALLOWED.keys()
    assert not found, "give the finding a field that says it, and ask that"


@pytest.mark.parametrize(
    "line",
    [
        "x = 'probabilities' not in cause.evidence",
        "x = WORDS in cause.evidence.lower()",
        "x = gating[0].evidence == first.message",
        "x = CAUSES[name].fix != cause.fix",
        "x = item.says.endswith('--fix')",
        "x = re.search('rounding', cause.evidence)",
    ],
)
def test_a_planted_line_is_seen(line: str) -> None:
    assert len(list(asked(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "x = result.evidence is None",
        "x = doubtful.message.partition(TAIL)[0]",
        "x = result.evidence.tokens == 3",
        "x = f'{cause.evidence}; and more'",
        "x = cause.cause == UNEXPLAINED",
        "x = dict.fromkeys(cause.fix for cause in causes)",
    ],
)
def test_what_only_tells_is_no_question(line: str) -> None:
    assert not list(asked(ast.parse(line)))
