"""`zerodrift serve` from a shell: what it refuses to open, and how it comes to its end."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from zerodrift.cli.main import main

TOKEN = "a-token-of-some-length"
SHADOW = ("--shadow-of", "http://127.0.0.1:1")


@pytest.fixture
def token(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--unsafe-allow-unauthenticated"),
        (["--role", "training"], "--token-file"),
        (["--role", "nobody"], "serving, training"),
        (["--weight-root", "nowhere"], "nowhere"),
        (["--token-file", "nowhere"], "--token-file"),
        (["--host", "192.0.2.1", "--unsafe-allow-unauthenticated"], "cannot listen"),
        (["--drain-updates"], "--shadow-of"),
        (["--rescore-every", "5"], "--shadow-of"),
        ([*SHADOW, "--max-num-seqs", "5"], "--max-num-seqs"),
        ([*SHADOW, "--shadow-key-env", "ZERODRIFT_NOT_SET"], "ZERODRIFT_NOT_SET"),
        (["--shadow-of", "http://127.0.0.1:1/v1"], "http://HOST:PORT"),
        (["--receipts", "r"], "--shadow-of"),
        ([*SHADOW, "--require-receipt"], "--receipts DIR"),
        ([*SHADOW, "--receipts", "r"], "zerodrift sync key receipt.key"),
        ([*SHADOW, "--receipts", "r", "--receipt-key", "k"], "--weight-root"),
        (
            [*SHADOW, "--receipts", "r", "--receipt-key", "k", "--weight-root", "."],
            "zerodrift sync key PATH",
        ),
        (["--shadow-of", "http://192.0.2.1:1", "--host", "0.0.0.0"], "--unsafe-allow-unauthenticated"),
    ],
)
def test_what_must_not_be_opened_is_refused_before_a_model_is_loaded(arguments, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "no-such-model", "--port", "0", *arguments])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def ask(url, body, token):
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_it_says_where_it_listens_and_ends_when_what_is_in_flight_has(token):
    command = [
        sys.executable,
        "-m",
        "zerodrift.cli.main",
        "serve",
        "testbed:qwen3",
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    server = subprocess.Popen(
        [*command, "--role", "training", "--token-file", token],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    where = server.stdout.readline().split()[2]
    admin = server.stdout.readline().split()[-1]
    file = Path(server.stdout.readline().removeprefix("admin token: ").strip())
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{where}/v1/completions", {"prompt": [1]}, "wrong")
    assert refused.value.code == 403
    refused.value.close()
    admin_token = file.read_text().strip()
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{where}/abort_requests", {}, admin_token)
    assert refused.value.code == 403
    refused.value.close()
    assert ask(f"{admin}/abort_requests", {}, admin_token)["aborted"] == 0
    answers = []
    long = {"prompt": [1], "max_tokens": 100, "ignore_eos": True}
    request = threading.Thread(target=lambda: answers.append(ask(f"{where}/v1/completions", long, TOKEN)))
    request.start()
    metrics = urllib.request.Request(f"{where}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    shown = b"in_flight 0"
    while not answers and b"in_flight 0" in shown:
        with urllib.request.urlopen(metrics, timeout=60) as page:
            shown = page.read()
    assert not answers, "it ended before it was seen"
    server.send_signal(signal.SIGTERM)
    assert server.wait(120) == 0
    request.join()
    assert answers[0]["usage"]["completion_tokens"] == 100
    assert not file.exists()
    told = server.communicate()[1]
    assert told.index("loading testbed:qwen3") < told.index("stopped")
