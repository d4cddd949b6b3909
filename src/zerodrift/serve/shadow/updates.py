"""What do control calls say about weights: out of which directory, under which label? Torch-free.

A body that cannot be read says nothing here; it is the engine that refuses it.
"""

from typing import Any, NamedTuple

import msgspec


class UpdateTold(NamedTuple):
    """Of one call."""

    directory: str | None = None
    """A whole checkpoint; None where weights come in another way, or in parts."""
    label: str | None = None


def action_of(content: bytes) -> object:
    """What a /weight_checker is to do."""
    return _body(content).get("action")


def _body(content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content) if content else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def told_of(handler: str, content: bytes) -> UpdateTold:
    """Of a call that `handler` handles."""
    body = _body(content)
    directory = _directory(body) if handler == "update" else _reloaded(body) if handler == "rpc" else None
    label = body.get({"finish": "weight_version", "relabel": "new_version"}.get(handler, ""))
    return UpdateTold(
        directory if isinstance(directory, str) else None, label if isinstance(label, str) else None
    )


def _directory(body: dict[str, Any]) -> object:
    """prime-rl's `weight_dir`, and what our plugin for vLLM takes."""
    if "weight_dir" in body:
        return body["weight_dir"]
    info = body.get("update_info")
    if isinstance(info, list) and len(info) == 1:
        [info] = info
    # With `names` it is a part of an update.
    if isinstance(info, dict) and info.get("names") is None:
        return info.get("directory")
    return None


def _reloaded(body: dict[str, Any]) -> object:
    kwargs = body.get("kwargs")
    if body.get("method") == "reload_weights" and isinstance(kwargs, dict):
        return kwargs.get("weights_path")
    return None
