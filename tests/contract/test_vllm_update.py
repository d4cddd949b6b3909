"""Which way weights take into a vLLM server is found by asking it; and whether our launcher turns the plugin on."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerodrift.backends import vllm_launch
from zerodrift.backends.http import HttpClient
from zerodrift.backends.vllm_facts import ServerInfo
from zerodrift.backends.vllm_launch import transfer_flags
from zerodrift.backends.vllm_update import FLAGS, LABEL, PHASES, RELOAD, UpdatePath, find_path
from zerodrift.core.errors import EngineError
from zerodrift.core.version import WeightVersion

OURS = ServerInfo({"weight_transfer_config": {"backend": "zerodrift"}})
EVERYTHING = {*PHASES, RELOAD, LABEL}
RELOADS = UpdatePath(by_transfer=False, reloads=True, labelled=True)


def having(*routes: str) -> Callable[[str], bool]:
    return lambda path: path in routes


@pytest.mark.parametrize(
    ("info", "routes", "path"),
    [
        (OURS, EVERYTHING, UpdatePath(by_transfer=True, reloads=True, labelled=True)),
        (OURS, EVERYTHING - {"/finish_weight_update"}, RELOADS),
        (None, EVERYTHING, RELOADS),
        (ServerInfo({"weight_transfer_config": None}), EVERYTHING, RELOADS),
        (ServerInfo({"weight_transfer_config": {"backend": "nccl"}}), EVERYTHING, RELOADS),
        (OURS, {*PHASES}, UpdatePath(by_transfer=True, reloads=False, labelled=False)),
        (None, set(), UpdatePath(by_transfer=False, reloads=False, labelled=False)),
    ],
)
def test_the_four_phases_are_taken_where_the_engine_is_ours(info, routes, path):
    assert find_path(info, having(*routes)) == path
    assert path.exists is bool(routes)


@pytest.fixture
def http(loopback):
    for route in EVERYTHING:
        loopback.routes[f"POST {route}"] = lambda call, handler: (200, {})
    with contextlib.closing(HttpClient(loopback.url)) as client:
        yield client


def test_the_label_comes_with_the_last_phase(http, loopback):
    find_path(OURS, having(*EVERYTHING)).push(http, Path("/weights"), WeightVersion("step-3"))
    assert [(call.path, call.body) for call in loopback.calls] == [
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"directory": "/weights"}}),
        ("/finish_weight_update", {"weight_version": "step-3"}),
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_fails_ends_it(http, loopback, phase):
    loopback.routes[f"POST {phase}"] = lambda call, handler: (500, {"error": {"message": "torn"}})
    with pytest.raises(EngineError, match="torn"):
        find_path(OURS, having(*EVERYTHING)).push(http, Path("/weights"), WeightVersion("step-3"))
    assert loopback.calls[-1].path == phase


ANSWERS = """
import sys
assert sys.argv[1] == "-c"
print('''{}''')
"""


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        ('["lora", "zerodrift"]', list(FLAGS)),
        ('["lora"]', []),
        ("null", []),
        ("what?", []),
    ],
)
def test_the_plugin_is_turned_on_where_it_is_installed(interpreter, answer, flags):
    assert transfer_flags(interpreter(source=ANSWERS.format(answer)), {}) == flags


def test_a_list_of_plugins_that_leaves_it_out_is_obeyed(interpreter):
    python = interpreter(source=ANSWERS.format('["zerodrift"]'))
    assert transfer_flags(python, {"VLLM_PLUGINS": "lora"}) == []
    assert transfer_flags(python, {"VLLM_PLUGINS": "lora,zerodrift"}) == list(FLAGS)


def test_our_own_environment_holds_no_such_plugin():
    assert transfer_flags(sys.executable, {}) == []


def test_no_interpreter_is_left_to_the_launcher(tmp_path):
    assert transfer_flags(tmp_path / "nothing", {}) == []


def test_an_interpreter_that_hangs_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_launch, "PATIENCE_S", 0.2)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 5\n")
    script.chmod(0o755)
    with pytest.raises(EngineError, match=r"0\.2"):
        transfer_flags(script, {})
