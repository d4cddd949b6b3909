"""The checklist on a page and in a terminal: the same answers, and nothing of a model acts in either."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from zerodrift.core.errors import RecordError
from zerodrift.records.preflight import Item, PreflightRecord, Status, write_preflight
from zerodrift.view.page import source_hash
from zerodrift.view.preflight import HEADLINES, print_checklist, render, write_page

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*191 }}\x1b[2J\u202eevil"


def record(*items: Item, status: Status = Status.FAIL) -> PreflightRecord:
    return PreflightRecord(
        status=status,
        config="run.yaml",
        engine="vllm",
        model="./model",
        items=items,
        reproduce="zerodrift preflight run.yaml",
    )


ITEMS = (
    Item(name="doctor", status=Status.WARN, says="1 risk", details=("risk: cache",), type=("doctor --fix",)),
    Item(
        name="audit",
        status=Status.FAIL,
        says="semantic/bos: seen",
        details=("parity, fail: far",),
        facts={"mean": 0.5},
        type=("mend it",),
    ),
    Item(name="weight-sync", status=Status.INCONCLUSIVE, says="no answer"),
    Item(name="rewards", status=Status.PASS, says="equal"),
    Item(name="history", status=Status.SKIPPED, says="none", type=("--record FILE",)),
)


def written(directory: Path, *items: Item) -> str:
    directory.mkdir(exist_ok=True)
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
        assert item.says in page
        assert all(typed in page for typed in item.type)
    assert HEADLINES[Status.FAIL] in page
    assert "risk: cache" in page
    assert "<bdi>0.5</bdi>" in page
    assert "zerodrift preflight run.yaml" in page
    assert '<body class="fail">' in page


def test_what_the_directory_holds_beside_it_is_on_the_page(tmp_path: Path) -> None:
    assert "report.html" not in written(tmp_path, *ITEMS)
    (tmp_path / "report.html").touch()
    (tmp_path / "config.yaml").write_text("engine: {name: vllm}\n")
    (tmp_path / "environment.json").write_text('{"packages": {"torch": "2.13"}}')
    page = render(tmp_path)
    assert '<a href="report.html">' in page
    assert "engine: {name: vllm}" in page
    assert "packages.torch" in page
    unreached = Item(name="audit", status=Status.INCONCLUSIVE, says="nobody answers")
    assert '<a href="report.html">' not in written(tmp_path, unreached), "it is of a run before"


def test_hostile_text_is_text(tmp_path: Path) -> None:
    item = Item(
        name=HOSTILE,
        status=Status.FAIL,
        says=HOSTILE,
        details=(HOSTILE,),
        facts={HOSTILE: HOSTILE},
        type=(HOSTILE,),
    )
    page = written(tmp_path, item)
    assert "<img" not in page
    assert "1337" not in page, "text was read as a template"
    assert not set(page) & {"\x1b", "\u202e"}
    assert page.count("<script") == 1
    for line in printed(record(item), width=400).splitlines():
        assert not set(line) & {"\x1b", "\u202e"}


def test_one_script_runs_and_the_policy_names_it(tmp_path: Path) -> None:
    page = written(tmp_path, *ITEMS)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert source_hash(script) in page
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|iframe|img|object|embed|base|form)\b| on[a-z]+=| src=", page)


def test_the_page_is_written_whole_or_stays(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="it is not a finished preflight"):
        write_page(tmp_path)
    assert not list(tmp_path.iterdir())
    page = written(tmp_path, *ITEMS)
    assert write_page(tmp_path).read_text(encoding="utf-8") == page


def test_no_torch_is_needed(tmp_path: Path) -> None:
    written(tmp_path, *ITEMS)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\nfrom zerodrift.view.preflight import render\n"
        "print(len(render(Path(sys.argv[1]))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) > 10_000


def test_the_terminal_has_one_line_an_item_and_what_to_type() -> None:
    text = printed(record(*ITEMS))
    assert text.startswith("FAIL  Do not train on this yet\nrun.yaml: vllm, ./model\n")
    table = text.splitlines()[4 : 4 + len(ITEMS)]
    assert [line.split()[:2] for line in table] == [[item.name, item.status] for item in ITEMS]
    assert "for audit:\n    mend it\n" in text
    assert "to have history:\n    --record FILE\n" in text
    assert text.endswith("page:\n    runs/it/preflight.html\n\n")


@pytest.mark.parametrize("status", Status)
def test_every_ending_has_its_headline(status: Status) -> None:
    assert HEADLINES[status] in printed(record(status=status))
