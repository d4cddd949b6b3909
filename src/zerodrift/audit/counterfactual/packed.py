"""Did prompts that were prefilled together see each other? Then their outputs have the numbers they would have so."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zerodrift.audit.counterfactual.attention import AttentionChange, Seen, with_attention
from zerodrift.backends.teacher import entries
from zerodrift.core.completion import Completion
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.rope import rope_bases
from zerodrift.stats.arrays import Floats

BETTER = 0.1
"""Share of the difference that may be left."""


def saw_each_other(model: Any, together: Sequence[Completion], gap: float, gate: float) -> bool:
    """Whether answers to requests of one call, which alone are `gap` nats otherwise, are explained by that."""
    windowed = getattr(model.config, "sliding_window", None)
    if windowed or not rope_bases(model.config) or not has_a_choice_of_attention(model):
        # Outputs stand behind all prompts here, where a window would hide their own.
        return False
    predicted = across(model, together)
    reported = [np.array(completion.logprobs) for completion in together]
    left = float(np.abs(np.concatenate(predicted) - np.concatenate(reported)).mean())
    return left <= max(gate, BETTER * gap)


@torch.no_grad()
def across(model: Any, completions: Sequence[Completion]) -> list[Floats]:
    """Raw logprobs of outputs whose prompts saw all prompts before them; outputs see their own prompt alone."""
    prompts = [completion.prompt_token_ids for completion in completions]
    # The last token of an output predicts nothing that was drawn.
    outputs = [completion.token_ids[:-1] for completion in completions]
    parts = [*prompts, *outputs]
    owner = torch.tensor([index % len(prompts) for index, part in enumerate(parts) for _ in part])
    in_prompt = torch.arange(len(owner)) < sum(map(len, prompts))
    counted = [range(len(prompt)) for prompt in prompts]
    counted += [range(len(one), len(one) + len(other)) for one, other in zip(prompts, outputs, strict=True)]

    def apart(seen: Seen) -> Seen:
        def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
            home = owner.to(query.device)[query] == owner.to(query.device)[key]
            both = in_prompt.to(query.device)[query] & in_prompt.to(query.device)[key]
            return seen(row, head, query, key) & (home | both)

        return visible

    ids_1L = torch.tensor([[token for part in parts for token in part]])
    output = with_attention(model, AttentionChange(mask=apart))(
        ids_1L.to(model.device),
        attention_mask=torch.ones_like(ids_1L),
        position_ids=torch.tensor([[place for places in counted for place in places]]),
        use_cache=False,
    )
    rows = output.logits[0].split([len(part) for part in parts])
    return [
        entries(torch.cat([rows[number][-1:], rows[len(prompts) + number]]), completion.token_ids)
        .double()
        .numpy()
        for number, completion in enumerate(completions)
    ]
