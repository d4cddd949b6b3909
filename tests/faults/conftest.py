"""The matrix as a module, and references that are loaded once."""

from functools import cache

import pytest

from zerodrift.backends.reference import ReferenceBackend


@pytest.fixture(scope="session")
def matrix(script):
    """The module `matrix`: the same code that makes docs/faults.md."""
    return script("faults/matrix")


@pytest.fixture(scope="session")
def would_have_caught(script):
    """The module `would_have_caught`: the same code that makes docs/would-have-caught.md."""
    return script("faults/would_have_caught")


@pytest.fixture(scope="session")
def reference():
    """In fp64; no audit changes it."""
    return cache(ReferenceBackend)
