"""Are the two models the same model at all?

A token is likelier in the context that it was drawn in than in the contexts of other tokens. That lead is measured on
the engine's tokens with the reference's logits, and no reported number is looked at:

    lead_left = lead of the engine's tokens / lead of tokens that the reference would have drawn there

It is 1 for samples of the same model, and 0 for tokens that say nothing about their context but which tokens are frequent.
With 320 tokens of a built-in model: another seed -0.02 to 0.05 (four architectures, two temperatures), another architecture
-0.02 and 0.06, weights under noise of their own size 0.12. Fine-tuned until mean |Δ| was 2.7 nats it is still 0.82, a foreign
layer in the middle leaves 0.64, the worst of the planted faults 0.65 (outputs of other requests), and the worst of forty
bugs without an explanation 0.38 (an embedding looked up one row too low). Two kinds of bug leave nothing of it either, and
are asked for: ids that are off by a few on their way out, and a model whose numbers are those of noise or of one token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from zerodrift.audit.measure import Measurement, Observed
from zerodrift.backends.teacher import Teacher
from zerodrift.sampler.processing import histories, processed_logprobs

UNRELATED = 0.15
"""Foreign models leave at most 0.12; gross bugs of the same model began at 0.38, and what has no name is told without."""
SEQUENCES = 32
"""512 tokens of sixteen each: lead_left is then known to about 0.05."""
SHIFTS = (1, -1, 2, -2)
"""Ids by which tokens may be off: of a head whose rows are rolled, or a vocabulary with one word more in front."""
RELATED = 0.5
OPEN = (0.4, 2.5)
"""Of the reported surprise over the entropy of the reference. Another model of the same kind is about as open; one whose
hidden states are lost says one token, or any."""
LEAST_LEAD = 0.5
"""Nats. A model that hardly looks at its context has no lead that could be lost."""
BEYOND_ROUNDING = 0.5
"""Nats: no token of a healthy dense model in bf16 was ever seen further off."""


def find_unrelated(
    teacher: Teacher, measurements: Sequence[Measurement], stop_ids: Sequence[int]
) -> str | None:
    """The evidence in words, or None where the engine's tokens are those of a related model."""
    some = measurements[:: max(1, len(measurements) // SEQUENCES)]
    share = lead_left(teacher, [item.observed for item in some], stop_ids)
    if share is None or share > UNRELATED or not _as_open(measurements):
        return None
    shifted = (lead_left(teacher, [item.observed for item in some], stop_ids, by) for by in SHIFTS)
    if any(each is not None and each > RELATED for each in shifted):
        return None
    sizes = np.abs(np.concatenate([item.delta for item in measurements]))
    far = int((sizes > BEYOND_ROUNDING).sum())
    return (
        f"{far} of {len(sizes)} tokens disagree by more than {BEYOND_ROUNDING:g} nats, which no rounding does, and they "
        f"are hardly likelier in their own contexts than in others: {share:.0%} of the lead that the reference's own "
        "tokens have"
    )


def _as_open(measurements: Sequence[Measurement]) -> bool:
    """Whether the engine is as unsure of its tokens as the reference is of its own."""
    surprise = -float(np.mean(np.concatenate([item.reported for item in measurements])))
    entropy = float(np.mean(np.concatenate([item.entropy for item in measurements])))
    low, high = OPEN
    return low * entropy <= surprise <= high * entropy


def lead_left(
    teacher: Teacher, observed: Sequence[Observed], stop_ids: Sequence[int], shift: int = 0
) -> float | None:
    """How much of the lead is left; None where the reference's own tokens have none. `shift`: of the tokens that are
    so many ids above those that came."""
    # Sums over tokens: of their logprob as drawn, as expected of a draw, of every row, and of every distribution.
    own = expected = 0.0
    rows_V = drawn_V = torch.zeros(())
    tokens: list[int] = []
    sequences, starts = zip(*(item.passage for item in observed), strict=True)
    for item, logits_TV in zip(observed, teacher.logits(sequences, starts), strict=True):
        completion = item.completion
        past = histories(completion.prompt_token_ids, completion.token_ids)
        # Raw logprobs, because processed ones may be -inf; tokens are drawn as requested all the same.
        raw_TV = torch.log_softmax(logits_TV.double(), dim=-1)
        probability_TV = processed_logprobs(logits_TV.double(), item.requested, past, stop_ids).exp()
        drawn_T = (torch.tensor(completion.token_ids) + shift) % raw_TV.shape[1]
        tokens += drawn_T.tolist()
        own += float(raw_TV[torch.arange(len(raw_TV)), drawn_T].sum())
        expected += float((probability_TV * raw_TV).sum())
        rows_V, drawn_V = rows_V + raw_TV.sum(dim=0), drawn_V + probability_TV.sum(dim=0)
    elsewhere_V, count = rows_V / len(tokens), len(tokens)
    lead = own / count - float(elsewhere_V[torch.tensor(tokens)].mean())
    lead_of_ours = expected / count - float(drawn_V @ elsewhere_V) / count
    return lead / lead_of_ours if lead_of_ours >= LEAST_LEAD else None
