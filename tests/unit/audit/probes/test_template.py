import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from zerodrift.audit.probes.template import CONVERSATIONS, chat_template, templates_asked
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import CapabilityMissing, EngineRefused, EngineUnreachable
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome

Messages = Sequence[dict[str, str]]


def templated(llama: ReferenceBackend, old: str, new: str) -> ReferenceBackend:
    """The same engine with another template."""
    engine = copy.copy(llama)
    engine.own_tokenizer = copy.deepcopy(llama.tokenizer)
    assert old in engine.own_tokenizer.chat_template
    engine.own_tokenizer.chat_template = engine.own_tokenizer.chat_template.replace(old, new)
    return engine


def test_the_same_template(llama):
    result = chat_template(llama, llama)
    assert (result.status, result.causes) == (Outcome.PASS, ())
    assert result.record.evidence == {"conversations": len(CONVERSATIONS), "differing": 0}
    assert templates_asked(result).seen_from == 1 / len(CONVERSATIONS)


@pytest.mark.parametrize(
    ("old", "new", "differing"),
    [
        # Where an answer begins, which two of the conversations do not ask for.
        ("assistant\n", "assistant\n\n", 7),
        ("assistant\n", "assistant", 7),
        # Content that is stripped differs only where there is something to strip.
        ("message['content']", "message['content'].strip()", 2),
        # Only behind a system message.
        (
            "message['role'] + '\n'",
            "message['role'] + ('\n\n' if message['role'] == 'system' else '\n')",
            1,
        ),
        ("'<|im_end|>' + '\n'", "'<|im_end|>'", 9),
    ],
)
def test_another_template_is_named_with_the_first_difference(llama, old, new, differing):
    result = chat_template(templated(llama, old, new), llama)
    (cause,) = result.causes
    assert (cause.cause, cause.gating, result.status) == ("semantic/template", True, Outcome.FAIL)
    assert result.record.evidence["differing"] == differing
    shown = next(each.name for each in CONVERSATIONS if each.name in cause.evidence)
    assert shown in result.message


def test_a_bos_that_is_added_to_chat_is_named_as_such(llama):
    bos = llama.tokenizer.bos_token
    engine = templated(llama, "{% for", "{{ '" + bos + "' }}{% for")
    (cause,) = chat_template(engine, llama).causes
    assert cause.cause == "semantic/bos"


class Partly(FaultyBackend):
    """Renders what `takes` it takes, and refuses the others."""

    def __init__(self, inner: Any, takes: Callable[[Messages, bool], bool], error: type[Exception]) -> None:
        super().__init__(inner)
        self._takes, self._error = takes, error

    def render_chat(self, messages: Messages, *, generation_prompt: bool = True) -> tuple[int, ...]:
        if not self._takes(messages, generation_prompt):
            raise self._error("no")
        return self.inner.render_chat(messages, generation_prompt=generation_prompt)


def test_what_the_engine_refuses_is_counted_and_not_blamed(llama):
    engine = Partly(llama, lambda messages, begin: begin, EngineRefused)
    result = chat_template(engine, llama)
    assert (result.status, result.causes) == (Outcome.PASS, ())
    assert result.record.evidence == {"conversations": 7, "differing": 0, "refused": 2}
    nothing = chat_template(Partly(llama, lambda *_: False, CapabilityMissing), llama)
    assert (nothing.status, nothing.required) == (Outcome.INCONCLUSIVE, False)
    with pytest.raises(EngineUnreachable):
        chat_template(Partly(llama, lambda *_: False, EngineUnreachable), llama)


def test_a_template_that_takes_no_system_message_is_compared_by_the_others(llama):
    strict = "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    both = templated(llama, "{% for message in messages %}", strict)
    both.tokenizer = both.own_tokenizer
    result = chat_template(both, both)
    assert result.record.evidence == {"conversations": len(CONVERSATIONS) - 1, "differing": 0}


def test_where_there_is_nothing_to_ask_it_is_said(llama, scripted):
    engine = scripted(lambda request, number: None)
    assert Capability.TOKENIZE not in engine.capabilities
    with pytest.raises(CapabilityMissing):
        chat_template(engine, llama)
    bare = copy.copy(llama)
    bare.tokenizer = copy.deepcopy(llama.tokenizer)
    bare.tokenizer.chat_template = None
    result = chat_template(llama, bare)
    assert (result.status, result.required) == (Outcome.INCONCLUSIVE, False)
    assert templates_asked(result).seen_from is None
