"""What an engine would have reported, and how likely its samples would have been, under an explanation.

Rows of logits are computed once per (context, forward) and kept; everything after that is arithmetic on rows. Tokens
of all cases stand in one flat array, in case order. Shapes: N tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from zerodrift.audit.counterfactual.explanation import (
    AS_SENT,
    ROUNDED_AS_EXPECTED,
    VANILLA,
    Explanation,
    Pick,
    Reported,
)
from zerodrift.core.request import SamplingParams
from zerodrift.sampler.moments import surprise_moments
from zerodrift.sampler.processing import Tally, histories, processed_logprobs, tally
from zerodrift.stats.arrays import Floats

Forward = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], Sequence[torch.Tensor]]
"""(sequences, starts, lengths of their prompts) to logits rows, as `Teacher.logits`."""
Edit = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Prompt ids as sent to prompt ids as seen."""

Rounding = Callable[[Sequence["CaseWindow"]], Floats]
"""Cases to the rounding scale of each of their tokens in some precision."""

EXCLUDED_LOGPROB = -30.0
"""What an impossible token costs in the likelihood of samples: much, and finite, because a token on the edge of a
kept set may fall on either side by rounding."""
FEWEST_FIRST = 3
"""First tokens with one and the same number that make it a placeholder."""


class CaseWindow(NamedTuple):
    """A window of one observed sequence: what was asked, what came back, and how far rounding alone may move it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """Up to the end of the window."""
    requested: SamplingParams
    reported: Floats
    """Of the judged tokens, as is `sigma`."""
    sigma: Floats
    stopped: bool = False
    """The last token ended the output."""
    before: int = 0
    """Tokens of the output that are context only; judged are those after them."""
    at_random: bool = True
    """Chosen by chance, so that it speaks for others too; not because it is off."""

    @property
    def judged(self) -> tuple[int, ...]:
        """Tokens whose numbers are compared."""
        return self.output[self.before :]


class Prediction(NamedTuple):
    """An explanation applied to all tokens."""

    reported: Floats
    """NaN where the account says nothing about a token."""
    sampled: Floats
    """Log-probability of each sampled token under the distribution it would have been drawn from."""


class Surprise(NamedTuple):
    """What sampling by an explanation would lead one to expect of log p."""

    entropy: Floats
    """Of the distribution that each token would have been drawn from."""
    variance: Floats
    """Of log p under it."""


class Evaluator:
    """Applies accounts to a fixed set of cases."""

    def __init__(
        self,
        cases: Sequence[CaseWindow],
        forwards: Mapping[str, Forward],
        contexts: Mapping[str, Edit] | None = None,
        stop_ids: Sequence[int] = (),
        roundings: Mapping[str, Rounding] | None = None,
    ) -> None:
        """`forwards` must hold VANILLA; forwards are built and run only when an explanation names them."""
        self.cases = cases
        self.stop_ids = stop_ids
        self.reported = np.concatenate([case.reported for case in cases])
        self.sigma = np.concatenate([case.sigma for case in cases])
        lengths = [len(case.judged) for case in cases]
        self.case_ids = np.repeat(np.arange(len(cases)), lengths)
        self.at_random = np.repeat([case.at_random for case in cases], lengths)
        self.tokens = np.array([token for case in cases for token in case.judged])
        self._tokens = torch.from_numpy(self.tokens)
        self._past = [row for case in cases for row in histories(case.prompt, case.output)[case.before :]]
        self._groups = _by_parameters(cases)
        self._last = np.cumsum(lengths) - 1
        self._first = (self._last - lengths + 1)[[case.before == 0 for case in cases]]
        self._forwards = forwards
        self._roundings = roundings or {}
        self._scales: dict[str, Floats] = {ROUNDED_AS_EXPECTED: self.sigma}
        self._contexts: dict[str, Edit] = {AS_SENT: lambda ids: ids, **(contexts or {})}
        self._rows: dict[tuple[str, str], torch.Tensor] = {}
        self._counted: dict[int, Tally] = {}
        self._told_already: dict[tuple[str, str, Reported, Pick], Floats] = {}

    def rows(self, context: str = AS_SENT, forward: str = VANILLA) -> torch.Tensor:
        """Logits that predict each token. In fp32: its error is a tenth of the smallest gate, at half the cost."""
        key = (context, forward)
        if key not in self._rows:
            prompts = self._prompts(context)
            sequences = [prompt + case.output for prompt, case in zip(prompts, self.cases, strict=True)]
            lengths = [len(prompt) for prompt in prompts]
            computed = self._forwards[forward](sequences, self._starts(context), lengths)
            self._rows[key] = torch.cat([rows.float() for rows in computed])
        return self._rows[key]

    def positions(self, context: str = AS_SENT) -> NDArray[np.int64]:
        """Where the row stands that predicts each token."""
        starts = zip(self._starts(context), self.cases, strict=True)
        return np.concatenate([start - 1 + np.arange(len(case.judged)) for start, case in starts])

    def _prompts(self, context: str) -> list[tuple[int, ...]]:
        return [self._contexts[context](case.prompt) for case in self.cases]

    def _starts(self, context: str) -> list[int]:
        """Index of the first judged token of each sequence."""
        prompts = zip(self._prompts(context), self.cases, strict=True)
        return [len(prompt) + case.before for prompt, case in prompts]

    def scale(self, explanation: Explanation) -> Floats:
        """How far rounding may move each token, if the account is true."""
        if explanation.rounding not in self._scales:
            coarse = self._roundings[explanation.rounding](self.cases)
            self._scales[explanation.rounding] = np.hypot(self.sigma, coarse)
        return self._scales[explanation.rounding]

    def predict(self, explanation: Explanation) -> Prediction:
        """What `explanation` says about every token."""
        logits_NV = self.rows(explanation.context, explanation.forward)
        told, drawn = np.empty(len(self.reported)), np.empty(len(self.reported))
        # Numbers that do not depend on the sampler are the same for every explanation about the sampler.
        key = (explanation.context, explanation.forward, explanation.reported, explanation.pick)
        known = self._told_already.get(key)
        for group, (requested, members) in enumerate(self._groups):
            # As an array: numpy takes a tensor of one index for a number.
            here = members.numpy()
            rows_NV = logits_NV if len(members) == len(logits_NV) else logits_NV[members]
            drawn_NV = self._distribution(rows_NV, in_force(explanation, requested), group)
            drawn[here] = _entries(drawn_NV, self._tokens[members])
            if known is None:
                told_NV = self._told(explanation, rows_NV, group, drawn_NV)
                told[here] = self._read(told_NV, explanation.pick, members)
        if known is None:
            # Finite, so that costs can be compared: an excluded token is as bad as a prediction can be.
            told = self._shift(np.maximum(told, EXCLUDED_LOGPROB), explanation.pick)
            if explanation.reported in (Reported.RAW, Reported.AS_REQUESTED):
                self._told_already[key] = told
        else:
            told = known
        return Prediction(told, np.maximum(drawn, EXCLUDED_LOGPROB))

    def masses(self, explanation: Explanation) -> NDArray[np.float32]:
        """[token, id]: how likely each id would have been in the place of each token."""
        logits_NV = self.rows(explanation.context, explanation.forward)
        masses_NV = torch.empty_like(logits_NV)
        for group, (requested, members) in enumerate(self._groups):
            drawn_NV = self._distribution(logits_NV[members], in_force(explanation, requested), group)
            masses_NV[members] = drawn_NV.exp()
        result: NDArray[np.float32] = masses_NV.numpy()
        return result

    def surprise(self, explanation: Explanation) -> Surprise:
        """Apart from predictions, because it costs as much as one and few accounts are asked for it."""
        logits_NV = self.rows(explanation.context, explanation.forward)
        entropy, variance = np.empty(len(self.reported)), np.empty(len(self.reported))
        for group, (requested, members) in enumerate(self._groups):
            drawn_NV = self._distribution(logits_NV[members], in_force(explanation, requested), group)
            moments = surprise_moments(drawn_NV)
            entropy[members.numpy()], variance[members.numpy()] = (part.double().numpy() for part in moments)
        return Surprise(entropy, variance)

    def _told(
        self, explanation: Explanation, logits_NV: torch.Tensor, group: int, drawn_NV: torch.Tensor
    ) -> torch.Tensor:
        """The distribution that reported numbers are read from."""
        requested, _ = self._groups[group]
        if explanation.reported is Reported.RAW:
            return torch.log_softmax(logits_NV, dim=-1)
        if explanation.reported is Reported.AS_REQUESTED:
            return self._distribution(logits_NV, requested, group)
        if explanation.reported is Reported.UNRENORMALISED:
            whole = msgspec.structs.replace(in_force(explanation, requested), top_p=1.0, top_k=0, min_p=0.0)
            return self._distribution(logits_NV, whole, group)
        if explanation.reported is Reported.OVER_LIKELIEST:
            count = min(int(explanation.sampling["top_k"]), drawn_NV.shape[-1])
            return drawn_NV - drawn_NV.topk(count, dim=-1).values.logsumexp(dim=-1, keepdim=True)
        return drawn_NV

    def _distribution(self, logits_NV: torch.Tensor, params: SamplingParams, group: int) -> torch.Tensor:
        past = [self._past[i] for i in self._groups[group][1].tolist()]
        if params.penalises and group not in self._counted:
            self._counted[group] = tally(past, logits_NV)
        return processed_logprobs(logits_NV, params, past, self.stop_ids, self._counted.get(group))

    def _read(self, told_NV: torch.Tensor, pick: Pick, members: torch.Tensor) -> Floats:
        if pick is Pick.TOP:
            return told_NV.amax(dim=-1).double().numpy()
        if pick in (Pick.NEXT_ROW, Pick.PREVIOUS_ROW):
            # A row earlier or later is the entry of the token one later or earlier; edges are cut by _shift.
            step = -1 if pick is Pick.NEXT_ROW else 1
            tokens = torch.roll(self._tokens, -step)[members]
            return _entries(told_NV, tokens)
        return _entries(told_NV, self._tokens[members])

    def _shift(self, told: Floats, pick: Pick) -> Floats:
        """Move values by one token within each case; NaN where a case has no neighbour."""
        step = {
            Pick.NEXT_ROW: -1,
            Pick.NEXT_VALUE: -1,
            Pick.PREVIOUS_ROW: 1,
            Pick.PREVIOUS_VALUE: 1,
        }.get(pick, 0)
        if pick is Pick.NO_STOP:
            told = told.copy()
            told[self._last[[case.stopped for case in self.cases]]] = 0.0
        if pick is Pick.NO_FIRST:
            told = self._with_placeholder(told)
        if step == 0:
            return told
        moved = np.roll(told, step)
        moved[np.roll(self.case_ids, step) != self.case_ids] = np.nan
        moved[0 if step == 1 else -1] = np.nan
        return moved

    def _with_placeholder(self, told: Floats) -> Floats:
        """The number that all first tokens carry, in the place of theirs; unchanged where they carry several."""
        values = self.reported[self._first]
        if len(values) >= FEWEST_FIRST and (values == values[0]).all():
            told = told.copy()
            told[self._first] = values[0]
        return told


def in_force(explanation: Explanation, requested: SamplingParams) -> SamplingParams:
    """The requested parameters with the explanation's changes made."""
    if not explanation.sampling and not explanation.bias:
        return requested
    sampling = dict(explanation.sampling)
    if explanation.reported is Reported.OVER_LIKELIEST:
        # Reports alone are cut off.
        del sampling["top_k"]
    bias = dict(requested.logit_bias)
    for token, value in explanation.bias.items():
        bias[token] = bias.get(token, 0.0) + value
    return requested.with_in_force(**sampling, logit_bias=bias)


def _by_parameters(cases: Sequence[CaseWindow]) -> list[tuple[SamplingParams, torch.Tensor]]:
    """Token indices by requested parameters; seed and number of samples do not shape a distribution."""
    groups: dict[SamplingParams, list[int]] = {}
    position = 0
    for case in cases:
        params = msgspec.structs.replace(case.requested, seed=None, n=1)
        groups.setdefault(params, []).extend(range(position, position + len(case.judged)))
        position += len(case.judged)
    return [(params, torch.tensor(members)) for params, members in groups.items()]


def _entries(logprobs_NV: torch.Tensor, tokens_N: torch.Tensor) -> Floats:
    values: Floats = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0].double().numpy()
    return values
