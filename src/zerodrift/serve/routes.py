"""Every route as data: who may call it, what it takes, what it is for. What is not in the table is not there. Torch-free.

The guard, the dispatcher, the OpenAPI document and the test of who gets in are made of this table.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from zerodrift.serve import control_wire as control
from zerodrift.serve import wire
from zerodrift.serve.wire import Body


class Level(IntEnum):
    """Who may call a route. Each may call what those before may."""

    OPEN = 0
    """Anybody who reaches the port by a name of ours: probes of orchestrators carry no token."""
    INFERENCE = 1
    """With the inference token, where the server has one."""
    ADMIN = 2
    """With the admin token, always: it changes what all others get, or shows how the server is set up."""


class ServedRoute(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    level: Level
    handler: str
    """Name of the function that answers."""
    says: str
    body: type[Body] | None = None
    query: type[Body] | None = None
    streams: bool = False
    body_optional: bool = False
    media: str = "application/json"


def _post(
    path: str, level: Level, handler: str, says: str, body: type[Body] | None = None, **more: object
) -> ServedRoute:
    return ServedRoute("POST", path, level, handler, says, body, **more)  # type: ignore[arg-type]


def _get(path: str, level: Level, handler: str, says: str, **more: object) -> ServedRoute:
    return ServedRoute("GET", path, level, handler, says, **more)  # type: ignore[arg-type]


_OPEN, _INFERENCE, _ADMIN = Level.OPEN, Level.INFERENCE, Level.ADMIN

ROUTES: tuple[ServedRoute, ...] = (
    _get("/health", _OPEN, "health", "200 while the engine answers; a pause is healthy"),
    _get("/liveness", _OPEN, "liveness", "Age of the last step or idle canary; 503 where the engine hangs"),
    _get("/version", _INFERENCE, "version", "Which zerodrift this is"),
    _get("/openapi.json", _INFERENCE, "openapi", "This document"),
    _get("/metrics", _INFERENCE, "metrics", "Prometheus", media="text/plain"),
    _get("/v1/models", _INFERENCE, "models", "The model that is served"),
    _post(
        "/v1/completions",
        _INFERENCE,
        "completions",
        "OpenAI's completions, with token ids in and out",
        wire.CompletionBody,
        streams=True,
    ),
    _post(
        "/v1/chat/completions",
        _INFERENCE,
        "chat",
        "OpenAI's chat completions, by the model's own template",
        wire.Chat,
        streams=True,
    ),
    _post(
        "/inference/v1/generate",
        _INFERENCE,
        "generate",
        "vLLM's tokens in, tokens out",
        wire.GenerateBody,
        streams=True,
    ),
    _post("/v1/token_logprobs", _INFERENCE, "token_logprobs", "Raw logprobs of given tokens", wire.Score),
    _post("/tokenize", _INFERENCE, "tokenize", "Ids of a text or a conversation", wire.Tokenize),
    _post(
        "/inference/v1/abort_requests",
        _ADMIN,
        "abort_requests",
        "As /abort_requests",
        control.Abort,
        body_optional=True,
    ),
    _post(
        "/abort_requests",
        _ADMIN,
        "abort_requests",
        "End requests by id, or all",
        control.Abort,
        body_optional=True,
    ),
    _post("/pause", _ADMIN, "pause", "No step until /resume", query=control.Pause),
    _post("/resume", _ADMIN, "resume", "Go on"),
    _get("/is_paused", _ADMIN, "is_paused", "Whether /pause is in force"),
    _post(
        "/sleep",
        _ADMIN,
        "sleep",
        "Pause and forget the prefix cache; no memory is given back",
        query=control.Sleep,
    ),
    _post("/wake_up", _ADMIN, "wake_up", "As /resume", query=control.WakeUp),
    _get("/is_sleeping", _ADMIN, "is_sleeping", "Whether /sleep is in force"),
    _post(
        "/init_weight_transfer_engine",
        _ADMIN,
        "init_transfer",
        "How weights will come",
        control.Init,
        body_optional=True,
    ),
    _post(
        "/shutdown_weight_transfer_engine",
        _ADMIN,
        "shutdown_transfer",
        "Forget it; an open update is aborted",
    ),
    _post(
        "/start_weight_update", _ADMIN, "start_update", "Open an update", control.Start, body_optional=True
    ),
    _post(
        "/update_weights",
        _ADMIN,
        "update_weights",
        "`update_info`: more of the open update; `weight_dir`: a whole update at once",
        control.UpdateBody,
    ),
    _post(
        "/finish_weight_update",
        _ADMIN,
        "finish_update",
        "Verify, keep and serve the open update",
        control.Finish,
        body_optional=True,
    ),
    _post(
        "/update_weight_version",
        _ADMIN,
        "relabel",
        "Another label for the weights that are served",
        control.Relabel,
    ),
    _get("/weight_info", _INFERENCE, "weight_info", "Label and digest of the weights that are served"),
    _post(
        "/weight_checker", _ADMIN, "weight_checker", "Checksums of the weights that are served", control.Check
    ),
    _post(
        "/reset_prefix_cache",
        _ADMIN,
        "reset_prefix_cache",
        "Forget cached prefixes",
        query=control.ResetCache,
    ),
    _get("/server_info", _INFERENCE, "server_info", "Settings in force, in vLLM's form", query=control.Info),
    _get("/get_world_size", _ADMIN, "world_size", "Workers: one", query=control.WorldSize),
    _post(
        "/v1/load_lora_adapter",
        _ADMIN,
        "load_adapter",
        "Serve a LoRA adapter below --weight-root under a name of its own",
        control.LoadAdapter,
    ),
    _post(
        "/load_lora_adapter",
        _ADMIN,
        "replace_adapter",
        "The same; one that has the name gives it up (prime-rl)",
        control.LoadAdapter,
    ),
    _post(
        "/v1/unload_lora_adapter",
        _ADMIN,
        "unload_adapter",
        "No new request may ask for it; those in flight keep it",
        control.UnloadAdapter,
    ),
)

BY_PATH: Mapping[str, Mapping[str, ServedRoute]] = {
    path: {route.method: route for route in ROUTES if route.path == path}
    for path in {route.path for route in ROUTES}
}
