"""Does the engine render chat messages as the trainer's tokenizer does? Conversations are sent to be encoded only.

An audit sends token ids, so that another template spoils no number of it; it does spoil every prompt that a trainer
sends as messages. Asked in several shapes, since a template is a program: it may differ for a system message, for the
turns before the last, or only where an answer is to begin.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged
from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import EngineError, EngineUnreachable
from zerodrift.records.evidence import Power, TemplateEvidence
from zerodrift.records.verdict import Outcome, Probe

NAME = Probe.TEMPLATE
Ids = tuple[int, ...]
CONTEXT = 4
"""Tokens before the first difference that are shown."""


class Conversation(NamedTuple):
    """Messages, and whether an answer is to begin behind them."""

    name: str
    messages: Sequence[tuple[str, str]]
    """Role and content of each."""
    generation_prompt: bool = True

    @property
    def as_sent(self) -> list[dict[str, str]]:
        """As every chat route takes them."""
        return [{"role": role, "content": content} for role, content in self.messages]


_ASKED, _TOLD = ("user", "How far is the lighthouse?"), ("assistant", "Three miles along the coast.")
CONVERSATIONS = (
    Conversation("one user turn", (_ASKED,)),
    Conversation("one user turn, no answer to begin", (_ASKED,), generation_prompt=False),
    Conversation("a system message and a user turn", (("system", "Answer in one word."), _ASKED)),
    Conversation("several turns", (_ASKED, _TOLD, ("user", "And back?"))),
    Conversation("a finished exchange", (_ASKED, _TOLD), generation_prompt=False),
    Conversation("content with spaces at its ends", (("user", "  3 + 4 =  "),)),
    Conversation("content with newlines", (("user", "\ndef f(x):\n    return x\n\n"),)),
    Conversation("content in other scripts", (("user", "Größe, naïve, 数学, 🙂"),)),
    Conversation("empty content", (("user", ""),)),
)


class _Difference(NamedTuple):
    conversation: Conversation
    seen: Ids
    expected: Ids


def chat_template(engine: Backend, reference: ReferenceBackend) -> ProbeResult:
    """Does the engine make the same ids of the same conversations?"""
    if not reference.tokenizer.chat_template:
        return not_judged(NAME, "the tokenizer has no chat template")
    need(engine, Capability.TOKENIZE, "nothing shows which ids it makes of messages")
    compared, refused, other = 0, 0, []
    for conversation in CONVERSATIONS:
        expected, seen = _rendered(reference, conversation), _rendered(engine, conversation)
        if expected is None or seen is None:
            # What both refuse is the same template at work; what the engine alone refuses it does not render otherwise.
            refused += seen is None and expected is not None
            continue
        compared += 1
        if seen != expected:
            other.append(_Difference(conversation, seen, expected))
    if not compared:
        return not_judged(NAME, "the engine or the template refuses every conversation")
    evidence = TemplateEvidence(conversations=compared, differing=len(other), refused=refused)
    left = f"; {refused} more are refused by the engine" if refused else ""
    if not other:
        message = f"{compared} conversations become the same ids{left}"
        return answered(NAME, Outcome.PASS, message, evidence)
    message = (
        f"{len(other)} of {compared} conversations become other ids: {_first(other[0], reference)}{left}"
    )
    cause = found(_named(other, reference), engine.name, NAME, message, explained=len(other) / compared)
    return answered(NAME, Outcome.FAIL, message, evidence, causes=(cause,))


def templates_asked(result: ProbeResult) -> Power:
    """What a PASS says of chat templates."""
    evidence = result.evidence
    if not isinstance(evidence, TemplateEvidence):
        return Power(name="chat template", message=f"chat templates were not asked: {result.message}")
    message = f"another chat template: if it shows in one of {evidence.conversations} conversations"
    return Power(name="chat template", message=message, seen_from=1 / evidence.conversations)


def _rendered(side: Backend, conversation: Conversation) -> Ids | None:
    """None where it refuses: templates may, for example where a system message comes first."""
    try:
        return side.render_chat(conversation.as_sent, generation_prompt=conversation.generation_prompt)
    except EngineUnreachable:
        raise
    except EngineError:
        return None


def _named(other: Sequence[_Difference], reference: ReferenceBackend) -> str:
    """A BOS more or fewer has a name of its own, where that is all."""
    bos = reference.facts.bos_token_id
    if bos is not None and all((bos, *short) == long for short, long in map(_by_length, other)):
        return "semantic/bos"
    return "semantic/template"


def _by_length(difference: _Difference) -> tuple[Ids, Ids]:
    short, long = sorted((difference.seen, difference.expected), key=len)
    return short, long


def _first(difference: _Difference, reference: ReferenceBackend) -> str:
    """Where they part, in text."""
    _, seen, expected = difference
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(seen, expected, strict=False)))
    before = reference.tokenizer.decode(list(expected[max(0, same - CONTEXT) : same]))
    behind = f"behind {before!r}" if same else "at the beginning"
    theirs, ours = (_shown(ids[same:], reference.tokenizer) for ids in (seen, expected))
    return f"of {difference.conversation.name}, {behind} the engine has {theirs}, and the reference {ours}"


def _shown(ids: Ids, tokenizer: Any) -> str:
    if not ids:
        return "nothing more"
    return (
        f"{tokenizer.decode(list(ids[:CONTEXT]))!r} {list(ids[:CONTEXT])}{'…' if len(ids) > CONTEXT else ''}"
    )
