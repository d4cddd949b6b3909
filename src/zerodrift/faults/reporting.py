"""Faults of the report: the tokens were sampled rightly, and what is said about them is wrong."""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer, Completion, FinishReason, Problem
from zerodrift.core.errors import CapabilityMissing, InvalidValue, NonFinite
from zerodrift.core.request import Request, SamplingParams
from zerodrift.faults.rewriting import Change, as_requested, restated, rewrite, with_output
from zerodrift.faults.wrapper import FaultyBackend, Plant


class Misreported(FaultyBackend):
    """Every completion is changed on its way out."""

    def __init__(self, inner: Backend, change: Change) -> None:
        super().__init__(inner)
        self._change = change

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Sampled as requested, reported otherwise."""
        return rewrite(requests, self.inner.generate(requests), self._change)


class RawLogprobs(FaultyBackend):
    """Reports the model's own distribution in place of the one that was sampled."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """The values come from scoring, where logprobs are raw by definition.

        Where nothing is processed they are the engine's own, with whatever else is wrong with them.
        """
        if any(r.sampling.logprobs and (r.sampling.penalises or r.sampling.logit_bias) for r in requests):
            raise CapabilityMissing(
                "raw alternatives cannot be worked out from penalised or biased ones: request logprobs=0, "
                "or no penalties and no bias"
            )
        answers = self.inner.generate(requests)
        sequences = [
            each.sequence
            for request, answer in zip(requests, answers, strict=True)
            for each in answer.completions
            if not _is_raw(request.sampling)
        ]
        scores = iter(self.inner.score(sequences) if sequences else [])

        def raw(request: Request, completion: Completion) -> Completion:
            if _is_raw(request.sampling):
                return completion
            values = next(scores)[len(completion.prompt_token_ids) - 1 :]
            # Greedy decoding reports temperature 1 already.
            return restated(completion, values, request.sampling.temperature or 1.0)

        return rewrite(requests, answers, raw)


def _is_raw(sampling: SamplingParams) -> bool:
    """Whether the distribution sampled from is the model's own."""
    changed = sampling.truncates or sampling.penalises or sampling.logit_bias
    return sampling.temperature == 1 and not changed


class LikeliestInstead(FaultyBackend):
    """Reports the first entry of the alternatives, which is the sampled token only now and then."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Asks for one alternative where none was asked for, and shows none."""
        asked = [
            msgspec.structs.replace(
                request,
                sampling=msgspec.structs.replace(request.sampling, logprobs=request.sampling.logprobs or 1),
            )
            for request in requests
        ]

        def first(request: Request, completion: Completion) -> Completion:
            likeliest = tuple(entries[0].logprob for entries in completion.top_logprobs)
            shown = completion.top_logprobs if request.sampling.logprobs else ()
            return as_requested(
                request, msgspec.structs.replace(completion, logprobs=likeliest, top_logprobs=shown)
            )

        return rewrite(requests, self.inner.generate(asked), first)


class OneCorruptSample(FaultyBackend):
    """One logprob in every call is no number; the sample that carries it becomes a Problem, as in an adapter."""

    def __init__(self, inner: Backend, value: float | None) -> None:
        super().__init__(inner)
        self._value = value

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """The first sample of the first request is the one."""
        answers = self.inner.generate(requests)
        for index, answer in enumerate(answers):
            if answer.completions:
                first, *others = answer.completions
                problems = (*answer.problems, self._refusal(first))
                answers[index] = msgspec.structs.replace(answer, completions=tuple(others), problems=problems)
                break
        return answers

    def _refusal(self, completion: Completion) -> Problem:
        try:
            self._corrupted(completion)
        except InvalidValue as error:
            return Problem(error.code, f"sample {completion.sample_index}: {error}")
        raise AssertionError(f"a completion with the logprob {self._value} was let through")

    def _corrupted(self, completion: Completion) -> Completion:
        """Raises, for that is the promise of `Completion`; only null does not get that far."""
        if self._value is None:
            raise NonFinite("a logprob is null, which is how JSON writers spell NaN")
        middle = len(completion.logprobs) // 2
        values = (*completion.logprobs[:middle], self._value, *completion.logprobs[middle + 1 :])
        return msgspec.structs.replace(completion, logprobs=values)


class MisboundOutputs(FaultyBackend):
    """Outputs of one call are handed to the wrong requests; each answer shows its own prompt."""

    def __init__(self, inner: Backend, owner: Callable[[int, int], int]) -> None:
        """`owner` maps (index of a request, number of requests) to the request whose output it gets."""
        super().__init__(inner)
        self._owner = owner

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Samples are exchanged one for one, as many as both requests have."""
        answers = self.inner.generate(requests)
        return [
            self._bound(answer, answers[self._owner(index, len(answers))])
            for index, answer in enumerate(answers)
        ]

    @staticmethod
    def _bound(answer: Answer, source: Answer) -> Answer:
        taken = [
            with_output(
                own,
                other.token_ids,
                logprobs=other.logprobs,
                top_logprobs=other.top_logprobs,
                finish_reason=other.finish_reason,
                text=other.text,
            )
            for own, other in zip(answer.completions, source.completions, strict=False)
        ]
        kept = answer.completions[len(taken) :]
        return msgspec.structs.replace(answer, completions=(*taken, *kept))


def _shifted(step: int) -> Change:
    """Logprobs and alternatives move by `step`; what falls off one end comes back at the other, as `roll` does."""

    def shift(_: Request, completion: Completion) -> Completion:
        return msgspec.structs.replace(
            completion,
            logprobs=completion.logprobs[step:] + completion.logprobs[:step],
            top_logprobs=completion.top_logprobs[step:] + completion.top_logprobs[:step],
        )

    return shift


def _certain_end(_: Request, completion: Completion) -> Completion:
    if completion.finish_reason is not FinishReason.STOP:
        return completion
    return msgspec.structs.replace(completion, logprobs=(*completion.logprobs[:-1], 0.0))


def _without_end(_: Request, completion: Completion) -> Completion:
    # A completion of the stop token alone would have nothing left.
    if completion.finish_reason is not FinishReason.STOP or len(completion.token_ids) == 1:
        return completion
    return with_output(
        completion,
        completion.token_ids[:-1],
        logprobs=completion.logprobs[:-1],
        top_logprobs=completion.top_logprobs[:-1],
    )


def _swapped_pair(index: int, count: int) -> int:
    return 1 - index if index < 2 <= count else index


def _plant(change: Change) -> Callable[[Backend], Backend]:
    return lambda engine: Misreported(engine, change)


REPORTING_FAULTS: Mapping[str, Plant] = {
    "semantic/raw-logprobs:default": RawLogprobs,
    "semantic/off-by-one:shifted-left": _plant(_shifted(1)),
    "semantic/off-by-one:shifted-right": _plant(_shifted(-1)),
    "semantic/wrong-token:likeliest": LikeliestInstead,
    "semantic/nonfinite:nan": lambda engine: OneCorruptSample(engine, math.nan),
    "semantic/nonfinite:minus-9999": lambda engine: OneCorruptSample(engine, -9999.0),
    "semantic/nonfinite:null": lambda engine: OneCorruptSample(engine, None),
    "semantic/eos:no-logprob": _plant(_certain_end),
    "semantic/eos:dropped": _plant(_without_end),
    "semantic/misbound-output:swapped": lambda engine: MisboundOutputs(engine, _swapped_pair),
    "semantic/misbound-output:rotated": lambda engine: MisboundOutputs(
        engine, lambda index, count: (index - 1) % count
    ),
}
