"""From a configuration to an engine: one name, one adapter, imported when it is asked for."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerodrift.backends.base import Backend
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import CapabilityMissing, ConfigError

if TYPE_CHECKING:
    from zerodrift.backends.launch import LaunchedServer

IN_PROCESS = frozenset({"exact", "reference"})
STARTED_BY_HAND = {
    "sglang": "python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference",
}
"""Engines that are audited where they run, and how they are started."""
STARTED_FROM = {"llama-cpp": "xllamacpp", "vllm": "vLLM"}
"""Engines that we start, and what the environment must hold for that."""
IMPOSSIBLE = {
    "mlc-llm": "MLC LLM returns no token ids, only strings that several tokens share, so nobody can say whose logprobs "
    "it reports; its /v1/completions would have to return the sampled ids",
}
"""Engines that no adapter could be honest about."""


class ServedModel(NamedTuple):
    """What an engine is to serve."""

    model: str
    dtype: str
    """`auto` leaves it to the engine."""


Opener = Callable[[EngineConfig, ServedModel, Path], AbstractContextManager[Backend]]


def check_name(name: str) -> None:
    """There is an engine of this name, and an adapter can be honest about it."""
    if name in IMPOSSIBLE:
        raise CapabilityMissing(f"{name} cannot be audited: {IMPOSSIBLE[name]}")
    if name not in OPENERS:
        near = difflib.get_close_matches(name, OPENERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no engine is called {name!r}; there are {', '.join(OPENERS)}{hint}")


def check_engine(config: EngineConfig) -> None:
    """`config` names an engine that exists, and settles how it is reached; asked before anything is loaded."""
    check_name(config.name)
    if config.name in STARTED_BY_HAND and config.url is None:
        raise ConfigError(
            f"{config.name} is audited where it runs: start it ({STARTED_BY_HAND[config.name]}), and give its address: "
            "--url http://HOST:PORT"
        )
    if config.name in STARTED_FROM and config.url is None and config.python is None:
        raise ConfigError(
            "engine.url and engine.python are both null: write the address of a running server into engine.url (audit: "
            f"--url), or into engine.python the interpreter of an environment with {STARTED_FROM[config.name]} (audit: --set "
            "engine.python=…/bin/python) to start one"
        )
    if config.name != "vllm" and config.route != EngineConfig().route:
        raise ConfigError(
            f"engine.route is {config.route!r}, and {config.name} is asked by one route only; leave it out"
        )
    if config.name in IN_PROCESS and (config.url or config.python or config.args or config.env):
        # Without this, an audit of a server whose kind was forgotten would pass: of the reference with itself.
        raise ConfigError(
            f"engine {config.name!r} runs in this process, while url={config.url!r}, python={config.python!r}, "
            f"args={list(config.args)} and env={dict(config.env)} are for a server; name its kind: --engine "
            f"{', '.join(sorted(OPENERS.keys() - IN_PROCESS, reverse=True))}"
        )


def open_engine(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    """The engine that `config` names; closed, and stopped if we started it, on leaving."""
    check_engine(config)
    return OPENERS[config.name](config, served, logs)


def _reference(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    from zerodrift.backends.reference import ReferenceBackend

    # Not the reference's own fp64: an engine rounds, and an audit of one that does not would show nothing.
    return closing(ReferenceBackend(served.model, dtype=_in_fp32(served), kind=_kind(config)))


def _exact(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    from zerodrift.backends.exact import ExactBackend

    return closing(ExactBackend(served.model, dtype=_in_fp32(served), config=config))


def _in_fp32(served: ServedModel) -> str:
    return "float32" if served.dtype == "auto" else served.dtype


def _vllm(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    from zerodrift.backends.vllm import VllmBackend
    from zerodrift.backends.vllm_launch import flags, launch_vllm, route_flags, transfer_flags
    from zerodrift.backends.vllm_release import read_release

    def start(python: str) -> "LaunchedServer":
        release = read_release(config, python, config.env)
        # The configuration's own come last, and win.
        arguments = [*transfer_flags(python, config.env), *route_flags(config)]
        arguments += flags(config, served.dtype, release.unknown_fields)
        env, patience_s = {**release.env, **config.env}, config.startup_timeout_s
        return launch_vllm(python, served.model, arguments, env, logs / "vllm.log", patience_s)

    return _reached(config, partial(VllmBackend, route=config.route, **_options(config)), start)


def _llama_cpp(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    from zerodrift.backends.llama_cpp import LlamaCppBackend
    from zerodrift.backends.llama_cpp_launch import launch_llama_cpp, settings

    def start(python: str) -> "LaunchedServer":
        arguments, patience_s = settings(config, served.dtype), config.startup_timeout_s
        return launch_llama_cpp(
            python, served.model, arguments, config.env, logs / "llama-cpp.log", patience_s
        )

    return _reached(config, partial(LlamaCppBackend, kind=_kind(config), **_options(config)), start)


def _sglang(config: EngineConfig, served: ServedModel, logs: Path) -> AbstractContextManager[Backend]:
    from zerodrift.backends.sglang import SglangBackend

    return closing(SglangBackend(config.url or "", kind=_kind(config), **_options(config)))


def _options(config: EngineConfig) -> dict[str, Any]:
    return {
        "model": config.served_model,
        "api_key": api_key(config),
        "timeout_s": config.request_timeout_s,
        "concurrency": config.concurrency,
    }


def _kind(config: EngineConfig) -> LogprobKind:
    return LogprobKind(config.logprobs_mode.removesuffix("_logprobs"))


@contextmanager
def _reached(
    config: EngineConfig, connect: Callable[..., Backend], start: "Callable[[str], LaunchedServer]"
) -> Iterator[Backend]:
    """The server that runs at `url`, or one that is started, and stopped in the end."""
    with ExitStack() as stack:
        if config.url is not None:
            yield stack.enter_context(closing(connect(config.url)))
            return
        server = stack.enter_context(start(config.python or ""))
        yield stack.enter_context(closing(connect(server.url, advice=server.advice)))


def api_key(config: EngineConfig) -> str | None:
    """The key of a server, out of the variable that the configuration names."""
    if config.api_key_env is None:
        return None
    if not (key := os.environ.get(config.api_key_env)):
        raise ConfigError(f"engine.api_key_env names {config.api_key_env}, which is not set; export it first")
    return key


OPENERS: Mapping[str, Opener] = {
    "exact": _exact,
    "llama-cpp": _llama_cpp,
    "reference": _reference,
    "sglang": _sglang,
    "vllm": _vllm,
}
