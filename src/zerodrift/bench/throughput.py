"""Tokens a second, of our engine and of others side by side in one run, in turns: A B C, A B C, …

A machine's speed drifts by more than what is measured here, so a ratio is taken within each round, where both sides
met the same machine, and the median of the ratios is what counts. Where others compute on the same machine, the ratio of
processor times says more than that of the clock; a server's own is not seen from here.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.core.errors import BadAnswer, InvalidValue
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.exact.preparation import prepare, restore

EXACT = "exact"
PLAIN_OPS = {
    "unconstrained": frozenset({"attention", "activation"}),
    "unconstrained, F.linear": frozenset({"attention", "activation", "linear"}),
}
"""What an engine may use that promises nothing. Which is faster depends on the machine, so both take part."""
SHORTEST, LONGEST = 16, 256
"""Tokens of a prompt, and of an output: rollouts of a small task."""


class Served(NamedTuple):
    """One request's answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Run(NamedTuple):
    """All answers, in the order of requests, and how long they took."""

    seconds: float
    processor_seconds: float
    """Of all threads of this process."""
    served: list[Served]


class Contender(Protocol):
    """One way of serving."""

    name: str

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        """Everything at once, from requests in memory to answers in memory."""
        ...


class OurEngine:
    """Our engine, its prefix cache off, exact or over ops that promise nothing."""

    def __init__(self, name: str, model: Any) -> None:
        """`name` is `exact` or one of PLAIN_OPS. `model` is copied by the engine, and comes back as it was."""
        self.name = name
        if name == EXACT:
            self._engine = Engine(model, enable_prefix_caching=False)
            return
        plain = prepare(model, plain=PLAIN_OPS[name])
        # Plain ops make no promise that a check could hold.
        self._engine = Engine(plain, enable_prefix_caching=False, logprob_check_interval=0)
        restore(model)

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        """In one call."""
        prompts, params = [each.prompt for each in requests], [each.sampling for each in requests]
        return [
            Served(output.token_ids, output.logprobs) for output in self._engine.generate(prompts, params)
        ]


class AuditedEngine:
    """Any engine that can be audited; a server is asked over HTTP, as a trainer asks it."""

    def __init__(self, backend: Backend) -> None:
        """`backend` stays the caller's to close."""
        self.name, self._backend = backend.name, backend

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        """All requests in flight together."""
        served = []
        for answer in self._backend.generate(requests):
            if len(answer.completions) != 1 or answer.problems:
                raise BadAnswer(
                    f"{self.name} gave {len(answer.completions)} answers to a request ({answer.problems})"
                )
            served.append(Served(answer.completions[0].token_ids, answer.completions[0].logprobs))
        return served


class Spread(msgspec.Struct, frozen=True):
    """A number that was measured several times."""

    median: float
    low: float
    high: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How one contender did, each list with one number per round."""

    name: str
    tokens_per_second: tuple[float, ...]
    """Generated tokens."""
    processor_seconds: tuple[float, ...]
    """Of this process: of a server's work it has only the asking."""
    speed: Spread
    ratio: Spread | None = None
    """How many times as fast the exact engine was; None for itself, and where it took no part."""
    processor_ratio: Spread | None = None
    """The same by processor time, between engines of this process."""


def mixed(count: int, vocab_size: int, context: int, divisor: int = 1, turn: int = 0) -> list[Request]:
    """`count` requests of mixed lengths over `divisor`, always the same lengths; each `turn` has tokens of its own.

    Tokens are random, so that no two share a prefix, and no cache holds anything of the turn before. All generate as
    many as they are told, whatever the model would rather do: all contenders do the same work.
    """
    if count < 1:
        raise InvalidValue(f"asked for {count} requests; a measurement needs one at least")
    if context < 2 * LONGEST:
        raise InvalidValue(
            f"the model's context of {context} is below the {2 * LONGEST} tokens of the longest request; "
            "choose a model with a longer one"
        )
    length, token = random.Random(0), random.Random(turn + 1)
    requests = []
    for seed in range(count):
        asked, answered = (max(1, length.randint(SHORTEST, LONGEST) // divisor) for _ in range(2))
        prompt = Prompt(tuple(token.randrange(vocab_size) for _ in range(asked)))
        requests.append(Request(prompt, SamplingParams(max_tokens=answered, ignore_eos=True, seed=seed)))
    return requests


def compare(
    contenders: Sequence[Contender],
    rounds: int,
    requests: Callable[[int], Sequence[Request]],
    progress: Callable[[int, int], None],
) -> tuple[Standing, ...]:
    """In round n every contender serves `requests(n)` once."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    total = rounds * len(contenders)
    for turn in range(total):
        contender, asked = contenders[turn % len(contenders)], requests(turn // len(contenders))
        progress(turn, total)
        begin, processor = time.perf_counter(), time.process_time()
        served = contender.serve(asked)
        run = Run(time.perf_counter() - begin, time.process_time() - processor, served)
        check(contender.name, asked, run.served)
        runs[contender.name].append(run)
    progress(total, total)
    return tuple(_standing(contender.name, runs) for contender in contenders)


def check(name: str, requests: Sequence[Request], served: Sequence[Served]) -> None:
    """Nobody is fast by doing less: every answer has its tokens, and a logprob for each."""
    if len(served) != len(requests):
        raise BadAnswer(f"{name} answered {len(served)} of {len(requests)} requests")
    for number, (request, each) in enumerate(zip(requests, served, strict=True)):
        tokens, logprobs, asked = len(each.token_ids), len(each.logprobs), request.sampling.max_tokens
        if not tokens == logprobs == asked:
            raise BadAnswer(
                f"{name} gave {tokens} tokens and {logprobs} logprobs for request {number}, which asked for {asked}"
            )
        if not all(math.isfinite(value) and value <= 0 for value in each.logprobs):
            raise BadAnswer(f"{name} gave request {number} a logprob that is none: NaN, infinite or positive")


def _standing(name: str, runs: Mapping[str, Sequence[Run]]) -> Standing:
    own, exact = runs[name], [] if name == EXACT else runs.get(EXACT, [])
    speeds = [sum(len(each.token_ids) for each in run.served) / run.seconds for run in own]
    rounds = list(zip(own, exact, strict=True)) if exact else []
    seen = rounds if name in PLAIN_OPS else []
    return Standing(
        name=name,
        tokens_per_second=tuple(speeds),
        processor_seconds=tuple(run.processor_seconds for run in own),
        speed=_spread(speeds),
        ratio=_spread([run.seconds / ours.seconds for run, ours in rounds]) if rounds else None,
        processor_ratio=_spread([run.processor_seconds / ours.processor_seconds for run, ours in seen])
        if seen
        else None,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
