import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from zerodrift import __version__
from zerodrift.cli import env
from zerodrift.cli.main import main


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["env", *arguments])
    assert caught.value.code == 0


def fake_torch(*, cuda: str | None) -> ModuleType:
    """As much of torch as `env` looks at, with two devices where there is CUDA."""
    torch = ModuleType("torch")
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 2**30)
    torch.backends = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2"))
    torch.get_num_threads = lambda: 7
    torch.version = SimpleNamespace(cuda=cuda)
    torch.cuda = SimpleNamespace(
        is_available=lambda: cuda is not None, device_count=lambda: 2, get_device_properties=lambda _: device
    )
    return torch


def test_as_json_and_as_one_fact_per_line(capsys):
    run("--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["zerodrift"] == __version__
    assert set(facts["packages"]) == set(env.PACKAGES)
    run()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["zerodrift"], lines["packages.torch"]) == (__version__, facts["packages"]["torch"])


def test_what_is_not_there_is_null(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package",))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    facts = env.collect(env._torch())
    assert facts["packages"] == {"no-such-package": None}
    assert facts["threads"] == {"torch": None, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": None}
    assert (facts["cpu_capability"], facts["cuda"], facts["devices"]) == (None, None, [])
    assert facts["cores"] == os.cpu_count()


def test_torch_threads_and_devices_are_read():
    facts = env.collect(fake_torch(cuda="13.0"))
    assert (facts["cpu_capability"], facts["threads"]["torch"], facts["cuda"]) == ("AVX2", "7", "13.0")
    assert facts["devices"] == ["NVIDIA H200 (sm_90, 150 GiB)"] * 2
    assert env.collect(fake_torch(cuda=None))["devices"] == []


def test_the_cpu_is_named(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2:80\nmodel name\t: Another\n")
    assert env.cpu_model(cpuinfo) == "Some CPU @ 2:80"
    cpuinfo.write_text("processor : 0\n")
    assert env.cpu_model(cpuinfo)
    assert env.cpu_model(tmp_path / "nothing")
