"""`zerodrift env`: what do the numbers depend on, here? Versions, instruction set, threads, devices."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from zerodrift import __version__
from zerodrift.cli import console
from zerodrift.core.frozen import FrozenFacts

if TYPE_CHECKING:
    from types import ModuleType

PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "tokenizers")


class Environment(FrozenFacts, frozen=True, kw_only=True):
    """Everything on this machine that may change the last bit of a logprob."""

    zerodrift: str
    python: str
    platform: str
    packages: Mapping[str, str | None]
    """Installed version of each, None where there is none."""
    cpu: str
    """Model name of the processor."""
    cpu_capability: str | None
    """Instruction set that torch's kernels use; None without torch."""
    cores: int
    """Logical processors that this process may run on."""
    threads: Mapping[str, str | None]
    """Settings and values of the thread pools; their number changes the order of sums."""
    cuda: str | None
    """CUDA version that torch was built for; None without torch, or for a CPU build."""
    devices: tuple[str, ...]
    """CUDA devices in torch's order."""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports and scripts.")] = False,
) -> None:
    """Show versions, processor, threads and devices.

    Two machines that differ here may differ in the last bits of every logprob.
    Attach the output to a bug report:

    $ zerodrift env --json > environment.json
    """
    environment = collect(_torch())
    if as_json:
        console.say(msgspec.json.format(msgspec.json.encode(environment)).decode())
    else:
        console.say(describe(environment))


def beside_a_run() -> bytes:
    """As `environment.json` of a run directory holds it; what runs has loaded torch anyway."""
    import torch

    return msgspec.json.encode(collect(torch))


def collect(torch: "ModuleType | None") -> Environment:
    """Look around; `torch` is the module, or None where it is not installed."""
    return Environment(
        zerodrift=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _installed(name) for name in PACKAGES},
        cpu=cpu_model(Path("/proc/cpuinfo")),
        cpu_capability=torch.backends.cpu.get_cpu_capability() if torch else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads={
            "torch": str(torch.get_num_threads()) if torch else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
            "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS"),
        },
        cuda=torch.version.cuda if torch else None,
        devices=cuda_devices(torch) if torch else (),
    )


def describe(environment: Environment) -> str:
    """One fact per line, for people."""
    missing = "not installed"
    facts = {"zerodrift": environment.zerodrift, "python": environment.python}
    facts |= {name: found or missing for name, found in environment.packages.items()}
    facts |= {
        "platform": environment.platform,
        "cpu": environment.cpu,
        "cpu capability": environment.cpu_capability or f"unknown: torch is {missing}",
        "cores": str(environment.cores),
        "threads": ", ".join(f"{name} {value or 'unset'}" for name, value in environment.threads.items()),
        "cuda": environment.cuda or "none",
        "devices": ", ".join(environment.devices) or "none",
    }
    return "\n".join(f"{name:<16}{value}" for name, value in facts.items())


def cpu_model(cpuinfo: Path) -> str:
    """The processor's own name for itself; Linux keeps it in `cpuinfo`, others tell Python."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cuda_devices(torch: Any) -> tuple[str, ...]:
    """Name, compute capability and memory of each device."""
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        f"{device.name} (sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB)"
        for device in found
    )


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> "ModuleType | None":
    try:
        import torch
    except ImportError:
        return None
    return torch
