"""Run a plan: copy blocks, forward, draw. Decides nothing, and remembers nothing but KV.

`launch` starts a step and gives a ticket, `ticket.results()` waits for what its rounds gave, one after another: between
the two the step is in flight. On a CPU nothing is left to wait for, since the forward computes in the calling thread.

Shapes: T tokens of the step, R rows that predict something asked for, H hidden size.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.core.completion import Problem
from zerodrift.core.errors import NonFinite
from zerodrift.core.version import AdapterVersion
from zerodrift.engine.batch import paged_batch
from zerodrift.engine.decode_graph import DecodeGraphs, Round, can_capture
from zerodrift.engine.kv import copy_blocks
from zerodrift.engine.plan import Draw, Drawn, Scored, Slice, StepPlan, StepResult, following, resolved
from zerodrift.engine.sampler import Sampler, not_finite
from zerodrift.exact.logprobs import head
from zerodrift.exact.lora import LoraAdapter, RowGroup, applied
from zerodrift.exact.paged import PagedKV, PagedStep, forward_step

LOGITS_AT_ONCE = 2**24
"""Elements of logits held at a time, 64 MB in fp32: scoring a long prompt must not need tokens × vocabulary."""
LOGITS_ON_GPU = 2**28
"""There, 1 GB: in three cuts the weights of a head were read three times."""


class _Part(NamedTuple):
    """A slice, and where its tokens are among those of the step."""

    slice: Slice
    begin: int

    @property
    def last(self) -> int:
        """Row of its last token."""
        return self.begin + len(self.slice.token_ids) - 1


class Ticket:
    """A step in flight."""

    def __init__(self, results: Iterable[StepResult], known: Sequence[StepResult] = ()) -> None:
        self._results = iter(results)
        self.known = known
        """All of them, where nothing is left to wait for."""
        self.waited = 0.0
        """Seconds in which whoever reads had nothing else to do."""

    def results(self) -> Iterator[StepResult]:
        """What each round of the step gave, as soon as it has: those behind it may still run. To be read once."""
        begin = time.perf_counter()
        for result in self._results:
            self.waited += time.perf_counter() - begin
            yield result
            begin = time.perf_counter()


class Runner:
    """One model, its KV, and a sampler."""

    def __init__(self, model: Any, kv: PagedKV, sampler: Sampler) -> None:
        """`model` is prepared, and nobody else writes to it."""
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.adapters: Mapping[AdapterVersion, LoraAdapter] = {}
        """By the names that slices have."""
        self.forwarded_tokens = 0
        """Counted where the forward is called, so that nobody can look twice without being seen."""
        self.planning_seconds = 0.0
        """Spent on where tokens lie, before the forward: bookkeeping, though it is done with tensors."""
        self.graphs = DecodeGraphs(model, kv) if can_capture(model) else None

    @torch.no_grad()
    def launch(self, plan: StepPlan, after: Ticket | None = None) -> Ticket:
        """One forward over all slices, and what it gives to each. A plan whose tokens `after` has yet to give goes on from
        what that one drew."""
        copy_blocks(self.kv, plan.copies)
        if (size := self._graph_size(plan)) is not None:
            assert self.graphs is not None, "only where a graph was found"
            self.forwarded_tokens += sum(part.rounds for part in plan.slices)
            return Ticket(_replayed(plan, self.graphs.run(plan, size)))
        results = list[StepResult]()
        if after is not None:
            plan = resolved(plan, after.known)
        while plan.slices:
            results.append(self._forward(plan))
            plan = following(plan, results[-1].drawn)
        return Ticket(results, results)

    def can_follow(self, plan: StepPlan, sequences: int, blocks: int) -> bool:
        """Whether rounds of so many of the sequences of `plan` can be launched before it is read: on a GPU by the graph that
        runs it, as long as no smaller one would do."""
        if self.graphs is None:
            return True
        return self._graph_size(plan) is not None and self.graphs.can_follow(plan, sequences, blocks)

    def _forward(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        batch = paged_batch(plan, self.kv.block_size, self.model.device)
        step = PagedStep(self.model, batch, self.kv)
        self.planning_seconds += time.perf_counter() - begin
        self.forwarded_tokens += len(batch.token_ids_T)
        with applied(self.model, self._adapted(plan.slices, batch.bounds)):
            hidden_TH = forward_step(self.model, step)
        parts = [_Part(part, begin) for part, begin in zip(plan.slices, batch.bounds, strict=False)]
        failed = _failed(hidden_TH, parts)
        parts = [part for part in parts if part.slice.key not in failed]
        return StepResult(self._draw(hidden_TH, parts), self._score(hidden_TH, parts), failed)

    def _adapted(self, slices: Sequence[Slice], bounds: Sequence[int]) -> list[RowGroup]:
        """Rows of each adapter of the step, whoever they belong to."""
        rows: dict[AdapterVersion, list[int]] = {}
        for part, begin, end in zip(slices, bounds, bounds[1:], strict=False):
            if part.lora is not None:
                rows.setdefault(part.lora, []).extend(range(begin, end))
        return [
            RowGroup(self.adapters[version], None if len(found) == bounds[-1] else torch.tensor(found))
            for version, found in rows.items()
        ]

    def _graph_size(self, plan: StepPlan) -> int | None:
        """Seats of the CUDA graph that can run `plan`, where there is one."""
        if self.graphs is None or not all(
            self.sampler.only_temperature(part.draws[0].sampling) for part in plan.slices if part.draws
        ):
            return None
        return self.graphs.size_for(plan)

    def _draw(self, hidden_TH: torch.Tensor, parts: list[_Part]) -> dict[int, Drawn | Problem]:
        drawing = [part for part in parts if part.slice.draws]
        drawn: dict[int, Drawn | Problem] = {}
        for cut in self._cuts(len(drawing)):
            members = drawing[cut]
            rows = torch.tensor([part.last for part in members], device=hidden_TH.device)
            draws: list[tuple[Draw, ...]] = [part.slice.draws for part in members]
            drawn |= self.sampler.draw(head(self.model, hidden_TH[rows]), draws)
        return drawn

    def _score(self, hidden_TH: torch.Tensor, parts: list[_Part]) -> dict[int, list[Scored]]:
        scored: dict[int, list[Scored]] = {}
        for part in parts:
            if not part.slice.scored:
                continue
            tokens, found = part.slice.scored, list[Scored]()
            hidden_RH = hidden_TH[part.begin : part.begin + len(tokens)]
            for cut in self._cuts(len(tokens)):
                logits_RV = head(self.model, hidden_RH[cut])
                found += self.sampler.score(logits_RV, tokens[cut], part.slice.score_top)
            scored[part.slice.key] = found
        return scored

    def _cuts(self, num_rows: int) -> Iterator[slice]:
        elements = LOGITS_ON_GPU if self.model.device.type == "cuda" else LOGITS_AT_ONCE
        at_once = max(1, elements // int(self.model.config.vocab_size))
        for begin in range(0, num_rows, at_once):
            yield slice(begin, begin + at_once)


def _replayed(plan: StepPlan, rounds: Iterable[Round]) -> Iterator[StepResult]:
    for number, got in enumerate(rounds):
        drawn: dict[int, Drawn | Problem] = {}
        failed: dict[int, Problem] = {}
        for index, part in enumerate(plan.slices):
            if number >= part.rounds:
                continue
            if not got.finite_hidden[index]:
                failed[part.key] = _hidden_problem(part, number)
            elif not got.finite_logits[index]:
                drawn[part.key] = not_finite(part.draws[0], number)
            else:
                token, logprob = got.tokens[index], got.logprobs[index]
                drawn[part.key] = Drawn(token, logprob, (), None, (), got.entropies[index])
        yield StepResult(drawn, {}, failed)


def _failed(hidden_TH: torch.Tensor, parts: list[_Part]) -> dict[int, Problem]:
    """Slices with a hidden state that is not finite: their KV is not to be trusted, whatever they were to predict."""
    finite_T = hidden_TH.sum(dim=-1).isfinite()
    if bool(finite_T.all()):
        return {}
    problems = {}
    for part in parts:
        if not bool(finite_T[part.begin : part.last + 1].all()):
            # Not which position: within a slice 0 · NaN takes the ones before it along.
            problems[part.slice.key] = _hidden_problem(part.slice)
    return problems


def _hidden_problem(part: Slice, number: int = 0) -> Problem:
    return Problem(
        NonFinite.code,
        f"the model's hidden states at positions {part.start + number} to {part.end + number - 1} are not finite; look for NaN in the "
        "weights, such as the embedding of a token of this request",
    )
