"""A real Chromium, driven over its debugging pipe: no port, no driver package, nothing but the browser.

`--dump-dom` would do for one look at the page. The pipe also sets a phone's true width (a window cannot be narrower
than 500 pixels), the colour scheme, and hears what the page complains about or asks the network for.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PATIENCE_S = 60.0


class Page:
    """One tab, with everything it said since it was opened."""

    def __init__(self, browser: "Browser", target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, parameters, self)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def said(self) -> list[str]:
        """Console messages, uncaught errors and what the browser itself logs, policy violations among them."""
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own included."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def wait_for(self, expression: str) -> None:
        """Until the expression is true on the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true in {PATIENCE_S:.0f} s"
            time.sleep(0.05)


class Browser:
    """A Chromium process; commands go in through its descriptor 3 and answers come out of 4."""

    def __init__(self, program: str, profile: Path) -> None:
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        # Out of the way of 3 and 4, which they become in the child.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (child_in, child_out)]
        log = os.open(profile / "chromium.log", os.O_WRONLY | os.O_CREAT, 0o600)
        self._pid = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={profile}"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
        )
        for end in (child_in, child_out, *ends, log):
            os.close(end)
        self._number, self._held, self._pages = 0, b"", dict[str, Page]()

    def open(self, place: Path | str, *, width: int, height: int = 844, dark: bool = False) -> Page:
        """A loaded page of a file, or of an address, in a window of that size and colour scheme."""
        target = self.call("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        attach = {"targetId": target, "flatten": True}
        page = Page(self, target, self.call("Target.attachToTarget", attach, None)["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        page.call("Emulation.setTouchEmulationEnabled", enabled=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        page.wait_for("document.readyState === 'complete' && location.protocol !== 'about:'")
        return page

    def call(self, method: str, parameters: dict[str, Any], page: Page | None) -> dict[str, Any]:
        """One command and its answer; events that arrive meanwhile go to their pages."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if page is not None:
            message["sessionId"] = page.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if (session := answer.get("sessionId")) in self._pages and "method" in answer:
                self._pages[session].events.append(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._held:
            readable, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert readable, f"chromium did not answer {method} within {PATIENCE_S:.0f} s"
            data = os.read(self._in, 2**20)
            assert data, f"chromium ended while it was asked for {method}"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def close_pages(self) -> None:
        """Pages of five megabytes add up on a small machine."""
        for page in self._pages.values():
            self.call("Target.closeTarget", {"targetId": page.target}, None)
        self._pages.clear()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        # The process that was started here, by its id; it takes its own children with it.
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of this folder."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.fail(
            "no Chromium was found, and these tests are about what a real browser does with the report: "
            "install it (Debian: apt-get install -y chromium), or leave them out with -m 'not browser'",
            pytrace=False,
        )
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The Chromium, without pages of earlier tests."""
    yield chromium
    chromium.close_pages()


@pytest.fixture(scope="session")
def example_runs(script: Callable[[str], ModuleType]) -> dict[str, Callable[[Path], Path]]:
    """The run directories of the unit tests."""
    runs: dict[str, Callable[[Path], Path]] = script("unit/view/example_runs").RUNS
    return runs
