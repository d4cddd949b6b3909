"""The checklist on a page and in a terminal; what holds for every page is in test_page.py."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from zerodrift.records.preflight import Item, PreflightRecord, Status, write_preflight
from zerodrift.view.preflight import HEADLINES, print_checklist, render

ITEMS = (
    Item(
        name="doctor", status=Status.WARN, message="1 risk", details=("risk: cache",), type=("doctor --fix",)
    ),
    Item(
        name="audit",
        status=Status.FAIL,
        message="semantic/bos: seen",
        details=("parity, fail: far",),
        facts={"mean": 0.5},
        type=("mend it",),
    ),
    Item(name="weight-sync", status=Status.INCONCLUSIVE, message="no answer"),
    Item(name="rewards", status=Status.PASS, message="equal"),
    Item(name="history", status=Status.SKIPPED, message="none", type=("--record FILE",)),
)
UNREACHED = Item(name="audit", status=Status.INCONCLUSIVE, message="nobody answers")


def record(*items: Item, status: Status = Status.FAIL) -> PreflightRecord:
    command = "zerodrift preflight run.yaml"
    return PreflightRecord(
        status=status, config="run.yaml", engine="vllm", model="./model", items=items, reproduce=command
    )


def written(directory: Path, *items: Item) -> str:
    write_preflight(directory, record(*items))
    return render(directory)


def printed(shown: PreflightRecord, width: int = 80) -> str:
    out = io.StringIO()
    print_checklist(shown, Console(file=out, width=width, highlight=False), Path("runs/it"))
    return out.getvalue()


def test_the_page_has_every_item_with_its_evidence(tmp_path: Path) -> None:
    page = written(tmp_path, *ITEMS)
    for item in ITEMS:
        assert f'<section id="{item.name}">' in page
        assert all(says in page for says in (item.message, *item.type, *item.details))
    for says in (
        HEADLINES[Status.FAIL],
        "<bdi>0.5</bdi>",
        "zerodrift preflight run.yaml",
        '<body class="fail">',
    ):
        assert says in page


def test_what_the_directory_holds_beside_it_is_on_the_page(tmp_path: Path) -> None:
    assert "report.html" not in written(tmp_path, *ITEMS)
    (tmp_path / "report.html").touch()
    (tmp_path / "config.yaml").write_text("engine: {name: vllm}\n")
    (tmp_path / "environment.json").write_text('{"packages": {"torch": "2.13"}}')
    page = render(tmp_path)
    assert all(says in page for says in ('<a href="report.html">', "engine: {name: vllm}", "packages.torch"))
    assert '<a href="report.html">' not in written(tmp_path, UNREACHED), "it is of a run before"


def test_the_terminal_has_one_line_an_item_and_what_to_type() -> None:
    text = printed(record(*ITEMS))
    assert text.startswith("FAIL  Do not train on this yet\nrun.yaml: vllm, ./model\n")
    table = text.splitlines()[4 : 4 + len(ITEMS)]
    assert [line.split()[:2] for line in table] == [[item.name, item.status] for item in ITEMS]
    assert "for audit:\n    mend it\n" in text
    assert "to have history:\n    --record FILE\n" in text
    assert text.endswith("page:\n    runs/it/preflight.html\n\n")
    hostile = Item(name="\x1b[2J", status=Status.FAIL, message="\u202eevil", type=("\x1b",))
    assert not set(printed(record(hostile))) & {"\x1b", "\u202e"}


@pytest.mark.parametrize("status", Status)
def test_every_ending_has_its_headline(status: Status) -> None:
    assert HEADLINES[status] in printed(record(status=status))
