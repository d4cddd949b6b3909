"""Loading models safely, and building tiny ones on the spot.

    import zerodrift as zd
    model = zd.models.load("testbed:llama")            # or a directory in Hugging Face's layout
    tokenizer = zd.models.tokenizer("testbed:llama")

Names are loaded when first used: `import zerodrift.models` costs no torch. No module here has the name of a
function below, because importing `zerodrift.models.load` would put the module in the function's place.
"""

from typing import TYPE_CHECKING

from zerodrift.core.lazy import lazy

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

__all__ = ["ModelFacts", "facts", "load", "materialise", "tokenizer"]

__getattr__ = lazy(__name__, _EXPORTS)
