"""Faults of the stream: what comes whole is right, and what a trainer's client puts together from deltas is not."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer, Completion, Problem
from zerodrift.core.errors import InvalidCompletion
from zerodrift.core.request import Request
from zerodrift.faults.rewriting import rewrite, with_output
from zerodrift.faults.wrapper import FaultyBackend, Plant


class LosingStream(FaultyBackend):
    """Streams through `change`; answers whole as ever."""

    def __init__(self, inner: Backend, change: Callable[[Completion], Completion]) -> None:
        super().__init__(inner)
        self._change = change

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """A client cannot know what it was not sent."""
        return rewrite(requests, self.inner.stream(requests), lambda _, each: self._change(each))


class StreamWithoutLogprobs(FaultyBackend):
    """A piece of several tokens carries one logprob; an adapter refuses a sample that has fewer than tokens."""

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """Outputs of one token stay whole: their piece has one token."""
        return [self._refused(answer) for answer in self.inner.stream(requests)]

    def _refused(self, answer: Answer) -> Answer:
        kept = [each for each in answer.completions if len(each.token_ids) < 2]
        lost = [each for each in answer.completions if len(each.token_ids) >= 2]
        problems = (*answer.problems, *map(self._refusal, lost))
        return msgspec.structs.replace(answer, completions=tuple(kept), problems=problems)

    def _refusal(self, completion: Completion) -> Problem:
        try:
            # Two tokens in a piece, and the logprob of the second is not sent.
            msgspec.structs.replace(completion, logprobs=completion.logprobs[::2], top_logprobs=())
        except InvalidCompletion as error:
            return Problem(error.code, f"sample {completion.sample_index}: {error}")
        raise AssertionError("a completion with fewer logprobs than tokens was let through")


def _without_a_piece(completion: Completion) -> Completion:
    """Its middle token, with all that was said of it."""
    middle = len(completion.token_ids) // 2
    if len(completion.token_ids) < 2:
        return completion
    kept = [place for place in range(len(completion.token_ids)) if place != middle]
    return with_output(
        completion,
        tuple(completion.token_ids[place] for place in kept),
        logprobs=tuple(completion.logprobs[place] for place in kept),
        top_logprobs=tuple(completion.top_logprobs[place] for place in kept if completion.top_logprobs),
    )


def _one_late(completion: Completion) -> Completion:
    """The first piece comes with the only logprob there is, and each one after it with that of the piece before."""
    logprobs, tops = completion.logprobs, completion.top_logprobs
    return msgspec.structs.replace(
        completion, logprobs=logprobs[:1] + logprobs[:-1], top_logprobs=tops[:1] + tops[:-1]
    )


STREAMING_FAULTS: Mapping[str, Plant] = {
    "semantic/streaming:chunk-lost": lambda engine: LosingStream(engine, _without_a_piece),
    "semantic/streaming:logprobs-one-late": lambda engine: LosingStream(engine, _one_late),
    "semantic/streaming:logprobs-lost": StreamWithoutLogprobs,
}
