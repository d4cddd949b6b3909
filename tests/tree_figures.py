"""How large is the tree? Lines of src and tests, files, the median file, the longest functions, patterns of prose.

    python tests/tree_figures.py                  # this tree
    python tests/tree_figures.py --tree ../other  # another checkout, for a comparison

One line for each part, so that two outputs can be laid side by side.
"""

import argparse
import ast
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

PATTERN = re.compile(r"\bmatch=")


def function_lengths(tree: ast.Module) -> list[int]:
    """Lines of every function, from its `def` to its end."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def percentile(values: Sequence[int], share: float) -> int:
    """The least value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0


def figures(folder: Path) -> dict[str, int]:
    """Of all Python below a folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    sizes = [len(text.splitlines()) for text in texts]
    functions = [length for text in texts for length in function_lengths(ast.parse(text))]
    return {
        "lines": sum(sizes),
        "files": len(sizes),
        "median file": round(statistics.median(sizes)) if sizes else 0,
        "largest file": max(sizes, default=0),
        "functions": len(functions),
        "p99 function": percentile(functions, 0.99),
        "match=": sum(len(PATTERN.findall(text)) for text in texts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the root of a checkout")
    root = parser.parse_args().tree
    for part in ("src", "tests"):
        if not (root / part).is_dir():
            parser.error(f"{root} has no folder {part}: give the root of a checkout")
        told = ", ".join(f"{name} {value:,}" for name, value in figures(root / part).items())
        sys.stdout.write(f"{part + ':':7}{told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
