"""Bodies and queries of control routes, as types; what clients of vLLM, TRL and prime-rl send. Torch-free."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from zerodrift.serve.parameters import ParameterRow, Support
from zerodrift.serve.wire import Body, Name

Path = Annotated[str, Meta(min_length=1, max_length=4096)]
_SENT_BY_TRL = ParameterRow(
    Support.REFUSED, "tensors come under the names of a checkpoint, and in no other form", (None, True)
)


class Pause(Body, kw_only=True):
    """Of /pause: with `clear_cache` it says what becomes of KV at an update."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class Sleep(Body, kw_only=True):
    """Of /sleep."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


class WakeUp(Body, kw_only=True):
    """Of /wake_up."""

    tags: Literal["weights", "kv_cache", "scheduling"] | None = None


class ResetCache(Body, kw_only=True):
    """Of /reset_prefix_cache."""

    reset_running_requests: bool = False
    reset_external: bool = False


class Info(Body, kw_only=True):
    """Of /server_info."""

    config_format: Literal["text", "json"] = "text"


class WorldSize(Body, kw_only=True):
    """Of /get_world_size."""

    include_dp: bool = True


class Abort(Body, kw_only=True):
    """Of /abort_requests."""

    request_ids: list[Name] | None = None
    """None: all; an empty list is none."""


class Init(Body, kw_only=True):
    """Of /init_weight_transfer_engine."""

    init_info: dict[str, Any] | None = None


class Start(Body, kw_only=True):
    """Of /start_weight_update."""

    refused: ClassVar[Mapping[str, ParameterRow]] = {"is_checkpoint_format": _SENT_BY_TRL}

    expect: Name | None = None
    """The version that must be current; whoever sends none takes what there is."""


class Directory(Body, kw_only=True):
    """`update_info`, as the transfer engine of our vLLM plugin takes it."""

    directory: Path
    names: list[Name] | None = None
    """None: all of the directory."""


class UpdateBody(Body, kw_only=True):
    """Of /update_weights: one of the two."""

    update_info: dict[str, Any] | list[Any] | None = None
    weight_dir: Path | None = None
    expect: Name | None = None
    """With weight_dir: the version that must be current."""


class Finish(Body, kw_only=True):
    """Of /finish_weight_update."""

    weight_version: Name | None = None


class Relabel(Body, kw_only=True):
    """Of /update_weight_version."""

    new_version: Name


class Check(Body, kw_only=True):
    """Of /weight_checker."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class LoadAdapter(Body, kw_only=True):
    """Of /v1/load_lora_adapter and /load_lora_adapter."""

    refused: ClassVar[Mapping[str, ParameterRow]] = {
        "is_3d_lora_weight": ParameterRow(
            Support.REFUSED, "adapters of experts are not run; target linear layers", (None, False)
        )
    }

    lora_name: Name
    lora_path: Path
    load_inplace: bool | None = None
    """One that has the name gives it up."""


class UnloadAdapter(Body, kw_only=True):
    """Of /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None
