"""Which tokens of a padded line are real, and which of these did the policy sample? Where the line has a mask, it says so.

attention_mask                                  real tokens of prompt and output, of the prompt, or of the output
prompt_mask, prompt_attention_mask              real tokens of the prompt
completion_mask, response_mask, loss_mask       output tokens that were sampled: what stands between them (tool
                                                output) is context of those that follow
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

from zerodrift.core.errors import InvalidCompletion
from zerodrift.records.dump_fields import Fields, is_given, listed, runs_of

PROMPT_MASKS = ("prompt_mask", "prompt_attention_mask")
SAMPLED_MASKS = ("completion_mask", "response_mask", "loss_mask")


class Part(NamedTuple):
    """A run of sampled tokens, by its place in the output as recorded, and all that was real before it."""

    prompt: tuple[int, ...]
    begin: int
    end: int

    def of(
        self, values: tuple[Any, ...], name: str, recorded: int, parts: Sequence["Part"]
    ) -> tuple[Any, ...]:
        """Those of `values` that stand beside it; they may have been recorded for every token or for sampled ones."""
        if len(values) == recorded:
            return values[self.begin : self.end]
        sampled = sum(part.end - part.begin for part in parts)
        if len(values) != sampled:
            either = f"{recorded} output tokens" + (
                f", {sampled} of them sampled," if sampled != recorded else ""
            )
            raise InvalidCompletion(f"{either} carry {len(values)} {name}; each token needs one")
        first = sum(part.end - part.begin for part in parts if part.end <= self.begin)
        return values[first : first + self.end - self.begin]


def sampled_parts(fields: Fields, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[Part]:
    """One part where the line has no mask, or one that marks padding alone; one for each turn where it has more."""
    real_prompt, real_output = _real(fields, len(prompt), len(output))
    sampled = _mask(fields, SAMPLED_MASKS, len(output)) or [True] * len(output)
    before = tuple(compress(prompt, real_prompt))
    drawn = [one and other for one, other in zip(real_output, sampled, strict=True)]
    parts = [
        Part(before + tuple(compress(output[:begin], real_output[:begin])), begin, end)
        for begin, end in runs_of(drawn)
    ]
    return parts or [Part(before, 0, 0)]


def _real(fields: Fields, prompt: int, output: int) -> tuple[list[bool], list[bool]]:
    """Which tokens of the prompt and of the output are no padding."""
    of_prompt, of_output = _mask(fields, PROMPT_MASKS, prompt), None
    if is_given(fields, "attention_mask"):
        length = len(listed(fields, "attention_mask"))
        if length == prompt + output:
            mask = _mask(fields, ("attention_mask",), length) or []
            of_prompt, of_output = mask[:prompt], mask[prompt:]
        elif prompt != output and length in (prompt, output):
            mask = _mask(fields, ("attention_mask",), length) or []
            of_prompt, of_output = (mask, None) if length == prompt else (of_prompt, mask)
        else:
            raise InvalidCompletion(
                f"attention_mask has {length} entries for {prompt} prompt and {output} output tokens; it needs one for "
                "each of both, in this order"
            )
    return of_prompt or [True] * prompt, of_output or [True] * output


def _mask(fields: Fields, names: Sequence[str], length: int) -> list[bool] | None:
    """The mask under one of `names`, where there is one."""
    present = [name for name in names if is_given(fields, name)]
    if not present:
        return None
    values = listed(fields, *present)
    if len(values) != length or not all(value in (0, 1) for value in values):
        raise InvalidCompletion(
            f"{present[0]} has {len(values)} entries for {length} tokens; write 0 or 1 for each of them"
        )
    return [bool(value) for value in values]
