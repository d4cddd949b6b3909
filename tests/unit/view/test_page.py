"""What every page promises: it loads nothing, runs what its policy names, shows foreign text as text, needs no torch."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from zerodrift.core.errors import MissingExtra, RecordError
from zerodrift.records.preflight import Item, PreflightRecord, Status, write_preflight
from zerodrift.view import page, preflight, report
from zerodrift.view.page import content_policy, source_hash

CONTROLS = {"\x1b", "\x00", "\x7f", "\x9b", "\u202e", "\u202c", "\u2028", "\ufeff"}
REPORTS = ["passing", "failing", "inconclusive", "hostile", "exact"]


class Structure(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open not in {"script", "style"}:
            self.text += data


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path], examples: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every report, and a preflight with every attack in every place."""
    found = {name: report.render(directory) for name, directory in runs.items()}
    attack = " ".join(examples.HOSTILE)
    item = Item(
        name=attack,
        status=Status.FAIL,
        message=attack,
        details=(attack,),
        facts={attack: attack},
        type=(attack,),
    )
    directory = tmp_path_factory.mktemp("preflight")
    config = {"config": attack, "engine": attack, "model": attack, "reproduce": attack}
    write_preflight(directory, PreflightRecord(status=Status.FAIL, items=(item,), **config))
    return found | {"preflight": preflight.render(directory)}


@pytest.mark.parametrize("name", [*REPORTS, "preflight"])
def test_only_scripts_that_the_policy_names_run_and_nothing_is_loaded(
    pages: dict[str, str], name: str
) -> None:
    structure = Structure(pages[name])
    (policy,) = [str(each["content"]) for _, each in structure.elements if "http-equiv" in each]
    scripts = re.findall(r"<script>(.*?)</script>", pages[name], re.DOTALL)
    assert re.findall(r"'sha256-[^']+'", policy) == [source_hash(text) for text in scripts]
    assert len(scripts) == (1 if name in {"inconclusive", "preflight"} else 2)
    places = {attributes.get("id") for _, attributes in structure.elements}
    for tag, attributes in structure.elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base", "form"}
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
        assert "src" not in attributes
        if "href" in attributes and name != "preflight":
            assert str(attributes["href"])[:1] == "#"
            assert str(attributes["href"])[1:] in places, "every link leads somewhere"
    assert len([tag for tag, _ in structure.elements if tag == "bdi"]) > (6 if name == "preflight" else 20)


@pytest.mark.parametrize("name", ["hostile", "preflight"])
def test_hostile_text_is_text(pages: dict[str, str], name: str) -> None:
    own = pages[name].partition("<script")[0]
    assert "<img" not in own
    assert "<b>" not in own
    assert "1337" not in own, "text was read as a template"
    assert not set(own) & CONTROLS
    text = Structure(own).text
    for shown in ("</script><script>document.title='owned'", "␛[2J␛]0;owned␇", "⟨U+202E⟩evil⟨U+202C⟩"):
        assert shown in text
    assert "characters)" in text, "ten megabytes are cut"
    assert len(pages[name]) < 6_000_000


def test_the_policy_allows_nothing_else() -> None:
    # The example of the CSP specification: echo -n "alert('Hello, world.');" | openssl dgst -sha256 -binary | base64.
    assert source_hash("alert('Hello, world.');") == "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='"
    policy = dict(part.split(" ", 1) for part in content_policy(["a", "b"]).split("; "))
    assert policy.pop("script-src") == f"{source_hash('a')} {source_hash('b')}"
    assert policy.pop("style-src") == "'unsafe-inline'"
    assert policy == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")


@pytest.mark.parametrize(
    ("write", "name"), [(report.write_report, "report"), (preflight.write_page, "preflight")]
)
def test_a_page_is_written_whole_or_stays(tmp_path: Path, write: Any, name: str, examples: Any) -> None:
    path = tmp_path / f"{name}.html"
    path.write_text("old")
    with pytest.raises(RecordError):
        write(tmp_path)
    assert path.read_text() == "old"
    examples.inconclusive(tmp_path)
    record = PreflightRecord(status=Status.PASS, config="", engine="", model="", items=())
    write_preflight(tmp_path, record)
    assert write(tmp_path) == path
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert not list(tmp_path.glob("*.tmp"))


def test_no_torch_is_needed(runs: dict[str, Path]) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors')))\n"
        "from pathlib import Path\nimport zerodrift.view.preflight\nfrom zerodrift.view.report import render\n"
        "print(len(render(Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", script, str(runs["failing"])]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) > 1_000_000


@pytest.mark.parametrize(
    ("module", "maker"), [("jinja2", page._environment), ("plotly.offline", report.plotly)]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, module: str, maker: Any) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra):
        maker.__wrapped__()
