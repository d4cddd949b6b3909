from collections.abc import Sequence
from typing import Any

import pytest

from zerodrift.audit.probes.identity import TEXTS, smaller_vocabulary, tokenizer
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import CapabilityMissing, EngineRefused
from zerodrift.core.request import Request
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome


def test_the_same_tokenizer(llama):
    result = tokenizer(llama, llama)
    assert (result.record.status, result.causes) == (Outcome.PASS, ())
    assert result.record.evidence == {"texts": len(TEXTS), "differing": 0}


def test_another_tokenizer_fails_with_an_example(llama):
    result = tokenizer(resolve("semantic/tokenizer").inject(llama), llama)
    (cause,) = result.causes
    assert (cause.cause, cause.gating) == ("semantic/tokenizer", True)
    assert result.record.status is Outcome.FAIL
    assert TEXTS[0] in cause.evidence


class Ending(FaultyBackend):
    """Puts an end-of-sequence behind every text."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        return (*self.inner.tokenize(text), 1)


def test_special_tokens_alone_are_listed(llama):
    assert 1 in llama.tokenizer.all_special_ids
    result = tokenizer(Ending(llama), llama)
    (cause,) = result.causes
    assert (cause.cause, cause.gating) == ("semantic/tokenizer", False)
    assert result.record.status is Outcome.PASS, "the audit sends ids, and its numbers stand"


def test_an_engine_that_shows_no_ids(llama, scripted):
    engine = scripted(lambda request, number: None)
    assert Capability.TOKENIZE not in engine.capabilities
    with pytest.raises(CapabilityMissing, match="which ids"):
        tokenizer(engine, llama)


class Refusing(FaultyBackend):
    """Knows so many tokens, as an engine does that checks what it is sent."""

    def __init__(self, inner: ReferenceBackend, known: range) -> None:
        super().__init__(inner)
        self._known = known

    def generate(self, requests: Sequence[Request]) -> Any:
        for request in requests:
            if max(request.prompt.token_ids) not in self._known:
                raise EngineRefused("400: Token id is out of vocabulary")
        return self.inner.generate(requests)


@pytest.mark.parametrize(("known", "smaller"), [(range(256), True), (range(512), False), (range(0), False)])
def test_a_smaller_vocabulary_is_told_from_any_other_refusal(llama, known, smaller):
    cause = smaller_vocabulary(Refusing(llama, known), 512)
    assert (cause is not None) is smaller
    if cause is not None:
        assert (cause.cause, cause.gating) == ("weights/other-model", True)
        assert "token id 511" in cause.evidence
