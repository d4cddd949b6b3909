"""Which model is audited? The same checkpoint on both sides; anything else is a comparison, not an audit."""

from typing import Literal

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
ReferenceDtype = Literal["auto", "float64", "float32", "bfloat16"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy: what the trainer trains and the engine serves."""

    path: str | None = None
    """Checkpoint directory, or the name of a built-in model; None must be filled in on the command line."""
    dtype: Dtype = "auto"
    """Dtype of the weights in engine and trainer; `auto` is the checkpoint's own."""
    max_model_len: int | None = None
    """Longest sequence that training will see, prompt and output together; None: the checkpoint's own."""

    def __post_init__(self) -> None:
        """A model must be nameable, and hold a prompt and one token."""
        if self.path == "":
            raise InvalidValue("path is an empty string; name a directory, or leave it null")
        if self.max_model_len is not None:
            rule = "it counts tokens, one of prompt and one of output at least"
            require.whole(InvalidValue, "max_model_len", self.max_model_len, rule, 2)
