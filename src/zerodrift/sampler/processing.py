"""From the model's logits to the distribution that is sampled, in the order that vLLM documents.

Order: minimum length, logit bias, penalties, temperature, min-p, top-k, top-p; what is left is renormalised.
Every step works on rows and keeps the dtype it is given. Shapes: T rows (tokens), V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from zerodrift.core.errors import InvalidSampling
from zerodrift.core.request import SamplingParams
from zerodrift.sampler.prefix import Prefix

_LOG_SOFTMAX = partial(torch.log_softmax, dim=-1)
NUCLEUS = 1024
"""Tokens among which the end of a nucleus is looked for first; of 49,152 tokens, sorting all takes five times as long."""


class TokenHistory(NamedTuple):
    """What a row looks back on: the ids that penalties count."""

    prompt: Sequence[int]
    output: Sequence[int]


def histories(
    prompt: Sequence[int], output: Sequence[int], begin: int = 0, end: int | None = None
) -> list[TokenHistory]:
    """One history per token of a finished output, or of a part: token i was drawn when `output[:i]` was known."""
    whole = tuple(output)
    return [TokenHistory(prompt, Prefix(whole, position)) for position in range(len(whole))[begin:end]]


class Tally(NamedTuple):
    """Rows of history, counted: what penalties need.

    Only ids that stand there: some hundreds, where counts of all of 49,152 took a tenth of a second for 200 rows.
    """

    ids_TK: torch.Tensor
    """Those of each row's prompt and output; a row with fewer than others repeats its first."""
    output_TK: torch.Tensor
    """How often each stands in the output so far."""
    seen_TK: torch.Tensor
    """Whether it stands in prompt or output."""


def tally(rows: Sequence[TokenHistory], logits_TV: torch.Tensor) -> Tally:
    """Count `rows` in the dtype of `logits_TV`."""
    counted = [_count(rows[begin:end], logits_TV) for begin, end in pairwise(_breaks(rows))]
    width = max((part.ids_TK.shape[-1] for part in counted), default=1)
    return Tally(
        *(torch.cat([_widened(part, width) for part in column]) for column in zip(*counted, strict=True))
    )


def _breaks(rows: Sequence[TokenHistory]) -> list[int]:
    """Where rows begin that do not go on from the one before, and the end of all."""
    new = [row for row in range(1, len(rows)) if not _goes_on(rows[row - 1], rows[row])]
    return [0, *new, len(rows)]


def _count(rows: Sequence[TokenHistory], logits_TV: torch.Tensor) -> Tally:
    """Rows of one output, each of which goes on from the one before."""
    # Nothing to count is counted as none of id 0.
    prompt, last = dict.fromkeys(rows[0].prompt), rows[-1].output
    places = {token: place for place, token in enumerate(dict.fromkeys((*prompt, *last)) or (0,))}
    counts_TK = torch.zeros(len(rows), len(places), dtype=logits_TV.dtype)
    known = 0
    for row, history in enumerate(rows):
        if row:
            counts_TK[row] = counts_TK[row - 1]
        added_A = torch.tensor([places[token] for token in history.output[known:]], dtype=torch.long)
        counts_TK[row].index_add_(0, added_A, torch.ones(len(added_A), dtype=counts_TK.dtype))
        known = len(history.output)
    seen_TK = counts_TK > 0
    seen_TK[:, : len(prompt)] = True
    ids_TK = torch.tensor(list(places)).expand(len(rows), -1)
    return Tally(*(each.to(logits_TV.device) for each in (ids_TK, counts_TK, seen_TK)))


def _widened(part_TK: torch.Tensor, width: int) -> torch.Tensor:
    more = width - part_TK.shape[-1]
    return torch.cat([part_TK, part_TK[:, :1].expand(-1, more)], dim=-1) if more else part_TK


def processed_logprobs(  # noqa: PLR0913 - all that shapes a distribution
    logits_TV: torch.Tensor,
    params: SamplingParams,
    rows: Sequence[TokenHistory],
    stop_ids: Sequence[int] = (),
    counted: Tally | None = None,
    *,
    log_softmax: Callable[[torch.Tensor], torch.Tensor] = _LOG_SOFTMAX,
    slack: float = 0.0,
) -> torch.Tensor:
    """Log-probabilities of the sampled distribution; excluded tokens are -inf.

    `counted` is `tally(rows, …)`, for callers that process the same rows many times. `log_softmax` normalises the
    rows at the end. `slack` as in `truncate`.
    """
    return log_softmax(processed_logits(logits_TV, params, rows, stop_ids, counted, slack=slack))


def processed_logits(
    logits_TV: torch.Tensor,
    params: SamplingParams,
    rows: Sequence[TokenHistory],
    stop_ids: Sequence[int] = (),
    counted: Tally | None = None,
    *,
    slack: float = 0.0,
) -> torch.Tensor:
    """As above, before it is normalised."""
    logits_TV = _forbid_stops(logits_TV, params, rows, stop_ids)
    logits_TV = _bias(logits_TV, params)
    if params.penalises:
        logits_TV = _penalise(logits_TV, params, counted or tally(rows, logits_TV))
    if not params.greedy:
        # Greedy decoding draws nothing; its reported distribution is that of temperature 1.
        if params.temperature != 1:
            logits_TV = logits_TV / params.temperature
        logits_TV = truncate(logits_TV, params, slack)
    return logits_TV


def truncate(logits_TV: torch.Tensor, params: SamplingParams, slack: float = 0.0) -> torch.Tensor:
    """Exclude what min-p, top-k and top-p exclude, each judged on what the one before left.

    `slack` moves the edges: above zero, what is excluded by less than that stays; below, what stays by less goes. It is
    a difference of logits for top-k, of mass for top-p, and relative for min-p.
    """
    if params.min_p > 0:
        probs_TV = torch.softmax(logits_TV, dim=-1)
        floor_T1 = params.min_p * (1 - slack) * probs_TV.amax(dim=-1, keepdim=True)
        logits_TV = logits_TV.masked_fill(probs_TV < floor_T1, -torch.inf)
    if 0 < params.top_k < logits_TV.shape[-1]:
        edges_T2 = logits_TV.topk(params.top_k + 1, dim=-1).values[:, -2:]
        outside_TV = logits_TV < edges_T2[:, :1] - max(slack, 0.0)
        if slack < 0:
            outside_TV |= logits_TV <= edges_T2[:, 1:] - slack
        logits_TV = logits_TV.masked_fill(outside_TV, -torch.inf)
    if params.top_p < 1 and params.top_p + slack < 1:
        logits_TV = _top_p(logits_TV, params.top_p + slack)
    return logits_TV


def _top_p(logits_TV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Drop a token if all the mass at and below it still fits into 1 - p; the likeliest always stays."""
    if logits_TV.shape[-1] <= NUCLEUS:
        return _top_p_of_all(logits_TV, top_p)
    probs_TV = torch.softmax(logits_TV, dim=-1)
    head_TK, order_TK = logits_TV.topk(NUCLEUS + 1, dim=-1)
    likelier_TK = probs_TV.gather(-1, order_TK).cumsum(dim=-1).roll(1, dims=-1)
    likelier_TK[:, 0] = 0
    kept_T = (likelier_TK < top_p).sum(dim=-1).clamp(min=1)
    edge_T1 = head_TK.gather(-1, (kept_T - 1)[:, None])
    kept_TV = logits_TV.masked_fill(logits_TV < edge_T1, -torch.inf)
    # A nucleus that goes on beyond these, or equal logits at its edge, of which the order of ids decides.
    next_T1 = head_TK.gather(-1, kept_T.clamp(max=NUCLEUS)[:, None])
    hard_T = (kept_T > NUCLEUS) | (next_T1 == edge_T1)[:, 0]
    if bool(hard_T.any()):
        kept_TV[hard_T] = _top_p_of_all(logits_TV[hard_T], top_p)
    return kept_TV


def _top_p_of_all(logits_TV: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered_TV, order_TV = logits_TV.sort(dim=-1, stable=True)
    dropped_TV = torch.softmax(ordered_TV, dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped_TV[:, -1] = False
    return logits_TV.masked_fill(torch.empty_like(dropped_TV).scatter_(-1, order_TV, dropped_TV), -torch.inf)


def _forbid_stops(
    logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory], stop_ids: Sequence[int]
) -> torch.Tensor:
    young = [row for row, history in enumerate(rows) if len(history.output) < params.min_tokens]
    forbidden = sorted({*stop_ids, *params.stop_token_ids})
    if not young or not forbidden:
        return logits_TV
    if len(forbidden) == logits_TV.shape[-1]:
        raise InvalidSampling(
            f"min_tokens={params.min_tokens} forbids every token, since each of {len(forbidden)} is a stop token; "
            "use min_tokens=0"
        )
    logits_TV = logits_TV.clone()
    where = (
        torch.tensor(young, device=logits_TV.device)[:, None],
        torch.tensor(forbidden, device=logits_TV.device),
    )
    logits_TV[where] = -torch.inf
    return logits_TV


def _bias(logits_TV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if not params.logit_bias:
        return logits_TV
    bias_V = torch.zeros_like(logits_TV[0])
    for token, value in params.logit_bias.items():
        bias_V[token] = value
    return logits_TV + bias_V


def _penalise(logits_TV: torch.Tensor, params: SamplingParams, counted: Tally) -> torch.Tensor:
    strength = params.repetition_penalty
    logits_TK = logits_TV.gather(-1, counted.ids_TK)
    repeated_TK = torch.where(logits_TK > 0, logits_TK / strength, logits_TK * strength)
    logits_TK = torch.where(counted.seen_TK, repeated_TK, logits_TK)
    logits_TK = logits_TK - params.frequency_penalty * counted.output_TK
    # A number times booleans is fp32, whatever the logits are.
    logits_TK = logits_TK - params.presence_penalty * (counted.output_TK > 0).to(logits_TK.dtype)
    return logits_TV.scatter(-1, counted.ids_TK, logits_TK)


def _goes_on(before: TokenHistory, row: TokenHistory) -> bool:
    """Whether what stands in `before` is known to stand in `row` too; False where that would have to be looked up."""
    one, other = before.output, row.output
    if before.prompt is not row.prompt:
        return False
    if one is other:
        return True
    same = isinstance(one, Prefix) and isinstance(other, Prefix) and one.whole is other.whole
    return same and len(one) <= len(other)
