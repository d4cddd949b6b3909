"""Each promise has been seen failing: on an engine that is the reference but for one thing."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import opened
import promises
import pytest
from opened import SECRET, Checkpoints, Subject

from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion, EngineFingerprint, FinishReason
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import WeightVersion

Change = Callable[[Completion], None]
set_field = msgspec.structs.force_setattr
"""A completion refuses to be impossible; an engine of somebody else's making may not."""


class Sound:
    """The reference, which streams as well; a control breaks one thing of it."""

    name = ReferenceBackend.name
    capabilities = ReferenceBackend.capabilities | {Capability.STREAM}

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.max_model_len = inner.max_model_len

    def fingerprint(self) -> EngineFingerprint:
        return self.inner.fingerprint()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return self.inner.generate(requests)

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        return [msgspec.structs.replace(answer, stream_deltas=2) for answer in self.inner.generate(requests)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.inner.score(sequences)

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        self.inner.load_weights(directory, version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Changed(Sound):
    """Every completion of `generate` goes through `change`, and may be made impossible there."""

    change: Change

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        for completion in (each for answer in answers for each in answer.completions):
            type(self).change(completion)
        return answers


def changed(change: Change) -> type[Changed]:
    return type("Changed", (Changed,), {"change": staticmethod(change)})


class Asked(Sound):
    """Every request goes through `asked` before it is answered."""

    def asked(self, request: Request) -> Request:
        return request

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return super().generate([self.asked(request) for request in requests])


# Order


class Reorders(Sound):
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return super().generate(requests)[::-1]


class ReordersBehindTheEcho(Sound):
    """As an adapter would that fills the prompt in from the request."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        for request, answer in zip(requests, answers[::-1], strict=True):
            for completion in answer.completions:
                set_field(completion, "prompt_token_ids", request.prompt.token_ids)
        return answers[::-1]


class ReordersSamples(Sound):
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            msgspec.structs.replace(answer, completions=answer.completions[::-1])
            for answer in super().generate(requests)
        ]


class LosesARequest(Sound):
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return super().generate(requests)[:-1]


# Tokens and their numbers


def setting(**changes: Callable[[Completion], Any]) -> type[Changed]:
    """Each of these fields is set to what is made of the completion."""

    def change(completion: Completion) -> None:
        for name, make in changes.items():
            set_field(completion, name, make(completion))

    return changed(change)


def spoil(value: float) -> type[Changed]:
    return setting(logprobs=lambda each: (value, *each.logprobs[1:]))


DROPS_A_LOGPROB = setting(logprobs=lambda each: each.logprobs[:-1])
ENDS_EARLY = setting(
    token_ids=lambda each: each.token_ids[:-1],
    logprobs=lambda each: each.logprobs[:-1],
    finish_reason=lambda each: FinishReason.LENGTH,
)
GIVES_UP = setting(finish_reason=lambda each: FinishReason.ABORT)
IS_ANOTHER = setting(fingerprint=lambda each: "of another")
SHIFTS_A_LITTLE = setting(logprobs=lambda each: tuple(value - 1e-6 for value in each.logprobs))
REVERSES_ALTERNATIVES = setting(top_logprobs=lambda each: tuple(top[::-1] for top in each.top_logprobs))
# Of the position before.
SHIFTS_ALTERNATIVES = setting(top_logprobs=lambda each: (*each.top_logprobs[-1:], *each.top_logprobs[:-1]))
FORGETS_ALTERNATIVES = setting(top_logprobs=lambda each: ())


# Seeds


class IgnoresSeeds(Asked):
    def asked(self, request: Request) -> Request:
        return Request(request.prompt, msgspec.structs.replace(request.sampling, seed=None))


class HasOneSeed(Asked):
    def asked(self, request: Request) -> Request:
        return Request(request.prompt, msgspec.structs.replace(request.sampling, seed=1))


class SeedsByPlace(Sound):
    """The noise depends on where in a batch a request is."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return super().generate(
            [
                Request(
                    each.prompt,
                    msgspec.structs.replace(each.sampling, seed=(each.sampling.seed or 0) + place),
                )
                for place, each in enumerate(requests)
            ]
        )


# Streams


class StreamsLessThanItMade(Sound):
    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().stream(requests)
        for completion in (each for answer in answers for each in answer.completions):
            set_field(completion, "token_ids", completion.token_ids[:-1])
            set_field(completion, "logprobs", completion.logprobs[:-1])
        return answers


class StreamsInOnePiece(Sound):
    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        return self.generate(requests)


class StreamsOutOfOrder(Sound):
    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        return super().stream(requests)[::-1]


# Scores


class ScoresLate(Sound):
    """By one position."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[*scores[1:], scores[0]] for scores in super().score(sequences)]


class ScoresTheFirstToken(Sound):
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0, *scores] for scores in super().score(sequences)]


# Prompts


class CutsPrompts(Asked):
    def asked(self, request: Request) -> Request:
        room = self.max_model_len - request.sampling.max_tokens
        return Request(Prompt(request.prompt.token_ids[-room:]), request.sampling)


class CutsPromptsBehindTheEcho(Asked):
    """To the last eight tokens, and says that it saw them all."""

    def asked(self, request: Request) -> Request:
        return Request(Prompt(request.prompt.token_ids[-8:]), request.sampling)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        for request, answer in zip(requests, answers, strict=True):
            for completion in answer.completions:
                set_field(completion, "prompt_token_ids", request.prompt.token_ids)
        return answers


class TakesTheNearestToken(Asked):
    def asked(self, request: Request) -> Request:
        return Request(Prompt(tuple(min(token, 511) for token in request.prompt.token_ids)), request.sampling)


class FailsWithATraceback(Sound):
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if any(token > 511 for request in requests for token in request.prompt.token_ids):
            raise IndexError("index out of range in self")
        return super().generate(requests)


class ScoresWhateverComes(Sound):
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * len(sequence) for sequence in sequences]


class DiesOfAStrangePrompt(Sound):
    alive = True

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        strange = any(token > 511 for request in requests for token in request.prompt.token_ids)
        self.alive = self.alive and not strange
        return super().generate(requests) if self.alive or strange else [Answer(())] * len(requests)


# Fingerprints


class CountsItsCalls(Sound):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.calls = itertools.count()

    def fingerprint(self) -> EngineFingerprint:
        facts = super().fingerprint()
        calls = {**facts.deployment, "calls": str(next(self.calls))}
        return msgspec.structs.replace(facts, deployment=calls)


class ShowsItsKey(Sound):
    def fingerprint(self) -> EngineFingerprint:
        facts = super().fingerprint()
        return msgspec.structs.replace(facts, deployment={"args": f"--api-key {SECRET}"})


class IsNobody(Sound):
    def fingerprint(self) -> EngineFingerprint:
        return msgspec.structs.replace(super().fingerprint(), engine="engine")


# Capabilities, weights, closing


class DoesWhatItDoesNotClaim(Sound):
    capabilities = Sound.capabilities - {Capability.STREAM}


class RefusesWithoutAWayOut(Sound):
    capabilities = Sound.capabilities - {Capability.STREAM}

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        raise CapabilityMissing(f"{self.name} cannot stream: no")


class LoadsNothing(Sound):
    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Says that it did."""


class KeepsTheOldLabel(Sound):
    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        super().load_weights(directory, WeightVersion("initial"))


class LoadsForGood(Sound):
    """The first checkpoint that is given to it."""

    loaded = False

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        if not self.loaded:
            super().load_weights(directory, version)
        self.loaded = True


class RefusesTooLate(Sound):
    """Half of the new weights are in their place already, where those were of another shape."""

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        try:
            super().load_weights(directory, version)
        except Exception:
            inner: Any = self.inner
            inner.model.model.norm.weight.data *= 0.5
            raise


class MovesTheLabelFirst(Sound):
    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        inner: Any = self.inner
        inner.version = version
        super().load_weights(directory, version)


class ClosesOnce(Sound):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


BROKEN: dict[Callable[[Subject], None], tuple[type[Sound], ...]] = {
    promises.answers_come_in_the_order_of_requests: (
        Reorders,
        ReordersBehindTheEcho,
        ReordersSamples,
        LosesARequest,
        SeedsByPlace,
    ),
    promises.tokens_carry_what_a_trainer_needs: (
        Reorders,
        DROPS_A_LOGPROB,
        spoil(float("nan")),
        spoil(0.5),
        ENDS_EARLY,
        GIVES_UP,
        IS_ANOTHER,
    ),
    promises.seeds_repeat: (IgnoresSeeds, HasOneSeed, SeedsByPlace),
    promises.what_is_streamed_is_what_comes_whole: (
        StreamsLessThanItMade,
        StreamsInOnePiece,
        StreamsOutOfOrder,
        DoesWhatItDoesNotClaim,
        RefusesWithoutAWayOut,
    ),
    promises.scores_are_the_logprobs_that_were_reported: (
        ScoresLate,
        ScoresTheFirstToken,
        CutsPromptsBehindTheEcho,
        SHIFTS_A_LITTLE,
    ),
    promises.alternatives_are_the_likeliest_in_order: (
        REVERSES_ALTERNATIVES,
        SHIFTS_ALTERNATIVES,
        FORGETS_ALTERNATIVES,
        SHIFTS_A_LITTLE,
    ),
    promises.strange_prompts_are_refused: (
        CutsPrompts,
        TakesTheNearestToken,
        FailsWithATraceback,
        ScoresWhateverComes,
        DiesOfAStrangePrompt,
    ),
    promises.a_longest_prompt_is_not_cut: (CutsPrompts, CutsPromptsBehindTheEcho),
    promises.the_fingerprint_names_the_engine_and_no_secret: (CountsItsCalls, ShowsItsKey, IsNobody),
    promises.closing_twice_is_fine: (ClosesOnce,),
}
BROKEN_WITH_CHECKPOINTS: dict[Callable[[Subject, Checkpoints], None], tuple[type[Sound], ...]] = {
    promises.what_is_not_claimed_is_refused: (DoesWhatItDoesNotClaim, RefusesWithoutAWayOut),
    promises.new_weights_change_the_numbers: (LoadsNothing, KeepsTheOldLabel, LoadsForGood),
    promises.weights_of_another_shape_are_refused: (LoadsNothing, RefusesTooLate, MovesTheLabelFirst),
}


def pairs(broken: dict[Any, tuple[type[Sound], ...]]) -> list[Any]:
    return [
        pytest.param(promise, kind, id=f"{promise.__name__}-{kind.__name__}-{number}")
        for promise, kinds in broken.items()
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For engines that load no weights into it."""
    with opened.reference(tmp_path_factory.mktemp("engine")) as subject:
        yield subject


def of(kind: type[Sound], subject: Subject) -> Subject:
    return replace(subject, backend=kind(subject.backend), connect=lambda: kind(subject.backend))


@pytest.mark.parametrize("promise", BROKEN, ids=lambda promise: promise.__name__)
def test_a_sound_engine_keeps(promise: Callable[[Subject], None], shared: Subject) -> None:
    promise(of(Sound, shared))


@pytest.mark.parametrize("promise", BROKEN_WITH_CHECKPOINTS, ids=lambda promise: promise.__name__)
def test_a_sound_engine_with_weights_keeps(
    promise: Callable[[Subject, Checkpoints], None], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with opened.reference(tmp_path) as subject:
        promise(of(Sound, subject), checkpoints)


@pytest.mark.parametrize(("promise", "kind"), pairs(BROKEN))
def test_a_broken_engine_breaks(
    promise: Callable[[Subject], None], kind: type[Sound], shared: Subject
) -> None:
    with pytest.raises(AssertionError):
        promise(of(kind, shared))


@pytest.mark.parametrize(("promise", "kind"), pairs(BROKEN_WITH_CHECKPOINTS))
def test_a_broken_engine_with_weights_breaks(
    promise: Callable[[Subject, Checkpoints], None],
    kind: type[Sound],
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    with opened.reference(tmp_path) as subject, pytest.raises(AssertionError):
        promise(of(kind, subject), checkpoints)
