"""Have oneMKL choose its kernels before two threads ask at once.

oneMKL looks up each vector function at that function's first call. Where several threads make it together, one of
them can get the kernel of least accuracy for its part of that call: a rotary table whose cosines are 1.5e-4 off in
half of its rows, in 5 of 4,000 fresh processes with two threads (pytorch#188792, open; torch 2.13 has oneMKL 2024.2).
Nothing that a process does later shows it, and the model computes with that table for as long as it lives.
"""

import functools

import torch

FUNCTIONS = (
    torch.cos,
    torch.sin,
    torch.exp,
    torch.expm1,
    torch.log,
    torch.log1p,
    torch.sqrt,
    torch.tanh,
    torch.erf,
)
"""What models, samplers and rotary tables are made of, as far as torch gives it to oneMKL."""


@functools.cache
def settle_first_calls() -> None:
    """Call each on one number, which no second thread shares. Costs 13 ms, once in a process."""
    for dtype in (torch.float32, torch.float64):
        for function in FUNCTIONS:
            function(torch.ones(1, dtype=dtype))
