"""The same sequences by every path a prepared model has, for counting the bits that differ: none may.

Paths: each sequence alone, packed one after another, padded on either side, and in pages, step by step, in chunks and
company drawn from a seed. All give hidden states, one tensor [length, H] per sequence; the shared head does the rest.
Where two paths part is said by `exact.first_difference`.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.exact.logprobs import Scored, token_logprobs
from zerodrift.exact.paged import PagedBatch, PagedKV, forward_paged
from zerodrift.exact.preparation import parameters_on

Hidden = list[torch.Tensor]


def alone(model: Any, sequences: Sequence[Sequence[int]]) -> Hidden:
    """One forward per sequence: what the other paths are compared with."""
    return [packed(model, [ids])[0] for ids in sequences]


def packed(model: Any, sequences: Sequence[Sequence[int]]) -> Hidden:
    """One row for all, positions starting over at each."""
    device = parameters_on(model)
    ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).to(device)
    output = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return list(output.last_hidden_state[0].split([len(sequence) for sequence in sequences]))


def padded(model: Any, sequences: Sequence[Sequence[int]], *, left: bool) -> Hidden:
    """One row per sequence, filled up to the longest with token 0."""
    device, longest = parameters_on(model), max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        inside = slice(longest - len(sequence), None) if left else slice(0, len(sequence))
        ids[row, inside] = torch.tensor(sequence)
        mask[row, inside] = 1
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    output = model.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        use_cache=False,
    )
    return [row[kept] for row, kept in zip(output.last_hidden_state, mask.bool().to(device), strict=True)]


@torch.no_grad()
def rescored(model: Any, completion: Scored, stop_ids: Sequence[int] | None = None) -> torch.Tensor:
    """Logprobs of its tokens, of its kind, by another path than an engine's: alone, the whole sequence at once."""
    return token_logprobs(model, [completion], stop_ids)[0]


class Schedule:
    """Which tokens of which sequences each step runs, and which pages they get; drawn from `seed` alone."""

    def __init__(
        self, seed: int, block_size: int, chunks: Sequence[int] = (1, 1, 1, 3, 17, 64), share: float = 0.7
    ) -> None:
        """Every step runs each unfinished sequence with probability `share`, by one of `chunks` tokens."""
        self.random = random.Random(seed)
        self.block_size, self.chunks, self.share = block_size, chunks, share

    def tables(self, lengths: Sequence[int]) -> tuple[list[list[int]], int]:
        """Blocks for each sequence, in shuffled order, and how many there are."""
        counts = [-(-length // self.block_size) for length in lengths]
        blocks = list(range(sum(counts) + 3))
        self.random.shuffle(blocks)
        return [[blocks.pop() for _ in range(count)] for count in counts], sum(counts) + 3

    def steps(self, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """For each step: (sequence, first token, token after the last), in the order of the batch."""
        done, steps = [0] * len(lengths), []
        while any(begin < length for begin, length in zip(done, lengths, strict=True)):
            chosen = [
                index
                for index, length in enumerate(lengths)
                if done[index] < length and self.random.random() < self.share
            ]
            self.random.shuffle(chosen)
            step = []
            for index in chosen:
                end = min(done[index] + self.random.choice(self.chunks), lengths[index])
                step.append((index, done[index], end))
                done[index] = end
            if step:
                steps.append(step)
        return steps


class PromptThenTokens(Schedule):
    """As an engine runs a sequence that has it to itself: its prompt in one step, then a token a step."""

    def __init__(self, prompt: int, block_size: int, seed: int = 0) -> None:
        super().__init__(seed, block_size)
        self.prompt = prompt

    def steps(self, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """All sequences side by side."""
        spans = [(0, self.prompt), *((at, at + 1) for at in range(self.prompt, max(lengths)))]
        return [
            [
                (index, begin, min(end, length))
                for index, length in enumerate(lengths)
                if begin < min(end, length)
            ]
            for begin, end in spans
        ]


def paged(
    model: Any, sequences: Sequence[Sequence[int]], schedule: Schedule, kv: PagedKV | None = None
) -> Hidden:
    """As an engine runs them; `kv` may hold what others left behind."""
    lengths = [len(sequence) for sequence in sequences]
    tables, blocks = schedule.tables(lengths)
    kv = PagedKV(model, blocks, schedule.block_size) if kv is None else kv
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in schedule.steps(lengths):
        hidden_TH = forward_paged(model, batch_of(model, sequences, tables, schedule.block_size, step), kv)
        sizes = [end - begin for _, begin, end in step]
        for (index, _, _), part in zip(step, torch.split(hidden_TH, sizes), strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]


def differing_rows(a: Hidden, b: Hidden) -> int:
    """Rows that differ in any bit."""
    found = 0
    for left, right in zip(a, b, strict=True):
        bits = [part.detach().contiguous().view(torch.uint8) for part in (left, right)]
        found += int((bits[0] != bits[1]).any(dim=-1).sum())
    return found


def batch_of(
    model: Any,
    sequences: Sequence[Sequence[int]],
    tables: list[list[int]],
    size: int,
    step: list[tuple[int, int, int]],
) -> PagedBatch:
    """The tensors of one step of a schedule."""
    device = parameters_on(model)
    places = [(index, position) for index, begin, end in step for position in range(begin, end)]
    bounds = [0]
    for _, begin, end in step:
        bounds.append(bounds[-1] + end - begin)
    return PagedBatch(
        torch.tensor([sequences[index][position] for index, position in places], device=device),
        torch.tensor([position for _, position in places], device=device),
        torch.tensor([tables[i][p // size] * size + p % size for i, p in places], device=device),
        tuple(bounds),
        tuple(begin for _, begin, _ in step),
        tuple(torch.tensor(tables[index][: (end - 1) // size + 1], device=device) for index, _, end in step),
    )
