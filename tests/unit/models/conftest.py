from pathlib import Path

import pytest
import torch

from zerodrift.models import testbed, tokenizer_testbed
from zerodrift.models.export import materialise
from zerodrift.models.testbed_config import CONFIGS


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizer_testbed.build()


@pytest.fixture(scope="session")
def words(tokenizer):
    """`words(rows, length, seed)`: ids drawn from the tokenizer's own text, in random order."""
    ids = torch.tensor(tokenizer.encode(tokenizer_testbed.TEXT, verbose=False))

    def draw(rows: int, length: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return ids[torch.randint(len(ids), (rows, length), generator=generator)]

    return draw


@pytest.fixture(scope="session", params=list(CONFIGS))
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name):
    return testbed.build(name)


@pytest.fixture(scope="session")
def written(name, tmp_path_factory) -> Path:
    """Each built-in as a directory; read it, do not change it."""
    return materialise(f"testbed:{name}", tmp_path_factory.mktemp("written") / name)


@pytest.fixture(scope="session")
def _llama_files(tmp_path_factory) -> Path:
    return materialise("testbed:llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama_directory(_llama_files, tmp_path) -> Path:
    """A model directory of one's own, to damage."""
    directory = tmp_path / "llama"
    directory.mkdir()
    for path in _llama_files.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory
