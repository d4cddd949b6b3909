"""Did both engines answer the same requests alike, before any reference is asked?

Two runs with the same questions sent the same prompts with the same seeds. A release that draws its noise in another
way gives other tokens for a seed, and every one of them may be right: up to where two answers part, they can still be
compared number by number.
"""

from pathlib import Path

import msgspec

from zerodrift.records.codec import read_lines
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.rollout import Rollout


class SameRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of two runs to the requests that both sent."""

    samples: int
    same_tokens: int
    """Samples with the same tokens in both."""
    shared_tokens: int
    """Tokens up to where two samples part: the same, after the same."""
    differing: int
    """Of the shared tokens, those whose logprob is not the same bits."""
    largest: float
    """Largest difference among those, in nats."""

    @property
    def says(self) -> str:
        """In one line."""
        if self.same_tokens == self.samples:
            tokens = f"all {self.samples} samples have the same tokens"
        elif self.same_tokens == 0:
            tokens = f"none of {self.samples} samples has the same tokens: a seed draws others now"
        else:
            tokens = f"{self.same_tokens} of {self.samples} samples have the same tokens"
        if not self.differing:
            return f"{tokens}; all {self.shared_tokens:,} logprobs up to where they part are the same bits"
        return (
            f"{tokens}; up to where they part {self.differing:,} of {self.shared_tokens:,} logprobs differ, "
            f"by {self.largest:.2g} at most"
        )


def same_requests(before: Path, after: Path) -> SameRequests | None:
    """The runs in two directories; None where they have no request in common."""
    if not all((directory / ROLLOUTS).is_file() for directory in (before, after)):
        return None
    old, new = _rollouts(before), _rollouts(after)
    pairs = [
        (old[key], new[key])
        for key in old.keys() & new.keys()
        if old[key].request.prompt.token_ids == new[key].request.prompt.token_ids
        and old[key].request.sampling == new[key].request.sampling
    ]
    if not pairs:
        return None
    samples, shared = 0, list[tuple[float, float]]()
    for one, other in pairs:
        assert one.completion is not None, "only answers are kept"
        assert other.completion is not None, "only answers are kept"
        same = _parting(one.completion.token_ids, other.completion.token_ids)
        samples += one.completion.token_ids == other.completion.token_ids
        shared += zip(one.completion.logprobs[:same], other.completion.logprobs[:same], strict=True)
    gaps = [abs(one - other) for one, other in shared if one != other]
    return SameRequests(
        samples=len(pairs),
        same_tokens=samples,
        shared_tokens=len(shared),
        differing=len(gaps),
        largest=max(gaps, default=0.0),
    )


def _rollouts(directory: Path) -> dict[tuple[int, int], Rollout]:
    """Answers by request and sample."""
    return {
        (rollout.index, rollout.completion.sample_index): rollout
        for rollout in read_lines(directory / ROLLOUTS, Rollout)
        if rollout.completion is not None
    }


def _parting(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens come before the first that is not the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
