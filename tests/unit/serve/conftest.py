import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerodrift.engine.engine import Engine

sys.path.append(str(Path(__file__).parent))

from serving import MODEL, Served, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Another engine of the same model, to compare bits with."""
    return Engine(MODEL)
