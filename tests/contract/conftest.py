"""What the suites share: a server on loopback, things that are closed, checkpoints."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What the suites share are plain modules that find each other as scripts do.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("promises", "asking")

from loopback import Loopback, serving  # noqa: E402


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with serving() as server:
        yield server


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """What is handed to it is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda opened: stack.enter_context(contextlib.closing(opened))


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A script in the place of an engine's interpreter, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\n{source}")
        script.chmod(0o755)
        return script

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories with the weights of the testbed, with others, and with others of another shape."""
    from opened import write_checkpoints

    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
