"""An engine seen through a fault: everything is passed on, except what the fault overrides.

The engine that was handed in is never changed by planting a fault; what must be changed is cloned first.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from zerodrift.backends.base import Backend
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, EngineFingerprint
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import WeightVersion

Plant = Callable[[Any], Any]
"""Backend to Backend; for a fault of the trainer, a transformers model to a Scorer."""


class FaultyBackend:
    """Delegates to `inner`; by itself it is no fault at all."""

    inside: ClassVar[bool] = False
    """Acts in the engine rather than on what it is sent or says: another fault may still be planted inside."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.max_model_len = inner.max_model_len

    def fingerprint(self) -> EngineFingerprint:
        """As the engine says: a fault does not announce itself."""
        return self.inner.fingerprint()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in request order."""
        return self.inner.generate(requests)

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """The fault as it is in `generate`, over what the engine beneath streams: never a stream without the fault."""
        inner = self.inner
        self.inner = Streamed(inner)
        try:
            return self.generate(requests)
        finally:
            self.inner = inner

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence."""
        return self.inner.score(sequences)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids that the engine makes of plain text."""
        return self.inner.tokenize(text)

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids that the engine makes of chat messages."""
        return self.inner.render_chat(messages, generation_prompt=generation_prompt)

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Replace the weights by those of a checkpoint directory."""
        self.inner.load_weights(directory, version)

    def reset_cache(self) -> None:
        """Forget every cached prefix."""
        self.inner.reset_cache()

    def close(self) -> None:
        """Close the engine beneath."""
        self.inner.close()


class Streamed(FaultyBackend):
    """An engine that answers by streaming."""

    inside = True

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """From the deltas of a stream."""
        return self.inner.stream(requests)


def innermost(engine: Backend) -> Backend:
    """The engine beneath all faults."""
    while isinstance(engine, FaultyBackend):
        engine = engine.inner
    return engine


def fact_of(engine: Backend, name: str) -> Any:
    """One of the `ModelFacts` of the engine's model; None where the engine does not know its model's files."""
    return getattr(getattr(innermost(engine), "facts", None), name, None)


def unstated_defaults(engine: Backend) -> dict[str, Any]:
    """Of the model's generation_config.json, what changes a request that does not state it."""
    neutral = SamplingParams()
    return {
        name: value
        for name, value in (fact_of(engine, "generation_defaults") or {}).items()
        # Every client states these two, and a default that is neutral changes nothing.
        if name not in {"temperature", "max_new_tokens"} and value != getattr(neutral, name)
    }


def host_in(engine: Backend) -> ReferenceBackend | ExactBackend | None:
    """The engine of our own inside which a fault can act; None where another engine or fault is in the way."""
    while isinstance(engine, FaultyBackend) and engine.inside:
        engine = engine.inner
    return engine if isinstance(engine, ReferenceBackend | ExactBackend) else None


def the_host(engine: Backend) -> ReferenceBackend | ExactBackend:
    """`host_in`, for a fault whose needs were checked before it was planted."""
    host = host_in(engine)
    assert host is not None, f"{engine.name} was not checked for an engine of our own inside"
    return host


def the_reference(engine: Backend) -> ReferenceBackend:
    """As above, for a fault that acts inside the reference alone."""
    reference = the_host(engine)
    assert isinstance(reference, ReferenceBackend), f"{engine.name} was not checked for a reference inside"
    return reference


def clone(engine: Backend) -> Backend:
    """An engine that shares today's weights and no future ones: `load_weights` replaces the model, never writes it.

    The exact engine has requests and caches of its own, so its clone is a second one, as the first was started.
    """
    if isinstance(engine, ExactBackend):
        return ExactBackend(engine.spec, dtype=engine.dtype, config=engine.config)
    twin = copy.copy(engine)
    if isinstance(twin, FaultyBackend):
        twin.inner = clone(twin.inner)
    return twin
