"""The smallest request that still shows a difference: fewer neighbours, fewer tokens, a shorter prompt, plainer sampling.

Starts from a request that was seen to be answered wrongly: a search from nothing would first have to find one again.
What is left may show another fault than the one it started from, where an engine has two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from zerodrift.core.request import PENALTIES, Prompt, Request, SamplingParams

Requests = tuple[Request, ...]
FirstBad = Callable[[Requests], int | None]
"""Requests to the index of the first wrong token of the first one's answer; None where all of them are right."""

MOST_QUESTIONS = 40
"""Asked of the engine in all."""
PLAIN = SamplingParams()
RESETTABLE = ("top_p", "top_k", "min_p", *PENALTIES, "temperature", "logprobs", "n")
"""Set back to their defaults one by one, where the difference survives that."""


@dataclass
class _Reduction:
    """The smallest that was seen to fail so far."""

    requests: Requests
    bad: int
    first_bad: FirstBad
    questions_left: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.requests[0].prompt.token_ids

    def accepts(self, requests: Requests) -> bool:
        """Whether these fail as well; then they are the smallest."""
        if self.questions_left == 0:
            return False
        self.questions_left -= 1
        if (bad := self.first_bad(requests)) is None:
            return False
        self.requests, self.bad = requests, bad
        return True

    def accepts_prompt(self, token_ids: tuple[int, ...]) -> bool:
        first = self.requests[0]
        prompt = Prompt(token_ids, cache_salt=first.prompt.cache_salt)
        return self.accepts((Request(prompt, first.sampling), *self.requests[1:]))

    def accepts_sampling(self, **changes: object) -> bool:
        first = self.requests[0]
        sampling = msgspec.structs.replace(first.sampling, **changes)
        return self.accepts((Request(first.prompt, sampling), *self.requests[1:]))


def reduce(requests: Requests, first_bad: FirstBad, most_questions: int = MOST_QUESTIONS) -> Requests | None:
    """The first request with as little else as possible; None where its answer is right when asked again."""
    if (bad := first_bad(requests)) is None:
        return None
    reduction = _Reduction(requests, bad, first_bad, most_questions - 1)
    _leave_neighbours_out(reduction)
    _end_behind_the_first_bad_token(reduction)
    _cut_pieces_out_of_the_prompt(reduction)
    _end_behind_the_first_bad_token(reduction)
    _sample_plainly(reduction)
    return reduction.requests


def _leave_neighbours_out(reduction: _Reduction) -> None:
    company = len(reduction.requests) - 1
    if company and not reduction.accepts(reduction.requests[:1]):
        while company > 1 and reduction.accepts(reduction.requests[: 1 + company // 2]):
            company //= 2


def _end_behind_the_first_bad_token(reduction: _Reduction) -> None:
    sampling, enough = reduction.requests[0].sampling, reduction.bad + 1
    if enough < sampling.max_tokens:
        reduction.accepts_sampling(max_tokens=enough, min_tokens=min(sampling.min_tokens, enough))


def _cut_pieces_out_of_the_prompt(reduction: _Reduction) -> None:
    """Ever smaller ones, down to single tokens."""
    width = len(reduction.prompt) // 2
    while width and reduction.questions_left:
        begin = 0
        while begin < len(reduction.prompt) and reduction.questions_left:
            shorter = reduction.prompt[:begin] + reduction.prompt[begin + width :]
            if not shorter or not reduction.accepts_prompt(shorter):
                begin += width
        width //= 2


def _sample_plainly(reduction: _Reduction) -> None:
    for name in RESETTABLE:
        plain = getattr(PLAIN, name)
        if getattr(reduction.requests[0].sampling, name) != plain:
            reduction.accepts_sampling(**{name: plain})
