"""Which calls of vLLM's are passed on, who may make them, and what becomes of each. What is not here is not passed. Torch-free.

Beside every control route stands the same path by GET: clients find out by 405 or 404 whether a release has it, and the
answer must be the engine's own.
"""

from collections.abc import Mapping

from zerodrift.serve.routes import Level, ServedRoute
from zerodrift.serve.wire import Body

GENERATE = "generate"
PASS = "passed"


def _route(method: str, path: str, level: Level, handler: str, says: str) -> ServedRoute:
    """A body, where a call may have one, is the engine's to read."""
    return ServedRoute(method, path, level, handler, says, Body if method == "POST" else None)


_GENERATING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
_ASKED = (
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
_CONTROL = (
    ("/pause", "pause"),
    ("/resume", "resume"),
    ("/abort_requests", PASS),
    ("/inference/v1/abort_requests", PASS),
    ("/sleep", "sleep"),
    ("/wake_up", PASS),
    ("/reset_prefix_cache", PASS),
    ("/weight_checker", "checker"),
    ("/init_weight_transfer_engine", PASS),
    ("/shutdown_weight_transfer_engine", PASS),
    ("/start_weight_update", "start"),
    ("/start_draft_weight_update", "start"),
    ("/update_weights", "update"),
    ("/finish_weight_update", "finish"),
    ("/update_weight_version", "relabel"),
    ("/collective_rpc", "rpc"),
    ("/v1/load_lora_adapter", "adapter"),
    ("/load_lora_adapter", "adapter"),
    ("/v1/unload_lora_adapter", "adapter"),
)
_SHOWN = ("/is_paused", "/is_sleeping", "/weight_info", "/server_info", "/get_world_size")

ROUTES: tuple[ServedRoute, ...] = (
    _route("GET", "/health", Level.OPEN, PASS, "The engine's own"),
    _route("GET", "/ping", Level.OPEN, PASS, "The engine's own"),
    _route("GET", "/metrics", Level.INFERENCE, "metrics", "The engine's page, and ours behind it"),
    *(
        _route("POST", path, Level.INFERENCE, GENERATE, "Passed on with a salted cache")
        for path in _GENERATING
    ),
    *(_route(method, path, Level.INFERENCE, PASS, "Passed on") for method, path in _ASKED),
    *(_route("POST", path, Level.ADMIN, handler, "Passed on, and noted") for path, handler in _CONTROL),
    *(_route("GET", path, Level.ADMIN, PASS, "Whether the engine has it") for path, _ in _CONTROL),
    *(_route("GET", path, Level.ADMIN, PASS, "Passed on") for path in _SHOWN),
)

BY_PATH: Mapping[str, Mapping[str, ServedRoute]] = {
    path: {route.method: route for route in ROUTES if route.path == path}
    for path in {route.path for route in ROUTES}
}
