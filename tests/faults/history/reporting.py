"""Bugs in which number is handed to the trainer: the tokens were sampled rightly."""

import math
from collections.abc import Sequence

import msgspec

from history.bug import reenacted
from history.twin import Reporting, Twin
from zerodrift.core.completion import Answer, Completion, FinishReason, LogprobKind, Problem
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Request


class RawByDefault(Reporting):
    """The engine's default logprobs are those of before the temperature, and are taken for those of after it."""

    def __init__(self, engine: object) -> None:
        super().__init__(engine)
        self._healthy = engine.fingerprint()
        self.reference.kind = LogprobKind.RAW

    def fingerprint(self) -> object:
        """Nobody looked there."""
        return self._healthy

    def rewrite(self, _: Request, completion: Completion) -> Completion:
        return msgspec.structs.replace(
            completion, kind=LogprobKind.PROCESSED, fingerprint=self._healthy.digest
        )


class DividedAfterSoftmax(RawByDefault):
    """Raw logprobs over the temperature: the right number but for the normaliser."""

    def rewrite(self, request: Request, completion: Completion) -> Completion:
        raw = super().rewrite(request, completion)
        heat = request.sampling.temperature or 1.0
        return msgspec.structs.replace(raw, logprobs=tuple(value / heat for value in raw.logprobs))


class FirstOfTheDictionary(Twin):
    """With one alternative asked for, each position is a dictionary that begins with the likeliest token."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        asked = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, logprobs=1))
            for each in requests
        ]
        return [
            msgspec.structs.replace(
                answer, completions=tuple(self._read(request, each) for each in answer.completions)
            )
            for request, answer in zip(requests, super().generate(asked), strict=True)
        ]

    @staticmethod
    def _read(request: Request, completion: Completion) -> Completion:
        positions = [
            {**{entry.token_id: entry.logprob for entry in entries}, token: value}
            for entries, token, value in zip(
                completion.top_logprobs, completion.token_ids, completion.logprobs, strict=True
            )
        ]
        return msgspec.structs.replace(
            completion,
            logprobs=tuple(next(iter(position.values())) for position in positions),
            top_logprobs=completion.top_logprobs if request.sampling.logprobs else (),
            sampling=msgspec.structs.replace(completion.sampling, logprobs=request.sampling.logprobs),
        )


class EndPutBack(Reporting):
    """The sampled end of sequence is stripped with the text, and put back with a logprob of zero."""

    def rewrite(self, _: Request, completion: Completion) -> Completion:
        if completion.finish_reason is not FinishReason.STOP:
            return completion
        stripped = completion.logprobs[:-1]
        return msgspec.structs.replace(completion, logprobs=(*stripped, 0.0))


class BrokenRows(Twin):
    """One row in sixteen has NaN in its keys: from there on its token is 0 and its logprob no number."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        return [self._broken(answer) if row % 16 == 3 else answer for row, answer in enumerate(answers)]

    @staticmethod
    def _broken(answer: Answer) -> Answer:
        problems = []
        for completion in answer.completions:
            whole = len(completion.token_ids) // 2
            rest = len(completion.token_ids) - whole
            try:
                msgspec.structs.replace(
                    completion,
                    token_ids=completion.token_ids[:whole] + (0,) * rest,
                    logprobs=completion.logprobs[:whole] + (math.nan,) * rest,
                )
            except InvalidValue as error:
                problems.append(Problem(error.code, str(error)))
        return Answer((), (*answer.problems, *problems))


REPORTING = (
    reenacted("trl#4159", RawByDefault),
    reenacted("prime-rl#697", DividedAfterSoftmax),
    reenacted("NeMo-RL#3297", FirstOfTheDictionary),
    reenacted("SkyRL#2148", EndPutBack),
    reenacted("trl#6693", BrokenRows),
)
