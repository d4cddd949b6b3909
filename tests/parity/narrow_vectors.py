"""Run by `test_exact_processors.py` in a process whose libraries were told to use narrower vectors.

Arguments are ops to leave as torch has them. Prints, as JSON, what torch says of its vectors, and how many rows differ
by each path, for each number of threads.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact
from zerodrift.core.errors import Unproven
from zerodrift.exact.probe import threads
from zerodrift.exact.verification import PromptThenTokens, Schedule, alone, differing_rows, packed, paged

SEQUENCES = [[7 * at % 101 for at in range(length)] for length in (70, 9)]


def build() -> Any:
    """One kv head for three heads of queries, and an inner size that no vector divides."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=96,
        intermediate_size=171,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=1,
        vocab_size=101,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


@torch.no_grad()
def main() -> None:
    """Alone on one thread, against decode, chunks and packing on several; or which proof refuses this processor."""
    try:
        model = exact.prepare(build(), plain=frozenset(sys.argv[1:]))
    except Unproven as refusal:
        json.dump({"refused": str(refusal)}, sys.stdout)
        return
    with threads(1):
        whole = alone(model, SEQUENCES)
    found = {}
    for number in (1, 2, 4):
        with threads(number):
            paths = {
                "decode": paged(model, SEQUENCES[:1], PromptThenTokens(60, 16)),
                "chunks": paged(model, SEQUENCES, Schedule(number, 16, chunks=(1, 3, 5, 17))),
                "packed": packed(model, SEQUENCES),
            }
        found[number] = {name: differing_rows(whole[: len(path)], path) for name, path in paths.items()}
    json.dump({"vectors": torch.backends.cpu.get_cpu_capability(), "differing": found}, sys.stdout)


if __name__ == "__main__":
    main()
