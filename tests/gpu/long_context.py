"""How far is vanilla transformers in fp32 from itself, over contexts longer than a model was trained for?

    python tests/gpu/long_context.py .cache/smollm2 > long_context.json

SmolLM2 (trained for 8,192) reads 32,768 tokens of this project's documents in fp32 with SDPA, in fp32 with a plain
softmax, and in fp64; as it is, and with positions divided by four. The largest and the mean |Δ| of each pair, by
position, say what rounding alone does there: no engine in fp32 can be asked to come closer to vanilla than vanilla.
"""

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from zerodrift import models

LENGTH = 32768
BANDS = ((0, 8191), (8191, 16384), (16384, LENGTH - 1))
ROPES: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "linear 4": {"rope_type": "linear", "factor": 4.0},
}
QUERIES, ROWS = 512, 1024
"""At a time: all scores of a layer would take 77 GB in fp64."""


def plain_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax as it is written down, some queries at a time."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    places = torch.arange(query.shape[2], device=query.device)
    parts = []
    for rows in places.split(QUERIES):
        end = int(rows[-1]) + 1
        scores = (query[:, :, rows] @ key[:, :, :end].mT) * scaling
        scores = scores.masked_fill(places[:end] > rows[:, None], -torch.inf)
        parts.append(scores.softmax(-1) @ value[:, :, :end])
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


@torch.no_grad()
def logprobs(model: Any, ids: torch.Tensor, attention: str) -> torch.Tensor:
    """Of each token but the first."""
    model.set_attn_implementation(attention)
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    wanted = ids[1:, None]
    parts = [
        model.lm_head(hidden[begin : begin + ROWS])[: len(wanted) - begin]
        .log_softmax(-1)
        .gather(-1, wanted[begin : begin + ROWS])
        for begin in range(0, len(wanted), ROWS)
    ]
    return torch.cat(parts)[:, 0].double()


def with_rope(directory: Path, rope: Mapping[str, object], copied: Path) -> Path:
    """The same weights with other rotary parameters."""
    shutil.copytree(directory, copied)
    config = json.loads((copied / "config.json").read_text())
    config["rope_parameters"] |= rope
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def gaps(one: torch.Tensor, other: torch.Tensor) -> dict[str, dict[str, float]]:
    """By position."""
    size = (one - other).abs()
    return {
        f"{begin}-{end}": {"max": float(size[begin:end].max()), "mean": float(size[begin:end].mean())}
        for begin, end in BANDS
    }


def compare(directory: Path, ids: torch.Tensor) -> dict[str, object]:
    """Three ways to compute the same."""
    model = models.load(directory).cuda()
    sdpa, plain = logprobs(model, ids, "sdpa"), logprobs(model, ids, "plain")
    truth = logprobs(copy.deepcopy(model).double(), ids, "plain")
    return {
        "mean logprob": {f"{begin}-{end}": float(truth[begin:end].mean()) for begin, end in BANDS},
        "SDPA fp32 from fp64": gaps(sdpa, truth),
        "plain fp32 from fp64": gaps(plain, truth),
        "SDPA fp32 from plain fp32": gaps(sdpa, plain),
    }


def main() -> int:
    directory, root = Path(sys.argv[1]), Path(__file__).parents[2]
    torch.backends.cuda.matmul.allow_tf32 = False
    AttentionInterface.register("plain", plain_attention)
    pages = [root / "README.md", root / "LOG.md", *sorted((root / "docs").glob("*.md"))]
    text: list[int] = models.tokenizer(directory)("\n".join(page.read_text() for page in pages))["input_ids"]
    ids = torch.tensor((text * (LENGTH // len(text) + 1))[:LENGTH]).cuda()
    with tempfile.TemporaryDirectory() as scratch:
        found = {
            name: compare(with_rope(directory, rope, Path(scratch) / name), ids)
            for name, rope in ROPES.items()
        }
    json.dump(
        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **found}, sys.stdout, indent=1
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
