"""What the scripts of this folder share: lines on standard output, a clock, and a report that is kept whatever happens."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VOCAB = 151_936
FAMILIES = ("qwen3", "gemma3", "qwen3-moe")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and the seconds that it took on the GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def size() -> argparse.Namespace:
    """How much is asked for on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--sequences", type=int, default=224)
    parser.add_argument("--small", action="store_true", help="two layers, to look at the script itself")
    return parser.parse_args()


def report_name(script: str, family: str) -> str:
    """Of the first family, the script's own name."""
    return script if family == FAMILIES[0] else f"{script}-{family}"


@contextmanager
def reported(name: str) -> Iterator[dict[str, Any]]:
    """A report that is told at the end, and written to $OUT where that is set."""
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin = time.perf_counter()
    try:
        yield report
    finally:
        report["seconds"] = round(time.perf_counter() - begin, 1)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], f"{name}.json").write_text(json.dumps(report, indent=1))
        say(json.dumps(report, indent=1))
