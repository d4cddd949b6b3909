"""Teacher-forced logits of given tokens, by vanilla `transformers`: the outside reference.

The model is used as it comes: no module is replaced and no op is patched. What may vary is what must not matter
in exact arithmetic: the dtype, the attention implementation, and the layout of the batch. Shapes: T rows, V
vocabulary, L positions, B sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from zerodrift.core.errors import InvalidPrompt

LOGIT_BYTES = 256 * 2**20
"""Most logits held at once; a padded batch is cut so that it stays below."""


class Layout(StrEnum):
    """How sequences are laid out for one forward."""

    ALONE = "alone"
    PADDED = "padded"
    """Several sequences of mixed length, padded on the right."""
    CHUNKED = "chunked"
    """One sequence in chunks over a KV cache, as an engine prefills it."""
    DECODED = "decoded"
    """Several prompts at once, padded on the left, and the rest token by token, as an engine decodes it."""


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
        self.layout = layout
        self.attention = attention
        self.batch = batch
        self.chunk = chunk
        self.positions = positions
        self.vocab_size: int = model.config.vocab_size

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence, in fp64 or fp32 as the model is."""
        return [scores.tolist() for scores in self.logprobs(sequences, [1] * len(sequences))]

    def logprobs(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each sequence, in order, the raw logprobs of tokens `start`… to the last, in at least fp32."""
        rows = self.logits(sequences, starts)
        for ids, start, logits_TV in zip(sequences, starts, rows, strict=True):
            yield entries(logits_TV, ids[start:])

    def shortest_first(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Which sequence, and its rows: in the order given, half of what padded batches compute is padding."""
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        rows = self.logits([sequences[index] for index in order], [starts[index] for index in order])
        yield from zip(order, rows, strict=True)

    def logits(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each sequence, in order, the rows that predict tokens `start`… to the last."""
        for ids, start in zip(sequences, starts, strict=True):
            self._check(ids, start)
        if self.layout is Layout.PADDED:
            yield from self._padded(sequences, starts)
        elif self.layout is Layout.DECODED:
            yield from self._decoded(sequences, starts)
        elif self.layout is Layout.CHUNKED:
            for ids, start in zip(sequences, starts, strict=True):
                yield self.continued(ids, start, self.model, 0)
        else:
            for ids, start in zip(sequences, starts, strict=True):
                keep = len(ids) - start + 1
                yield self._forward(torch.tensor([list(ids)]), logits_to_keep=keep).logits[0, :-1]

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
        cache, rows = None, []
        cuts = range(split, len(ids), self.chunk) if self.layout is Layout.CHUNKED else ()
        bounds = sorted({0, split, *cuts, len(ids)})
        for begin, end in pairwise(bounds):
            model = earlier if end <= split else self.model
            output = self._forward(
                torch.tensor([list(ids[begin:end])]), model=model, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            rows.append(output.logits[0])
        return torch.cat(rows)[start - 1 : -1]

    def _padded(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        for begin, end in self._batches([len(ids) for ids in sequences]):
            group = sequences[begin:end]
            longest = max(map(len, group))
            ids_BL = torch.zeros(len(group), longest, dtype=torch.long)
            mask_BL = torch.zeros_like(ids_BL)
            for row, ids in enumerate(group):
                ids_BL[row, : len(ids)] = torch.tensor(list(ids))
                mask_BL[row, : len(ids)] = 1
            first = min(starts[begin:end]) - 1
            options = (
                {}
                if self.positions is None
                else {"position_ids": self.positions(torch.arange(longest))[None]}
            )
            output = self._forward(ids_BL, attention_mask=mask_BL, logits_to_keep=longest - first, **options)
            for row, ids in enumerate(group):
                yield output.logits[row, starts[begin + row] - 1 - first : len(ids) - 1 - first]

    def _decoded(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        for begin, end in self._batches([len(ids) for ids in sequences]):
            group, first = sequences[begin:end], starts[begin:end]
            longest = max(first)
            ids_BL = torch.zeros(len(group), longest, dtype=torch.long)
            mask_BL = torch.zeros_like(ids_BL)
            for row, (ids, start) in enumerate(zip(group, first, strict=True)):
                ids_BL[row, longest - start :] = torch.tensor(list(ids[:start]))
                mask_BL[row, longest - start :] = 1
            cache, steps = None, []
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
                cache = output.past_key_values
                steps.append(output.logits[:, -1])
            rows_BTV = torch.stack(steps, dim=1)
            for row, (ids, start) in enumerate(zip(group, first, strict=True)):
                yield rows_BTV[row, : len(ids) - start]

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Consecutive groups of at most `batch` sequences whose logits stay below LOGIT_BYTES."""
        row_bytes = self.vocab_size * self.model.dtype.itemsize
        begin = 0
        while begin < len(lengths):
            end = begin + 1
            while (
                end < len(lengths)
                and end - begin < self.batch
                and (end - begin + 1) * max(lengths[begin : end + 1]) * row_bytes <= LOGIT_BYTES
            ):
                end += 1
            yield begin, end
            begin = end

    @torch.no_grad()
    def _forward(self, ids_BL: torch.Tensor, model: Any = None, **options: Any) -> Any:
        model = self.model if model is None else model
        # The public setter has no public getter.
        if model.config._attn_implementation != self.attention:  # noqa: SLF001
            model.set_attn_implementation(self.attention)
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


def entries(logits_TV: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Raw logprobs of `tokens`, one of each row, in at least fp32: a softmax in bf16 would measure itself."""
    wide_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
    return torch.log_softmax(wide_TV, dim=-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
