"""`import zerodrift` must cost nothing: it runs inside other people's trainers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "scipy", "pyarrow", "plotly", "jinja2"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh Python has loaded after running `code`."""
    show = "print(file=sys.stderr); print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\n{show}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stderr.splitlines()[-1].split())


def least_s(*arguments: str) -> float:
    """The least processor time of five fresh Pythons. Not wall time, nor the median: a busy machine must not fail the test."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        after = os.times()
        times.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    return min(times)


@pytest.mark.parametrize(
    "code",
    [
        "import zerodrift",
        "from zerodrift import Completion, LogprobContract, Prompt, Request, SamplingParams",
        "from zerodrift.config.load import load; load(None)",
        "from zerodrift.cli.main import main; main(['--help'])",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    loaded = modules_after(code)
    assert "zerodrift" in loaded
    assert not loaded & HEAVY


def test_the_probe_would_see_a_heavy_module() -> None:
    assert "scipy" in modules_after("import scipy")


def test_the_clock_runs() -> None:
    assert least_s("-c", "sum(range(10**7))") > 0.05


def test_importing_takes_less_than_300_ms() -> None:
    assert least_s("-c", "import zerodrift") - least_s("-c", "pass") < 0.3


def test_help_takes_less_than_500_ms() -> None:
    assert least_s("-m", "zerodrift.cli.main", "--help") < 0.5


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).with_name("zerodrift")
    if not script.exists():
        pytest.skip("the package is on the path but not installed")
    run = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("zerodrift ")
