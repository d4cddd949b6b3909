"""Hypotheses about the prompt: the model saw other ids than were sent, and the engine does not show it."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from zerodrift.audit.counterfactual.evaluate import Edit
from zerodrift.audit.counterfactual.explanation import AS_SENT, Explanation, Hypothesis


class PromptEdit(NamedTuple):
    """A change to prompt ids, and the cause it stands for."""

    cause: str
    message: str
    edit: Edit


def prompt_edits(tokenizer: Any, bos: int | None) -> dict[str, PromptEdit]:
    """What may have happened to a prompt on its way."""
    edits = {
        f"cut-{count}": PromptEdit(
            "semantic/template",
            f"the last {count} prompt token{'s' * (count > 1)} lost",
            partial(_cut, count),
        )
        for count in (1, 2, 3)
    }
    edits["retokenised"] = PromptEdit(
        "semantic/retokenised",
        "the prompt decoded to text and encoded again",
        # Not verbose: random ids of a long prompt come back as more tokens than a context has, of which it would warn.
        lambda ids: (
            tuple(tokenizer(tokenizer.decode(ids), add_special_tokens=False, verbose=False)["input_ids"])
            or ids
        ),
    )
    if bos is not None:
        edits["bos-added"] = PromptEdit("semantic/bos", "one BOS more than was sent", lambda ids: (bos, *ids))
        edits["bos-removed"] = PromptEdit(
            "semantic/bos",
            "one BOS fewer than was sent",
            lambda ids: ids[1:] if ids[0] == bos and len(ids) > 1 else ids,
        )
    return edits


def context_hypotheses(explanation: Explanation, edits: Mapping[str, PromptEdit]) -> Iterator[Hypothesis]:
    """Every change of prompt that can be made to `explanation`."""
    if explanation.context != AS_SENT:
        return
    for name, edit in edits.items():
        yield Hypothesis(edit.cause, edit.message, msgspec.structs.replace(explanation, context=name))


def _cut(count: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[:-count] if len(ids) > count else ids
