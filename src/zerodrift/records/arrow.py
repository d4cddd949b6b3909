"""pyarrow, which records need that hold columns: loaded when the first of them is written or read."""

from importlib import import_module
from types import ModuleType

from zerodrift.core.errors import MissingExtra


def arrow(what: str) -> ModuleType:
    """With its Parquet, or an error that says how to get it and that `what` needs it."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{what} needs pyarrow: pip install 'zerodrift[local]'") from error
