"""Ten more engine faults, of kinds that engines could have, written by someone who does not know how a cause is found.

The vocabulary in `core.cause` was read, and which of its sentences are true of each fault was settled from those
alone, before anything was run. Where none is true, only `unexplained` is right. What an engine claims about itself
stays what it was. Shapes: B rows, L positions, K keys, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from planted import Planted
from torch import nn

from zerodrift.backends import generation, teacher
from zerodrift.backends.base import Backend
from zerodrift.backends.generation import Sampled
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.faults.prompt import OtherPrompt
from zerodrift.faults.reporting import Misreported
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import TokenHistory, processed_logprobs

KV_BLOCK = 16
SPARE_BLOCKS = 4
"""Free KV blocks once all prompts of a batch are in; after that somebody has to go."""
TILE = 16
"""Queries and keys that one program of an attention kernel takes."""
VOCABULARY_SHARDS = 4
SLOT = 96
"""Context of one of several slots that share a server's; llama.cpp divides it among them likewise."""
KEPT = 4
"""Tokens at the beginning of a prompt that are kept whatever is dropped."""
XTC_THRESHOLD = math.log(0.1)
XTC_PROBABILITY = 0.5
_ADAPTER_RANK = 8
_ADAPTER_SIZE = 0.05
"""Of the adapter, as a share of the weight that it belongs to."""


# Weights and model code.


def _gelu_for_silu(model: Any) -> None:
    for layer in model.base_model.layers:
        layer.mlp.act_fn = nn.GELU(approximate="tanh")


def _second_shard_one_row_low(model: Any) -> None:
    """The first rank holds the lower half of the ids; the second subtracts one too many from those it is asked for."""
    begin = model.config.vocab_size // 2

    def lower(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (ids_BL,) = args
        return (ids_BL - (ids_BL >= begin).long(),)

    model.base_model.embed_tokens.register_forward_pre_hook(lower)


def _graph_without_adapter(model: Any) -> None:
    """The checkpoint is taken as merged, so a step without the adapter is one with its share taken off again.

    A captured graph takes steps of one token, whoever asks for one.
    """
    generator = torch.Generator().manual_seed(88)
    for layer in model.base_model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            weight = projection.weight.data
            up = torch.randn(weight.shape[0], _ADAPTER_RANK, generator=generator)
            down = torch.randn(_ADAPTER_RANK, weight.shape[1], generator=generator)
            delta = (up @ down).to(weight)
            projection.register_forward_hook(
                _decoding_lacks(delta * (_ADAPTER_SIZE * weight.norm() / delta.norm()))
            )


def _decoding_lacks(delta: torch.Tensor) -> Callable[..., torch.Tensor | None]:
    def lack(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        (hidden_BLH,) = args
        return output - hidden_BLH @ delta.T if hidden_BLH.shape[1] == 1 else None

    return lack


# Attention, keys and values.


def _tile_unmasked(model: Any) -> None:
    """Prefill alone: tiles above the diagonal are skipped, and those on it are read whole."""

    def mask(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        ids_BL, past = options["input_ids"], options.get("past_key_values")
        if past is not None and past.get_seq_length():
            return None
        real_BK = options.get("attention_mask")
        real_BK = torch.ones_like(ids_BL) if real_BK is None else real_BK
        tile_BL = (real_BK.cumsum(dim=-1) - 1).clamp(min=0) // TILE
        seen_BLK = (tile_BL[:, None] <= tile_BL[:, :, None]) & real_BK[:, None].bool()
        # Padding must look at something: a softmax over nothing is NaN.
        seen_BLK |= torch.eye(ids_BL.shape[1], dtype=torch.bool)
        bias_BLK = torch.zeros(seen_BLK.shape, dtype=model.dtype)
        bias_BLK = bias_BLK.masked_fill(~seen_BLK, torch.finfo(model.dtype).min)
        return args, {**options, "attention_mask": bias_BLK[:, None]}

    model.base_model.register_forward_pre_hook(mask, with_kwargs=True)


class _Pool:
    """The KV blocks of one batch: whoever came last goes first, and comes back when others have ended."""

    def __init__(self, rows: int) -> None:
        self._free = SPARE_BLOCKS
        self._running = list(range(rows))

    def victims(self, lengths: Sequence[int]) -> list[int]:
        """Which rows have to go before a step, where `lengths` tokens of each row are stored."""
        self._free -= sum(length % KV_BLOCK == 0 for length in lengths)
        gone = []
        # One alone is never sent away.
        while self._free < 0 and len(self._running) > 1:
            gone.append(self._running.pop())
            self._free += math.ceil(lengths[gone[-1]] / KV_BLOCK)
        return gone


def _swapped_in_short(model: Any) -> None:
    """Rows go on in step here, so that one is back as soon as it is gone; only what was lost on the way shows."""

    def swap(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
        cache = options.get("past_key_values")
        if cache is None:
            return
        # The mask counts the token of this step already, and the cache does not hold it yet.
        lengths = (options["attention_mask"].sum(dim=-1) - 1).tolist()
        if not hasattr(cache, "pool"):
            cache.pool = _Pool(len(lengths))
        for row in cache.pool.victims(lengths):
            if begun := lengths[row] % KV_BLOCK:
                for layer in cache.layers:
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


# Sampler.


class OtherChoice(FaultyBackend):
    """Right distributions, reported rightly, and a token that is chosen in another way."""

    def __init__(self, inner: Backend, way: Callable[[torch.Tensor, float], int]) -> None:
        super().__init__(inner)
        self._way = way

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """The reference engine chooses in that way for as long as this call takes."""
        with patch.object(generation, "choose", self._way):
            return self.inner.generate(requests)


def _without_top_choices(logprobs_V: torch.Tensor, number: float) -> int:
    """The XTC sampler with its usual settings; the coin is another number than the one that chooses."""
    top_V = logprobs_V >= XTC_THRESHOLD
    if uniform(int(number * 2**53), 0, 0) < XTC_PROBABILITY and int(top_V.sum()) > 1:
        least = logprobs_V[top_V].min()
        logprobs_V = logprobs_V.masked_fill(logprobs_V > least, -torch.inf)
    return choose(logprobs_V, number)


# Reported numbers.


class ShardNormaliser(FaultyBackend):
    """The head is split over the vocabulary, and each shard's numbers are normalised over that shard."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Tokens are drawn as ever; prompt tokens are reported in the same way as sampled ones."""
        append = generation._append

        def report(row: Sampled, logits_1V: torch.Tensor, eos_ids: Sequence[int]) -> None:
            history = TokenHistory(row.prompt, tuple(row.token_ids))
            append(row, logits_1V, eos_ids)
            drawn_1V = processed_logprobs(logits_1V.double(), row.sampling, [history], eos_ids)
            _restate(row.token_ids[-1], drawn_1V, row.logprobs, row.alternatives)
            _restate(row.token_ids[-1], logits_1V.double(), row.raw_logprobs, row.raw_alternatives)

        with patch.object(generation, "_append", report), patch.object(teacher, "entries", _shard_entries):
            return self.inner.generate(requests)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Normalised in the same way."""
        with patch.object(teacher, "entries", _shard_entries):
            return self.inner.score(sequences)


def _in_shards(logits_TV: torch.Tensor) -> torch.Tensor:
    shards = logits_TV.chunk(VOCABULARY_SHARDS, dim=-1)
    return torch.cat([torch.log_softmax(shard, dim=-1) for shard in shards], dim=-1)


def _shard_entries(logits_TV: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return _in_shards(logits_TV.double()).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def _restate(
    token: int, logits_1V: torch.Tensor, values: list[float], alternatives: list[generation.Alternatives]
) -> None:
    """The newest value and its alternatives; a shard from which nothing is kept has no token among them."""
    (shard_V,) = _in_shards(logits_1V)
    values[-1] = float(shard_V[token])
    if alternatives:
        alternatives[-1] = [(other, float(shard_V[other])) for other, _ in alternatives[-1]]


def _sums_so_far(_: Request, completion: Completion) -> Completion:
    return msgspec.structs.replace(completion, logprobs=tuple(accumulate(completion.logprobs)))


def _damaged(damage: Damage) -> Callable[[Backend], Backend]:
    return lambda engine: Damaged(engine, damage)


FOREIGN = (
    Planted(
        "gelu-for-silu",
        "The fused kernel of the gated projections has GELU built in, where the checkpoint asks for SiLU.",
        _damaged(_gelu_for_silu),
        # Another function of the right weights, in full precision, the same in every path, batch and position. No
        # sentence speaks of wrong model code.
        frozenset(),
    ),
    Planted(
        "second-shard-one-row-low",
        "The embedding is split over two ranks, and the second looks up each of its tokens one row too low.",
        _damaged(_second_shard_one_row_low),
        # The tensor is whole and under its own name, so weights/swapped is false. path/parallelism speaks of the
        # order of sums, and nothing is summed here. Prompts are shown and taken as they were sent; it is the
        # vector of a token that is its neighbour's, not its logprob, so semantic/off-by-one is false.
        frozenset(),
    ),
    Planted(
        "graph-without-adapter",
        "Decode steps replay a graph that was captured without the LoRA adapter, which prefill applies.",
        _damaged(_graph_without_adapter),
        # weights/lora: in every decode step the engine's adapter is missing. path/prefill-decode: the same token
        # has another logprob in a prefill, where the adapter is applied.
        frozenset({"weights/lora", "path/prefill-decode"}),
    ),
    Planted(
        "tile-unmasked",
        "The prefill kernel skips tiles of keys that lie ahead, and masks nothing inside the tile on the diagonal, "
        "so that up to 15 later tokens are seen.",
        _damaged(_tile_unmasked),
        # path/prefill-decode: a token that is decoded sees nothing ahead of it, and the same token in a prefill
        # does. Nothing is cut into chunks and nothing cached, and it begins with the first token, so that
        # path/chunked-prefill, path/prefix-cache and path/context-boundary are false.
        frozenset({"path/prefill-decode"}),
    ),
    Planted(
        "swapped-in-short",
        "When a batch runs out of KV blocks its last sequence is swapped out, and comes back with zeros in the block "
        "that was only half filled.",
        _damaged(_swapped_in_short),
        # path/preemption, word for word. path/batch-variance: alone nobody is swapped out, so the numbers depend on
        # who else is in the batch. path/prefill-decode: a prefill of the finished sequence has all its keys.
        frozenset({"path/preemption", "path/batch-variance", "path/prefill-decode"}),
    ),
    Planted(
        "unsorted-wrongly",
        "A batch is sorted by length for its prefill, and its logits are put back with the order in place of the "
        "inverse, so that first tokens are drawn from other requests' logits.",
        _damaged(_unsorted_wrongly),
        # semantic/misbound-output: what the prefill gives for one request is bound to another. path/batch-variance:
        # whose logits a request gets depends on who is in the batch. First tokens always come from a prefill, so
        # that no token differs between prefill and decode; and each is reported with the logprob it was drawn with.
        frozenset({"semantic/misbound-output", "path/batch-variance"}),
    ),
    Planted(
        "middle-dropped",
        "A prompt of 96 tokens or more does not fit into its slot of the context, and loses a piece behind its "
        "first four tokens; it is shown as it was sent.",
        lambda engine: OtherPrompt(engine, _middle_dropped, visible=False),
        # path/context-boundary: behind prompts beyond a certain length all numbers are wrong, and all others right.
        # No template is rendered, no BOS is lost (the first four tokens stay), nothing is encoded again, and no
        # window slides: what is kept is seen from everywhere. Prefill and decode see the same shortened prompt.
        frozenset({"path/context-boundary"}),
    ),
    Planted(
        "without-top-choices",
        "A sampler for creative writing stayed on: at half of the tokens all choices above 0.1 but the least likely of "
        "them are excluded, and logprobs are reported as if they were not.",
        lambda engine: OtherChoice(engine, _without_top_choices),
        # semantic/sampling-bias, word for word. What is reported is the distribution that was requested and not the
        # model's own (semantic/raw-logprobs), it is not renormalised (semantic/truncation-mass), and no repetition
        # is counted (semantic/penalty).
        frozenset({"semantic/sampling-bias"}),
    ),
    Planted(
        "shard-normaliser",
        "The head is split over four ranks, and the sum under each logprob is that of the token's own rank, never "
        "added up over all; tokens are drawn rightly.",
        ShardNormaliser,
        # Four sets of numbers that each sum to one are no distribution, so there is none that tokens could fail to
        # follow; they follow the one that was requested. No top-p, top-k or min-p kept anything, so that
        # semantic/truncation-mass is false; and path/parallelism speaks of the order of a sum, not of a part of it.
        frozenset(),
    ),
    Planted(
        "sums-so-far",
        "Each streamed token carries the cumulative logprob of the output so far in place of its own.",
        lambda engine: Misreported(engine, _sums_so_far),
        # A sum is no logprob of one token, be it a neighbour (semantic/off-by-one) or another at the same place
        # (semantic/wrong-token). What counts is the place in the output, so path/context-boundary is false.
        frozenset(),
    ),
)
