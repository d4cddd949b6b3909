"""The live page in a real browser: it loads at once, grows without a reload, and stays quick with 100,000 steps.

Marked `browser`: needs Chromium, see conftest.py.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerodrift.monitor.monitor import Monitor
from zerodrift.view.live.access import Access
from zerodrift.view.live.server import LiveServer, open_server
from zerodrift.web.access import names_of

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
def serve() -> Iterator[Callable[[Path], LiveServer]]:
    servers: list[LiveServer] = []

    def start(directory: Path) -> LiveServer:
        server = open_server(directory, "127.0.0.1", 0, Access(names_of("127.0.0.1"), None))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.feed.close()
        server.shutdown()
        server.server_close()


def address(server: LiveServer) -> str:
    return f"http://127.0.0.1:{server.server_port}/"


def rows(count: int) -> str:
    return f"document.body && Number(document.body.dataset.rows) >= {count} && document.body.dataset.drawMs !== undefined"


def inked(page: Any, card: str) -> int:
    """Pixels of a plot that are not empty."""
    return page.evaluate(
        f"(() => {{ const c = document.querySelector('#card-{card} canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
    )


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_everything_is_drawn_and_nothing_else_is_asked_for(
    browser: Any, serve: Callable[[Path], LiveServer], run: Path, width: int, dark: bool
) -> None:
    own = address(serve(run))
    page = browser.open(own, width=width, dark=dark)
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
        own,
        f"{own}events",
        own.rstrip("/"),
    }


def test_it_begins_with_nothing_and_grows_without_a_reload(
    browser: Any, serve: Callable[[Path], LiveServer], training: ModuleType, tmp_path: Path
) -> None:
    page = browser.open(address(serve(tmp_path / "later")), width=DESKTOP)
    page.wait_for("!document.getElementById('waiting').hidden")
    assert "Monitor(directory=" in page.evaluate("document.getElementById('waiting').innerText")
    page.evaluate("window.sameDocument = true")
    training.train(tmp_path / "later", 12, tokens=1000)
    page.wait_for(rows(12))
    assert page.evaluate("window.sameDocument && document.getElementById('waiting').hidden")
    page.wait_for("document.getElementById('facts').innerText.includes('11')")
    assert page.said() == []


def test_what_a_run_cannot_show_is_called_so_and_text_does_nothing(
    browser: Any, serve: Callable[[Path], LiveServer], tmp_path: Path
) -> None:
    monitor = Monitor(directory=tmp_path / "plain")
    for step in range(5):
        monitor.log_step(step, kl_estimate=1e-4)
    monitor.trigger_alert("<img src=x onerror=document.body.dataset.hurt=1>\u202e<script>1</script>")
    monitor.close()
    page = browser.open(address(serve(tmp_path / "plain")), width=DESKTOP)
    page.wait_for(rows(5))
    page.wait_for("document.getElementById('history').innerText.includes('onerror')")
    shown = page.evaluate(
        "[...document.querySelectorAll('.card')].filter((c) => !c.hidden && c.innerText.includes('not observable')).map((c) => c.id)"
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


def said_of_the_writer(page: Any, word: str) -> None:
    page.wait_for(f"document.getElementById('connection').innerText === '{word}'")


def test_it_says_live_while_a_monitor_writes_and_what_became_of_it(
    browser: Any, serve: Callable[[Path], LiveServer], tmp_path: Path
) -> None:
    monitor = Monitor(directory=tmp_path)
    monitor.log_step(0, kl_estimate=1e-4)
    page = browser.open(address(serve(tmp_path)), width=DESKTOP)
    page.wait_for(rows(1))
    said_of_the_writer(page, "live")
    monitor.close()
    said_of_the_writer(page, "ended")
    assert page.evaluate("document.getElementById('notice').hidden")
    assert "was as it should be" in page.evaluate("document.getElementById('sentence').innerText")
    # As a kill leaves it.
    (tmp_path / "ended").unlink()
    said_of_the_writer(page, "stopped")
    assert "killed" in page.evaluate("document.getElementById('notice').innerText")
    (tmp_path / ".lock").unlink()
    said_of_the_writer(page, "connected")
    assert page.said() == []


def busy_s(page: Any) -> float:
    """Processor time of the page since it was asked to count: a busy machine does not make it longer."""
    told = page.call("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in told if each["name"] == "TaskDuration"))


def load_s(page: Any, count: int) -> float:
    """What it takes to load the page once more, until everything is drawn."""
    page.call("Performance.enable", timeDomain="threadTicks")
    before = busy_s(page)
    page.evaluate("document.body.dataset.rows = 0")
    page.call("Page.reload")
    page.wait_for(rows(count))
    return busy_s(page) - before


def test_it_loads_within_a_second(browser: Any, serve: Callable[[Path], LiveServer], run: Path) -> None:
    page = browser.open(address(serve(run)), width=DESKTOP)
    page.wait_for(rows(STEPS))
    assert load_s(page, STEPS) < 1.0


def test_a_hundred_thousand_steps_stay_quick(
    browser: Any, serve: Callable[[Path], LiveServer], training: ModuleType, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "long")
    training.prolong(tmp_path / "long", MANY)
    server = serve(tmp_path / "long")
    while len(server.feed.series) < MANY:  # 230 MB; how long that takes is the machine's affair
        time.sleep(0.1)
    page = browser.open(address(server), width=DESKTOP)
    page.wait_for(rows(MANY))
    assert load_s(page, MANY) < 2.0
    before = busy_s(page)
    page.evaluate("(() => { for (let i = 0; i < 10; i++) drawCards(); })()")
    assert (busy_s(page) - before) / 10 < 0.1, "ten pictures a second leave nothing for a hand on the mouse"
    before = busy_s(page)
    page.evaluate(
        "(() => { for (let i = 0; i < 10; i++) { hovered = 1000 * i; cursors(visibleRange()); legends(); } })()"
    )
    assert (busy_s(page) - before) / 10 < 0.02
    size = page.evaluate("performance.getEntriesByType('navigation')[0].transferSize")
    assert size < 100_000, "the page itself is small, whatever the run"
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    assert page.said() == []
