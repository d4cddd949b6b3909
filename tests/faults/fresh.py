"""Ten engine faults, written by someone who had read the vocabulary of causes and nothing of how one is found.

Each says what happens, and which causes would be a true statement about it: settled from the sentences in
`core.cause` alone, before any audit of it was run. Where none is true, only `unexplained` is right. What an engine
claims about itself stays what it was. Shapes: B rows, L positions, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.after_update import Fleet
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.faults.reporting import Misreported
from zerodrift.faults.rewriting import restated, rewrite
from zerodrift.faults.wrapper import FaultyBackend, the_reference
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform

KV_BLOCK = 16
NORM_BLOCK = 128
PAGE_BYTES = 4096
THREAD_TOKENS = 8
"""What one thread of a sampling kernel reads at once."""
STREAM_INTERVAL = 4
DRAFTED = 3
"""Tokens that a draft proposes in a row; the one behind them is the model's own."""
ACCEPTED = math.log(0.3)
"""Logprob from which on a drafted token is let through; Medusa's typical acceptance has the same 0.3."""


# Weights and model code.


def _norm_in_blocks(model: Any) -> None:
    """A kernel that takes one block per program and never adds up the blocks of a row."""

    def blockwise(norm: Any, args: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        (hidden_BLH,) = args
        blocks = hidden_BLH.view(*hidden_BLH.shape[:-1], -1, NORM_BLOCK)
        scale = torch.rsqrt(blocks.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon)
        normalised_BLH: torch.Tensor = (blocks * scale).flatten(-2) * norm.weight
        return normalised_BLH

    decoder = model.base_model
    for layer in decoder.layers:
        layer.input_layernorm.register_forward_hook(blockwise)
        layer.post_attention_layernorm.register_forward_hook(blockwise)
    decoder.norm.register_forward_hook(blockwise)


def _heads_dealt_in_turn(model: Any) -> None:
    """Query head h reads KV head h mod K. Said by moving query heads to where the model reads that KV head."""
    heads, pairs = model.config.num_attention_heads, model.config.num_key_value_heads
    order = torch.arange(heads).view(-1, pairs).T.flatten()
    for layer in model.base_model.layers:
        attention = layer.self_attn
        queries, output = attention.q_proj.weight, attention.o_proj.weight
        queries.data = queries.data.unflatten(0, (heads, -1))[order].flatten(0, 1)
        output.data = output.data.unflatten(1, (heads, -1))[:, order].flatten(1, 2)


def _lose_page(model: Any) -> None:
    weight = model.base_model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.clone()
    weight.data.view(-1)[: PAGE_BYTES // weight.element_size()] = 0


class CorruptReplica(Fleet):
    """Replicas served in turn, one of which lost a page of its weights on the way into memory."""

    def __init__(self, engine: Backend) -> None:
        super().__init__(engine)
        self._forgotten = Damaged(engine, _lose_page)

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """All replicas get it, and the bad memory stays bad."""
        self.inner.load_weights(directory, version)
        self._forgotten.load_weights(directory, version)


# Attention, keys and values, positions.


def _gap_before_output(model: Any) -> None:
    """The position counter moves once when the prompt ends and once more when decoding begins."""

    def later(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        if options.get("past_key_values") is None:
            return None
        return args, {**options, "position_ids": options["position_ids"] + 1}

    model.register_forward_pre_hook(later, with_kwargs=True)


class _SharedTails:
    """Stands in for the KV cache of one decoding step: forked rows write into one block, and the last one stays."""

    def __init__(self, cache: Any, writers_B: torch.Tensor) -> None:
        self._cache = cache
        self._writers_B = writers_B

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any) -> Any:
        """Written before it is read, as in any step."""
        return self._cache.update(keys[self._writers_B], values[self._writers_B], layer, *rest)


@dataclass(frozen=True, slots=True)
class _Forks:
    """Which rows of a batch continue the same prompt."""

    begin: int
    """Padded length of the prompts."""
    last_B: torch.Tensor
    """The last row with the same prompt."""
    room_B: torch.Tensor
    """Slots that the prompt leaves free in its last block."""

    def writers(self, length: int) -> torch.Tensor:
        """Whose keys and values each row finds in the slot at `length`."""
        shared_B = length - self.begin < self.room_B
        return torch.where(shared_B, self.last_B, torch.arange(len(self.last_B)))


def _forks(ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> _Forks:
    pairs = zip(ids_BL, mask_BL, strict=True)
    prompts = [tuple(ids_L[mask_L.bool()].tolist()) for ids_L, mask_L in pairs]
    last = {prompt: row for row, prompt in enumerate(prompts)}
    return _Forks(
        ids_BL.shape[1],
        torch.tensor([last[prompt] for prompt in prompts]),
        torch.tensor([-len(prompt) % KV_BLOCK for prompt in prompts]),
    )


def _no_copy_on_write(model: Any) -> None:
    def remember(_: nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
        if options.get("use_cache") and options.get("past_key_values") is None:
            output.past_key_values.forks = _forks(args[0], options["attention_mask"])

    def share(attention: Any, args: Any, options: dict[str, Any]) -> Any:
        cache: Any = options.get("past_key_values")
        forks = getattr(cache, "forks", None)
        if forks is None:
            return None
        writers_B = forks.writers(cache.get_seq_length(attention.layer_idx))
        return args, {**options, "past_key_values": _SharedTails(cache, writers_B)}

    model.register_forward_hook(remember, with_kwargs=True)
    for layer in model.base_model.layers:
        layer.self_attn.register_forward_pre_hook(share, with_kwargs=True)


class ForkedSamples(Damaged):
    """All rows of a call are in one batch, so that the samples of a prompt are forks of each other."""

    def __init__(self, engine: Backend) -> None:
        super().__init__(engine, _no_copy_on_write)
        the_reference(self.inner).batch = 128


# Sampler and noise.

Draw = Callable[[Sampled, torch.Tensor, float], int]
"""(the row, logprobs [V] of its next token, its uniform number) to the token."""


class OtherDraws(FaultyBackend):
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


def _equal_noise_in_threads(_: Sampled, logprobs_V: torch.Tensor, number: float) -> int:
    """Gumbel-max where every thread of the kernel starts the same generator at the same place."""
    generator = torch.Generator().manual_seed(int(number * 2**53))
    one_thread = torch.rand(THREAD_TOKENS, generator=generator, dtype=torch.float64)
    noise_V = -(-one_thread.log()).log().repeat(len(logprobs_V) // THREAD_TOKENS)
    return int((logprobs_V + noise_V).argmax())


def _noise_of_the_pair(row: Sampled, logprobs_V: torch.Tensor, _: float) -> int:
    assert row.sampling.seed is not None, "rows are made with a seed"
    position = len(row.token_ids)
    return choose(logprobs_V, uniform(row.sampling.seed, row.sample_index, position - position % 2))


# Speculation.


def _eager_acceptance(engine: Backend) -> Backend:
    """The draft is nearly the model, as a quantised copy is: its logits have an error that is fixed per token."""
    generator = torch.Generator().manual_seed(1)
    error_V = torch.randn(the_reference(engine).facts.vocab_size, generator=generator)

    def draw(row: Sampled, logprobs_V: torch.Tensor, number: float) -> int:
        drafted = int((logprobs_V + error_V).argmax())
        own = len(row.token_ids) % (DRAFTED + 1) == DRAFTED
        return choose(logprobs_V, number) if own or logprobs_V[drafted] < ACCEPTED else drafted

    return OtherDraws(engine, draw)


# Reported numbers.


class TemperatureAfterSoftmax(FaultyBackend):
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


def _spread_over_chunks(_: Request, completion: Completion) -> Completion:
    means = [sum(chunk) / len(chunk) for chunk in _streamed(completion.logprobs) for _ in range(len(chunk))]
    return msgspec.structs.replace(completion, logprobs=tuple(means))


def _streamed(values: Sequence[float]) -> Iterator[Sequence[float]]:
    """The first token goes out at once, the others as many at a time as the interval says."""
    yield values[:1]
    for begin in range(1, len(values), STREAM_INTERVAL):
        yield values[begin : begin + STREAM_INTERVAL]


def _damaged(damage: Damage) -> Callable[[Backend], Backend]:
    return lambda engine: Damaged(engine, damage)


FRESH = (
    Planted(
        "norm-in-blocks",
        "Root-mean-square norms divide each block of 128 features by the root mean square of that block, not of "
        "the whole row.",
        _damaged(_norm_in_blocks),
        # Another function of the right weights in full precision, the same in every path, batch and position. No
        # sentence speaks of wrong model code. path/parallelism speaks of the order of sums; these are other sums.
        frozenset(),
    ),
    Planted(
        "heads-dealt-in-turn",
        "Query heads are dealt to the shared key-value heads in turn, where neighbours should share one.",
        _damaged(_heads_dealt_in_turn),
        # Every tensor arrived under its own name, so weights/swapped is false; positions and precision are right.
        frozenset(),
    ),
    Planted(
        "replica-lost-a-page",
        "One of eight replicas, served in turn, has a zeroed page of 4 KiB in a projection of its second layer.",
        CorruptReplica,
        # weights/replica: one replica runs other weights than the rest, word for word. path/nondeterminism: a
        # request repeated alone meets another replica and gets other numbers. Nothing was updated, so neither
        # stale nor partial.
        frozenset({"weights/replica", "path/nondeterminism"}),
    ),
    Planted(
        "gap-before-output",
        "Decoding counts positions one too high, so that output tokens stand one further from the prompt.",
        _damaged(_gap_before_output),
        # path/rope: rotary positions are computed with another offset, that of decoding. path/prefill-decode: the
        # same token in a prefill has the right position and another logprob. There is no position in the context
        # beyond which all goes wrong, so path/context-boundary is false.
        frozenset({"path/rope", "path/prefill-decode"}),
    ),
    Planted(
        "no-copy-on-write",
        "Samples of one prompt go on writing into its half-filled last KV block, and overwrite each other there.",
        ForkedSamples,
        # path/batch-variance: the numbers depend on which siblings are in the batch. path/prefill-decode: a
        # prefill of the finished sequence gives its tokens another logprob than the decode did. No cached prefix
        # differs from a cold one: the prompt's own keys are right.
        frozenset({"path/batch-variance", "path/prefill-decode"}),
    ),
    Planted(
        "equal-noise-in-threads",
        "The sampling kernel's threads, each with eight tokens of the vocabulary, all draw the same eight Gumbel "
        "numbers, so that of the tokens at one place only the likeliest can win.",
        lambda engine: OtherDraws(engine, _equal_noise_in_threads),
        # semantic/sampling-bias: the tokens do not follow the reported distribution. Two samples share nothing, so
        # semantic/seed is false; nothing is renormalised, so semantic/truncation-mass is false as well.
        frozenset({"semantic/sampling-bias"}),
    ),
    Planted(
        "noise-of-the-pair",
        "The counter of the random generator advances every other step, so that two tokens in a row are drawn with "
        "one number.",
        lambda engine: OtherDraws(engine, _noise_of_the_pair),
        # semantic/sampling-bias: given the token before, the second of a pair does not follow the distribution
        # that is reported. semantic/seed: two draws that should be independent share their noise, if a draw is
        # called a sample; the sentence does not say that it must be a whole sequence.
        frozenset({"semantic/sampling-bias", "semantic/seed"}),
    ),
    Planted(
        "eager-acceptance",
        "A speculative decoder takes its draft's likeliest token whenever the model gives it at least 0.3, and "
        "reports the model's logprob.",
        _eager_acceptance,
        # path/spec-decode: it accepts what the model alone would not have drawn. semantic/sampling-bias: so the
        # tokens do not follow the reported distribution.
        frozenset({"path/spec-decode", "semantic/sampling-bias"}),
    ),
    Planted(
        "temperature-after-softmax",
        "Logprobs are divided by the temperature after the softmax and not normalised again; tokens are drawn "
        "rightly.",
        TemperatureAfterSoftmax,
        # The numbers are logprobs of no distribution: not of the model's own (semantic/raw-logprobs), and not of
        # another temperature (semantic/temperature), since the temperature is the right one and the normaliser
        # is missing. Nothing was truncated. Tokens are drawn from what was asked for.
        frozenset(),
    ),
    Planted(
        "spread-over-chunks",
        "A stream carries the logprob of four tokens as one sum, and each of the four is given a quarter of it.",
        lambda engine: Misreported(engine, _spread_over_chunks),
        # A mean over a chunk is neither the neighbour's logprob (semantic/off-by-one) nor that of another token at
        # the same place (semantic/wrong-token); the sum over the sequence is right.
        frozenset(),
    ),
)
