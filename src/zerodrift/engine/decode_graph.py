"""A round in which every sequence decodes one token, captured once as a CUDA graph and replayed: no launch but one.

The graph holds what an eager step does, with the same modules and kernels: forward, head, draw; and it goes on to the next
round by itself, with the tokens that it drew. Its inputs lie in tensors that never move; a step writes them by three
copies and replays as many rounds as it has. Copies come from and go to pinned memory, of which there are two sets in turn: so a
step can be launched behind another that is not read yet, and takes its tokens from where that one leaves them. Sequences are seats 0 to the size of the
graph; seats that nobody has, or that have had their rounds, are computed with no key in sight, write their K and V into a
block that is nobody's, and are not read. Weights never move either, so a swap leaves a graph valid.
Shapes: B seats, J blocks, K rounds.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from zerodrift.engine.limits import MOST_ROUNDS
from zerodrift.engine.plan import TO_COME, Draw, StepPlan
from zerodrift.exact.logprobs import head
from zerodrift.exact.paged import PagedKV, PageStep, forward_tokens
from zerodrift.exact.preparation import ops_of

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Seats of a graph. Captured when first needed, about a second each."""
_COLUMNS = 10
"""Of a seat: token, position, last position that it may forward, where its table begins, and the six of a draw."""
_DRAW, _DRAWN = 4, 7
"""Where those of a draw begin, and which says how many tokens were drawn before."""


def can_capture(model: Any) -> bool:
    """Whether a step of `model` runs without the host: dynamic frequencies look at positions, plain twins at the plan."""
    dynamic = any(type(module).__name__ == "ExactRotary" for module in model.modules())
    return model.device.type == "cuda" and not dynamic and not ops_of(model).plain


class DecodeGraphs:
    """Graphs of all sizes for one model and its KV."""

    def __init__(self, model: Any, kv: PagedKV) -> None:
        self.model, self.kv = model, kv
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None

    @property
    def sizes(self) -> frozenset[int]:
        """Those that were captured."""
        return frozenset(self._graphs)

    def size_for(self, plan: StepPlan) -> int | None:
        """Seats for `plan`; None where a slice is no plain decode, or there are more than any graph has."""
        if len(plan.slices) > SIZES[-1] or not all(
            len(part.token_ids) == 1 and len(part.draws) == 1 and not part.scored for part in plan.slices
        ):
            return None
        return _least(len(plan.slices))

    def can_follow(self, plan: StepPlan, sequences: int, blocks: int) -> bool:
        """Whether a step behind `plan`, of some of its sequences, runs by the very graph that holds their tokens."""
        graph = self._graphs.get(size := _least(len(plan.slices)))
        return graph is not None and _least(sequences) == size and blocks <= graph.step.room

    def run(self, plan: StepPlan, size: int) -> "Iterator[Round]":
        """Start all rounds of `plan`; what every slice got in each, as soon as it is there."""
        if size not in self._graphs:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._graphs[size] = _Graph(self.model, self.kv, size, self._pool)
        return self._graphs[size].run(plan)


class Round:
    """Per slice, in the order of the plan. What a slice got beyond its own rounds says nothing."""

    def __init__(self, columns: Sequence[Sequence[float]], count: int) -> None:
        tokens, self.logprobs, self.entropies, broken, finite = (each[:count] for each in columns)
        self.tokens = [int(token) for token in tokens]
        self.finite_logits = [each == 0 for each in broken]
        self.finite_hidden = [each == 1 for each in finite]


class _Graph:
    def __init__(self, model: Any, kv: PagedKV, size: int, pool: Any) -> None:
        self.model, self.kv, self.size = model, kv, size
        device = model.device
        self.seats_XB = torch.zeros(_COLUMNS, size, dtype=torch.int64, device=device)
        self.scale_B = torch.ones(size, device=device)
        self.round_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.out_K5B = torch.zeros(MOST_ROUNDS, 5, size, dtype=torch.float64, device=device)
        self.step = _SeatedStep(model, kv, size, 0)
        self.vocabulary = import_module("zerodrift.exact.ops.triton.vocabulary")
        self._from_B = torch.zeros(size, dtype=torch.int64, device=device)
        self._pinned = deque(_Pinned(size) for _ in range(2))
        self._keys: dict[int, int] = {}
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, plan: StepPlan) -> Iterator[Round]:
        count, tables = len(plan.slices), array("i")
        to_come = plan.slices[0].token_ids[0] == TO_COME
        # Those of the step before last: it was read before the last one could be launched.
        self._pinned.rotate()
        pinned = self._pinned[0]
        seats = list[tuple[int, ...]]()
        for seat, part in enumerate(plan.slices):
            last = part.start + part.rounds - 1
            seats.append((part.token_ids[0], part.start, last, len(tables), *_asked(part.draws[0], seat)))
            tables.extend(part.blocks)
        seats += [(0, 0, -1, 0, seat, 0, 0, 0, 0, 0) for seat in range(count, self.size)]
        if len(tables) > self.step.room:
            assert not to_come, "asked before, since the tokens would be lost"
            # Where tables lie is part of the graph: more room is a new one.
            self.step = _SeatedStep(self.model, self.kv, self.size, 2 * len(tables) + 64 * self.size)
            self._graph = None
        columns = array("q", [value for column in zip(*seats, strict=True) for value in column])
        pinned.seats_XB.copy_(torch.frombuffer(columns, dtype=torch.int64).view(_COLUMNS, self.size))
        temperatures = [part.draws[0].sampling.temperature or 1.0 for part in plan.slices]
        # As torch divides by a number on a GPU: it multiplies with the fp32 reciprocal.
        pinned.scale_B[:count] = torch.tensor(temperatures, dtype=torch.float32).reciprocal_()
        pinned.give_tables(tables)
        if to_come:
            pinned.from_B[:count] = torch.tensor([self._keys[part.key] for part in plan.slices])
        self._write(pinned, len(tables), to_come=to_come)
        if self._graph is None:
            self._graph = self._captured()
            self._write(pinned, len(tables), to_come=False)
        self._keys = {part.key: seat for seat, part in enumerate(plan.slices)}
        return self._read(self._replay(plan.rounds, pinned), pinned, count)

    def _replay(self, rounds: int, pinned: "_Pinned") -> list[Any]:
        assert self._graph is not None, "captured before"
        done = []
        for number in range(rounds):
            self._graph.replay()
            # Into pinned memory: the copy waits for its round alone, and the host for the copy.
            pinned.out_K5B[number].copy_(self.out_K5B[number], non_blocking=True)
            done.append(event := torch.cuda.Event())  # type: ignore[no-untyped-call]
            event.record()
        return done

    def _read(self, done: list[Any], pinned: "_Pinned", count: int) -> Iterator[Round]:
        for event, out_5B in zip(done, pinned.out_K5B, strict=False):
            event.synchronize()
            yield Round(out_5B.tolist(), count)

    def _write(self, pinned: "_Pinned", blocks: int, *, to_come: bool) -> None:
        """Behind whatever is in flight; the host does not wait."""
        tokens_B = None
        if to_come:
            self._from_B.copy_(pinned.from_B, non_blocking=True)
            tokens_B = self.seats_XB[0][self._from_B]
        self.seats_XB.copy_(pinned.seats_XB, non_blocking=True)
        if tokens_B is not None:
            self.seats_XB[0].copy_(tokens_B)
        self.scale_B.copy_(pinned.scale_B, non_blocking=True)
        self.step.tables[:blocks].copy_(pinned.tables[:blocks], non_blocking=True)
        self.round_1.zero_()

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Twice: the first time kernels are compiled, and libraries take their workspaces. What they write is written again.
            for _ in range(2):
                self._round()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another may stage weights meanwhile, which takes memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._round()
        return graph

    @torch.no_grad()
    def _round(self) -> None:
        token_ids_B, positions_B, *_ = self.seats_XB
        live_B = self.step.take(self.seats_XB)
        hidden_BH = forward_tokens(self.model, token_ids_B, positions_B, self.step)
        with ops_of(self.model).computing(), torch.autocast("cuda", enabled=False):
            logits_BV = head(self.model, hidden_BH)
        out_5B = torch.empty_like(self.out_K5B[0])
        self.vocabulary.draw_into(logits_BV, self.scale_B, self.seats_XB[_DRAW:], out_5B[:4])
        out_5B[4] = hidden_BH.sum(dim=-1).isfinite()
        self.out_K5B.index_copy_(0, self.round_1, out_5B[None])
        # On to the next round: the token that was drawn, one position further.
        self.round_1 += 1
        token_ids_B.copy_(out_5B[0])
        positions_B += live_B
        self.seats_XB[_DRAWN] += live_B


class _Pinned:
    """What a step brings to the device and back, in memory that a copy reads while the host goes on."""

    def __init__(self, size: int) -> None:
        self.seats_XB = torch.zeros(_COLUMNS, size, dtype=torch.int64, pin_memory=True)
        self.from_B = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        """Seat of each sequence in the step before."""
        self.scale_B = torch.ones(size, pin_memory=True)
        self.out_K5B = torch.empty(MOST_ROUNDS, 5, size, dtype=torch.float64, pin_memory=True)
        self.tables = torch.zeros(0, dtype=torch.int32)

    def give_tables(self, tables: "array[int]") -> None:
        if len(tables) > len(self.tables):
            self.tables = torch.zeros(2 * len(tables), dtype=torch.int32, pin_memory=True)
        self.tables[: len(tables)] = torch.frombuffer(tables, dtype=torch.int32)


class _SeatedStep(PageStep):
    """A captured round: all of it on the device, at places that stay.

    Keys out of sight are not even loaded on a GPU: what a block held before does not matter.
    """

    def __init__(self, model: Any, kv: PagedKV, size: int, room: int) -> None:
        """`room` is for the blocks of all sequences together."""
        self.kv, self.room = kv, room
        tokens_B, first_B, table_B = (
            torch.zeros(size, dtype=torch.int32, device=model.device) for _ in range(3)
        )
        self.tables = torch.zeros(room, dtype=torch.int32, device=model.device)
        self.rows = torch.zeros(size * kv.num_kv_heads, dtype=torch.int64, device=model.device)
        self._layout = (first_B, tokens_B, table_B)
        self.plan = ops_of(model).seated(*self._layout, self.tables)

    def take(self, seats_XB: torch.Tensor) -> torch.Tensor:
        """Where the seats are, as kernels read it. Returns which of them are in this round."""
        _, positions_B, last_B, table_B, *_ = seats_XB
        size = self.kv.block_size
        live_B: torch.Tensor = positions_B <= last_B
        for place, values in zip(self._layout, (positions_B, live_B, table_B), strict=True):
            place.copy_(values)
        blocks_B = self.tables[torch.where(live_B, table_B + positions_B // size, 0)]
        slots_B = torch.where(live_B, blocks_B * size + positions_B % size, self.kv.scratch * size)
        self.rows.copy_(self.kv.rows_of(slots_B))
        return live_B


def _least(sequences: int) -> int:
    return next(size for size in SIZES if size >= sequences)


def _asked(draw: Draw, seat: int) -> tuple[int, int, int, int, int, int]:
    """A draw as the kernel reads it: row, seed, sample, tokens before, forced token, greedy."""
    seed = draw.sampling.seed
    assert seed is not None, "the engine gives every request a seed"
    forced = -1 if draw.forced is None else draw.forced
    return seat, seed, draw.sample_index, len(draw.output), forced, int(draw.sampling.greedy)
