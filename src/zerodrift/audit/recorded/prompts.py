"""Which other prompts may the engine have seen? Those of the same words under another template or system prompt.

A chat template is taken apart by rendering it with marks in the place of words: what stands before a system prompt,
between it and the user, and behind the user. A recorded prompt that has this form is then put together again without
its system prompt, with the tokenizer's own, with others of the dump, or with no template at all. Where the dump has the
conversation or the text beside the ids, those are rendered as well.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zerodrift.records.recorded import Message, RecordedRollout

SYSTEM, USER = "{the system's words}", "{the user's words}"
USUAL_SYSTEM_PROMPTS = ("You are a helpful assistant.",)
MOST_SYSTEM_PROMPTS = 4
"""Of the dump, that are tried on rollouts that have another."""


class ChatFrame(NamedTuple):
    """A chat template as text around words: `before_system` S `after_system` U `behind`, or `default` U `behind`."""

    before_system: str
    after_system: str
    header: str
    """What opens the user's turn, where nothing stands before it."""
    default: str
    """What stands before the user's words where nobody gives a system prompt."""
    closing: str
    """What ends the user's turn."""
    behind: str
    """That, and what asks for an answer."""

    def words(self, text: str) -> tuple[str | None, str] | None:
        """System prompt (None: no turn of its own) and the rest of a rendered prompt; None where it has another form."""
        if not text.endswith(self.behind):
            return None
        text = text[: len(text) - len(self.behind)]
        if self.before_system and text.startswith(self.before_system):
            system, cut, rest = text.removeprefix(self.before_system).partition(self.after_system)
            return (system, rest) if cut else None
        if text.startswith(self.header):
            return None, text.removeprefix(self.header)
        return None


def frame_of(tokenizer: Any) -> ChatFrame | None:
    """The tokenizer's template; None where it has none, or one that cannot be taken apart."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = (Message("system", SYSTEM), Message("user", USER))
    whole, plain = rendered(tokenizer, turns), rendered(tokenizer, turns[1:])
    closed = rendered(tokenizer, turns[1:], prompting=False)
    if whole is None or plain is None or closed is None or SYSTEM not in whole or USER not in plain:
        return None
    before, rest = whole.split(SYSTEM, 1)
    after, behind = rest.split(USER, 1)
    closing = closed.split(USER, 1)[1]
    return ChatFrame(before, after, after.removeprefix(closing), plain.split(USER, 1)[0], closing, behind)


def rendered(tokenizer: Any, turns: Sequence[Message], *, prompting: bool = True) -> str | None:
    """Text of a conversation; None where the template refuses it."""
    conversation = [turn._asdict() for turn in turns]
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=prompting
        )
    except Exception:
        return None
    return text


def other_prompts(
    tokenizer: Any, frame: ChatFrame | None, rollout: RecordedRollout, systems: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What may have been done to the prompt, in words, and the ids that the engine then saw."""
    text: str = tokenizer.decode(list(rollout.prompt), skip_special_tokens=False)
    seen = {rollout.prompt}
    for words, other in _texts(tokenizer, frame, rollout, text, systems):
        ids = tuple(tokenizer(other, add_special_tokens=False)["input_ids"])
        if ids and ids not in seen:
            seen.add(ids)
            yield words, ids


def _texts(
    tokenizer: Any, frame: ChatFrame | None, rollout: RecordedRollout, text: str, systems: Sequence[str]
) -> Iterator[tuple[str, str]]:
    if rollout.messages:
        yield (
            "the dump's messages under the tokenizer's template",
            rendered(tokenizer, rollout.messages) or "",
        )
        asked = [turn for turn in rollout.messages if turn.role != "system"]
        yield "the dump's messages without their system prompt", rendered(tokenizer, asked) or ""
    if rollout.text is not None:
        yield "the dump's text as it is", rollout.text
        if frame is not None:
            yield "the dump's text in the tokenizer's template", frame.default + rollout.text + frame.behind
    if frame is None:
        return
    parsed = frame.words(text)
    if parsed is None:
        yield "the prompt in the tokenizer's template", frame.default + text + frame.behind
        yield (
            "the prompt in the tokenizer's template without a system prompt",
            frame.header + text + frame.behind,
        )
        return
    _, user = parsed
    yield "the prompt without its system prompt", frame.header + user + frame.behind
    yield "the prompt with the template's own system prompt", frame.default + user + frame.behind
    for system in (*systems, "", *USUAL_SYSTEM_PROMPTS):
        told = f"the prompt with the system prompt {system!r}"
        yield told, frame.before_system + system + frame.after_system + user + frame.behind
    yield "the prompt without the turn that asks for an answer", frame.default + user + frame.closing
    yield "the user's words without a template", user


def system_prompts(tokenizer: Any, frame: ChatFrame | None, rollouts: Sequence[RecordedRollout]) -> list[str]:
    """System prompts of the dump, the commonest first."""
    if frame is None:
        return []
    counts: dict[str, int] = {}
    for prompt in {rollout.prompt for rollout in rollouts}:
        parsed = frame.words(tokenizer.decode(list(prompt), skip_special_tokens=False))
        if parsed is not None and parsed[0] is not None:
            counts[parsed[0]] = counts.get(parsed[0], 0) + 1
    for rollout in rollouts:
        for turn in rollout.messages:
            if turn.role == "system":
                counts[turn.content] = counts.get(turn.content, 0) + 1
    return sorted(counts, key=lambda system: -counts[system])[:MOST_SYSTEM_PROMPTS]
