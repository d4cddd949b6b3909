"""How large is the tree? Lines of src and tests, files, the median file, the longest functions, patterns of prose, and
passages that are written twice.

    python tests/tree_figures.py                     # this tree
    python tests/tree_figures.py --tree ../other     # another checkout
    python tests/tree_figures.py --before ../older   # tables of both and of every package: docs/tree.md

The blind exam is left out: it is kept as it was written.
"""

import argparse
import ast
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PATTERN = re.compile(r"\bmatch=")
PASSAGE = 8
"""Lines that are the same in two places, without imports, comments and blank lines: fewer are alike by chance."""
LEFT_OUT = "exam"
PARTS = ("src", "tests")
PACKAGES = {"src/zerodrift": "package", "tests": "tests", "tests/unit": "unit tests"}
"""Folders whose folders are counted one by one, with what to call one of them."""


def function_lengths(tree: ast.Module) -> list[int]:
    """Lines of every function, from its `def` to its end."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def percentile(values: Sequence[int], share: float) -> int:
    """The least value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0


def plain_lines(text: str) -> list[str]:
    """What a passage is compared by: no indentation, no blank lines, no comments, no imports."""
    imports = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    stripped = ((number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), start=1))
    return [line for number, line in stripped if line and line[0] != "#" and number not in imports]


def repeated_passages(texts: Sequence[str]) -> int:
    """Runs of at least so many lines that stood somewhere before, each as long as it goes on."""
    seen = set[tuple[str, ...]]()
    found = 0
    for lines in map(plain_lines, texts):
        repeats = False
        for start in range(len(lines) - PASSAGE + 1):
            passage = tuple(lines[start : start + PASSAGE])
            found += passage in seen and not repeats
            repeats = passage in seen
            seen.add(passage)
    return found


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if LEFT_OUT not in path.relative_to(folder).parts)


def figures(folder: Path) -> dict[str, int]:
    """Of all Python below a folder."""
    texts = [path.read_text(encoding="utf-8") for path in sources(folder)]
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
        "repeated passages": repeated_passages(texts),
    }


def lines_of(folder: Path) -> dict[str, int]:
    """By the folders directly below."""
    counts = dict[str, int]()
    for path in sources(folder):
        part = path.relative_to(folder).parts[0]
        if not part.endswith(".py"):
            counts[part] = counts.get(part, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counts


def table(what: str, rows: Iterable[tuple[str, int, int]]) -> Iterator[str]:
    """In Markdown."""
    yield from (f"| {what} | before | now | change |", "|---|---:|---:|---:|")
    yield from (f"| {name} | {before:,} | {now:,} | {now - before:+,} |" for name, before, now in rows)
    yield ""


def comparison(before: Path, now: Path) -> Iterator[str]:
    """Both trees beside each other, then every package, those that grew most first."""
    for part in PARTS:
        old, new = figures(before / part), figures(now / part)
        yield from table(part, ((name, old[name], value) for name, value in new.items()))
    for folder, what in PACKAGES.items():
        old, new = lines_of(before / folder), lines_of(now / folder)
        rows = [(name, old.get(name, 0), new.get(name, 0)) for name in {*old, *new}]
        yield from table(f"lines of {what}", sorted(rows, key=lambda row: (row[1] - row[2], row[0])))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the root of a checkout")
    parser.add_argument("--before", type=Path, help="the root of an older checkout, to compare with")
    options = parser.parse_args()
    for root in filter(None, (options.tree, options.before)):
        for part in PARTS:
            if not (root / part).is_dir():
                parser.error(f"{root} has no folder {part}: give the root of a checkout")
    if options.before is not None:
        sys.stdout.write("\n".join(comparison(options.before, options.tree)))
        return 0
    for part in PARTS:
        told = ", ".join(f"{name} {value:,}" for name, value in figures(options.tree / part).items())
        sys.stdout.write(f"{part + ':':7}{told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
