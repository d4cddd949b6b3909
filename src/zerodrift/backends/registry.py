"""From a configuration to an engine: one name, one adapter, imported when it is asked for."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift.backends.base import Backend
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError

IN_PROCESS = frozenset({"exact", "reference"})


class Served(NamedTuple):
    """What an engine is to serve."""

    model: str
    dtype: str
    """`auto` leaves it to the engine."""


Opener = Callable[[EngineConfig, Served, Path], AbstractContextManager[Backend]]


def check_engine(config: EngineConfig) -> None:
    """`config` names an engine that exists, and settles how it is reached; asked before anything is loaded."""
    if config.name not in OPENERS:
        near = difflib.get_close_matches(config.name, OPENERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no engine is called {config.name!r}; there are {', '.join(OPENERS)}{hint}")
    if config.name not in IN_PROCESS and config.url is None and config.python is None:
        raise ConfigError(
            "engine.url and engine.python are both null: give the address of a running server (--url), or the "
            f"interpreter of an environment with {config.name} (--set engine.python=…/bin/python) to start one"
        )
    if config.name in IN_PROCESS and (config.url or config.python or config.args or config.env):
        # Without this, an audit of a server whose kind was forgotten would pass: of the reference with itself.
        raise ConfigError(
            f"engine {config.name!r} runs in this process, while url={config.url!r}, python={config.python!r}, "
            f"args={list(config.args)} and env={dict(config.env)} are for a server; name its kind: --engine vllm or llama-cpp"
        )


def open_engine(config: EngineConfig, served: Served, logs: Path) -> AbstractContextManager[Backend]:
    """The engine that `config` names; closed, and stopped if we started it, on leaving."""
    check_engine(config)
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

    options: dict[str, Any] = {
        "model": config.served_model,
        "api_key": api_key(config),
        "timeout_s": config.request_timeout_s,
    }
    if config.url is not None:
        yield from _connected(VllmBackend(config.url, **options))
        return
    with launch_vllm(
        config.python or "",
        served.model,
        flags(config, served.dtype),
        config.env,
        logs / "vllm.log",
        timeout_s=config.startup_timeout_s,
    ) as server:
        yield from _connected(VllmBackend(server.url, **options))


@contextmanager
def _llama_cpp(config: EngineConfig, served: Served, logs: Path) -> Iterator[Backend]:
    from zerodrift.backends.llama_cpp_launch import launch_llama_cpp, settings
    from zerodrift.backends.openai import OpenAIBackend
    from zerodrift.backends.openai_dialects import LLAMA_CPP
    from zerodrift.core.completion import LogprobKind

    options: dict[str, Any] = {
        # Asked for call by call, so that a server which runs already obeys as well.
        "kind": LogprobKind(config.logprobs_mode.removesuffix("_logprobs")),
        "model": config.served_model,
        "api_key": api_key(config),
        "timeout_s": config.request_timeout_s,
    }
    if config.url is not None:
        yield from _connected(OpenAIBackend(config.url, LLAMA_CPP, **options))
        return
    with launch_llama_cpp(
        config.python or "",
        served.model,
        settings(config, served.dtype),
        config.env,
        logs / "llama-cpp.log",
        timeout_s=config.startup_timeout_s,
    ) as server:
        yield from _connected(OpenAIBackend(server.url, LLAMA_CPP, **options))


def api_key(config: EngineConfig) -> str | None:
    """The key of a server, out of the variable that the configuration names."""
    if config.api_key_env is None:
        return None
    if not (key := os.environ.get(config.api_key_env)):
        raise ConfigError(f"engine.api_key_env names {config.api_key_env}, which is not set; export it first")
    return key


def _connected(engine: Backend) -> Iterator[Backend]:
    try:
        yield engine
    finally:
        engine.close()


OPENERS: Mapping[str, Opener] = {
    "exact": _exact,
    "llama-cpp": _llama_cpp,
    "reference": _reference,
    "vllm": _vllm,
}
