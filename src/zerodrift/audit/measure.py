"""Per-token measurement: what the engine reported beside what the reference makes of the same tokens.

Δ = contracted − reported = log π_trainer − log π_rollout, the sign that every RL framework uses. Rows of logits are
reduced to some numbers per token as they come, whatever the vocabulary: 48 bytes, and 48 more in the table, beside 271 for
each of the first tokens, whose draws are counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch

from zerodrift.audit.floor import Passage
from zerodrift.backends.teacher import LogitRows, Teacher
from zerodrift.core.completion import Completion
from zerodrift.core.request import SamplingParams
from zerodrift.drift.floor import Floor
from zerodrift.drift.tokens import RECENT, DrawMasses, TokenTable, joined, no_masses
from zerodrift.sampler.masses import draw_masses
from zerodrift.sampler.moments import surprise_moments
from zerodrift.sampler.placement import place
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Floats

CELLS = 2**20
"""Rows × vocabulary that are worked on at once. A step holds up to ten arrays of so many numbers: 80 MB in fp64, where
256 rows of a 151,936-word vocabulary took 1,490 MiB."""
EDGE = 1e-5
"""Rounding decides on which side of a nucleus a token falls that is so near its edge; sums of fp32 probabilities are
off by a few 1e-6. One such token in a million moved a healthy logprob by 7e-3."""
WINDOW = 1024
"""Sequences whose ids are laid out for the teacher at once."""
LONG = 256
"""Tokens, up to which padding costs less than another batch."""


class Observed(NamedTuple):
    """A completion and the parameters that were asked for; its own may be other than these."""

    completion: Completion
    requested: SamplingParams

    @property
    def passage(self) -> Passage:
        """The whole sequence, to be scored from the first output token on."""
        return Passage(self.completion.sequence, len(self.completion.prompt_token_ids))

    @property
    def length(self) -> int:
        """Of prompt and output."""
        return len(self.completion.prompt_token_ids) + len(self.completion.token_ids)


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
    by_likelihood: Floats
    """Where the draw fell, with likelier tokens first (`sampler.placement`)."""
    by_id: Floats
    """Where it fell, with tokens in the order of their ids."""
    masses: DrawMasses
    """How likely it was to fall into some sets (`drift.draws`)."""

    @property
    def reported(self) -> Floats:
        """The engine's own number."""
        return np.array(self.observed.completion.logprobs)

    @property
    def delta(self) -> Floats:
        """log π_trainer − log π_rollout."""
        result: Floats = self.contracted - self.reported
        return result


class MeasuredColumns(Sequence[Measurement]):
    """Measurements whose numbers stand end to end in one array for each kind, in the order of the sequences."""

    def __init__(self, observed: Sequence[Observed]) -> None:
        """Room for every token; nothing is known of any yet."""
        self.observed = observed
        self.ends = np.cumsum([0, *(len(item.completion.token_ids) for item in observed)])
        self.columns = np.full((len(Measurement._fields) - 2, int(self.ends[-1])), np.nan)
        self.masses: DrawMasses | None = None
        """None until the first row says how large the vocabulary is."""

    def __len__(self) -> int:
        return len(self.observed)

    @overload
    def __getitem__(self, index: int) -> Measurement: ...
    @overload
    def __getitem__(self, index: slice) -> list[Measurement]: ...
    def __getitem__(self, index: int | slice) -> Measurement | list[Measurement]:
        """A view, never a copy."""
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        part = slice(*self.ends[place : place + 2])
        assert self.masses is not None, "measured before it is read"
        contracted, raw, entropy, variance, by_likelihood, by_id = (column[part] for column in self.columns)
        return Measurement(
            self.observed[place],
            contracted,
            raw,
            entropy,
            variance,
            by_likelihood,
            by_id,
            self.masses.rows(part),
        )

    def put(self, at: int, numbers: Floats, masses: DrawMasses) -> None:
        """The numbers of some tokens, from number `at` on."""
        if self.masses is None:
            self.masses = no_masses(int(self.ends[-1]), masses.vocab_size)
        part = slice(at, at + numbers.shape[1])
        self.columns[:, part] = numbers
        self.masses.put(part, masses)


def measure(
    teacher: Teacher,
    observed: Sequence[Observed],
    stop_ids: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MeasuredColumns:
    """Score every observed sequence as it was sent; what comes back is in the same order."""
    measured = MeasuredColumns(observed)
    total, done = int(measured.ends[-1]), 0
    rng = np.random.default_rng(0)
    # Shortest first: in the order given, half of what padded batches compute is padding.
    order = sorted(range(len(observed)), key=lambda index: observed[index].length)
    for window in _windows(order, observed):
        passages = [observed[index].passage for index in window]
        within = [rng.random(len(ids) - start) for ids, start in passages]
        for piece in teacher.logit_rows([ids for ids, _ in passages], [start for _, start in passages]):
            index = window[piece.sequence]
            for begin, numbers, masses in _measure(observed[index], piece, stop_ids, within[piece.sequence]):
                measured.put(int(measured.ends[index]) + begin, numbers, masses)
            done += len(piece.logits_TV)
            progress(done, total)
    return measured


def _windows(order: Sequence[int], observed: Sequence[Observed]) -> Iterator[list[int]]:
    """Sequences that are laid out together; a long one is not padded to by such as are less than half of it."""
    window: list[int] = []
    for index in order:
        length = observed[index].length
        apart = bool(window) and length > max(LONG, 2 * observed[window[0]].length)
        if apart or len(window) == WINDOW:
            yield window
            window = []
        window.append(index)
    if window:
        yield window


def _measure(
    item: Observed, piece: LogitRows, stop_ids: Sequence[int], within: Floats
) -> Iterator[tuple[int, Floats, DrawMasses]]:
    """The columns of a `Measurement` for the rows of `piece`, a few at a time, and where in the output they begin."""
    prompt, output = item.completion.prompt_token_ids, item.completion.token_ids
    most = max(1, CELLS // piece.logits_TV.shape[-1])
    for first in range(0, len(piece.logits_TV), most):
        logits_TV = piece.logits_TV[first : first + most]
        logits_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
        begin = piece.begin + first
        end = begin + len(logits_TV)
        past = histories(prompt, output, begin, end)
        drawn_TV = processed_logprobs(logits_TV, item.requested, past, stop_ids).double()
        entropy_T, variance_T = surprise_moments(drawn_TV)
        rows, tokens = torch.arange(len(logits_TV)), torch.tensor(output[begin:end])
        points = place(drawn_TV, tokens, torch.from_numpy(within[begin:end]))
        accounts = [drawn_TV[rows, tokens]]
        if item.requested.truncates:
            for slack in (EDGE, -EDGE):
                moved_TV = processed_logprobs(logits_TV, item.requested, past, stop_ids, slack=slack)
                accounts.append(moved_TV[rows, tokens].double())
        columns = (
            _nearest(accounts, item.completion.logprobs[begin:end]),
            torch.log_softmax(logits_TV, dim=-1)[rows, tokens].double(),
            entropy_T,
            variance_T,
            points.by_likelihood_T,
            points.by_id_T,
        )
        ends = item.requested.stop_token_ids + (() if item.requested.ignore_eos else tuple(stop_ids))
        masses = draw_masses(drawn_TV, tokens, ends, output[max(0, begin - max(RECENT)) : begin])
        yield begin, torch.stack(columns).numpy(), masses


def _nearest(accounts: Sequence[torch.Tensor], told: Sequence[float]) -> torch.Tensor:
    """Of equally good numbers the one that was reported; the first where several are as near."""
    accounts_AT = torch.stack(list(accounts))
    chosen_T = (accounts_AT - torch.tensor(told, dtype=torch.float64)).abs().argmin(dim=0)
    return accounts_AT.gather(0, chosen_T[None])[0]


def tabulate(measurements: Iterable[Measurement], floor: Floor) -> TokenTable:
    """Columns of every token, with the rounding scale that `floor` gives it. Those of `MeasuredColumns` are not copied."""
    rows = measurements if isinstance(measurements, MeasuredColumns) else list(measurements)
    answers = [item.observed.completion for item in rows]
    counts = [len(answer.token_ids) for answer in answers]
    # Numbered through, less the number of the first of each sequence.
    index = np.arange(sum(counts)) - np.repeat(np.cumsum([0, *counts])[:-1], counts)
    if isinstance(rows, MeasuredColumns):
        assert rows.masses is not None, "measured before it is tabulated"
        columns, masses = tuple(rows.columns), rows.masses
    else:
        columns = tuple(np.concatenate(column) for column in zip(*(item[1:-1] for item in rows), strict=True))
        masses = joined(_counted(rows))
    contracted, raw, entropy, variance, by_likelihood, by_id = columns
    return TokenTable(
        sequence=np.repeat(np.arange(len(rows)), counts),
        index=index,
        position=index + np.repeat([len(answer.prompt_token_ids) for answer in answers], counts),
        token=np.fromiter(chain.from_iterable(answer.token_ids for answer in answers), np.int64),
        reported=np.fromiter(chain.from_iterable(answer.logprobs for answer in answers), np.float64),
        contracted=contracted,
        raw=raw,
        entropy=entropy,
        variance=variance,
        by_likelihood=by_likelihood,
        by_id=by_id,
        sigma=floor.sigma(contracted),
        masses=masses,
        ends_told=_ends_told(rows, counts, masses),
    )


def _ends_told(rows: Sequence[Measurement], counts: Sequence[int], masses: DrawMasses) -> bool:
    """Whether each output reaches the length that was asked for, or ends in a stop token."""
    full = [count >= item.observed.requested.max_tokens for item, count in zip(rows, counts, strict=True)]
    lasts = np.cumsum(counts) - 1
    known = lasts < len(masses.stopped)
    return bool(np.all(np.array(full)[known] | masses.stopped[lasts[known]]))


def _counted(rows: Sequence[Measurement]) -> list[DrawMasses]:
    """Masses of the first tokens, up to the first that has none."""
    parts = []
    for item in rows:
        parts.append(item.masses)
        if len(item.masses.stop) < len(item.contracted):
            break
    return parts
