"""`zerodrift view`: what it says before it serves, and what it refuses."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from zerodrift.cli.main import main
from zerodrift.core.errors import ConfigError
from zerodrift.view.live.access import token_for
from zerodrift.view.live.server import LiveServer
from zerodrift.web.access import is_loopback, names_of


def refused(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["view", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_it_prints_where_it_is_serves_and_ends_with_an_interrupt(tmp_path):
    # Whoever runs tests in the background may have told them to ignore interrupts, and that is inherited.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from zerodrift.cli.main import main; main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "view", str(tmp_path / "later"), "--wait", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address, "loopback asks for no token"
        with urllib.request.urlopen(address[0], timeout=60) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "later" in told, "a directory that is not there is noted: it may be a typing mistake"


def test_what_cannot_be_served_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    assert refused(file) == 2
    assert refused(tmp_path / "mistyped", "--port", "0") == 2, "and not served without an end"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert refused(tmp_path, "--port", taken.getsockname()[1]) == 2
    assert refused(tmp_path, "--port", "70000") == 2
    assert refused(tmp_path, "--host", "no such host", "--port", "0") == 2
    assert refused(tmp_path, "--token-file", tmp_path / "none") == 2
    assert refused() == 2
    assert capsys.readouterr().err.count("config/invalid") == 5


@pytest.fixture
def served(monkeypatch):
    """What would be served, without an end, is served for no time."""

    def serve(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", serve)

    def view(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["view", *map(str, arguments), "--port", "0"])
        return ended.value.code

    return view


def test_a_directory_of_other_things_is_refused_by_what_it_holds(tmp_path, capsys, served):
    (tmp_path / "README.md").write_text("mine")
    for number in range(9):
        (tmp_path / f"notes-{number}").mkdir()
    assert served(tmp_path) == 2, "and not waited for without an end"
    told = " ".join(capsys.readouterr().err.split())
    assert "README.md" in told
    assert "7 more" in told
    assert "--wait" in told, "as for a training that writes beside other things"
    assert served(tmp_path, "--wait") == 0


def test_an_empty_directory_may_be_one_that_a_training_is_about_to_fill(tmp_path, capsys, served):
    assert served(tmp_path) == 0
    told = capsys.readouterr()
    assert "empty" in told.err, "but what the page waits for is said"
    assert "http://" in told.out


@pytest.mark.parametrize(
    "name",
    ["steps.jsonl", "monitor.json", ".lock", "archive", "index.sqlite", "config.yaml", "rank1/steps.jsonl"],
)
def test_what_a_run_begins_with_is_enough(tmp_path, name, served, capsys):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert served(tmp_path) == 0
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)
    assert token_for(host, None) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-3", "localhost.evil.example", ""])
def test_beyond_it_there_is_always_one(host):
    first, second = token_for(host, None), token_for(host, None)
    assert first is not None
    assert len(first) >= 32
    assert first != second


@pytest.mark.parametrize("content", ["", "short", "with space in it, long enough", "a" * 300, "é" * 20])
def test_a_token_that_is_none_is_refused(tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError):
        token_for("127.0.0.1", file)
    file.write_text("0123456789abcdef\n")
    assert token_for("127.0.0.1", file) == "0123456789abcdef"


def test_a_wildcard_is_no_name():
    for host in ("0.0.0.0", "::"):
        assert host not in names_of(host, ["proxy.example"])
        assert {"localhost", "proxy.example"} <= names_of(host, ["Proxy.Example"])
    assert socket.gethostname().lower() not in names_of("127.0.0.1") - {"localhost"}
