from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import Layer
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.sampling import write_model_with_defaults

NEW = WeightVersion("new")


class Elsewhere:
    """An engine of which nothing is known but the protocol, as one behind HTTP."""

    name = "elsewhere"

    def __init__(self, hidden: ReferenceBackend, *without: Capability) -> None:
        self._hidden = hidden
        self.capabilities = hidden.capabilities - set(without)
        self.max_model_len = hidden.max_model_len
        for method in ("fingerprint", "generate", "score", "tokenize", "render_chat"):
            setattr(self, method, getattr(hidden, method))
        for method in ("load_weights", "reset_cache", "close"):
            setattr(self, method, getattr(hidden, method))


@pytest.fixture(scope="session")
def llama() -> ReferenceBackend:
    """Shared: tests that load weights make their own."""
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def exact() -> ExactBackend:
    """As above; it streams."""
    return ExactBackend("testbed:llama")


@pytest.fixture(scope="session")
def mistral() -> ReferenceBackend:
    return ReferenceBackend("testbed:mistral")


@pytest.fixture(scope="session")
def with_defaults(tmp_path_factory: pytest.TempPathFactory) -> ReferenceBackend:
    return ReferenceBackend(
        write_model_with_defaults("testbed:llama", tmp_path_factory.mktemp("defaults") / "model")
    )


@pytest.fixture(scope="session")
def elsewhere(llama: ReferenceBackend) -> Callable[..., Any]:
    return lambda *without: Elsewhere(llama, *without)


@pytest.fixture
def fresh() -> ReferenceBackend:
    """An engine of one's own, to load weights into."""
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def update(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def updated(update: Path) -> ReferenceBackend:
    """A sound engine after that step."""
    engine = ReferenceBackend("testbed:llama")
    engine.load_weights(update, NEW)
    return engine


@pytest.fixture(scope="session")
def host(
    llama: ReferenceBackend, mistral: ReferenceBackend, with_defaults: ReferenceBackend, exact: ExactBackend
) -> Callable[[Fault], Backend]:
    """An engine that a fault can be planted in; a fault of weights gets one of its own."""

    def choose(fault: Fault) -> Backend:
        if Need.SLIDING_WINDOW in fault.needs:
            return mistral
        if Need.STREAM in fault.needs:
            return exact
        if Need.GENERATION_DEFAULTS in fault.needs:
            return with_defaults
        return ReferenceBackend("testbed:llama") if Need.SYNC in fault.needs else llama

    return choose


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[Request]]:
    """Requests with prompts of the given lengths, BOS first, and whatever sampling parameters."""

    def make(*lengths: int, **sampling: Any) -> list[Request]:
        values = {"temperature": 0.8, "max_tokens": 6, **sampling}
        return [
            Request(
                Prompt((0, *((37 * place + 101 * row) % 500 + 4 for place in range(length - 1)))),
                SamplingParams(**{"seed": 11 + row, **values}),
            )
            for row, length in enumerate(lengths)
        ]

    return make


@pytest.fixture(scope="session")
def tell() -> Callable[[Sequence[Answer]], list[Completion]]:
    """Every completion, in order."""
    return lambda answers: [completion for answer in answers for completion in answer.completions]


@pytest.fixture(scope="session")
def same() -> Callable[[Sequence[Completion], Sequence[Completion]], bool]:
    """Equal tokens, and logprobs equal up to rounding: an engine that batches otherwise gives other last bits."""

    def compare(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
        return [each.token_ids for each in ours] == [each.token_ids for each in theirs] and all(
            a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in zip(ours, theirs, strict=True)
        )

    return compare


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`fault` runs over all faults of engines, `trainer_fault` over those of the trainer."""
    for name, of_trainer in (("fault", False), ("trainer_fault", True)):
        if name in metafunc.fixturenames:
            chosen = [f for f in FAULTS.values() if (f.kind is Layer.TRAINER) is of_trainer]
            metafunc.parametrize(name, chosen, ids=[each.spec for each in chosen])
