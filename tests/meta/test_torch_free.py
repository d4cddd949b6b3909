"""Decision code runs inside any trainer's environment: importing all of it must not bring torch along."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("core", "config", "records", "stats", "view", "doctor", "monitor", "web")
SERVE = ("access", "app", "asked", "control_wire", "figures", "openapi", "protocol", "wire", "shadow.app")
MODULES = ("sample", "plan", "limits", "blocks", "prefix_cache", "scheduler")


def modules_of(package: str) -> list[str]:
    where = import_module(f"zerodrift.{package}").__path__
    return [f"zerodrift.{package}", *(m.name for m in pkgutil.walk_packages(where, f"zerodrift.{package}."))]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_no_torch(package: str) -> None:
    assert heavy_after(modules_of(package)) == "", (
        "the linter looks at direct imports; this looks at all of them"
    )


def test_the_engines_decisions_import_no_torch() -> None:
    assert heavy_after([f"zerodrift.engine.{name}" for name in MODULES]) == ""


def test_the_checklists_decisions_import_no_torch() -> None:
    assert heavy_after(["zerodrift.audit.checklist", "zerodrift.audit.history"]) == ""


def test_whom_a_server_lets_in_is_decided_without_torch() -> None:
    assert heavy_after([f"zerodrift.serve.{name}" for name in SERVE]) == ""


def test_the_decisions_of_training_import_no_torch() -> None:
    names = ("advantage", "buffer", "comparison", "story")
    assert heavy_after([f"zerodrift.train.{name}" for name in names]) == ""


def test_it_would_be_seen() -> None:
    assert "torch" in heavy_after(["zerodrift.sampler.processing"])


def heavy_after(names: list[str]) -> str:
    """Which heavy packages a fresh interpreter holds after importing `names`."""
    program = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)), end='')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
