"""From logits to tokens and the numbers reported with them, for all rows of a step together.

A row is processed with rows of the same parameters, and its bits are those it would have alone: every op works on
rows. A token is what `sampler.choose` gives for its row and its own uniform number; `n` samples of one prompt share
the row and differ in the number. Shapes: R rows, G rows of one group, V vocabulary, K alternatives.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import attrgetter

import torch

from zerodrift.core.completion import LogprobKind, Problem
from zerodrift.core.errors import InvalidSampling, NonFinite, ZerodriftError
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.engine import device_draws
from zerodrift.engine.plan import Draw, Drawn, Scored
from zerodrift.engine.sample import Sample
from zerodrift.exact.logprobs import processed
from zerodrift.exact.normalisation import log_softmax
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import TokenHistory, processed_logits

Pairs = tuple[tuple[int, float], ...]
MARGIN = {torch.float32: 1e-6, torch.float64: 1e-12}
"""How far from the ends of a token's slice a number must lie for a cumulative sum to be trusted with it."""

ELEMENTS_AT_ONCE = 2**21
"""Probabilities held at a time, 8 MB: 256 rows of 49,152 tokens took 174 ms in one piece and 139 in pieces of 43 rows."""
ELEMENTS_ON_GPU = 2**26
"""There, 441 rows of 151,936: 13 at a time left nine tenths of the chip idle. Some six tensors of this size are held."""


class LogprobsMode(StrEnum):
    """What is reported beside a token, in vLLM's words.

    In the two logits modes a completion carries logits *besides* the logprobs of the same kind: vLLM puts logits in
    the logprobs' place, where a trainer takes them for what they are not.
    """

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def kind(self) -> LogprobKind:
        """Of the logprobs."""
        return LogprobKind.RAW if self.value.startswith("raw") else LogprobKind.PROCESSED

    @property
    def gives_logits(self) -> bool:
        """Whether logits are reported too."""
        return self.value.endswith("logits")


# Rows with the same of these are processed together.
_GROUPED_BY = attrgetter(*SHAPING, "stop_token_ids", "logprobs")


class Sampler:
    """Draws tokens, and reports them in one of four modes."""

    def __init__(self, mode: LogprobsMode, stop_ids: Sequence[int]) -> None:
        """`stop_ids` are those that `min_tokens` forbids, beside the request's own."""
        self.mode = mode
        self.stop_ids = tuple(stop_ids)

    def draw(self, logits_RV: torch.Tensor, rows: Sequence[Sequence[Draw]]) -> dict[int, Drawn | Problem]:
        """A token, or a problem, for each draw of each row."""
        if not logits_RV.is_cuda:
            return self._draw_rows(logits_RV, rows)
        quick = [self.only_temperature(draws[0].sampling) for draws in rows]
        drawn: dict[int, Drawn | Problem] = {}
        if any(quick):
            some_RV = (
                logits_RV if all(quick) else logits_RV[[index for index, each in enumerate(quick) if each]]
            )
            some = [draws for draws, each in zip(rows, quick, strict=True) if each]
            for draw, found in device_draws.draw(some_RV, some):
                drawn[draw.key] = not_finite(draw) if found is None else found
        if not all(quick):
            others = [index for index, each in enumerate(quick) if not each]
            drawn |= self._draw_rows(logits_RV[others], [rows[index] for index in others])
        return drawn

    def runs_ahead(self, sample: Sample) -> bool:
        """Whether a GPU draws its tokens without the host, and nobody looks at each as it comes."""
        watched = sample.stream_text or sample.next_forced is not None
        return not watched and self.only_temperature(sample.sampling)

    def only_temperature(self, params: SamplingParams) -> bool:
        """Whether a request with these can be drawn on a GPU without the host."""
        return not self.mode.gives_logits and device_draws.only_temperature(params, self.mode.kind)

    def _draw_rows(
        self, logits_RV: torch.Tensor, rows: Sequence[Sequence[Draw]]
    ) -> dict[int, Drawn | Problem]:
        drawn: dict[int, Drawn | Problem] = {}
        # A sum is finite exactly where its terms are: one pass, and no tensor of booleans.
        finite = logits_RV.sum(dim=-1).isfinite().tolist()
        groups: dict[object, list[int]] = {}
        for index, draws in enumerate(rows):
            if finite[index]:
                groups.setdefault(_GROUPED_BY(draws[0].sampling), []).append(index)
            else:
                drawn.update((draw.key, not_finite(draw)) for draw in draws)
        elements = ELEMENTS_ON_GPU if logits_RV.is_cuda else ELEMENTS_AT_ONCE
        at_once = max(1, elements // logits_RV.shape[-1])
        for whole in groups.values():
            for begin in range(0, len(whole), at_once):
                members = whole[begin : begin + at_once]
                # Consecutive rows are looked at where they are; others are copied together.
                together = members[-1] - members[0] == len(members) - 1
                logits_GV = logits_RV[members[0] : members[-1] + 1] if together else logits_RV[members]
                self._draw_group(logits_GV, [rows[index] for index in members], drawn)
        return drawn

    def _draw_group(
        self, logits_GV: torch.Tensor, rows: Sequence[Sequence[Draw]], drawn: dict[int, Drawn | Problem]
    ) -> None:
        params = rows[0][0].sampling
        history = [TokenHistory(draws[0].prompt, draws[0].output) for draws in rows]
        try:
            processed_GV = processed(logits_GV, params, history, self.stop_ids)
        except InvalidSampling as error:
            problem = Problem(error.code, str(error))
            drawn.update((draw.key, problem) for draws in rows for draw in draws)
            return
        row_of = [row for row, draws in enumerate(rows) for _ in draws]
        flat = [draw for draws in rows for draw in draws]
        probs_GV = processed_GV.exp()
        tokens = choose_all(processed_GV, probs_GV, row_of, flat)
        raw = self.mode.kind is LogprobKind.RAW
        reported_GV = log_softmax(logits_GV) if raw else processed_GV
        logprobs = _gather(reported_GV, row_of, tokens)
        tops = _tops(reported_GV, params.logprobs or 0)
        logits: list[float] | list[None] = [None] * len(flat)
        top_logits: list[Pairs] = [()] * len(rows)
        if self.mode.gives_logits:
            shown_GV = logits_GV if raw else processed_logits(logits_GV, params, history, self.stop_ids)
            logits, top_logits = _gather(shown_GV, row_of, tokens), _tops(shown_GV, params.logprobs or 0)
        entropy = _entropy(processed_GV, probs_GV, params)
        for draw, row, token, logprob, logit in zip(flat, row_of, tokens, logprobs, logits, strict=True):
            if logprob == -torch.inf:
                drawn[draw.key] = _problem(
                    InvalidSampling,
                    f"output token {len(draw.output)} was forced to be {token}, which the sampling parameters exclude; "
                    "force tokens without truncation and bias",
                )
                continue
            drawn[draw.key] = Drawn(token, logprob, tops[row], logit, top_logits[row], entropy[row])

    def score(self, logits_RV: torch.Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
        """Raw logprobs of given tokens, one per row."""
        logprobs_RV = log_softmax(logits_RV)
        values = _gather(logprobs_RV, range(len(tokens)), tokens)
        return [Scored(*pair) for pair in zip(values, _tops(logprobs_RV, top), strict=True)]


def choose_all(
    logprobs_GV: torch.Tensor, probs_GV: torch.Tensor, row_of: Sequence[int], draws: Sequence[Draw]
) -> list[int]:
    """The token of each draw: given, likeliest, or found by inversion as `sampler.choose` does it."""
    if all(draw.forced is not None for draw in draws):
        return [draw.forced for draw in draws if draw.forced is not None]
    if draws[0].sampling.greedy:
        tokens = logprobs_GV.argmax(dim=-1)[torch.tensor(row_of)].tolist()
    else:
        tokens = invert(logprobs_GV, probs_GV, row_of, [_uniform(draw) for draw in draws])
    return [token if draw.forced is None else draw.forced for token, draw in zip(tokens, draws, strict=True)]


def invert(
    logprobs_GV: torch.Tensor, probs_GV: torch.Tensor, row_of: Sequence[int], uniforms: Sequence[float]
) -> list[int]:
    """`choose` for many draws, in a cheaper way where that is certain to find the same token.

    fp64 over 256 rows of 49,152 tokens costs 150 ms, a third of a small model's step; fp32 costs 25. Its cumulative
    sum is off by less than 3e-7 (an ulp of exp, an ulp of rounding; torch adds in fp64): a number that lies
    further than the margin from both ends of its token's slice is in the same slice in fp64. A GPU adds in an order
    of its own, in fp64 here, and is trusted to 1e-12.
    """
    if probs_GV.is_cuda:
        probs_GV = logprobs_GV.double().exp()
    rows_D = torch.tensor(row_of, device=probs_GV.device)
    wanted_D = torch.tensor(uniforms, dtype=torch.float64).to(probs_GV.device)
    cumulative_DV = probs_GV.cumsum(dim=-1)
    if len(row_of) != len(probs_GV):
        cumulative_DV = cumulative_DV[rows_D]
    scaled_D1 = (wanted_D * cumulative_DV[:, -1]).to(probs_GV.dtype)[:, None]
    tokens_D1 = torch.searchsorted(cumulative_DV, scaled_D1, right=True).clamp_(max=probs_GV.shape[-1] - 1)
    above_D1 = cumulative_DV.gather(-1, tokens_D1) - scaled_D1
    below_D1 = scaled_D1 - cumulative_DV.gather(-1, (tokens_D1 - 1).clamp_(min=0)).masked_fill_(
        tokens_D1 == 0, 0
    )
    room_D, tokens_D = torch.minimum(above_D1, below_D1)[:, 0], tokens_D1[:, 0]
    tokens: list[int] = tokens_D.tolist()
    for index in (room_D <= MARGIN[probs_GV.dtype]).nonzero().flatten().tolist():
        tokens[index] = choose(logprobs_GV[row_of[index]].cpu(), uniforms[index])
    return tokens


def _uniform(draw: Draw) -> float:
    seed = draw.sampling.seed
    assert seed is not None, "the engine gives every request a seed"
    return uniform(seed, draw.sample_index, len(draw.output))


def _gather(values_GV: torch.Tensor, rows: Iterable[int], tokens: Sequence[int]) -> list[float]:
    device = values_GV.device
    where = (torch.tensor(list(rows), device=device), torch.tensor(list(tokens), device=device))
    found: list[float] = values_GV[where].tolist()
    return found


def _tops(values_GV: torch.Tensor, count: int) -> list[Pairs]:
    """The `count` likeliest of each row; excluded ones have no logprob and are left out."""
    if not count:
        return [()] * len(values_GV)
    best = values_GV.topk(min(count, values_GV.shape[-1]), dim=-1)
    return [
        tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -torch.inf)
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _entropy(logprobs_GV: torch.Tensor, probs_GV: torch.Tensor, params: SamplingParams) -> list[float]:
    """In nats, for the metrics."""
    if params.truncates or params.min_tokens:
        # 0 · -inf would be NaN, so what is excluded gets a finite logprob first.
        logprobs_GV = logprobs_GV.clamp(min=-1e4)
    values: list[float] = (probs_GV * logprobs_GV).sum(dim=-1).neg().tolist()
    return values


def not_finite(draw: Draw, rounds: int = 0) -> Problem:
    """What ends a sample whose next token, `rounds` after that of `draw`, has no distribution."""
    return _problem(
        NonFinite,
        f"the logits of output token {len(draw.output) + rounds} are not finite; look for NaN in the weights, and in the KV of "
        "this request",
    )


def _problem(error: type[ZerodriftError], message: str) -> Problem:
    return Problem(error.code, message)
