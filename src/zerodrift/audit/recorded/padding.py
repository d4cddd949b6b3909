"""Which tokens at the ends of a prompt or of an output look like padding? Whether they are is for the numbers to say."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from zerodrift.records.recorded import RecordedRollout

Ids = tuple[int, ...]
USUAL = 0
"""What tensors are filled up with where nobody says otherwise."""
REPEATED = 2
"""An unknown id is taken for padding where it stands so often at an end, …"""
COMMON = 0.25
"""… in this share of the rollouts at least."""


class Trimmed(NamedTuple):
    """A rollout without what looks like padding; `begin` and `end` are the places of what is left of the output."""

    prompt: Ids
    begin: int
    end: int


def padding_ids(rollouts: Sequence[RecordedRollout], known: Sequence[int]) -> list[int]:
    """Ids that are known to pad, the usual one, and those that many rollouts begin or end with, again and again."""
    seen: Counter[int] = Counter()
    for rollout in rollouts:
        ends = (rollout.prompt, rollout.prompt[::-1], rollout.output, rollout.output[::-1])
        seen.update({ids[0] for ids in ends if len(ids) > REPEATED and len(set(ids[:REPEATED])) == 1})
    common = [token for token, count in seen.most_common() if count >= COMMON * len(rollouts)]
    return list(dict.fromkeys([*known, *common, USUAL]))


def trim(rollout: RecordedRollout, pad: int, stop_ids: Collection[int]) -> Trimmed | None:
    """Without `pad` at either end of prompt and output; None where there is none, or nothing but."""
    prompt, output = rollout.prompt, rollout.output
    first, last = _real(prompt, pad)
    begin, end = _real(output, pad)
    # The token that ended the output was sampled, even where it is what pads as well.
    if end < len(output) and output[end] in stop_ids:
        end += 1
    if (first, last, begin, end) == (0, len(prompt), 0, len(output)) or first >= last or begin >= end:
        return None
    return Trimmed(prompt[first:last], begin, end)


def _real(ids: Ids, pad: int) -> tuple[int, int]:
    """Where the first token that is no padding stands, and where the last one ends."""
    real = [place for place, token in enumerate(ids) if token != pad]
    return (real[0], real[-1] + 1) if real else (0, 0)
