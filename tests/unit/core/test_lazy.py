import sys

import pytest

from zerodrift.core.errors import MissingExtra
from zerodrift.core.lazy import lazy


def test_a_missing_extra_is_named_and_any_other_missing_module_is_not_hidden(monkeypatch):
    load = lazy("zerodrift", {"Tensor": "torch", "ours": "zerodrift.core.nothing"})
    # None there is how Python says that a module cannot be imported.
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra):
        load("Tensor")
    with pytest.raises(ModuleNotFoundError):
        load("ours")
    with pytest.raises(AttributeError):
        load("unknown")
