"""Loading models safely, and building tiny ones on the spot.

    import zerodrift as zd
    model = zd.models.load("testbed:llama")            # or a directory in Hugging Face's layout
    tokenizer = zd.models.tokenizer("testbed:llama")

Names are loaded when first used: `import zerodrift.models` costs no torch. No module here has the name of a
function below, because importing `zerodrift.models.load` would put the module in the function's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerodrift.models.export import materialise
    from zerodrift.models.loading import load, tokenizer
    from zerodrift.models.model_facts import ModelFacts, facts

_EXPORTS = {
    "ModelFacts": "zerodrift.models.model_facts",
    "facts": "zerodrift.models.model_facts",
    "load": "zerodrift.models.loading",
    "materialise": "zerodrift.models.export",
    "tokenizer": "zerodrift.models.loading",
}
_LOCAL_EXTRA = frozenset({"safetensors", "tokenizers", "torch", "transformers"})

__all__ = ["ModelFacts", "facts", "load", "materialise", "tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'zerodrift.models' has no attribute {name!r}")
    try:
        return getattr(import_module(_EXPORTS[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _LOCAL_EXTRA:
            raise
        missing_extra = import_module("zerodrift.core.errors").MissingExtra
        raise missing_extra(
            f"zerodrift.models.{name} needs {error.name}, which is not installed: pip install 'zerodrift[local]'"
        ) from error
