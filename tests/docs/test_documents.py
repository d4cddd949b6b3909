"""What the documents show is what the project does: snippets run, commands exist, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import zerodrift
from zerodrift.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def commands(document: Path) -> list[list[str]]:
    lines = [line for block in blocks(document, "console") for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def test_the_documents_show_commands_at_all() -> None:
    assert len(commands(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_snippets_run(document: Path) -> None:
    for snippet in blocks(document, "python"):
        exec(compile(snippet, document.name, "exec"), {})  # our own documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    shown = {words[1] for words in commands(document) if words[0] == "make" and len(words) > 1}
    shown |= set(re.findall(r"`make ([a-z0-9-]+)`", document.read_text()))
    assert shown <= MAKE_TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_exist(document: Path) -> None:
    """Every `zerodrift` line names a verb that exists, with options that it has."""
    root = get_command(app)
    for words in commands(document):
        if words[0] != "zerodrift":
            continue
        command, rest = root, words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]  # type: ignore[attr-defined]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        known |= {"--help"}
        # With a blank in it, it is the value of an option: a launch line of somebody else.
        named = {word for word in rest if word.startswith("--") and " " not in word}
        assert named <= known, words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_every_public_name_is_in_an_example_of_the_api_page() -> None:
    examples = "\n".join(blocks(ROOT / "docs" / "api.md", "python"))
    public = {*zerodrift.__all__} - {"__version__"} | {"exact.prepare", "exact.token_logprobs", "models.load"}
    assert not {name for name in public if not re.search(rf"\bzd\.{re.escape(name)}\b", examples)}
