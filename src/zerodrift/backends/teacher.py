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
    """The prompt at once and the rest token by token, as an engine decodes it."""


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
        starts = [1] * len(sequences)
        scores = []
        for ids, logits_TV in zip(sequences, self.logits(sequences, starts), strict=True):
            logprobs_TV = torch.log_softmax(_wide(logits_TV), dim=-1)
            scores.append(logprobs_TV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
        return scores

    def logits(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """For each sequence, in order, the rows that predict tokens `start`… to the last."""
        for ids, start in zip(sequences, starts, strict=True):
            self._check(ids, start)
        if self.layout is Layout.PADDED:
            yield from self._padded(sequences, starts)
        elif self.layout in (Layout.CHUNKED, Layout.DECODED):
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
        cuts = {
            Layout.CHUNKED: range(split, len(ids), self.chunk),
            Layout.DECODED: range(max(start, split), len(ids)),
        }
        bounds = sorted({0, split, *cuts.get(self.layout, ()), len(ids)})
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


def _wide(logits_TV: torch.Tensor) -> torch.Tensor:
    """At least fp32: a softmax over bf16 logits in bf16 would measure itself."""
    return logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
