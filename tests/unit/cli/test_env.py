import json
import os
import sys
from pathlib import Path
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
    torch.backends = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2"))  # type: ignore[attr-defined]
    torch.get_num_threads = lambda: 7  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(cuda=cuda)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: cuda is not None, device_count=lambda: 2, get_device_properties=lambda _: device
    )
    return torch


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["zerodrift"] == __version__
    assert set(facts["packages"]) == set(env.PACKAGES)
    assert facts["cores"] >= 1


def test_text_has_one_fact_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["zerodrift", __version__]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_without_torch_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert env._torch() is None
    environment = env.collect(None)
    assert (environment.cpu_capability, environment.cuda, environment.devices) == (None, None, ())
    assert "cpu capability  unknown: torch is not installed" in env.describe(environment)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package",))
    environment = env.collect(None)
    assert environment.packages == {"no-such-package": None}
    assert "no-such-package not installed" in env.describe(environment)


def test_torch_threads_and_devices_are_read() -> None:
    environment = env.collect(fake_torch(cuda="13.0"))
    assert environment.cpu_capability == "AVX2"
    assert environment.threads["torch"] == "7"
    assert environment.cuda == "13.0"
    assert environment.devices == ("NVIDIA H200 (sm_90, 150 GiB)",) * 2
    assert env.collect(fake_torch(cuda=None)).devices == ()


def test_thread_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS 3, MKL_NUM_THREADS unset" in env.describe(env.collect(None))


def test_the_cpu_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2:80\nmodel name\t: Another\n")
    assert env.cpu_model(cpuinfo) == "Some CPU @ 2:80"
    cpuinfo.write_text("processor : 0\n")
    assert env.cpu_model(cpuinfo)
    assert env.cpu_model(tmp_path / "nothing")


def test_cores_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert env.collect(None).cores == os.cpu_count()
