"""Which way weights take into a vLLM server is found by asking it; and whether our launcher turns the plugin on."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pretend import KINDS

from zerodrift import models
from zerodrift.backends import vllm_launch
from zerodrift.backends.http import HttpClient
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_facts import ServerInfo
from zerodrift.backends.vllm_launch import transfer_flags
from zerodrift.backends.vllm_update import FLAGS, LABEL, PHASES, RELOAD, UpdatePath, find_path
from zerodrift.core.errors import EngineError
from zerodrift.core.version import WeightVersion
from zerodrift.sync.target import ServerTarget
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.of_model import update_of

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


@pytest.mark.parametrize("says", [True, False])
def test_the_cache_is_reset_before_anybody_goes_on(loopback, tmp_path, closing, says):
    """A server that does not say whether it forgot is looked at afterwards: paused, it would answer nothing."""
    server = next(iter(KINDS.values()))(loopback)
    reset = (200, {"success": True}) if says else (200, None)
    loopback.routes["POST /reset_prefix_cache"] = lambda *_: reset
    for route in ("/pause", "/pause?mode=wait", "/resume"):
        loopback.routes[f"POST {route}"] = lambda *_: (200, {})
    backend = closing(VllmBackend(server.url))
    model = models.load("testbed:qwen3")
    target = ServerTarget(
        backend, tmp_path / "exchange", models.materialise("testbed:qwen3", tmp_path / "A"), name="it"
    )
    target.prepare(update_of(model, "step 1"), checkpoint_state(model))
    loopback.calls.clear()
    with contextlib.nullcontext() if says else pytest.raises(EngineError, match=r"nobody can say|came from"):
        target.publish()
    paths = [call.path for call in loopback.calls]
    order = [paths.index(path) for path in ("/pause?mode=wait", RELOAD, "/reset_prefix_cache", "/resume")]
    assert order == sorted(order)
    assert not any("completions" in path for path in paths[: paths.index("/resume")])
