"""Thirteen engine bugs that the auditor was not written for, one of each kind that forty had.

All forty were written in tens by people who had not seen how causes are attributed. `true_names` was settled from the
sentences in `core.cause` alone, before a bug was run: the causes whose sentence is true of it. Where none is, only
`unexplained` is right. What an engine claims about itself stays what it was. Shapes: B rows, L positions, K keys, H
hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from planted import Planted
from torch import nn

from zerodrift.backends import generation
from zerodrift.backends.base import Backend
from zerodrift.backends.generation import Sampled
from zerodrift.core.completion import Answer, Completion, TokenAlternative
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.after_update import Fleet
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.faults.prompt import OtherPrompt
from zerodrift.faults.reporting import Misreported
from zerodrift.faults.rewriting import restated, rewrite
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform

PAGE = 16
"""Tokens of one KV block."""
SPARE_BLOCKS = 4
"""Free KV blocks once all prompts of a batch are in; after that somebody has to go."""
LOST_BYTES = 4096
SLOT = 96
"""Context of one of several slots that share a server's; llama.cpp divides it among them likewise."""
KEPT = 4
"""Tokens at the beginning of a prompt that are kept whatever is dropped."""
DRAFTED = 3
"""Tokens that a draft proposes in a row; the one behind them is the model's own."""
ACCEPTED = math.log(0.3)
"""Logprob from which on a drafted token is let through; Medusa's typical acceptance has the same 0.3."""


# Weights and model code.


def _soft_cap(model: Any) -> None:
    cap = 30.0
    model.lm_head.register_forward_hook(lambda _, __, logits_BLV: cap * torch.tanh(logits_BLV / cap))


def _adapter_twice(model: Any) -> None:
    """The checkpoint holds W + BA already; what is added here is BA once more."""
    rank, alpha = 8, 16
    generator = torch.Generator().manual_seed(20)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            down = torch.randn(rank, linear.in_features, generator=generator) / math.sqrt(linear.in_features)
            up = torch.randn(linear.out_features, rank, generator=generator) * 0.005
            linear.weight.data += ((alpha / rank) * up @ down).to(linear.weight.dtype)


def _lose_page(model: Any) -> None:
    weight = model.base_model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.clone()
    weight.data.view(-1)[: LOST_BYTES // weight.element_size()] = 0


class _CorruptReplica(Fleet):
    """Replicas served in turn, one of which lost a page of its weights on the way into memory."""

    def __init__(self, engine: Backend) -> None:
        super().__init__(engine)
        self._forgotten = Damaged(engine, _lose_page)

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """All replicas get it, and the bad memory stays bad."""
        self.inner.load_weights(directory, version)
        self._forgotten.load_weights(directory, version)


# Keys, values and positions.


def _gap_before_output(model: Any) -> None:
    """The position counter moves once when the prompt ends and once more when decoding begins."""

    def later(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        if options.get("past_key_values") is None:
            return None
        return args, {**options, "position_ids": options["position_ids"] + 1}

    model.register_forward_pre_hook(later, with_kwargs=True)


def _page_given_twice(model: Any) -> None:
    """Positions 32 to 47 are written over positions 0 to 15, whose entries in the block table still point there.

    In terms of a mask: the old key is gone as soon as the new one is written, and the new one counts twice.
    """

    def misread(module: Any, args: Any, options: dict[str, Any]) -> Any:
        hidden_BLH, positions_BL = options["hidden_states"], options["position_ids"]
        cached = options.get("past_key_values")
        keys = hidden_BLH.shape[1] + (0 if cached is None else cached.get_seq_length(module.layer_idx))
        # Padding is all on one side, so the last query tells where the keys are.
        position_BK = torch.arange(keys) - (keys - 1 - positions_BL[:, -1:])
        query_BL1, key_B1K = positions_BL[:, :, None], position_BK[:, None, :]
        visible_BLK = (key_B1K >= 0) & (key_B1K <= query_BL1)
        lost_BLK = (key_B1K < PAGE) & (key_B1K + 2 * PAGE <= query_BL1)
        doubled_B1K = (key_B1K >= 2 * PAGE) & (key_B1K < 3 * PAGE)
        bias_BLK = torch.zeros(visible_BLK.shape, dtype=hidden_BLH.dtype)
        bias_BLK = bias_BLK.masked_fill(doubled_B1K, math.log(2))
        bias_BLK = bias_BLK.masked_fill(~visible_BLK | lost_BLK, torch.finfo(hidden_BLH.dtype).min)
        return args, {**options, "attention_mask": bias_BLK[:, None]}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(misread, with_kwargs=True)


class _Pool:
    """The KV blocks of one batch: whoever came last goes first, and comes back when others have ended."""

    def __init__(self, rows: int) -> None:
        self._free = SPARE_BLOCKS
        self._running = list(range(rows))

    def victims(self, lengths: Sequence[int]) -> list[int]:
        """Which rows have to go before a step, where `lengths` tokens of each row are stored."""
        self._free -= sum(length % PAGE == 0 for length in lengths)
        gone = []
        # One alone is never sent away.
        while self._free < 0 and len(self._running) > 1:
            gone.append(self._running.pop())
            self._free += math.ceil(lengths[gone[-1]] / PAGE)
        return gone


def _swapped_in_short(model: Any) -> None:
    """Rows go on in step here, so that one is back as soon as it is gone; only what was lost on the way shows."""

    def swap(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
        cached = options.get("past_key_values")
        if cached is None:
            return
        # The mask counts the token of this step already, and the cache does not hold it yet.
        lengths = (options["attention_mask"].sum(dim=-1) - 1).tolist()
        if not hasattr(cached, "pool"):
            cached.pool = _Pool(len(lengths))
        for row in cached.pool.victims(lengths):
            if begun := lengths[row] % PAGE:
                for layer in cached.layers:
                    layer.keys[row, :, -begun:] = 0
                    layer.values[row, :, -begun:] = 0

    model.register_forward_pre_hook(swap, with_kwargs=True)


# Requests beside each other, and what becomes of a prompt.


def _unsorted_wrongly(model: Any) -> None:
    """Sorted rows s[i] = x[order[i]] are put back as s[order[i]], which is right if the order is its own inverse."""

    def misplace(_: nn.Module, __: Any, options: dict[str, Any], output: Any) -> Any:
        if not options.get("use_cache") or options.get("past_key_values") is not None:
            return None
        lengths_B = options["attention_mask"].sum(dim=-1)
        order_B = lengths_B.argsort(descending=True, stable=True)
        output.logits = output.logits[order_B][order_B]
        return output

    model.register_forward_hook(misplace, with_kwargs=True)


def _middle_dropped(prompt: Prompt) -> tuple[int, ...]:
    """As llama.cpp's server shortens a prompt: blocks of half the slot go, behind the tokens that are kept."""
    ids = prompt.token_ids
    if len(ids) < SLOT:
        return ids
    block = (SLOT - KEPT) // 2
    dropped = (len(ids) - KEPT - block) // block * block
    return ids[:KEPT] + ids[KEPT + dropped :]


# Between logits and token.


class _Watermarked(FaultyBackend):
    """Raises the logits of a half of the vocabulary that the token before decides on. Scoring is left alone."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """A twin of the engine does it, with the same weights and a model that is called in another way."""
        twin = the_reference(clone(self.inner))
        twin.model = _Marking(twin.model)
        return twin.generate(requests)


class _Marking:
    """Stands in for a model, and is called as `sample` calls one."""

    def __init__(self, model: Any) -> None:
        self.dtype, self.device, self._model = model.dtype, model.device, model

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        """The last position alone is sampled from."""
        output = self._model(ids_BL, **options)
        green_BV = torch.stack([_green(token, output.logits.shape[-1]) for token in ids_BL[:, -1].tolist()])
        output.logits[:, -1] += 2.0 * green_BV
        return output


@cache
def _green(token: int, vocabulary: int) -> torch.Tensor:
    """One where a token is on the list that follows `token`, and zero elsewhere."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(15_485_863 + token))
    green_V = torch.zeros(vocabulary)
    green_V[order[: vocabulary // 2]] = 1
    return green_V


Draw = Callable[[Sampled, torch.Tensor, float], int]
"""(the row, logprobs [V] of its next token, its uniform number) to the token."""


class _OtherDraws(FaultyBackend):
    """Right distributions, reported rightly, and tokens that are drawn from them in another way."""

    def __init__(self, inner: Backend, draw: Draw) -> None:
        super().__init__(inner)
        self._draw = draw

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """The sampler of the reference engine is another one for as long as this call takes."""
        append = generation._append
        rows: list[Sampled] = []

        def remember(row: Sampled, *rest: Any) -> None:
            rows[:] = [row]
            append(row, *rest)

        def draw(logprobs_V: torch.Tensor, number: float) -> int:
            return self._draw(rows[0], logprobs_V, number)

        with patch.object(generation, "_append", remember), patch.object(generation, "choose", draw):
            return self.inner.generate(requests)


def _frozen_noise(row: Sampled, logprobs_V: torch.Tensor, _: float) -> int:
    assert row.sampling.seed is not None, "rows are made with a seed"
    return choose(logprobs_V, uniform(row.sampling.seed, row.sample_index, 0))


def _eager_acceptance(engine: Backend) -> Backend:
    """The draft is nearly the model, as a quantised copy is: its logits have an error that is fixed per token."""
    generator = torch.Generator().manual_seed(1)
    error_V = torch.randn(the_reference(engine).facts.vocab_size, generator=generator)

    def draw(row: Sampled, logprobs_V: torch.Tensor, number: float) -> int:
        drafted = int((logprobs_V + error_V).argmax())
        own = len(row.token_ids) % (DRAFTED + 1) == DRAFTED
        return choose(logprobs_V, number) if own or logprobs_V[drafted] < ACCEPTED else drafted

    return _OtherDraws(engine, draw)


# In what is reported.


class _TemperatureAfterSoftmax(FaultyBackend):
    """Samples from softmax(logits / T) and reports log_softmax(logits) / T."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """The model's own logprobs come from scoring; differences to the alternatives are right either way."""
        answers = self.inner.generate(requests)
        sequences = [each.sequence for answer in answers for each in answer.completions]
        scores = iter(self.inner.score(sequences) if sequences else [])

        def divided(request: Request, completion: Completion) -> Completion:
            own = next(scores)[len(completion.prompt_token_ids) - 1 :]
            return restated(completion, [value / (request.sampling.temperature or 1.0) for value in own], 1.0)

        return rewrite(requests, answers, divided)


def _two_decimals(_: Request, completion: Completion) -> Completion:
    return msgspec.structs.replace(
        completion,
        logprobs=tuple(round(value, 2) for value in completion.logprobs),
        top_logprobs=tuple(
            tuple(TokenAlternative(each.token_id, round(each.logprob, 2)) for each in entries)
            for entries in completion.top_logprobs
        ),
    )


def _damaged(damage: Damage) -> Callable[[Backend], Backend]:
    return lambda engine: Damaged(engine, damage)


def _bug(name: str, says: str, plant: Callable[[Backend], Backend], *true_names: str) -> Planted:
    return Planted(name, says, plant, frozenset(true_names))


BLIND = (
    # No sentence speaks of wrong model code.
    _bug(
        "logit-soft-cap",
        "Final logits are soft-capped at 30, as another family wants it.",
        _damaged(_soft_cap),
    ),
    _bug(
        "adapter-twice",
        "The trainer sends weights with its LoRA adapter merged in, and the engine applies the adapter once more.",
        _damaged(_adapter_twice),
        "weights/lora",
    ),
    # A request repeated alone meets another replica. Nothing was updated, so neither stale nor partial.
    _bug(
        "replica-lost-a-page",
        "One of eight replicas, served in turn, has a zeroed page of 4 KiB in a projection of its second layer.",
        _CorruptReplica,
        *("weights/replica", "path/nondeterminism"),
    ),
    # The same token in a prefill has the right position. No position in the context is one beyond which all is wrong.
    _bug(
        "gap-before-output",
        "Decoding counts positions one too high, so that output tokens stand one further from the prompt.",
        _damaged(_gap_before_output),
        *("path/rope", "path/prefill-decode"),
    ),
    _bug(
        "page-given-twice",
        "The KV page of positions 0 to 15 is freed while in use, and handed out again for positions 32 to 47.",
        _damaged(_page_given_twice),
        "path/context-boundary",
    ),
    # Alone nobody is swapped out; and a prefill of the finished sequence has all its keys.
    _bug(
        "swapped-in-short",
        "When KV blocks run out the last sequence is swapped out, and its half-filled block comes back as zeros.",
        _damaged(_swapped_in_short),
        *("path/preemption", "path/batch-variance", "path/prefill-decode"),
    ),
    # Whose logits a request gets depends on who is in the batch.
    _bug(
        "unsorted-wrongly",
        "A batch is sorted by length for its prefill, and its logits are put back with the order for the inverse.",
        _damaged(_unsorted_wrongly),
        *("semantic/misbound-output", "path/batch-variance"),
    ),
    # No template, no BOS (the first four tokens stay), no window: what is kept is seen from everywhere.
    _bug(
        "middle-dropped",
        "A prompt of 96 tokens or more loses a piece behind its first four tokens; it is shown as it was sent.",
        lambda engine: OtherPrompt(engine, _middle_dropped, visible=False),
        "path/context-boundary",
    ),
    # No constant bias, no penalty, and what is sampled is what is reported.
    _bug(
        "watermark",
        "Adds 2 to the logits of half of the vocabulary, which half is decided by the token before.",
        _Watermarked,
    ),
    # Draws that should be independent share their noise, within a sample and not between two.
    _bug(
        "frozen-noise",
        "Draws every token of a sample with the same random number, as a captured graph does.",
        lambda engine: _OtherDraws(engine, _frozen_noise),
        *("semantic/seed", "semantic/sampling-bias"),
    ),
    _bug(
        "eager-acceptance",
        "Speculation takes its draft's likeliest token whenever the model gives it at least 0.3.",
        _eager_acceptance,
        *("path/spec-decode", "semantic/sampling-bias"),
    ),
    # Logprobs of no distribution: neither the model's own nor of another temperature.
    _bug(
        "temperature-after-softmax",
        "Logprobs are divided by the temperature after the softmax and not normalised again.",
        _TemperatureAfterSoftmax,
    ),
    # Everything is computed in full precision: naming a precision is false, however much it looks like rounding.
    _bug(
        "two-decimals",
        "Rounds reported logprobs to two decimals, as a writer of short JSON does.",
        lambda engine: Misreported(engine, _two_decimals),
    ),
)
