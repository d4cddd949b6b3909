import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from zerodrift.core.errors import MissingExtra, RecordError
from zerodrift.records.verdict import Outcome
from zerodrift.view import page, report
from zerodrift.view.page import source_hash
from zerodrift.view.report import render, write_report

ALL_RUNS = ["passing", "failing", "inconclusive", "hostile", "exact"]


class Structure(HTMLParser):
    """What a browser would make of the page: elements with their attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open != "style":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path]) -> dict[str, str]:
    return {name: render(directory) for name, directory in runs.items()}


@pytest.fixture(scope="module")
def structures(pages: dict[str, str]) -> dict[str, Structure]:
    return {name: Structure(page) for name, page in pages.items()}


def first_screen(page: str) -> str:
    return Structure(page[page.index("<header>") : page.index("</header>")]).text


def policy_of(structure: Structure) -> str:
    (meta,) = [
        each for each in structure.named("meta") if each.get("http-equiv") == "Content-Security-Policy"
    ]
    assert meta["content"]
    return meta["content"]


def test_a_failure_is_answered_on_the_first_screen(pages: dict[str, str]) -> None:
    text = first_screen(pages["failing"])
    for answer in (
        "FAIL",
        "Not the same policy",
        "The engine (vllm)",
        "semantic/raw-logprobs",
        "not of the one it sampled from",
        "--logprobs-mode processed_logprobs",
        "1 more cause fails this audit",
    ):
        assert answer in text


def test_a_pass_says_that_there_is_nothing_to_do(pages: dict[str, str]) -> None:
    text = first_screen(pages["passing"])
    for answer in ("PASS", "The same policy", "Neither side", "Nothing.", "1 known effect below the gate"):
        assert answer in text
    assert "known effect" not in first_screen(pages["exact"])


def test_without_a_verdict_the_page_says_why_and_how_to_ask_again(
    pages: dict[str, str], examples: Any
) -> None:
    text = first_screen(pages["inconclusive"])
    for answer in ("INCONCLUSIVE", "Not judged", "nothing answers at", examples.REPRODUCE, "Not measured"):
        assert answer in text
    assert "Nothing could be measured" in pages["inconclusive"]
    assert 'id="drift"' not in pages["inconclusive"]


def test_a_failure_without_a_cause_points_at_the_probes(examples: Any, tmp_path: Path) -> None:
    directory = examples.write(
        tmp_path, examples.verdict(Outcome.FAIL, guilty="engine", says="parity failed"), None
    )
    page = render(directory)
    assert "No fix is known" in first_screen(page)
    assert "No probe was asked" in page


def test_many_fixes_are_counted(examples: Any, tmp_path: Path) -> None:
    causes = tuple(
        examples.cause(name, 1.0, "") for name in ("weights/stale", "semantic/bos", "semantic/eos")
    )
    record = examples.verdict(Outcome.FAIL, guilty="engine", says="", causes=causes)
    assert "2 more causes fail this audit: see their fixes" in first_screen(
        render(examples.write(tmp_path, record, None))
    )


@pytest.mark.parametrize("name", ALL_RUNS)
def test_only_scripts_that_the_policy_names_are_on_the_page(
    structures: dict[str, Structure], name: str
) -> None:
    structure = structures[name]
    runnable = [
        text for attributes, text in structure.scripts if attributes.get("type") != "application/json"
    ]
    policy = policy_of(structure)
    assert re.findall(r"'sha256-[^']+'", policy) == [source_hash(text) for text in runnable]
    assert len(runnable) == (1 if name == "inconclusive" else 2)
    assert "default-src 'none'" in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", ALL_RUNS)
def test_nothing_is_loaded_and_nothing_is_handled_inline(structures: dict[str, Structure], name: str) -> None:
    for tag, attributes in structures[name].elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base", "form"}
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALL_RUNS)
def test_every_link_leads_somewhere(structures: dict[str, Structure], name: str) -> None:
    places = {attributes.get("id") for _, attributes in structures[name].elements}
    targets = {str(each["href"])[1:] for each in structures[name].named("a")}
    assert targets
    assert targets <= places


def test_every_figure_has_its_place(structures: dict[str, Structure]) -> None:
    structure = structures["failing"]
    (held,) = [text for attributes, text in structure.scripts if attributes.get("id") == "figures"]
    figures = json.loads(held)
    places = {attributes.get("id") for _, attributes in structure.elements}
    assert {f"plot-{key}" for key in figures} <= places
    assert len(figures) == 4


def test_hostile_text_is_text(pages: dict[str, str], structures: dict[str, Structure]) -> None:
    page, structure = pages["hostile"], structures["hostile"]
    own = page[: page.index('<script type="application/json"')]
    assert "<script" not in own
    assert "<img" not in own
    assert "<b>" not in own
    assert "1337" not in own, "text was read as a template"
    assert "</script><script>document.title='owned'</script>" in structure.text
    assert not set(own) & {"\x1b", "\x00", "\x7f", "\x9b", "\u202e", "\u202c", "\u2028", "\ufeff"}
    assert "␛[2J␛]0;owned␇" in structure.text
    assert "⟨U+202E⟩evil⟨U+202C⟩" in structure.text
    assert "AAAA… (10,000,000 characters)" in structure.text


@pytest.mark.parametrize("name", ALL_RUNS)
def test_foreign_strings_are_isolated_in_direction(structures: dict[str, Structure], name: str) -> None:
    assert len(structures[name].named("bdi")) > 20


def test_the_page_stays_small_whatever_a_token_holds(pages: dict[str, str]) -> None:
    assert len(pages["hostile"]) < 6_000_000
    assert len(pages["inconclusive"]) < 60_000


def test_impossible_tokens_are_counted(pages: dict[str, str], examples: Any, tmp_path: Path) -> None:
    assert "1 sampled token is impossible" in pages["hostile"]
    drawn = examples.draw(sequences=2, length=12)
    drawn.columns["contracted"][:] = float("-inf")
    page = render(examples.write(tmp_path, examples.verdict(Outcome.FAIL, guilty="engine", says=""), drawn))
    assert "sampled tokens are impossible" in page
    assert "there is no finite Δ to draw" in page
    assert "No ratio can be made of these numbers" in page
    assert len(page) < 100_000, "five megabytes of Plotly that draw nothing"


def test_equal_tokens_are_said_to_be_equal(pages: dict[str, str]) -> None:
    assert "Every token is equal to the last bit" in pages["exact"]
    assert "No token differs" in pages["exact"]
    assert "did not record its command" in pages["exact"]


def test_differing_facts_are_marked(structures: dict[str, Structure]) -> None:
    rows = [attributes.get("class") for attributes in structures["failing"].named("tr")]
    assert rows.count("differs") == 4  # logprobs_mode, generation_config; attention_backend, dtype
    assert structures["failing"].text.count("2 facts differ") == 2


def test_ratios_come_from_the_tokens(pages: dict[str, str], examples: Any) -> None:
    drawn = examples.draw()
    drawn.columns["reported"] = drawn.columns["raw"] + drawn.columns["reported"] - drawn.columns["contracted"]
    assert f"{100 * examples.metrics(drawn)['token_ess']:.1f}%" in pages["failing"]
    assert "PPO, ε = 0.2" in pages["failing"]


def test_a_long_command_is_whole_and_a_long_config_is_cut_with_a_note(examples: Any, tmp_path: Path) -> None:
    command = "zerodrift audit " + " ".join(f"--set a.b{i}={i}" for i in range(200))
    record = examples.verdict(Outcome.PASS, guilty="none", says="", reproduce=command)
    directory = examples.write(tmp_path, record, None)
    (directory / "config.yaml").write_text("key: value\n" * 20_000)
    page = render(directory)
    assert command in page
    assert "220,000 characters; the file has them all" in page
    (directory / "config.yaml").unlink()
    (directory / "environment.json").unlink()
    assert "<details>" not in render(directory)


def test_the_smallest_case_is_shown_with_its_command(examples: Any, tmp_path: Path) -> None:
    fields = {
        "smallest": "prompt of <b>1</b> token",
        "reproduce_smallest": "zerodrift audit --case case.json",
    }
    record = examples.verdict(Outcome.FAIL, guilty="engine", says="", reproduce="zerodrift audit", **fields)
    page = render(examples.write(tmp_path, record, None))
    assert "zerodrift audit --case case.json" in page
    assert "prompt of &lt;b&gt;1&lt;/b&gt; token" in page


def test_the_file_is_written_whole(examples: Any, tmp_path: Path) -> None:
    directory = examples.passing(tmp_path / "run")
    path = write_report(directory)
    assert path == directory / "report.html"
    assert path.read_text(encoding="utf-8") == render(directory)
    assert not list(directory.glob("*.tmp"))


def test_a_run_that_cannot_be_read_leaves_the_old_report(examples: Any, tmp_path: Path) -> None:
    directory = examples.inconclusive(tmp_path / "run")
    (directory / "report.html").write_text("old")
    (directory / "verdict.json").unlink()
    with pytest.raises(RecordError):
        write_report(directory)
    assert (directory / "report.html").read_text() == "old"


def test_the_same_run_gives_the_same_page(runs: dict[str, Path], pages: dict[str, str]) -> None:
    assert render(runs["failing"]) == pages["failing"]


def test_no_torch_is_needed(runs: dict[str, Path]) -> None:
    """In a process where importing torch, transformers or safetensors raises."""
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'torch', 'transformers', 'safetensors'}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from pathlib import Path\n"
        "from zerodrift.view.report import render\n"
        "page = render(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    import torch\n"
        "except ImportError as error:\n"
        "    print(len(page), error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(runs["failing"])], capture_output=True, text=True, check=True
    )
    size, message = run.stdout.split(" ", 1)
    assert int(size) > 1_000_000
    assert message.strip() == "torch is blocked"


@pytest.mark.parametrize(
    ("module", "maker", "message"),
    [
        ("jinja2", page._environment, "a page in HTML needs Jinja: pip install 'zerodrift\\[local\\]'"),
        ("plotly.offline", report._plotly, "report.html need Plotly: pip install 'zerodrift\\[local\\]'"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, maker: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=message):
        maker.__wrapped__()
