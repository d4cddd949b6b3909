"""Exact is also right: trained weights, long texts, and vanilla transformers in fp32 as the outside reference.

Every token of a text is scored by both in one forward. The testbed models have this test in `test_exact_training`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from zerodrift import exact, models
from zerodrift.models.smollm2 import COMPLETE

pytestmark = pytest.mark.smollm2
ROWS_AT_ONCE = 256
"""Rows of logits held at a time: all of them would take 1.6 GB at 8,192 tokens."""


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.config.rootpath / ".cache" / "smollm2"
    if not (found / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return found


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest, directory: Path) -> list[int]:
    """The project's own documents as tokens, over and over."""
    root: Path = request.config.rootpath
    pages = [root / "README.md", root / "LOG.md", *sorted((root / "docs").glob("*.md"))]
    ids: list[int] = models.tokenizer(directory)("\n".join(page.read_text() for page in pages))["input_ids"]
    return ids * (2**15 // len(ids) + 1)


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    wanted = torch.tensor(ids[1:])[:, None]
    parts = [
        model.lm_head(hidden[begin : begin + ROWS_AT_ONCE])[: len(wanted) - begin]
        .log_softmax(-1)
        .gather(-1, wanted[begin : begin + ROWS_AT_ONCE])
        for begin in range(0, len(wanted), ROWS_AT_ONCE)
    ]
    return torch.cat(parts)[:, 0]


def scaled(directory: Path, copy: Path, factor: float) -> Path:
    """The same weights with positions divided by `factor`, as one runs a model beyond the length it was trained for."""
    shutil.copytree(directory, copy)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": factor}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


# 8,192 tokens, the trained length, take four minutes on one core, and four times as many up to an hour. Fewer layers
# would be cheaper and no fair test: four of thirty give logprobs down to -59, and were 9.5e-5 apart at 4,096 tokens.
# Beyond the trained length positions are scaled: as it is, the model is so ill-conditioned there that vanilla in fp32
# is 0.1 nat off its own fp64, and 5.6e-3 off itself with another softmax (tests/gpu/long_context.py).
@pytest.mark.parametrize(
    ("length", "factor"),
    [
        (512, 1),
        pytest.param(2048, 1, marks=pytest.mark.long),
        pytest.param(8192, 1, marks=pytest.mark.long),
        pytest.param(32768, 4, marks=pytest.mark.long),
    ],
)
def test_logprobs_are_vanillas(
    directory: Path, text: list[int], tmp_path: Path, length: int, factor: float
) -> None:
    model = models.load(directory if factor == 1 else scaled(directory, tmp_path / "scaled", factor))
    expected = logprobs(model, text[:length])
    found = logprobs(exact.prepare(model), text[:length])
    assert len(found) == length - 1
    assert float((found - expected).abs().max()) <= 1e-4
    assert not torch.equal(found, expected), "both sides ran the same ops, so nothing was compared"
