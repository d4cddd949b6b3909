"""What one step forwards, and what came of it: the values between scheduler and runner.

A prefill chunk, a decode and a recomputation after preemption are the same thing: a slice of a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerodrift.core.completion import Problem
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import AdapterVersion, WeightVersion
from zerodrift.sampler.prefix import Prefix

TO_COME = -1
"""In the place of a token that the step before has yet to draw."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn from the logits of a slice's last position."""

    key: int
    """Which sample it is for."""
    sampling: SamplingParams
    sample_index: int
    prompt: tuple[int, ...]
    output: Prefix
    """Tokens drawn before this one: as long as it was when it was planned, whatever is appended since."""
    forced: int | None
    """Take this token, and say how likely it was."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Positions [start, start + len(token_ids)) of one sequence, to be forwarded in this step."""

    key: int
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    """Blocks that cover positions 0 up to the end of the slice, and of the rounds that follow it."""
    draws: tuple[Draw, ...]
    """Several where `n` samples start from one prompt; none where the slice ends before the sequence does."""
    scored: Sequence[int]
    """Prompt tokens whose logprobs are asked for: row i of the slice gives the logprob of the i-th."""
    score_top: int
    """Alternatives to report for each."""
    rounds: int = 1
    """Tokens to draw, each but the first from the one before it, without anybody looking in between."""
    lora: AdapterVersion | None = None
    """The adapter that its rows run with."""

    @property
    def end(self) -> int:
        """First position after the slice."""
        return self.start + len(self.token_ids)


class Copy(NamedTuple):
    """The content of one block, to be copied before anything is written in this step."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, under one set of weights."""

    version: WeightVersion
    slices: tuple[Slice, ...]
    copies: tuple[Copy, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(len(each.token_ids) for each in self.slices)

    @property
    def rounds(self) -> int:
        """Of the slice that has most."""
        return max((each.rounds for each in self.slices), default=0)


class Drawn(NamedTuple):
    """A token, and what the forward that made it says of it."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    logit: float | None
    """Set where the engine's mode asks for logits."""
    top_logits: tuple[tuple[int, float], ...]
    entropy: float
    """Of the distribution that was sampled, in nats."""


class Scored(NamedTuple):
    """The logprob of a given token."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one round of a plan gave: one entry for every draw, and one list for every slice that scores."""

    drawn: Mapping[int, Drawn | Problem]
    """By sample key; a problem ends its sample and no other."""
    scored: Mapping[int, Sequence[Scored]]
    """By slice key."""
    failed: Mapping[int, Problem]
    """By slice key: the KV that the slice wrote is not to be trusted, and everybody who starts from it ends."""


def following(plan: StepPlan, drawn: Mapping[int, Drawn | Problem]) -> StepPlan:
    """The round after `plan`: what it drew, forwarded, for those that have another one to go."""
    slices = []
    for part in plan.slices:
        got = drawn.get(part.key)
        if part.rounds > 1 and isinstance(got, Drawn):
            (draw,) = part.draws
            output = [*draw.output, got.token_id]
            draw = replace(draw, output=Prefix(output, len(output)), forced=None)
            rounds = part.rounds - 1
            slices.append(
                Slice(part.key, (got.token_id,), part.end, part.blocks, (draw,), (), 0, rounds, part.lora)
            )
    return StepPlan(plan.version, tuple(slices), ())


def resolved(plan: StepPlan, results: Sequence[StepResult]) -> StepPlan:
    """`plan` with the tokens that were to come, of the step before it, whose `results` are all there."""
    slices = []
    for part in plan.slices:
        (draw,) = part.draws
        drawn = [got.token_id for each in results if isinstance(got := each.drawn.get(part.key), Drawn)]
        missing = len(draw.output) - len(draw.output.whole)
        if len(drawn) < missing:
            continue  # It came to an end on the way, and gets nothing more.
        output = [*draw.output.whole, *drawn[len(drawn) - missing :]]
        draw = replace(draw, output=Prefix(output, len(output)))
        slices.append(replace(part, token_ids=(output[-1],), draws=(draw,)))
    return StepPlan(plan.version, tuple(slices), plan.copies)
