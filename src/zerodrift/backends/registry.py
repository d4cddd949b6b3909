"""From a configuration to an engine: one name, one adapter, imported when it is asked for."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from zerodrift.backends.base import Backend
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError


class Served(NamedTuple):
    """What an engine is to serve."""

    model: str
    dtype: str
    """`auto` leaves it to the engine."""


Opener = Callable[[EngineConfig, Served, Path], AbstractContextManager[Backend]]


def open_engine(config: EngineConfig, served: Served, logs: Path) -> AbstractContextManager[Backend]:
    """The engine that `config` names; closed, and stopped if we started it, on leaving."""
    if config.name not in OPENERS:
        near = difflib.get_close_matches(config.name, OPENERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no engine is called {config.name!r}; there are {', '.join(OPENERS)}{hint}")
    return OPENERS[config.name](config, served, logs)


@contextmanager
def _reference(config: EngineConfig, served: Served, logs: Path) -> Iterator[Backend]:
    from zerodrift.backends.reference import ReferenceBackend
    from zerodrift.core.completion import LogprobKind

    kind = LogprobKind.RAW if config.logprobs_mode == "raw_logprobs" else LogprobKind.PROCESSED
    # Not the reference's own fp64: an engine rounds, and an audit of one that does not would show nothing.
    dtype = "float32" if served.dtype == "auto" else served.dtype
    engine = ReferenceBackend(served.model, dtype=dtype, kind=kind)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def _exact(config: EngineConfig, served: Served, logs: Path) -> Iterator[Backend]:
    from zerodrift.backends.exact import ExactBackend

    dtype = "float32" if served.dtype == "auto" else served.dtype
    yield from _connected(ExactBackend(served.model, dtype=dtype, config=config))


@contextmanager
def _vllm(config: EngineConfig, served: Served, logs: Path) -> Iterator[Backend]:
    from zerodrift.backends.launch import launch_vllm
    from zerodrift.backends.vllm import VllmBackend
    from zerodrift.backends.vllm_flags import flags

    if config.url is not None:
        yield from _connected(VllmBackend(config.url, timeout_s=config.request_timeout_s))
        return
    if config.python is None:
        raise ConfigError(
            "engine.url and engine.python are both null: give the address of a running server (--url), or the "
            "interpreter of an environment with vLLM (--set engine.python=…/bin/python) to start one"
        )
    with launch_vllm(
        config.python,
        served.model,
        flags(config, served.dtype),
        config.env,
        logs / "vllm.log",
        timeout_s=config.startup_timeout_s,
    ) as server:
        yield from _connected(VllmBackend(server.url, timeout_s=config.request_timeout_s))


def _connected(engine: Backend) -> Iterator[Backend]:
    try:
        yield engine
    finally:
        engine.close()


OPENERS: Mapping[str, Opener] = {"exact": _exact, "reference": _reference, "vllm": _vllm}
