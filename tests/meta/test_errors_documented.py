"""Codes are an interface: the classes and `docs/errors.md` must name the same ones."""

import re
from pathlib import Path

import pytest

from zerodrift.core import errors
from zerodrift.core.errors import ZerodriftError


def classes(base: type[ZerodriftError] = ZerodriftError) -> list[type[ZerodriftError]]:
    """The tree of `errors.py`, depth first. Subclasses that live elsewhere would be found, and refused, too."""
    return [base, *(found for child in base.__subclasses__() for found in classes(child))]


def headings(root: Path) -> dict[str, str]:
    text = (root / "docs" / "errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert len(parts[::2]) == len(set(parts[::2])), "a heading occurs twice"
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_code_belongs_to_one_class() -> None:
    codes = [error.code for error in classes()]
    assert len(codes) == len(set(codes))
    assert all(error.__module__ == errors.__name__ for error in classes())


def test_every_code_has_a_heading_and_every_heading_a_code(root: Path) -> None:
    assert set(headings(root)) == {error.code for error in classes()}


def test_headings_stand_in_the_order_of_the_tree(root: Path) -> None:
    assert list(headings(root)) == [error.code for error in classes()]


def test_every_error_says_what_it_means_and_shows_an_example(root: Path) -> None:
    for code, text in headings(root).items():
        assert len(text.split()) > 15, code
        assert code == "zerodrift" or "Example: *" in " ".join(text.split()), code
        assert text.strip().count("\n\n") == 0, f"{code} has more than one paragraph"


@pytest.mark.parametrize("error", classes())
def test_every_error_has_a_docstring_an_exit_code_and_a_code_of_its_own(error: type[ZerodriftError]) -> None:
    assert error.__doc__
    assert error.exit_code in {2, 3}
    assert "code" in vars(error)
    assert re.fullmatch(r"zerodrift|[a-z]+/[a-z-]+", error.code)
