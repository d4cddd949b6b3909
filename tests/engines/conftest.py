"""Servers that start in half of the time, but for a test that gives them a PYTHONPATH of its own."""

from pathlib import Path

import pytest

from zerodrift.backends import vllm_launch


@pytest.fixture(scope="session", autouse=True)
def forked_servers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vllm_launch.DEFAULTS, "PYTHONPATH", str(Path(__file__).with_name("forking")))
        yield
