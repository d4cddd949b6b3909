"""`zerodrift bisect` as a command: pip, environments, servers and audits are real; the releases are a few lines each."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DOES_NOT_START = "sys.exit('this release needs a GPU')"
HANGS = "import time; print('hanging', flush=True); time.sleep(600)"
FEW = ("validation.num_prompts=16", "validation.equivalence_trials=16", "validation.max_tokens=16")


@pytest.fixture(scope="module")
def index(script, tmp_path_factory):
    """Seven releases: the third does not start, the fourth does not install, and from the fifth on seeds draw otherwise."""
    tiny, directory = script("unit/bisect/tiny_index"), tmp_path_factory.mktemp("index")
    for number in range(1, 8):
        tiny.write_release(
            directory,
            f"0.{number}.0",
            seeds_from=10**6 if number >= 5 else 0,
            first=DOES_NOT_START if number == 3 else "",
            needs=["nobody-has-this"] if number == 4 else [],
        )
    tiny.write_release(directory, "0.9.0", first=HANGS)
    for project in ("pip", "setuptools"):
        tiny.write_wheel(directory, project, "99.0", {})
    return directory


@pytest.fixture(scope="module")
def upstream(script, tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    with script("reliability/serving_process").served(root, model="testbed:qwen3") as server:
        yield server.url


@pytest.fixture
def bisect(index, upstream, tmp_path):
    """The command, with these words; what it prints is read as JSON."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "UPSTREAM": upstream}
    few = [word for each in FEW for word in ("--set", each)]

    def command(*words):
        out = ["--out", str(tmp_path / "search")]
        return subprocess.Popen(
            [sys.executable, "-m", "zerodrift.cli.main", "bisect", *words, *few, *out],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return command


def answered(process, code):
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, err
    assert out, err
    return json.loads(out), err


def test_the_release_is_found_past_two_that_cannot_be_judged(bisect, tmp_path):
    found, told = answered(bisect("0.1.0", "0.7.0", "--json"), 3)
    assert (found["kind"], found["before"], found["after"]) == ("sampling", "0.2.0", "0.5.0")
    assert found["skipped"] == ["0.3.0", "0.4.0"]
    said = {each["name"]: each["says"] for each in found["looked"]}
    assert "needs a GPU" in said["0.3.0"]
    assert "nobody-has-this" in said["0.4.0"]
    assert said["0.2.0"] == "as 0.1.0"
    assert "note: 0.5.0: as 0.7.0" in told
    assert not (tmp_path / "search" / "environments").exists()
    # Nothing is left to do, and it says the same.
    again, told = answered(bisect("0.1.0", "0.7.0", "--json"), 3)
    assert again == found
    assert "is next" not in told


def test_the_flag_is_found_among_those_of_two_lines(bisect, tmp_path):
    words = ["--release", "0.1.0", "--flags", "--a 1", "--flags", "--b --other-seeds --c 3"]
    found, _ = answered(bisect(*words, "--json"), 0)
    assert (found["kind"], found["after"], found["of"]) == ("sampling", "--other-seeds", 5)
    assert not (tmp_path / "search" / "environments").exists()


def test_interrupted_it_leaves_nothing_running_or_installed_and_goes_on(bisect, tmp_path):
    process = bisect("0.7.0", "0.9.0", "--json")
    log = tmp_path / "search" / "001-0.9.0" / "vllm.log"
    deadline = time.monotonic() + 600
    while not (log.exists() and "hanging" in log.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    second = bisect("0.7.0", "0.9.0")
    _, refused = second.communicate(timeout=120)
    assert second.returncode == 2
    assert "another process" in refused
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "repeat the same command" in told
    assert not (tmp_path / "search" / "environments").exists()
    assert (tmp_path / "search" / "000-0.7.0" / "tried.json").is_file()
    assert not running("0.9.0/bin/python")


def running(words):
    """Command lines of live processes that hold these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line:
            found.append(line)
    return found
