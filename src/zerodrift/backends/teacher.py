"""Teacher-forced logits of given tokens, by vanilla `transformers`: the outside reference.

The model is used as it comes: no module is replaced and no op is patched. What may vary is what must not matter
in exact arithmetic: the dtype, the attention implementation, and the layout of the batch. Shapes: T rows, V
vocabulary, L positions, B sequences, H hidden size.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from zerodrift.backends.generation import padded
from zerodrift.backends.head import own_head
from zerodrift.core.errors import InvalidPrompt, UnsupportedModel
from zerodrift.models.family.abilities import cache_in, has_kv_cache, usable_attention

LOGIT_BYTES = 256 * 2**20
"""A padded batch is cut where logits of all its positions would take more."""
ROWS_BYTES = 32 * 2**20
"""Most logits held at once: 256 rows of a 151,936-word vocabulary would be 148 MiB in fp32. Its 55 rows still keep a
matrix product busy, and give the bits that all rows at once give (fp32 and fp64, from 5 rows on)."""


class Layout(StrEnum):
    """How sequences are laid out for one forward."""

    ALONE = "alone"
    PADDED = "padded"
    """Several sequences of mixed length, padded on the right."""
    CHUNKED = "chunked"
    """One sequence in chunks over a KV cache, as an engine prefills it."""
    DECODED = "decoded"
    """Several prompts at once, padded on the left, and the rest token by token, as an engine decodes it."""


class LogitRows(NamedTuple):
    """Some rows of one sequence."""

    sequence: int
    """Its index among those that were given."""
    begin: int
    """Of the first row here, among the rows that were asked for of this sequence."""
    logits_TV: torch.Tensor


class _Computed(NamedTuple):
    """A forward of which any rows can be had."""

    rows: Callable[[int, slice], torch.Tensor]
    """Logits of these rows of this sequence of the batch, counted among the rows that were kept."""
    cache: Any


class Teacher:
    """One way of computing the same logits."""

    def __init__(
        self,
        model: Any,
        *,
        layout: Layout = Layout.ALONE,
        attention: str = "sdpa",
        batch: int = 8,
        chunk: int = 16,
        positions: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`model` is a transformers causal LM in eval mode; it is shared, never copied or changed.

        `positions` turns right positions into those to use, in padded batches: for asking what a wrong one does.
        """
        self.model = model
        # Without a KV cache there are no chunks and no steps: a sequence is one forward.
        in_steps = layout in (Layout.CHUNKED, Layout.DECODED)
        self.layout = Layout.ALONE if in_steps and not has_kv_cache(model) else layout
        self.attention = usable_attention(model, attention)
        self.batch = batch
        self.chunk = chunk
        self.positions = positions
        self.vocab_size: int = model.config.vocab_size

    @property
    def computation(self) -> tuple[str, str, int]:
        """What tells it from another way of computing the same."""
        size = {Layout.CHUNKED: self.chunk, Layout.ALONE: 1}.get(self.layout, self.batch)
        return self.layout, self.attention, size

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence, in fp64 or fp32 as the model is."""
        return [scores.tolist() for scores in self.logprobs(sequences, [1] * len(sequences))]

    def logprobs(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each sequence, in order, the raw logprobs of tokens `start`… to the last, in at least fp32."""

        def scored(rows: LogitRows) -> torch.Tensor:
            first = starts[rows.sequence] + rows.begin
            return entries(rows.logits_TV, sequences[rows.sequence][first : first + len(rows.logits_TV)])

        return self._joined(sequences, starts, scored)

    def shortest_first(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Which sequence, and its rows: in the order given, half of what padded batches compute is padding."""
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        rows = self.logits([sequences[index] for index in order], [starts[index] for index in order])
        yield from zip(order, rows, strict=True)

    def logits(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each sequence, in order, the rows that predict tokens `start`… to the last, all of them at once."""
        return self._joined(sequences, starts, lambda rows: rows.logits_TV)

    def logit_rows(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[LogitRows]:
        """The same rows, a few at a time: those of one sequence in order, between those of others of its batch."""
        for ids, start in zip(sequences, starts, strict=True):
            self._check(ids, start)
        if self.layout is Layout.PADDED:
            yield from self._padded(sequences, starts)
        elif self.layout is Layout.DECODED:
            yield from self._decoded(sequences, starts)
        else:
            for index, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
                for begin, logits_TV in self._alone(ids, start, self.model, 0):
                    yield LogitRows(index, begin, logits_TV)

    def continued(self, ids: Sequence[int], start: int, earlier: Any, split: int) -> torch.Tensor:
        """Rows where positions below `split` went through the model `earlier`, and left their KV behind.

        With `earlier` the same model this is chunked prefill; with older weights it is a prefix cache that
        survived a weight update.
        """
        self._check(ids, start)
        if not 0 <= split <= len(ids):
            raise InvalidPrompt(
                f"the first {split} of {len(ids)} tokens cannot be cached; count from 0 to all"
            )
        if 0 < split < len(ids) and not (has_kv_cache(earlier) and has_kv_cache(self.model)):
            raise UnsupportedModel(
                f"{type(self.model).__name__} keeps no keys and values, so that nothing can follow from those of "
                f"{split} tokens; score whole sequences"
            )
        return torch.cat([logits_TV for _, logits_TV in self._alone(ids, start, earlier, split)])

    def _joined(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        reduced: Callable[[LogitRows], torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        """What `reduced` makes of the rows of each sequence, end to end, in order."""
        parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        following = 0
        missing = [len(ids) - start for ids, start in zip(sequences, starts, strict=True)]
        for rows in self.logit_rows(sequences, starts):
            parts[rows.sequence].append(reduced(rows))
            missing[rows.sequence] -= len(rows.logits_TV)
            while following < len(missing) and not missing[following]:
                found = parts.pop(following)
                yield found[0] if len(found) == 1 else torch.cat(found)
                following += 1

    def _alone(
        self, ids: Sequence[int], start: int, earlier: Any, split: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows of one sequence from `start` - 1 on, but the last, with the number of the first in each part."""
        cuts = range(split, len(ids), self.chunk) if self.layout is Layout.CHUNKED else ()
        bounds = sorted({0, split, *cuts, len(ids)})
        cached = {"use_cache": True} if len(bounds) > 2 else {}
        cache = None
        for begin, end in pairwise(bounds):
            model = earlier if end <= split else self.model
            # Of a chunk that is read, every row goes through the head, as in an engine; of any other, one has to.
            kept = end - 1 if end < start else begin if cached else start - 1
            ids_1L = torch.tensor([list(ids[begin:end])])
            computed = self._compute(ids_1L, end - kept, model, past_key_values=cache, **cached)
            cache = computed.cache
            for rows in self._parts(max(begin, start - 1) - kept, min(end, len(ids) - 1) - kept):
                yield kept + rows.start - (start - 1), computed.rows(0, rows)

    def _padded(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[LogitRows]:
        for begin, end in self._batches([len(ids) for ids in sequences]):
            group = sequences[begin:end]
            ids_BL, mask_BL = padded(group, "right")
            longest = ids_BL.shape[1]
            first = min(starts[begin:end]) - 1
            options = (
                {}
                if self.positions is None
                else {"position_ids": self.positions(torch.arange(longest))[None]}
            )
            computed = self._compute(ids_BL, longest - first, self.model, attention_mask=mask_BL, **options)
            for row, ids in enumerate(group):
                skipped = starts[begin + row] - 1 - first
                for rows in self._parts(skipped, len(ids) - 1 - first):
                    yield LogitRows(begin + row, rows.start - skipped, computed.rows(row, rows))

    def _decoded(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[LogitRows]:
        for begin, end in self._batches([len(ids) for ids in sequences]):
            group, first = sequences[begin:end], starts[begin:end]
            prompts = [ids[:start] for ids, start in zip(group, first, strict=True)]
            ids_BL, mask_BL = padded(prompts, "left")
            cache = None
            for step in range(max(len(ids) - start for ids, start in zip(group, first, strict=True))):
                if step:
                    # A sequence that has ended goes on with its last token; its rows are not read.
                    at = [min(start + step, len(ids)) - 1 for ids, start in zip(group, first, strict=True)]
                    ids_BL = torch.tensor([[ids[index]] for ids, index in zip(group, at, strict=True)])
                    mask_BL = torch.cat([mask_BL, torch.ones_like(ids_BL)], dim=-1)
                positions_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
                output = self._forward(
                    ids_BL,
                    attention_mask=mask_BL,
                    position_ids=positions_BL,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = cache_in(output)
                for row, (ids, start) in enumerate(zip(group, first, strict=True)):
                    if start + step < len(ids):
                        yield LogitRows(begin + row, step, output.logits[row])

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Consecutive groups of at most `batch` sequences whose logits would stay below LOGIT_BYTES."""
        begin = 0
        while begin < len(lengths):
            end = begin + 1
            while (
                end < len(lengths)
                and end - begin < self.batch
                and (end - begin + 1) * max(lengths[begin : end + 1]) * self._row_bytes <= LOGIT_BYTES
            ):
                end += 1
            yield begin, end
            begin = end

    @property
    def _row_bytes(self) -> int:
        return self.vocab_size * int(self.model.dtype.itemsize)

    def _parts(self, begin: int, end: int) -> Iterator[slice]:
        """Rows `begin` to `end`, in slices whose logits stay below ROWS_BYTES."""
        most = max(1, ROWS_BYTES // self._row_bytes)
        return (slice(at, min(at + most, end)) for at in range(begin, end, most))

    def _compute(self, ids_BL: torch.Tensor, keep: int, model: Any, **options: Any) -> _Computed:
        """Forward, with the last `keep` rows of each sequence to be had; where they are many, the head comes later."""
        if len(ids_BL) * keep * self._row_bytes <= ROWS_BYTES:
            output = self._forward(ids_BL, model, logits_to_keep=keep, **options)
            # Some take no such option, and give all rows (xLSTM).
            logits_BTV = output.logits[:, -keep:]
            return _Computed(lambda row, rows: logits_BTV[row, rows], _left_by(output, options))
        output = self._forward(ids_BL, model.base_model, **options)
        hidden_BTH, head = output.last_hidden_state[:, -keep:], own_head(model, type(output))
        return _Computed(lambda row, rows: head(hidden_BTH[row, rows]), _left_by(output, options))

    @torch.no_grad()
    def _forward(self, ids_BL: torch.Tensor, model: Any = None, **options: Any) -> Any:
        model = self.model if model is None else model
        # The public setter has no public getter.
        if model.config._attn_implementation != self.attention:  # noqa: SLF001
            model.set_attn_implementation(self.attention)
        if not has_kv_cache(model):
            options.pop("past_key_values", None)
        options.setdefault("use_cache", False)
        return model(ids_BL.to(model.device), **options)

    def _check(self, ids: Sequence[int], start: int) -> None:
        if len(ids) < 2 or not 1 <= start < len(ids):
            raise InvalidPrompt(
                f"cannot score tokens {start}… of a sequence of {len(ids)}; the first token is never predicted"
            )
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(
                    f"token {position} is {token}, but the model has {self.vocab_size} tokens; "
                    "the ids belong to another tokenizer"
                )


def _left_by(output: Any, options: Mapping[str, Any]) -> Any:
    """Keys and values, where they were asked for."""
    return cache_in(output) if options.get("use_cache") else None


def entries(logits_TV: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Raw logprobs of `tokens`, one of each row, in at least fp32: a softmax in bf16 would measure itself."""
    wide_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
    return torch.log_softmax(wide_TV, dim=-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
