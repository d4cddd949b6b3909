"""A process whose first cosines come from two threads at once may compute with wrong ones ever after."""

import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).with_name("first_calls.py")
PROCESSES = 6000
"""Some nine of them are wrong where nothing is done about it."""

LOADS = """
import torch
torch.set_num_threads(2)
from zerodrift.exact.ops.cpu import op_set
from zerodrift.models import first_calls, loading, testbed

called, entered = [], []
def remembering(function):
    return lambda x: called.append((function.__name__, x.dtype, x.numel()))
def first(function):
    def enter(*args, **options):
        entered.append(len(called))
        return function(*args, **options)
    return enter
first_calls.FUNCTIONS = tuple(map(remembering, first_calls.FUNCTIONS))
build = testbed.build
{opens}
assert entered and entered[0] == len(called) == 2 * len(first_calls.FUNCTIONS), (entered, called)
assert ("cos", torch.float32, 1) in called
"""
OPENS = {
    "a model": """
testbed.build = first(build)
loading.load("testbed:llama")""",
    "a trainer's own model": """
from zerodrift import exact
op_set.prove_attention = first(op_set.prove_attention)
exact.prepare(build("llama", torch.float32))""",
}


@pytest.mark.parametrize("opens", OPENS.values(), ids=OPENS.keys())
def test_kernels_are_chosen_before_anything_is_computed(opens: str) -> None:
    subprocess.run([sys.executable, "-c", LOADS.format(opens=opens)], check=True, timeout=120)


def wrong_tables(*options: str) -> int:
    """In a process of its own: this one has called everything already."""
    command = [sys.executable, STORM, "--processes", str(PROCESSES), *options]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])


@pytest.mark.long
def test_no_process_computes_wrong_cosines() -> None:
    if not wrong_tables("--enough", "1"):
        pytest.skip(f"this machine's torch got {PROCESSES} first calls right: nothing to be saved from")
    assert wrong_tables("--settle") == 0
