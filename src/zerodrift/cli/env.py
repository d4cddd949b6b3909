"""`zerodrift env`: what do the numbers depend on, here? Versions, instruction set, threads, devices."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zerodrift import __version__
from zerodrift.cli import console
from zerodrift.cli.console import JsonOption

if TYPE_CHECKING:
    from types import ModuleType

PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "tokenizers")


def command(
    as_json: JsonOption = False,
) -> None:
    """Show versions, processor, threads and devices.

    Two machines that differ here may differ in the last bits of every logprob.
    Attach the output to a bug report:

    $ zerodrift env --json > environment.json
    """
    from zerodrift.view.run_directory import flattened

    facts = collect(_torch())
    if as_json:
        console.say_json(facts)
    else:
        console.say("\n".join(f"{name:<24}{value}" for name, value in flattened(facts)))


def beside_a_run() -> bytes:
    """As `environment.json` of a run directory holds it; what runs has loaded torch anyway."""
    import torch

    return msgspec.json.encode(collect(torch))


def collect(torch: "ModuleType | None") -> dict[str, Any]:
    """Everything here that may change the last bit of a logprob; null is what is not installed or not set."""
    return {
        "zerodrift": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        # The instruction set that torch's kernels use.
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if torch else None,
        # That this process may run on.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        # Their number changes the order of sums.
        "threads": {
            "torch": str(torch.get_num_threads()) if torch else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
            "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS"),
        },
        "cuda": torch.version.cuda if torch else None,
        "devices": cuda_devices(torch) if torch else [],
    }


def cpu_model(cpuinfo: Path) -> str:
    """The processor's own name for itself; Linux keeps it in `cpuinfo`, others tell Python."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cuda_devices(torch: Any) -> list[str]:
    """Name, compute capability and memory of each device."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        f"{device.name} (sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB)"
        for device in found
    ]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> "ModuleType | None":
    try:
        import torch
    except ImportError:
        return None
    return torch
