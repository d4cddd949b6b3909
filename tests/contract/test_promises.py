"""Each promise has been seen failing: on an engine that is the reference but for one thing."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import opened
import promises
import pytest
from msgspec.structs import force_setattr
from msgspec.structs import replace as with_
from opened import SECRET, Checkpoints, Subject

from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion, EngineFingerprint, FinishReason
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import WeightVersion


class Sound:
    """The reference, which streams as well; a control replaces one of the methods."""

    name = ReferenceBackend.name
    capabilities = ReferenceBackend.capabilities | {Capability.STREAM}

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.max_model_len = inner.max_model_len
        self.calls = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def asked(self, place: int, request: Request) -> Request:
        return request

    def told(self, requests: Sequence[Request], answers: list[Answer]) -> list[Answer]:
        return answers

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        asked = [self.asked(place, request) for place, request in enumerate(requests)]
        return self.told(requests, self.inner.generate(asked))

    def streamed(self, answers: list[Answer]) -> list[Answer]:
        return answers

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        return self.streamed([with_(each, stream_deltas=2) for each in self.inner.generate(requests)])

    def scored(self, scores: list[float]) -> list[float]:
        return scores

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self.scored(scores) for scores in self.inner.score(sequences)]

    def facts(self, facts: EngineFingerprint) -> EngineFingerprint:
        return facts

    def fingerprint(self) -> EngineFingerprint:
        return self.facts(self.inner.fingerprint())

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        self.inner.load_weights(directory, version)


def but(**methods: Any) -> type[Sound]:
    assert all(hasattr(Sound, name) or hasattr(ReferenceBackend, name) for name in methods)
    return type("Broken", (Sound,), methods)


def setting(**changes: Callable[[Completion], Any]) -> type[Sound]:
    """Each of these fields is set to what is made of the completion, which may then be impossible."""
    return but(told=lambda self, _, answers: set_fields(answers, changes))


def set_fields(answers: list[Answer], changes: dict[str, Callable[[Completion], Any]]) -> list[Answer]:
    for completion in (each for answer in answers for each in answer.completions):
        for name, make in changes.items():
            force_setattr(completion, name, make(completion))
    return answers


def echoing(requests: Sequence[Request], answers: list[Answer]) -> list[Answer]:
    """As an adapter would that fills the prompt in from the request."""
    for request, answer in zip(requests, answers, strict=True):
        set_fields([answer], {"prompt_token_ids": lambda _, request=request: request.prompt.token_ids})
    return answers


def seeding(seed: Callable[[int, int | None], int | None]) -> type[Sound]:
    return but(
        asked=lambda self, place, request: Request(
            request.prompt, with_(request.sampling, seed=seed(place, request.sampling.seed))
        )
    )


def prompting(cut: Callable[[Any, Request], tuple[int, ...]], **more: Any) -> type[Sound]:
    return but(asked=lambda self, _, request: Request(Prompt(cut(self, request)), request.sampling), **more)


def strange(requests: Sequence[Request]) -> bool:
    return any(token > 511 for request in requests for token in request.prompt.token_ids)


def fail_with_a_traceback(self: Any, requests: Sequence[Request]) -> list[Answer]:
    if strange(requests):
        raise IndexError("index out of range in self")
    return Sound.generate(self, requests)


def die_of_a_strange_prompt(self: Any, requests: Sequence[Request]) -> list[Answer]:
    self.dead = self.__dict__.get("dead", False) or strange(requests)
    return (
        [Answer(())] * len(requests)
        if self.dead and not strange(requests)
        else Sound.generate(self, requests)
    )


def load_the_first_for_good(self: Any, directory: Path, version: WeightVersion) -> None:
    if next(self.calls) == 0:
        Sound.load_weights(self, directory, version)


def refuse_too_late(self: Any, directory: Path, version: WeightVersion) -> None:
    """Half of the new weights are in their place already, where those were of another shape."""
    try:
        Sound.load_weights(self, directory, version)
    except Exception:
        self.inner.model.model.norm.weight.data *= 0.5
        raise


def move_the_label_first(self: Any, directory: Path, version: WeightVersion) -> None:
    self.inner.version = version
    Sound.load_weights(self, directory, version)


def refuse_without_a_way_out(self: Any, requests: Sequence[Request]) -> list[Answer]:
    raise CapabilityMissing(f"{self.name} cannot stream: no")


def close_once(self: Any) -> None:
    if next(self.calls):
        raise RuntimeError("closed already")


def first(value: float) -> type[Sound]:
    return setting(logprobs=lambda each: (value, *each.logprobs[1:]))


SHORTER = {"token_ids": lambda each: each.token_ids[:-1], "logprobs": lambda each: each.logprobs[:-1]}
REORDERS = but(told=lambda self, _, answers: answers[::-1])
SEEDS_BY_PLACE = seeding(lambda place, seed: (seed or 0) + place)
SHIFTS_A_LITTLE = setting(logprobs=lambda each: tuple(value - 1e-6 for value in each.logprobs))
CUTS_PROMPTS = prompting(
    lambda self, request: request.prompt.token_ids[-(self.max_model_len - request.sampling.max_tokens) :]
)
CUTS_BEHIND_THE_ECHO = prompting(
    lambda _, request: request.prompt.token_ids[-8:], told=lambda self, *answered: echoing(*answered)
)
NOT_CLAIMED = Sound.capabilities - {Capability.STREAM}
DOES_WHAT_IT_DOES_NOT_CLAIM = but(capabilities=NOT_CLAIMED)
REFUSES_WITHOUT_A_WAY_OUT = but(capabilities=NOT_CLAIMED, stream=refuse_without_a_way_out)
LOADS_NOTHING = but(load_weights=lambda self, *_: None)

BROKEN: dict[Callable[[Subject], None], tuple[type[Sound], ...]] = {
    promises.answers_come_in_the_order_of_requests: (
        REORDERS,
        but(told=lambda self, requests, answers: echoing(requests, answers[::-1])),
        but(
            told=lambda self, _, answers: [
                with_(each, completions=each.completions[::-1]) for each in answers
            ]
        ),
        but(told=lambda self, _, answers: answers[:-1]),
        SEEDS_BY_PLACE,
    ),
    promises.tokens_carry_what_a_trainer_needs: (
        REORDERS,
        setting(logprobs=SHORTER["logprobs"]),
        first(float("nan")),
        first(0.5),
        setting(**SHORTER, finish_reason=lambda _: FinishReason.LENGTH),
        setting(finish_reason=lambda _: FinishReason.ABORT),
        setting(fingerprint=lambda _: "of another"),
    ),
    promises.seeds_repeat: (seeding(lambda *_: None), seeding(lambda *_: 1), SEEDS_BY_PLACE),
    promises.what_is_streamed_is_what_comes_whole: (
        but(streamed=lambda self, answers: set_fields(answers, SHORTER)),
        but(stream=Sound.generate),
        but(streamed=lambda self, answers: answers[::-1]),
        DOES_WHAT_IT_DOES_NOT_CLAIM,
        REFUSES_WITHOUT_A_WAY_OUT,
    ),
    promises.scores_are_the_logprobs_that_were_reported: (
        but(scored=lambda self, scores: [*scores[1:], scores[0]]),
        but(scored=lambda self, scores: [0.0, *scores]),
        CUTS_BEHIND_THE_ECHO,
        SHIFTS_A_LITTLE,
    ),
    promises.alternatives_are_the_likeliest_in_order: (
        setting(top_logprobs=lambda each: tuple(top[::-1] for top in each.top_logprobs)),
        # Of the position before.
        setting(top_logprobs=lambda each: (*each.top_logprobs[-1:], *each.top_logprobs[:-1])),
        setting(top_logprobs=lambda each: ()),
        SHIFTS_A_LITTLE,
    ),
    promises.strange_prompts_are_refused: (
        CUTS_PROMPTS,
        prompting(lambda _, request: tuple(min(token, 511) for token in request.prompt.token_ids)),
        but(generate=fail_with_a_traceback),
        but(score=lambda self, sequences: [[-1.0] * len(sequence) for sequence in sequences]),
        but(generate=die_of_a_strange_prompt),
    ),
    promises.a_longest_prompt_is_not_cut: (CUTS_PROMPTS, CUTS_BEHIND_THE_ECHO),
    promises.the_fingerprint_names_the_engine_and_no_secret: (
        but(facts=lambda self, facts: with_(facts, deployment={"calls": str(next(self.calls))})),
        but(facts=lambda self, facts: with_(facts, deployment={"args": f"--api-key {SECRET}"})),
        but(facts=lambda self, facts: with_(facts, engine="engine")),
    ),
    promises.closing_twice_is_fine: (but(close=close_once),),
}
BROKEN_WITH_CHECKPOINTS: dict[Callable[[Subject, Checkpoints], None], tuple[type[Sound], ...]] = {
    promises.what_is_not_claimed_is_refused: (DOES_WHAT_IT_DOES_NOT_CLAIM, REFUSES_WITHOUT_A_WAY_OUT),
    promises.new_weights_change_the_numbers: (
        LOADS_NOTHING,
        but(
            load_weights=lambda self, directory, _: self.inner.load_weights(
                directory, WeightVersion("initial")
            )
        ),
        but(load_weights=load_the_first_for_good),
    ),
    promises.weights_of_another_shape_are_refused: (
        LOADS_NOTHING,
        but(load_weights=refuse_too_late),
        but(load_weights=move_the_label_first),
    ),
}


def pairs(broken: dict[Any, tuple[type[Sound], ...]]) -> list[Any]:
    """Each promise with a sound engine, which keeps it, and with those that do not."""
    return [
        pytest.param(promise, kind, id=f"{promise.__name__}-{number}")
        for promise, kinds in broken.items()
        for number, kind in enumerate((Sound, *kinds))
    ]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For engines that load no weights into it."""
    with opened.reference(tmp_path_factory.mktemp("engine")) as subject:
        yield subject


def check(kind: type[Sound], subject: Subject, promise: Callable[[Subject], None]) -> None:
    engine: Backend = kind(subject.backend)
    tested = replace(subject, backend=engine, connect=lambda: kind(subject.backend))
    if kind is Sound:
        promise(tested)
        return
    with pytest.raises(AssertionError):
        promise(tested)


@pytest.mark.parametrize(("promise", "kind"), pairs(BROKEN))
def test_a_broken_engine_breaks(promise, kind, shared):
    check(kind, shared, promise)


@pytest.mark.parametrize(("promise", "kind"), pairs(BROKEN_WITH_CHECKPOINTS))
def test_a_broken_engine_with_weights_breaks(promise, kind, checkpoints, tmp_path):
    with opened.reference(tmp_path) as subject:
        check(kind, subject, lambda tested: promise(tested, checkpoints))
