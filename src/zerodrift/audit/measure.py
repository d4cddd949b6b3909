"""Per-token measurement: what the engine reported beside what the reference makes of the same tokens.

Δ = contracted − reported = log π_trainer − log π_rollout, the sign that every RL framework uses. Rows of logits are
reduced to a handful of numbers per token as they come: a run of 10,000 prompts × 256 tokens holds 150 MB.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from zerodrift.audit.floor import Floor
from zerodrift.backends.teacher import Teacher
from zerodrift.core.completion import Completion, LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.sampler.processing import histories, processed_logprobs

Floats = NDArray[np.float64]


class Observed(NamedTuple):
    """A completion and the parameters that were asked for; its own may be other than these."""

    completion: Completion
    requested: SamplingParams


class Measurement(NamedTuple):
    """One sequence, one entry per output token."""

    observed: Observed
    contracted: Floats
    """Reference logprob under the requested parameters: what the trainer computes."""
    raw: Floats
    entropy: Floats
    """Of the distribution that should have been sampled."""
    variance: Floats
    """Of log p under that distribution."""

    @property
    def reported(self) -> Floats:
        """The engine's own number."""
        return np.array(self.observed.completion.logprobs)

    @property
    def delta(self) -> Floats:
        """log π_trainer − log π_rollout."""
        result: Floats = self.contracted - self.reported
        return result


def measure(
    teacher: Teacher,
    observed: Sequence[Observed],
    stop_ids: Sequence[int],
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Score every observed sequence as it was sent, in order."""
    sequences = [item.completion.sequence for item in observed]
    starts = [len(item.completion.prompt_token_ids) for item in observed]
    for item, logits_TV in zip(observed, teacher.logits(sequences, starts), strict=True):
        yield _measure(item, logits_TV, stop_ids)
        progress(len(item.completion.token_ids))


def _measure(item: Observed, logits_TV: torch.Tensor, stop_ids: Sequence[int]) -> Measurement:
    logits_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
    completion = item.completion
    past = histories(completion.prompt_token_ids, completion.token_ids)
    drawn_TV = processed_logprobs(logits_TV, item.requested, past, stop_ids).double()
    probs_TV = drawn_TV.exp()
    # 0 · log 0 = 0: excluded tokens carry no surprise because they carry no mass.
    surprise_TV = torch.where(probs_TV > 0, drawn_TV, 0.0)
    entropy_T = -(probs_TV * surprise_TV).sum(dim=-1)
    variance_T = (probs_TV * surprise_TV**2).sum(dim=-1) - entropy_T**2
    rows = torch.arange(len(completion.token_ids))
    tokens = torch.tensor(completion.token_ids)
    return Measurement(
        item,
        drawn_TV[rows, tokens].numpy(),
        torch.log_softmax(logits_TV, dim=-1)[rows, tokens].double().numpy(),
        entropy_T.numpy(),
        variance_T.clamp(min=0).numpy(),
    )


class TokenTable(NamedTuple):
    """All tokens of all measurements, as columns."""

    sequence: NDArray[np.int64]
    index: NDArray[np.int64]
    """Within the output."""
    position: NDArray[np.int64]
    """Within prompt and output."""
    token: NDArray[np.int64]
    reported: Floats
    contracted: Floats
    raw: Floats
    entropy: Floats
    variance: Floats
    sigma: Floats

    @property
    def delta(self) -> Floats:
        """log π_trainer − log π_rollout."""
        result: Floats = self.contracted - self.reported
        return result


def tabulate(measurements: Iterable[Measurement], floor: Floor) -> TokenTable:
    """Columns of every token, with the rounding scale that `floor` gives it."""
    columns: list[list[NDArray[np.int64] | Floats]] = [[] for _ in range(9)]
    for number, item in enumerate(measurements):
        completion = item.observed.completion
        count = len(completion.token_ids)
        index = np.arange(count)
        values = (
            np.full(count, number),
            index,
            index + len(completion.prompt_token_ids),
            np.array(completion.token_ids),
            item.reported,
            item.contracted,
            item.raw,
            item.entropy,
            item.variance,
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    whole = [np.concatenate(column) for column in columns]
    # An excluded token has contracted = −inf: its Δ is infinite, its rounding scale is that of a rare token.
    sigma = floor.sigma(np.maximum(whole[5].astype(np.float64), -100.0))
    return TokenTable(*whole, sigma=sigma)  # type: ignore[arg-type]


def kind_of(observed: Sequence[Observed]) -> LogprobKind:
    """The kind that the engine claims for all of them."""
    kinds = {item.completion.kind for item in observed}
    return kinds.pop() if len(kinds) == 1 else LogprobKind.PROCESSED
