"""Do engine and reference have the same tokenizer and the same tokens? Texts are sent to be encoded only.

An audit sends token ids, so that another tokenizer spoils no number of it; it does spoil every prompt that a trainer
sends as text, and where the numbers are wrong it says why: behind the address is another model. Special tokens at the
ends alone are listed and do not gate: whether they are added is for each request to say.
"""

from collections.abc import Sequence

from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import EngineError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.evidence import TokenizerEvidence
from zerodrift.records.verdict import CauseFound, Outcome, Probe

NAME = Probe.TOKENIZER
TEXTS = (
    "The capital of France is",
    "1234567890 + 1 = 1234567891",
    "def f(x):\n    return x  # twice\n",
    "Größe, naïve, 数学, 🙂",
    " leading and trailing ",
)


def tokenizer(engine: Backend, reference: ReferenceBackend) -> ProbeResult:
    """Does the engine make the same ids of the same texts?"""
    need(engine, Capability.TOKENIZE, "nothing shows which ids it makes of text")
    theirs, ours = map(engine.tokenize, TEXTS), map(reference.tokenize, TEXTS)
    other = [(text, a, b) for text, a, b in zip(TEXTS, theirs, ours, strict=True) if tuple(a) != tuple(b)]
    evidence = TokenizerEvidence(texts=len(TEXTS), differing=len(other))
    if not other:
        return answered(NAME, Outcome.PASS, f"{len(TEXTS)} texts become the same ids", evidence)
    text, seen, expected = other[0]
    message = (
        f"{len(other)} of {len(TEXTS)} texts become other ids: {text!r} is {_shown(seen)} to the engine and "
        f"{_shown(expected)} to the reference"
    )
    special = frozenset(reference.tokenizer.all_special_ids)
    gating = any(_plain(a, special) != _plain(b, special) for _, a, b in other)
    cause = found(
        "semantic/tokenizer", engine.name, NAME, message, explained=len(other) / len(TEXTS), gating=gating
    )
    return answered(NAME, Outcome.FAIL if gating else Outcome.PASS, message, evidence, causes=(cause,))


def smaller_vocabulary(engine: Backend, vocab_size: int) -> CauseFound | None:
    """Asked of an engine that refused a request: is the refusal one of the model's own tokens?"""
    if not _takes(engine, 0) or _takes(engine, vocab_size - 1):
        return None
    message = (
        f"it refuses token id {vocab_size - 1}, the reference's last, and takes 0: its vocabulary is smaller"
    )
    return found("weights/other-model", engine.name, Probe.CONTRACT, message)


def _takes(engine: Backend, token: int) -> bool:
    try:
        engine.generate([Request(Prompt((token,)), SamplingParams(max_tokens=1))])
    except EngineError:
        return False
    return True


def _plain(ids: Sequence[int], special: frozenset[int]) -> list[int]:
    return [each for each in ids if each not in special]


def _shown(ids: tuple[int, ...]) -> str:
    return f"{list(ids[:6])}{'…' if len(ids) > 6 else ''}"
