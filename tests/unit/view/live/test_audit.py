"""A directory of an audit: while it runs its answers are counted, and when it is done the page is its report."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from zerodrift.view.live.feed import Feed
from zerodrift.view.live.server import LiveServer


def test_answers_are_counted_until_there_is_a_verdict(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.poll()
    assert feed.status()["audit"] is None
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "rollouts.jsonl").write_text("{}\n{}\n{")
    feed.poll()
    assert feed.status()["audit"] == {"answers": 2, "finished": False}
    (tmp_path / "verdict.json").write_text("{}")
    feed.poll()
    assert feed.status()["audit"]["finished"]
    feed.close()


def test_a_finished_audit_is_its_report(
    tmp_path: Path, serve: Callable[..., LiveServer], script: Callable[[str], ModuleType]
) -> None:
    import http.client

    run = script("unit/view/example_runs").RUNS["failing"](tmp_path / "run")
    server = serve(run)
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        assert answer.status == 200
        assert "--logprobs-mode processed_logprobs" in body
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"


def test_a_disk_that_is_gone_for_a_while_is_said_and_tried_again(
    training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(training)
    working = feed._steps.read
    calls = []

    def failing() -> list[bytes]:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(116, "Stale file handle")
        return working()

    monkeypatch.setattr(feed._steps, "read", failing)
    told: list[str] = []
    tell = feed._tell_trouble
    monkeypatch.setattr(feed, "_tell_trouble", lambda says: (told.append(says), tell(says)))
    feed.start()
    while len(feed.series) < 6 or told[-1]:
        time.sleep(0.05)
    feed.close()
    assert "Stale file handle" in told[0]
    assert feed.status()["trouble"] == ""
