"""The live page in a real browser: it loads at once, grows without a reload, and stays quick with 100,000 steps.

Marked `browser`: needs Chromium, see conftest.py.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerodrift.view.live.access import Access
from zerodrift.view.live.server import LiveServer, names_of, open_server

pytestmark = pytest.mark.browser
STEPS, MANY = 40, 100_000
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def training(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("reliability/live_training")


@pytest.fixture(scope="module")
def run(training: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("live") / "train"
    training.train(directory, STEPS, tokens=2000)
    return directory


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers: list[LiveServer] = []

    def start(directory: Path) -> str:
        server = open_server(directory, "127.0.0.1", 0, Access(names_of("127.0.0.1"), None))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.feed.close()
        server.shutdown()
        server.server_close()


def rows(count: int) -> str:
    return f"Number(document.body.dataset.rows) >= {count} && document.body.dataset.drawMs !== undefined"


def inked(page: Any, card: str) -> int:
    """Pixels of a plot that are not empty."""
    return page.evaluate(
        f"(() => {{ const c = document.querySelector('#card-{card} canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
    )


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_everything_is_drawn_and_nothing_else_is_asked_for(
    browser: Any, serve: Callable[[Path], str], run: Path, width: int, dark: bool
) -> None:
    address = serve(run)
    page = browser.open(address, width=width, dark=dark)
    page.wait_for(rows(STEPS))
    page.wait_for("document.querySelectorAll('#batches tbody tr').length > 0")
    cards = (
        "state",
        "mismatch",
        "staleness",
        "update",
        "ess",
        "clip",
        "entropy",
        "reward",
        "lag",
        "reference",
    )
    page.wait_for("[...document.querySelectorAll('.card')].every((card) => !card.hidden)")
    assert all(inked(page, card) > 500 for card in cards)
    assert page.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    page.evaluate("document.querySelector('#batches button').click()")
    page.wait_for("document.querySelectorAll('#batch tbody tr').length > 0")
    page.evaluate("document.querySelector('#batch tbody button').click()")
    page.wait_for("document.querySelectorAll('.tokens tbody tr').length > 5")
    assert page.said() == [], "the console must be empty: policy violations and errors land there"
    assert {url.split("?")[0].rpartition("/batches/")[0] or url for url in page.requests()} <= {
        address,
        f"{address}events",
        address.rstrip("/"),
    }


def test_it_begins_with_nothing_and_grows_without_a_reload(
    browser: Any, serve: Callable[[Path], str], training: ModuleType, tmp_path: Path
) -> None:
    page = browser.open(serve(tmp_path / "later"), width=DESKTOP)
    page.wait_for("!document.getElementById('waiting').hidden")
    assert "Monitor(directory=" in page.evaluate("document.getElementById('waiting').innerText")
    assert page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") > 0
    page.evaluate("window.sameDocument = true")
    training.train(tmp_path / "later", 12, tokens=1000)
    page.wait_for(rows(12))
    assert page.evaluate("window.sameDocument && document.getElementById('waiting').hidden")
    page.wait_for("document.getElementById('facts').innerText.includes('11')")
    assert page.said() == []


def test_what_a_run_cannot_show_is_called_so_and_text_does_nothing(
    browser: Any, serve: Callable[[Path], str], tmp_path: Path
) -> None:
    from zerodrift.monitor.monitor import Monitor

    monitor = Monitor(directory=tmp_path / "plain")
    for step in range(5):
        monitor.log_step(step, kl_estimate=1e-4)
    monitor.trigger_alert("<img src=x onerror=document.body.dataset.hurt=1>\u202e<script>1</script>")
    monitor.close()
    page = browser.open(serve(tmp_path / "plain"), width=DESKTOP)
    page.wait_for(rows(5))
    page.wait_for("document.getElementById('history').innerText.includes('onerror')")
    shown = page.evaluate(
        "[...document.querySelectorAll('.card')].filter((c) => c.innerText.includes('not observable')).map((c) => c.id)"
    )
    assert set(shown) == {
        "card-staleness",
        "card-update",
        "card-ess",
        "card-clip",
        "card-entropy",
        "card-reward",
        "card-lag",
    }
    assert inked(page, "mismatch") > 200
    assert page.evaluate("document.body.dataset.hurt === undefined && document.images.length === 0")
    assert page.said() == []


def test_a_hundred_thousand_steps_stay_quick(
    browser: Any, serve: Callable[[Path], str], training: ModuleType, run: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(run, tmp_path / "long")
    training.prolong(tmp_path / "long", MANY)
    page = browser.open(serve(tmp_path / "long"), width=DESKTOP)
    page.wait_for(rows(MANY))
    # Of several pictures the quickest: what the page costs, and not what else the machine does meanwhile.
    times = page.evaluate(
        "(() => { const all = []; for (let i = 0; i < 7; i++) { drawCards(); all.push(Number(document.body.dataset.drawMs)); } return all; })()"
    )
    assert min(times) < 250, times
    load = page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
    assert load["transferSize"] < 100_000, "the page itself is small, whatever the run"
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    assert page.said() == []
