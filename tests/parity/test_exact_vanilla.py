"""Exact is also right: trained weights, long texts, and vanilla transformers in fp32 as the outside reference.

Every token of a text is scored by both in one forward. The testbed models have this test in `test_exact_training`.
"""

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


# 8,192 tokens, the trained length, take four minutes on one core, and four times as many up to an hour. Fewer layers
# would be cheaper and no fair test: four of thirty give logprobs down to -59, and were 9.5e-5 apart at 4,096 tokens.
@pytest.mark.parametrize(
    "length",
    [2048, pytest.param(8192, marks=pytest.mark.long), pytest.param(32768, marks=pytest.mark.long)],
)
def test_logprobs_are_vanillas(directory: Path, text: list[int], length: int) -> None:
    model = models.load(directory)
    expected = logprobs(model, text[:length])
    found = logprobs(exact.prepare(model), text[:length])
    assert len(found) == length - 1
    assert float((found - expected).abs().max()) <= 1e-4
    assert not torch.equal(found, expected), "both sides ran the same ops, so nothing was compared"
