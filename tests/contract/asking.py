"""What most tests of a backend begin with: a request of two tokens, and the one answer to it."""

from typing import Any

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams


def ask(*ids: int, salt: str | None = None, **sampling: Any) -> Request:
    return Request(Prompt(ids, cache_salt=salt), SamplingParams(**({"max_tokens": 2} | sampling)))


def one(backend: Backend, request: Request) -> Answer:
    [answer] = backend.generate([request])
    return answer


def only(backend: Backend, request: Request) -> Completion:
    answer = one(backend, request)
    assert answer.problems == ()
    [completion] = answer.completions
    return completion
