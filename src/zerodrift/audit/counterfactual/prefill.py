"""What a prefill made of a prompt, and not of the tokens that were decoded after it: which tokens it read, at which
positions, and which of them saw which. Sequences are computed one at a time, since each has its own prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from zerodrift.audit.counterfactual.attention import leaking, with_attention
from zerodrift.audit.counterfactual.variant import Alone, Variant

WHOLE = 2**30
"""Further ahead than any prompt reaches."""


class PrefillReading(NamedTuple):
    """Which tokens of a sequence went through the model, in order, and under which positions."""

    places: tuple[int, ...]
    positions: tuple[int, ...]


Read = Callable[[int, int], PrefillReading]
"""(length of the prompt, length of the sequence) to what was read."""


def reader(read: Read) -> Alone:
    """Rows of a sequence of which this was read."""
    return lambda model, ids, prompt, start: _rows(model, ids, start, read(prompt, len(ids)))


def leak_variants() -> dict[str, Variant]:
    """Prompts whose tokens see what comes after them."""
    return {
        "leak-1": Variant(
            "path/mask", "tokens of a prompt see the one after them", lambda m: m, alone=partial(_leak, 1)
        ),
        "leak-all": Variant(
            "path/mask", "tokens of a prompt see all of it", lambda m: m, alone=partial(_leak, WHOLE)
        ),
    }


def _leak(ahead: int, model: Any, ids: Sequence[int], prompt: int, start: int) -> torch.Tensor:
    changed = with_attention(model, leaking(prompt, ahead))
    everything = tuple(range(len(ids)))
    return _rows(changed, ids, start, PrefillReading(everything, everything))


@torch.no_grad()
def _rows(model: Any, ids: Sequence[int], start: int, reading: PrefillReading) -> torch.Tensor:
    """Logits that predict tokens `start`… of `ids`; a prompt's last token is the last of what was read of it."""
    read_1L = torch.tensor([[ids[place] for place in reading.places]])
    in_order = reading.positions == tuple(range(len(reading.positions)))
    output = model(
        read_1L.to(model.device),
        # Given, or transformers takes a step in the positions for the border of two packed sequences.
        attention_mask=torch.ones_like(read_1L),
        # Not every model takes them.
        **({} if in_order else {"position_ids": torch.tensor([reading.positions])}),
        use_cache=False,
        logits_to_keep=len(ids) - start + 1,
    )
    logits_TV: torch.Tensor = output.logits[0, :-1]
    return logits_TV
