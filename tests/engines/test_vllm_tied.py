"""A model whose head is tied to its embedding, updated through our plugin in a real vLLM.

The head was "not loaded" and the server left torn; and on a CPU, where vLLM packs a head once, it would keep old weights.
The plugin is taken from this tree, before the one that the engine's environment holds.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerodrift import models
from zerodrift.audit.perturb import perturbed, write_checkpoint
from zerodrift.backends.reference import load_reference
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.backends.teacher import Teacher
from zerodrift.backends.vllm import VllmBackend
from zerodrift.config.load import load
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.models.smollm2 import COMPLETE

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "integrations" / "vllm_plugin" / "src"
PYTHON = ROOT / ".engines" / "vllm-0.32.0" / "bin" / "python"
SETTINGS = (
    f"engine.python={PYTHON}",
    "engine.env={OMP_NUM_THREADS: '1', PYTHONPATH: '" + str(PLUGIN) + "'}",
    "engine.max_model_len=160",
)


def given(model: str, directory: Path) -> Path:
    if model.startswith("testbed"):
        return models.materialise(model, directory)
    if not (ROOT / model / COMPLETE).exists():
        pytest.skip("SmolLM2 is not here: make smollm2")
    return ROOT / model


def ask(backend: VllmBackend) -> Completion:
    request = Request(Prompt(tuple(range(40, 76))), SamplingParams(max_tokens=8, temperature=0.0))
    [answer] = backend.generate([request])
    return answer.completions[0]


def gap(model: Any, answer: Completion) -> float:
    [scores] = Teacher(model).logprobs([answer.sequence], [len(answer.prompt_token_ids)])
    return float(np.abs(scores.double().numpy() - answer.logprobs).mean())


@pytest.mark.parametrize("model", [pytest.param(".cache/smollm2", marks=pytest.mark.long), "testbed:llama"])
def test_a_tied_head_follows_its_embedding(model: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: engines/install vllm-0.32.0")
    a = given(model, tmp_path / "a")
    old = load_reference(a).model
    new = perturbed(old, 3).new
    b = write_checkpoint(new, a, tmp_path / "b")
    engine = load(ROOT / "docs" / "vllm.yaml", SETTINGS).engine
    with contextlib.chdir(ROOT), open_engine(engine, ServedModel(str(a), "float32"), tmp_path) as backend:
        assert isinstance(backend, VllmBackend)
        assert backend.update_path.by_transfer
        for directory, held, other in ((b, new, old), (a, old, new)):
            backend.load_weights(directory, WeightVersion(directory.name))
            backend.reset_cache()
            answer = ask(backend)
            assert gap(held, answer) < 1e-3
            assert gap(other, answer) > 1e-2
