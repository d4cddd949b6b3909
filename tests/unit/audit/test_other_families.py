"""Any causal language model of transformers can be audited: sound it passes, broken it fails, and nothing crashes.

What could not be asked of it is said by name.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tiny_models import tiny, written

from zerodrift.audit.counterfactual.path import not_asked
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.cli.main import main
from zerodrift.faults.rewriting import rewrite
from zerodrift.models.family.abilities import has_kv_cache, usable_attention

# A planted fault's rewritten checkpoint goes when its engine is collected: the audit closes the engine inside it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Implicitly cleaning up:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
PASSED, FAILED, USAGE = 0, 1, 2
FAMILIES = ("gpt2", "mamba")
"""With every change: fused and transposed projections, no attention at all."""
MORE_FAMILIES = ("gemma2", "mixtral", "phi3", "olmo2", "gpt_neox", "falcon", "openai-gpt")
FEW = [
    *("--set", "validation.num_prompts=4", "--trials", "4", "--set", "validation.max_tokens=52"),
    *("--set", "validation.position_probes=[]", "--engine", "reference"),
]


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    known: dict[str, Path] = {}

    def find(model_type):
        if model_type not in known:
            known[model_type] = written(model_type, tmp_path_factory.mktemp(model_type))
        return known[model_type]

    return find


def audited(model: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(model), *FEW, "--out", str(out), *options])
    verdict = out / "verdict.json"
    return int(str(ended.value.code)), json.loads(verdict.read_text()) if verdict.exists() else {}


@pytest.mark.parametrize(
    "model_type", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.long) for each in MORE_FAMILIES)]
)
def test_a_sound_engine_passes_an_update_included(model_type, directory, tmp_path):
    # An update of the slowest is followed below.
    options = [] if model_type == "mamba" else ["--sync"]
    code, verdict = audited(directory(model_type), tmp_path / "out", *options)
    assert code == PASSED
    statuses = {probe["name"]: probe["status"] for probe in verdict["probes"]}
    assert statuses["parity"] == "PASS"
    assert statuses.get("weight-sync") == ("PASS" if options else None)
    # Two of eight ways to compute are the others again without a choice of attention, and five without a KV cache.
    assert verdict["floor"]["variants"] == {"gemma2": 7, "falcon": 7, "mamba": 3, "openai-gpt": 3}.get(
        model_type, 8
    )


@pytest.mark.parametrize(
    ("model_type", "fault", "cause"),
    [
        ("gpt2", "weights/partial:last-layer", "weights/partial"),
        pytest.param("gpt2", "weights/swapped:layers", "weights/swapped", marks=pytest.mark.long),
        pytest.param("mamba", "weights/partial:last-layer", "weights/partial", marks=pytest.mark.long),
    ],
)
def test_an_update_that_goes_wrong_is_named(model_type, fault, cause, directory, tmp_path):
    code, verdict = audited(directory(model_type), tmp_path / "out", "--sync", "--inject", fault)
    assert code == FAILED
    assert verdict["causes"][0]["cause"] == cause


@pytest.mark.parametrize("model_type", ["gpt2", pytest.param("gemma2", marks=pytest.mark.long)])
def test_what_is_not_asked_is_named_where_nothing_explains(model_type, directory, tmp_path, monkeypatch):
    """Numbers of no distribution have no name: the search goes through all that can be asked, and says what could not be."""

    def bent(_, completion):
        told = tuple(-(abs(value) ** 1.2) - 0.3 * value * value for value in completion.logprobs)
        return msgspec.structs.replace(completion, logprobs=told)

    def generate(engine, requests):
        return rewrite(requests, honest(engine, requests), bent)

    honest = ReferenceBackend.generate
    monkeypatch.setattr(ReferenceBackend, "generate", generate)
    code, verdict = audited(directory(model_type), tmp_path / "out")
    assert code == FAILED
    first, lacking = verdict["causes"][0], not_asked(tiny(model_type))
    assert first["cause"] == "unexplained"
    assert lacking
    assert [words for words in lacking if words not in first["evidence"]] == []


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        ("gpt2", "path/rope:theta-doubled"),
        ("mamba", "path/prefill-decode:bf16-attention"),
        ("gpt2", "path/weight-quantisation:4-bit"),
    ],
)
def test_a_fault_that_a_model_has_no_part_for_is_refused(model_type, fault, directory, tmp_path):
    code, verdict = audited(directory(model_type), tmp_path / "out", "--inject", fault)
    assert (code, verdict) == (USAGE, {})


def test_what_models_can_be_asked_to_do():
    assert not has_kv_cache(tiny("mamba"))
    assert has_kv_cache(tiny("gpt2"))
    assert "prompts in chunks" in not_asked(tiny("mamba"))
    for model_type, own in {"gemma2": "eager", "gpt2": "sdpa", "falcon": "sdpa"}.items():
        assert usable_attention(tiny(model_type), "sdpa") == own
    assert usable_attention(tiny("falcon"), "eager") == "sdpa"
    assert usable_attention(tiny("gpt2"), "eager") == "eager"
    assert not_asked(tiny("gpt2")) == ("rotary positions",)
    assert not_asked(tiny("falcon")) == ("keys and values in fp8", "masks", "groups of KV heads")
    assert not_asked(tiny("olmo2")) == ()
