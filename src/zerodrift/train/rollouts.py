"""Which engine a training asks for rollouts, by one key, `train.rollouts`; what could not be learnt from is refused before it begins."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.backends.base import Capability, need
from zerodrift.backends.http import HttpClient, RefusalAdvice
from zerodrift.backends.registry import api_key
from zerodrift.backends.vllm import HINTS, VllmBackend
from zerodrift.config.engine import EngineConfig
from zerodrift.config.run import EXACT, RunConfig
from zerodrift.config.training import RolloutsFrom
from zerodrift.core.completion import LogprobContract, LogprobKind
from zerodrift.core.errors import CapabilityMissing, ConfigError, UpdateFailed, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.exact.fingerprint import require_same
from zerodrift.sync.serve import ServeTarget
from zerodrift.sync.target import CONFIG, ServerTarget, WeightTarget
from zerodrift.train.kept import KeptVersions
from zerodrift.train.measured import measured_engine
from zerodrift.train.served import ReachedServer, ServedSource
from zerodrift.train.source import ExactSource, RolloutSource
from zerodrift.web.access import read_token
from zerodrift.weights.update import UpdateManifest

_OF_ANY_SERVER = frozenset({"name", "url", "served_model", "request_timeout_s", "concurrency", "route"})
_HONOURED = {
    RolloutsFrom.EXACT: frozenset[str](),
    RolloutsFrom.REFERENCE: frozenset[str](),
    RolloutsFrom.SERVE: _OF_ANY_SERVER,
    RolloutsFrom.VLLM: _OF_ANY_SERVER | {"api_key_env"},
}
_NAMES = {RolloutsFrom.SERVE: (EXACT.name,), RolloutsFrom.VLLM: (EXACT.name, "vllm")}
_OPTION = "train.admin_token_file"
COARSE = frozenset({"bfloat16", "float16"})


def check_engine(config: RunConfig) -> None:
    """Section engine says where the server is, and nothing that nobody would do."""
    asked, engine = config.train.rollouts, config.engine
    plain = EXACT if engine.name == EXACT.name else EngineConfig()
    given = {name for name in engine.__struct_fields__ if getattr(engine, name) != getattr(plain, name)}
    if unread := sorted(given - _HONOURED[asked]):
        where = (
            "which generates in this process (train.rollouts=serve or vllm asks the server at engine.url)"
            if asked.in_process
            else "which only asks the server at engine.url"
        )
        raise ConfigError(
            f"engine.{unread[0]} is set with train.rollouts={asked}, {where}; leave it out, and set it where the server is started"
        )
    if asked.in_process:
        return
    if engine.url is None:
        raise ConfigError(f"train.rollouts={asked} asks a server; write its address into engine.url")
    if engine.name not in _NAMES[asked]:
        raise ConfigError(f"engine.name is {engine.name!r} with train.rollouts={asked}; leave it out")
    if asked is RolloutsFrom.SERVE:
        _token(config)


def measured_here(config: RunConfig) -> bool:
    """Whether the engine is in this process, and its numbers are not the trainer's."""
    train = config.train
    return train.rollouts is RolloutsFrom.REFERENCE or bool(train.inject)


def reach(config: RunConfig, numeric: Mapping[str, str]) -> ReachedServer | None:
    """The server that is asked, found fit; None where it is the exact engine in this process. `numeric` is how the trainer computes."""
    asked = config.train.rollouts
    if asked.in_process:
        return _in_process(config) if measured_here(config) else None
    backend = _connected(config)
    try:
        if asked is RolloutsFrom.SERVE:
            return _exact_server(config, backend, numeric)
        return _measured_server(config, backend)
    except BaseException:
        backend.close()
        raise


def open_source(
    config: RunConfig,
    server: ReachedServer | None,
    model: Any,
    tokenizer: Any,
    directory: Path,
    *,
    first: int,
) -> RolloutSource:
    """What the loop asks. `directory` has the last versions of the weights, and is made anew."""
    train = config.train
    if server is None:
        return ExactSource(model, tokenizer, directory, first=first, kv=train.kv, max_lag=train.max_lag)
    kept = KeptVersions(directory, model, train.max_lag + 2)
    return ServedSource(model, server, _target(config, server, model, directory), kept, first=first)


def _target(config: RunConfig, server: ReachedServer, model: Any, directory: Path) -> WeightTarget:
    train = config.train
    name = (
        f"the engine with {', '.join(train.inject)}"
        if train.inject
        else f"{train.rollouts} at {config.engine.url}"
    )
    if train.rollouts is RolloutsFrom.SERVE:
        assert server.control is not None, "an exact server is reached with one"
        return ServeTarget(server.control, directory, name=name)
    # vLLM reads a checkpoint, and a checkpoint has the model's configuration beside its weights.
    checkpoint = directory / "model"
    checkpoint.mkdir()
    model.config.to_json_file(checkpoint / CONFIG, use_diff=False)
    return ServerTarget(server.backend, directory, checkpoint, name=name, retain=None)


def _connected(config: RunConfig) -> VllmBackend:
    """Every parameter is sent, so that no server fills in one of its own."""
    engine, serve = config.engine, config.train.rollouts is RolloutsFrom.SERVE
    return VllmBackend(
        engine.url or "", route=engine.route, explicit=True, model=engine.served_model,
        api_key=_token(config) if serve else api_key(engine), timeout_s=engine.request_timeout_s,
        concurrency=engine.concurrency, **({"advice": _ADVICE} if serve else {}),
    )  # fmt: skip


_ADVICE = RefusalAdvice(key=f"name the file of its admin token in {_OPTION}")


def _control(config: RunConfig) -> HttpClient:
    return HttpClient(
        (config.engine.url or "").rstrip("/").removesuffix("/v1"),
        api_key=_token(config),
        timeout_s=config.engine.request_timeout_s,
        advice=_ADVICE,
    )


def _token(config: RunConfig) -> str:
    """Out of a file that nobody else reads; it is never written down."""
    if config.train.admin_token_file is None:
        raise ConfigError(
            f"train.rollouts=serve sends weights, which takes the admin token; name its file in {_OPTION}: `zerodrift serve` says "
            "at its start where it is"
        )
    file = Path(config.train.admin_token_file)
    token = read_token(_OPTION, file)
    if (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
        raise ConfigError(
            f"{_OPTION} {file} has mode {mode:04o}, and others may read it; chmod 600, and give the server a new token"
        )
    return token


# --- two kinds of servers -----------------------------------------------------------------------------------------------


def _in_process(config: RunConfig) -> ReachedServer:
    """Asked by one thread: an engine of one owner."""
    engine = measured_engine(config)
    coarse = config.model.dtype in COARSE
    return ReachedServer(engine, None, _send_or_stop, {}, salted=False, coarse=coarse, width=1)


def _exact_server(config: RunConfig, backend: VllmBackend, numeric: Mapping[str, str]) -> ReachedServer:
    control = _control(config)
    try:
        theirs = ServeTarget(control, Path(), name="serve").numeric()
        require_same(theirs, numeric)
    except BaseException:
        control.close()
        raise
    return ReachedServer(
        backend, control, _send, theirs, salted=False, coarse=False, width=config.engine.concurrency
    )


def _measured_server(config: RunConfig, backend: VllmBackend) -> ReachedServer:
    """What would make its numbers meaningless is refused, where the server shows it."""
    for capability in (Capability.EFFECTIVE_CONFIG, Capability.LOAD_WEIGHTS, Capability.WEIGHT_VERSION):
        need(backend, capability, HINTS[capability])
    salted = Capability.CACHE_SALT in backend.capabilities
    if not salted and Capability.RESET_CACHE not in backend.capabilities:
        raise CapabilityMissing(
            "this vLLM neither reads cache_salt nor resets its prefix cache, so that KV of old weights would be used on; "
            f"{HINTS[Capability.RESET_CACHE]}"
        )
    _check_meaning(backend, config.sampling_defaults.params())
    coarse = backend.fingerprint().numeric.get("dtype") in COARSE
    width = config.engine.concurrency
    return ReachedServer(backend, None, _send_or_stop, {}, salted=salted, coarse=coarse, width=width)


def _check_meaning(backend: VllmBackend, sampling: SamplingParams) -> None:
    """Raw logprobs are another distribution's than the one that was sampled, wherever sampling is not plain."""
    if backend.fingerprint().semantic.get("logprobs_mode", "").startswith("raw"):
        LogprobContract(kind=LogprobKind.RAW, sampling=sampling)


def _send(target: WeightTarget, update: UpdateManifest, tensors: Mapping[str, Any]) -> None:
    """All of it is verified, or the old version serves on."""
    try:
        target.prepare(update, tensors)
        target.publish()
    except ZerodriftError:
        _forgotten(target)
        raise


def _forgotten(target: WeightTarget) -> None:
    try:
        target.abort()
    except ZerodriftError:
        # Gone, with all that was open in it; what went wrong first is what is told.
        return


def _send_or_stop(target: WeightTarget, update: UpdateManifest, tensors: Mapping[str, Any]) -> None:
    """It has no way back: one that fails in the middle is asked nothing more."""
    target.prepare(update, tensors)
    try:
        target.publish()
    except ZerodriftError as error:
        raise UpdateFailed(
            f"{target.name} did not take the weights of {update.version!r} ({error}); it cannot go back, so nobody knows what it "
            "serves, and nothing more is asked of it: look into its log, start it anew where it is gone, and go on with --resume, "
            "which sends it the checkpoint's weights first"
        ) from error
