"""What an engine would have reported, and how likely its samples would have been, under an account.

Rows of logits are computed once per (context, forward) and kept; everything after that is arithmetic on rows.
Shapes: T tokens of a case, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from zerodrift.audit.counterfactual.account import AS_SENT, VANILLA, Account, Pick, Reported
from zerodrift.core.request import SamplingParams
from zerodrift.sampler.processing import histories, processed_logprobs

Floats = NDArray[np.float64]
Forward = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[torch.Tensor]]
"""(sequences, starts) to logits rows, as `Teacher.logits`."""
Edit = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Prompt ids as sent to prompt ids as seen."""

EXCLUDED_LOGPROB = -30.0
"""What an impossible token costs in the likelihood of samples: much, and finite, because a token on the edge of a
kept set may fall on either side by rounding."""


class Case(NamedTuple):
    """One observed sequence: what was asked, what came back, and how far rounding alone may move it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    requested: SamplingParams
    reported: Floats
    sigma: Floats


class Prediction(NamedTuple):
    """An account applied to one case."""

    reported: Floats
    """NaN where the account says nothing about a token."""
    sampled: Floats
    """Log-probability of each sampled token under the distribution it would have been drawn from."""


class Evaluator:
    """Applies accounts to a fixed set of cases."""

    def __init__(
        self,
        cases: Sequence[Case],
        forwards: Mapping[str, Forward],
        contexts: Mapping[str, Edit] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """`forwards` must hold VANILLA; forwards are built and run only when an account names them."""
        self.cases = cases
        self.stop_ids = stop_ids
        self._forwards = forwards
        self._contexts: dict[str, Edit] = {AS_SENT: lambda ids: ids, **(contexts or {})}
        self._rows: dict[tuple[str, str], list[torch.Tensor]] = {}

    def rows(self, context: str = AS_SENT, forward: str = VANILLA) -> list[torch.Tensor]:
        """Logits that predict each case's output, in fp32 or better."""
        key = (context, forward)
        if key not in self._rows:
            edit = self._contexts[context]
            prompts = [edit(case.prompt) for case in self.cases]
            sequences = [prompt + case.output for prompt, case in zip(prompts, self.cases, strict=True)]
            computed = self._forwards[forward](sequences, [len(prompt) for prompt in prompts])
            self._rows[key] = [_wide(rows) for rows in computed]
        return self._rows[key]

    def predict(self, account: Account) -> list[Prediction]:
        """One prediction per case."""
        rows = self.rows(account.context, account.forward)
        return [
            self._predict(account, case, logits_TV) for case, logits_TV in zip(self.cases, rows, strict=True)
        ]

    def _predict(self, account: Account, case: Case, logits_TV: torch.Tensor) -> Prediction:
        params = in_force(account, case.requested)
        past = histories(case.prompt, case.output)
        drawn_TV = processed_logprobs(logits_TV, params, past, self.stop_ids)
        if account.reported is Reported.RAW:
            told_TV = torch.log_softmax(logits_TV, dim=-1)
        elif account.reported is Reported.UNRENORMALISED:
            whole = msgspec.structs.replace(params, top_p=1.0, top_k=0, min_p=0.0)
            told_TV = processed_logprobs(logits_TV, whole, past, self.stop_ids)
        else:
            told_TV = drawn_TV
        sampled = _entries(drawn_TV, case.output, 0)
        return Prediction(_read(told_TV, case.output, account.pick), np.maximum(sampled, EXCLUDED_LOGPROB))


def in_force(account: Account, requested: SamplingParams) -> SamplingParams:
    """The requested parameters with the account's changes made."""
    if not account.sampling and not account.bias:
        return requested
    bias = dict(requested.logit_bias)
    for token, value in account.bias.items():
        bias[token] = bias.get(token, 0.0) + value
    return msgspec.structs.replace(requested, **account.sampling, logit_bias=bias)


def _read(logprobs_TV: torch.Tensor, output: tuple[int, ...], pick: Pick) -> Floats:
    if pick is Pick.TOP:
        return logprobs_TV.amax(dim=-1).double().numpy()
    if pick is Pick.NEXT_ROW:
        return _entries(logprobs_TV, output, 1)
    if pick is Pick.PREVIOUS_ROW:
        return _entries(logprobs_TV, output, -1)
    values = _entries(logprobs_TV, output, 0)
    if pick is Pick.SAMPLED:
        return values
    shifted = np.full_like(values, np.nan)
    if pick is Pick.PREVIOUS_VALUE:
        shifted[1:] = values[:-1]
    else:
        shifted[:-1] = values[1:]
    return shifted


def _entries(logprobs_TV: torch.Tensor, output: tuple[int, ...], shift: int) -> Floats:
    """The entry of each output token in the row `shift` further on; NaN beyond the ends."""
    values = np.full(len(output), np.nan)
    rows = np.arange(len(output)) + shift
    inside = (rows >= 0) & (rows < len(output))
    tokens = torch.tensor(output)[torch.from_numpy(inside)]
    values[inside] = logprobs_TV[torch.from_numpy(rows[inside]), tokens].double().numpy()
    return values


def _wide(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
