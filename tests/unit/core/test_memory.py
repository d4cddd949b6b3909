import errno

import pytest
import torch

from zerodrift.core import memory


@pytest.mark.parametrize(
    ("error", "memory_ran_out"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
            ),
            True,
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_what_memory_that_ran_out_looks_like(error, memory_ran_out):
    assert memory.ran_out(error) is memory_ran_out


@pytest.mark.parametrize(
    ("limit", "in_use", "machine", "free"),
    [
        ("max", "1000", "MemTotal: 9 kB\nMemAvailable: 4 kB\n", 4096),
        ("5000", "2000", "MemAvailable: 4 kB\n", 3000),
        ("900000", "2000", "MemAvailable: 4 kB\n", 4096),
        (None, None, "MemAvailable: 4 kB\n", 4096),
        (None, None, None, None),
        ("5000", "2000", None, 3000),
    ],
)
def test_the_tighter_of_machine_and_container_counts(tmp_path, monkeypatch, limit, in_use, machine, free):
    for name, text in (("LIMIT", limit), ("IN_USE", in_use), ("MEMINFO", machine)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(memory, name, path)
    assert memory.free_on_host() == free
