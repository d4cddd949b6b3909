"""Ten more bugs that engines could have, written by someone who has not seen how the auditor decides.

None of them is a variant of a fault that can be planted by name. What would be true to say about each was settled
before any of them was audited. They hide as planted faults do: what is claimed is what was requested, and the
engine says nothing of it.

Shapes: B rows, L positions, H hidden, V vocabulary, K positions that are looked back on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch
from planted import Planted
from torch import nn

from zerodrift.backends import generation
from zerodrift.backends.base import Backend
from zerodrift.backends.generation import Sampled
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion, TokenAlternative
from zerodrift.core.request import Request
from zerodrift.faults.damage import Damaged
from zerodrift.faults.reporting import Misreported
from zerodrift.faults.rewriting import with_output
from zerodrift.faults.sampling import OtherParameters
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import TokenHistory, processed_logprobs

BURST = 8
"""Decode steps between two visits of the scheduler."""
CHUNK = 8
"""Tokens that are prefilled at once; as small against these prompts as thousands are against real ones."""
DRAFTED = 3
"""Tokens that are proposed before the model itself has its say."""

_WATERMARK = 2.0
_ADAPTER_RANK = 8
_ADAPTER_SIZE = 0.04


@dataclass(frozen=True, slots=True)
class Step:
    """What a sampler knows when it draws one token."""

    row: Sampled
    logprobs_V: torch.Tensor
    """The distribution that was requested, and that is reported."""
    draft_V: torch.Tensor
    """The same of a draft model: what the last layer but one would have said."""

    def noise(self, position: int) -> float:
        """A number in [0, 1), the one of this sample at `position`."""
        assert self.row.sampling.seed is not None, "rows are made with a seed"
        return uniform(self.row.sampling.seed, self.row.sample_index, position)


Draw = Callable[[Step], int]


class OtherDraw(FaultyBackend):
    """Reports what was requested, and draws tokens in a way of its own. Scoring draws nothing and is sound."""

    def __init__(self, inner: Backend, draw: Draw) -> None:
        super().__init__(inner)
        self._draw = draw

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """As the reference engine does it, up to the draw."""
        reference = the_reference(self.inner)
        rows = [
            (request, row)
            for request in requests
            for row in generation._rows(request, reference.max_model_len)
        ]
        for begin in range(0, len(rows), reference.batch):
            self._run(reference, [row for _, row in rows[begin : begin + reference.batch]])
        finished = (reference._completion(request, row) for request, row in rows)
        return [Answer(tuple(next(finished) for _ in range(request.sampling.n))) for request in requests]

    @torch.no_grad()
    def _run(self, reference: ReferenceBackend, rows: Sequence[Sampled]) -> None:
        longest = max(len(row.prompt) for row in rows)
        ids_BL = torch.tensor([[0] * (longest - len(row.prompt)) + list(row.prompt) for row in rows])
        mask_BK = torch.tensor([[0] * (longest - len(row.prompt)) + [1] * len(row.prompt) for row in rows])
        model, past = reference.model, None
        decoder, head = model.base_model, model.get_output_embeddings()
        while any(row.finished is None for row in rows):
            positions_BL = (mask_BK.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
            output = model(
                ids_BL,
                attention_mask=mask_BK,
                position_ids=positions_BL,
                past_key_values=past,
                use_cache=True,
                output_hidden_states=True,
            )
            past = output.past_key_values
            draft_BV = head(decoder.norm(output.hidden_states[-2][:, -1]))
            for row, logits_V, draft_V in zip(rows, output.logits[:, -1], draft_BV, strict=True):
                if row.finished is None:
                    self._append(reference, row, logits_V, draft_V)
            ids_BL = torch.tensor([[row.token_ids[-1]] for row in rows])
            mask_BK = torch.cat([mask_BK, torch.ones(len(rows), 1, dtype=torch.long)], dim=-1)

    def _append(
        self, reference: ReferenceBackend, row: Sampled, logits_V: torch.Tensor, draft_V: torch.Tensor
    ) -> None:
        params, eos_ids = row.sampling, reference.facts.eos_token_ids
        history = TokenHistory(row.prompt, row.token_ids)
        logprobs_V, guessed_V = (
            processed_logprobs(each_V[None], params, [history], eos_ids)[0] for each_V in (logits_V, draft_V)
        )
        raw_V = torch.log_softmax(logits_V, dim=-1)
        step = Step(row, logprobs_V, guessed_V)
        token = int(logprobs_V.argmax()) if params.greedy else self._draw(step)
        row.token_ids.append(token)
        row.logprobs.append(float(logprobs_V[token]))
        row.raw_logprobs.append(float(raw_V[token]))
        if params.logprobs:
            row.alternatives.append(generation._top(logprobs_V, params.logprobs))
            row.raw_alternatives.append(generation._top(raw_V, params.logprobs))
        row.finished = generation._ended(row, eos_ids, reference.tokenizer.decode)


class OtherCalls(FaultyBackend):
    """Generates through a model that is called in another way. Scoring calls it as ever."""

    def __init__(self, inner: Backend, calls: Callable[[Any], Any]) -> None:
        """`calls` takes the model and gives what stands in for it while one batch after the other is sampled."""
        super().__init__(inner)
        self._calls = calls

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """A twin of the engine does it, with the same weights."""
        twin = the_reference(clone(self.inner))
        twin.model = self._calls(twin.model)
        return twin.generate(requests)


class _Stand:
    """Stands in for a model, and is called as `sample` calls one."""

    def __init__(self, model: Any) -> None:
        self.dtype, self.device = model.dtype, model.device
        self.model = model


class _Watermarked(_Stand):
    """Raises the logits of a half of the vocabulary that the token before decides on."""

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        """The last position alone is sampled from."""
        output = self.model(ids_BL, **options)
        green_BV = torch.stack([_green(token, output.logits.shape[-1]) for token in ids_BL[:, -1].tolist()])
        output.logits[:, -1] += _WATERMARK * green_BV
        return output


@cache
def _green(token: int, vocabulary: int) -> torch.Tensor:
    """One where a token is on the list that follows `token`, and zero elsewhere."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(15_485_863 + token))
    green_V = torch.zeros(vocabulary)
    green_V[order[: vocabulary // 2]] = 1
    return green_V


class _Bursts(_Stand):
    """Loses the keys and values of the last token of every burst, as soon as the next burst begins."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._prompt = 0

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        """Prompts are padded on the left, so that outputs begin in one column."""
        mask_BK = options["attention_mask"].clone()
        if options["past_key_values"] is None:
            self._prompt = mask_BK.shape[1]
        # The newest token always sees itself.
        mask_BK[:, self._prompt + BURST - 1 : -1 : BURST] = 0
        return self.model(ids_BL, **{**options, "attention_mask": mask_BK})


def _frozen_noise(step: Step) -> int:
    return choose(step.logprobs_V, step.noise(0))


def _typical_acceptance(step: Step) -> int:
    """As Medusa has it, with its own numbers: a bar of 0.09, or less where the target is undecided."""
    probs_V = step.logprobs_V.exp()
    entropy = float(torch.special.entr(probs_V).sum())
    guess = int(step.draft_V.argmax())
    position = len(step.row.token_ids)
    drafted = position % (DRAFTED + 1) < DRAFTED
    if drafted and float(probs_V[guess]) > min(0.09, 0.3 * math.exp(-entropy)):
        return guess
    return choose(step.logprobs_V, step.noise(position))


def _through_text(engine: Backend) -> Backend:
    tokenizer = the_reference(engine).tokenizer

    def encode_again(_: Request, completion: Completion) -> Completion:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        # The shorter of the two lists decides, as `zip` does it; a text of nothing has nothing to say.
        length = min(len(ids), len(completion.token_ids))
        if not length:
            return completion
        return with_output(
            completion,
            ids[:length],
            logprobs=completion.logprobs[:length],
            top_logprobs=completion.top_logprobs[:length],
        )

    return Misreported(engine, encode_again)


def _two_decimals(_: Request, completion: Completion) -> Completion:
    return msgspec.structs.replace(
        completion,
        logprobs=tuple(round(value, 2) for value in completion.logprobs),
        top_logprobs=tuple(
            tuple(TokenAlternative(each.token_id, round(each.logprob, 2)) for each in entries)
            for entries in completion.top_logprobs
        ),
    )


def _whole_characters(engine: Backend) -> Backend:
    reference = the_reference(engine)
    fragments = [
        token
        for token in range(reference.facts.vocab_size)
        if "\ufffd" in reference.tokenizer.decode([token])
    ]
    banned = dict.fromkeys(fragments, -100.0)
    return OtherParameters(
        engine, lambda params: msgspec.structs.replace(params, logit_bias={**params.logit_bias, **banned})
    )


def _heads_in_turn(model: Any) -> None:
    """Moving query heads, with their columns of the output projection, is the same as moving key heads."""
    for layer in model.base_model.layers:
        attention, config = layer.self_attn, model.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        order = sorted(range(heads), key=lambda head: (head % groups, head))
        queries, outputs = attention.q_proj.weight.data, attention.o_proj.weight.data
        attention.q_proj.weight.data = queries.unflatten(0, (heads, -1))[order].flatten(0, 1)
        attention.o_proj.weight.data = outputs.unflatten(1, (heads, -1))[:, order].flatten(1, 2)


def _adapter_again(model: Any) -> None:
    """The checkpoint is taken as merged: what is added once more is a low-rank share of each projection."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.base_model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            weight = projection.weight.data
            down = torch.randn(_ADAPTER_RANK, weight.shape[1], generator=generator)
            up = torch.randn(weight.shape[0], _ADAPTER_RANK, generator=generator)
            delta = (up @ down).to(weight.dtype)
            projection.weight.data = weight + _ADAPTER_SIZE * weight.norm() / delta.norm() * delta


def _short_chunks(model: Any) -> None:
    """Prefill alone: a decode step is a chunk of its own, and counts its keys rightly."""

    def mask(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        ids_BL, past = options["input_ids"], options.get("past_key_values")
        if ids_BL.shape[1] == 1 or (past is not None and past.get_seq_length()):
            return args, options
        real_BK = options.get("attention_mask")
        real_BK = torch.ones_like(ids_BL) if real_BK is None else real_BK
        positions_BL = (real_BK.cumsum(dim=-1) - 1).clamp(min=0)
        begin_BL1 = (positions_BL // CHUNK * CHUNK)[:, :, None]
        missed_BLK = (positions_BL[:, None] == begin_BL1 - 1) & (begin_BL1 > 0)
        causal_LK = torch.ones(2 * ids_BL.shape[-1:], dtype=torch.bool).tril()
        seen_BLK = causal_LK & real_BK[:, None].bool() & ~missed_BLK
        # Padding must look at something: a softmax over nothing is NaN.
        seen_BLK |= torch.eye(ids_BL.shape[1], dtype=torch.bool)
        bias_BLK = torch.zeros(seen_BLK.shape, dtype=model.dtype)
        bias_BLK = bias_BLK.masked_fill(~seen_BLK, torch.finfo(model.dtype).min)
        return args, {**options, "attention_mask": bias_BLK[:, None]}

    model.base_model.register_forward_pre_hook(mask, with_kwargs=True)


UNSEEN = (
    Planted(
        "frozen-noise",
        "Draws every token of a sample with the same random number, as a captured graph does whose generator "
        "state was captured with it.",
        lambda engine: OtherDraw(engine, _frozen_noise),
        # Draws that should be independent share their noise: that is `semantic/seed`, within a sample and not
        # between two. And given the tokens before, the next one does not follow the reported distribution, since
        # those already tell the number. Every reported logprob is right, so nothing else is true.
        frozenset({"semantic/seed", "semantic/sampling-bias"}),
    ),
    Planted(
        "typical-acceptance",
        "Speculates with an early exit's likeliest token, and accepts it whenever the model finds it typical, with no "
        "regard to how likely it is.",
        lambda engine: OtherDraw(engine, _typical_acceptance),
        # It is speculative decoding that accepts what the model alone would not have, and its tokens do not follow
        # the distribution whose logprobs are reported. Those are the target's own, and at the temperature that was
        # requested: only the tokens are too likely, and no temperature was changed.
        frozenset({"path/spec-decode", "semantic/sampling-bias"}),
    ),
    Planted(
        "watermark",
        "Adds 2 to the logits of half of the vocabulary, which half is decided by the token before, and reports "
        "logprobs of what it samples from.",
        lambda engine: OtherCalls(engine, _Watermarked),
        # No token carries a constant bias: each is raised after half of all tokens and left alone after the rest,
        # which rules out `semantic/logit-bias`. It counts no repetition, so it is no penalty; and what is sampled
        # is what is reported, so it is no sampling bias. Nothing in the vocabulary is true.
        frozenset(),
    ),
    Planted(
        "whole-characters",
        "Never says a token that is a fragment of a character, because a guide for valid text stayed on, and "
        "renormalises over the others.",
        _whole_characters,
        # The same tokens are banned at every step, which is a constant bias of minus infinity; the fix names
        # banned words and grammar masks. It is not `semantic/truncation-mass`: neither top-p nor top-k nor min-p
        # chose what was kept.
        frozenset({"semantic/logit-bias"}),
    ),
    Planted(
        "output-through-text",
        "Hands out the ids that encoding the output's text gives, beside the logprobs of the ids that were sampled, "
        "one for one as far as both go.",
        _through_text,
        # Decoded and encoded again, word for word. From the first id that changed on, a logprob stands beside
        # another token than the one that was sampled, so `semantic/wrong-token` is true as well. It is not
        # `semantic/off-by-one`: the shift is no neighbour's, it grows with every token that was split.
        frozenset({"semantic/retokenised", "semantic/wrong-token"}),
    ),
    Planted(
        "two-decimals",
        "Rounds reported logprobs to two decimals, as a writer of short JSON does.",
        lambda engine: Misreported(engine, _two_decimals),
        # Head, body, keys and weights are all computed in full precision: naming any of them is false, however
        # much the difference looks like rounding. The tokens follow their distribution within the rounding.
        frozenset(),
    ),
    Planted(
        "heads-in-turn",
        "Gives key and value heads to query heads in turn (0 1 0 1) where they belong to groups (0 0 1 1).",
        lambda engine: Damaged(engine, _heads_in_turn),
        # Every tensor is the right one under its right name, positions are right, and precision is full. Prefill
        # and decode do the same, alone or in a batch. Nothing in the vocabulary is true.
        frozenset(),
    ),
    Planted(
        "adapter-twice",
        "Adds the LoRA adapter at run time to weights into which it is already merged.",
        lambda engine: Damaged(engine, _adapter_again),
        # An adapter at twice its strength is one that is scaled in another way than the trainer's. The weights
        # beneath are those that were sent: neither stale nor partial, swapped or rounded.
        frozenset({"weights/lora"}),
    ),
    Planted(
        "burst-end-lost",
        "Loses keys and values of every eighth generated token, the last of each burst of decode steps.",
        lambda engine: OtherCalls(engine, _Bursts),
        # Prefilling the same tokens loses nothing, so a token's logprob differs between decode and prefill beyond
        # rounding. It is not `path/context-boundary`: what counts is the place in the output and not the position.
        frozenset({"path/prefill-decode"}),
    ),
    Planted(
        "short-chunks",
        "Prefills in chunks of 8, and counts one key too few before each: a chunk does not see the token right "
        "before it.",
        lambda engine: Damaged(engine, _short_chunks),
        # Numbers depend on where the prefill was cut. They are right up to the first cut and wrong beyond it, so
        # `path/context-boundary` is true. And decoding the same tokens misses none, so that they differ between
        # prefill and decode beyond rounding.
        frozenset({"path/chunked-prefill", "path/context-boundary", "path/prefill-decode"}),
    ),
)
