import pytest

from zerodrift.backends.reference import ReferenceBackend


@pytest.fixture(scope="session")
def _reference():
    return ReferenceBackend("testbed:llama", batch=4)


@pytest.fixture
def reference(_reference):
    """Shared by all tests of this folder: to be asked, not to be changed."""
    version = _reference.version
    yield _reference
    assert _reference.version == version
