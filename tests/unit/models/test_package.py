import subprocess
import sys

import pytest

import zerodrift.models

CHECK = """
import sys
import zerodrift.models
assert "torch" not in sys.modules and "transformers" not in sys.modules
assert zerodrift.models.facts("testbed:llama").vocab_size == 512
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import zerodrift.models
from zerodrift.core.errors import MissingExtra
try:
    zerodrift.models.load
except MissingExtra as error:
    assert "zerodrift.models.load needs torch" in str(error) and "zerodrift[local]" in str(error)
else:
    raise SystemExit("loaded without torch")
"""


@pytest.mark.parametrize("code", [CHECK, WITHOUT_TORCH])
def test_torch_is_needed_by_models_and_not_by_facts(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_resolves():
    for name in zerodrift.models.__all__:
        assert callable(getattr(zerodrift.models, name)), name


def test_public_names_stay_functions_whatever_is_imported():
    """A module named like a function would take its place once imported."""
    assert not set(zerodrift.models.__all__) & {
        module.rpartition(".")[2] for module in sys.modules if module.startswith("zerodrift.models.")
    }


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        zerodrift.models.lod  # noqa: B018


def test_a_bug_of_our_own_is_not_called_a_missing_extra(monkeypatch):
    monkeypatch.setitem(zerodrift.models._EXPORTS, "broken", "zerodrift.models.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        zerodrift.models.broken  # noqa: B018
