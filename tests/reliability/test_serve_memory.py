"""What a server keeps for requests of many lengths: kernels that are made for each, and no more than so many of them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from hour_traffic import MODEL, Client
from serving_process import served

MOST_MIB = 70
"""For sixty lengths, with what a bounded cache of kernels may still hold; half a MiB for each of four kernels per length is 120."""


def resident_mib(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def test_lengths_that_were_never_asked_for_do_not_take_memory_for_ever(tmp_path):
    with served(tmp_path, "--max-model-len", "256", model=MODEL) as server:
        client = Client(server.url)

        def ask(lengths):
            for length in lengths:
                assert client.ask("/v1/token_logprobs", {"token_ids": [[5] * length]})[0] == 200

        ask(range(10, 30))
        before = resident_mib(server.process.pid)
        ask(range(100, 160))
        assert resident_mib(server.process.pid) - before < MOST_MIB
