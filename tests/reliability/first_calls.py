"""Fresh processes that each compute one rotary table on several threads: how many get it wrong?

python tests/reliability/first_calls.py --processes 2000            # as torch comes
python tests/reliability/first_calls.py --processes 2000 --settle   # as our models and engine do it
MKL_CBWR=AVX2 python tests/reliability/first_calls.py --processes 2000
"""

import argparse
import os

import torch

from zerodrift.models.first_calls import settle_first_calls

# A forked process has not called anything yet: importing torch, which takes seconds, is done once.
POSITIONS, FREQUENCIES = 1024, 32
TOLERANCE = 1e-6
"""Right cosines are within 4e-8, those of the wrong kernel up to 1.5e-4 off."""


def wrong_tables(processes: int, threads: int, *, settle: bool, enough: int | None = None) -> int:
    """How many of `processes` got a wrong table; stops after `enough` of them."""
    wrong = 0
    for _ in range(processes):
        wrong += _one_process(threads, settle=settle)
        if wrong == enough:
            break
    return wrong


def _one_process(threads: int, *, settle: bool) -> bool:
    child = os.fork()
    if child == 0:
        status = 2
        try:
            torch.set_num_threads(threads)
            if settle:
                settle_first_calls()
            status = int(_is_wrong())
        finally:
            os._exit(status)
    _, state = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(state)
    assert status in (0, 1), f"a process ended with {status}"
    return status == 1


def _is_wrong() -> bool:
    frequencies = torch.tensor([1e6 ** (-i / FREQUENCIES) for i in range(FREQUENCIES)])
    angles = torch.arange(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    table = angles.cos()
    return bool(((table.double() - angles.double().cos()).abs() > TOLERANCE).any())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--enough", type=int, help="stop after so many wrong ones")
    given = parser.parse_args()
    wrong = wrong_tables(given.processes, given.threads, settle=given.settle, enough=given.enough)
    stopped = ", and the rest were not started" if wrong == given.enough else ""
    said = (
        f"{wrong} of {given.processes} processes with {given.threads} threads computed a wrong table{stopped}"
    )
    print(said)  # noqa: T201 - the figure is what this is for


if __name__ == "__main__":
    main()
