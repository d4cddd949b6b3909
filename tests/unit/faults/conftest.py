import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.faults.support import NEW

from zerodrift import models
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.fault import Need
from zerodrift.faults.sampling import write_model_with_defaults


@pytest.fixture(scope="session")
def llama():
    """Shared: tests that load weights make their own."""
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def exact():
    """As above; it streams."""
    return ExactBackend("testbed:llama")


@pytest.fixture(scope="session")
def mistral():
    return ReferenceBackend("testbed:mistral")


@pytest.fixture(scope="session")
def with_defaults(tmp_path_factory):
    return ReferenceBackend(
        write_model_with_defaults("testbed:llama", tmp_path_factory.mktemp("defaults") / "model")
    )


@pytest.fixture
def fresh():
    """An engine of one's own, to load weights into."""
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def update(tmp_path_factory):
    """The llama testbed after a training step in which every tensor moved."""
    directory = models.materialise("testbed:llama", tmp_path_factory.mktemp("update") / "model")
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def updated(update):
    """A sound engine after that step."""
    engine = ReferenceBackend("testbed:llama")
    engine.load_weights(update, NEW)
    return engine


@pytest.fixture(scope="session")
def host(llama, mistral, with_defaults, exact):
    """An engine that a fault can be planted in; a fault of weights gets one of its own."""

    def choose(fault):
        if Need.SYNC in fault.needs:
            return ReferenceBackend("testbed:llama")
        fitting = {
            Need.SLIDING_WINDOW: mistral,
            Need.STREAM: exact,
            Need.GENERATION_DEFAULTS: with_defaults,
        }
        return next((fitting[need] for need in fault.needs if need in fitting), llama)

    return choose
