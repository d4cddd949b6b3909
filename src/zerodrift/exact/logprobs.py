"""From hidden states to log-probabilities: the one path that engine, trainer and audit share.

Shapes: R rows (tokens that are predicted), H hidden size, V vocabulary, T tokens of all sequences.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import InvalidPrompt, UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.exact.fingerprint import (
    STOP_IDS,
    numeric_fingerprint,
    require_same,
    stop_ids_of,
    stop_ids_text,
)
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.ops.cpu.elementwise import soft_cap
from zerodrift.exact.ops.cpu.proof import require_rows
from zerodrift.exact.packed_head import can_pack, packed_logprobs, temperature_of
from zerodrift.exact.peft_model import unwrapped
from zerodrift.exact.preparation import (
    is_sharded,
    ops_of,
    parameters_on,
    require_gathered,
    require_untouched,
)
from zerodrift.models.family.parts import ModelParts
from zerodrift.sampler.processing import NUCLEUS, TokenHistory, histories, processed_logprobs

LOGIT_BYTES = 256 * 2**20
"""Most logits computed at once, and kept for a backward."""


class Scored(Protocol):
    """What is needed of a completion to reproduce its logprobs."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def kind(self) -> LogprobKind: ...


def head(model: Any, hidden_RH: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] in fp32, differentiable where gradients are on."""
    ops_of(model)
    require_gathered(model)
    parts = ModelParts(model)
    logits_RV: torch.Tensor = parts.head.rounded_to(hidden_RH, torch.float32)
    cap = parts.family.logit_cap(model.config)
    return logits_RV if cap is None else soft_cap(logits_RV, cap)


def processed(
    logits_RV: torch.Tensor,
    params: SamplingParams,
    rows: Sequence[TokenHistory],
    stop_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Log-probabilities of the sampled distribution; a row's bits do not depend on the rows beside it."""
    if logits_RV.is_cuda and len(logits_RV) == 1:
        # On a GPU torch adds up a single row by another algorithm than the rows of many (cumsum, for top-p).
        twice_RV = logits_RV.expand(2, -1)
        return processed_logprobs(twice_RV, params, [*rows, *rows], stop_ids, log_softmax=log_softmax)[:1]
    if params.truncates and not logits_RV.is_cuda:
        require_rows("masses of truncation", _masses, logits_RV.shape[-1], len(logits_RV))
    return processed_logprobs(logits_RV, params, rows, stop_ids, log_softmax=log_softmax)


def _masses(hard_RV: torch.Tensor) -> torch.Tensor:
    """What top-p and min-p are decided by, whose last bits a set of tokens would not show: of the vocabulary, and of the
    likeliest."""
    probs_RV = torch.softmax(hard_RV / 2**12, dim=-1)
    likeliest_RK = probs_RV[:, : NUCLEUS + 1].contiguous()
    return torch.cat([probs_RV.cumsum(dim=-1), likeliest_RK.cumsum(dim=-1)], dim=-1)


def token_logprobs(
    model: Any, completions: Sequence[Scored], stop_ids: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The trainer's side: for each completion the logprobs of its tokens, of its kind, by one packed forward.

    One without tokens (refused, or aborted before the first) gives an empty tensor. One that says how it was computed
    is refused where this model computes otherwise. `stop_ids` are what `min_tokens` forbids, by default the model's.
    Of a prepared PEFT model the active adapter takes part, unmerged. Where FSDP2 has sharded the model, every rank calls this at once, with completions of its own, and with one at least.
    """
    if not isinstance(completions, (list, tuple)):
        raise InvalidPrompt(f"completions are a {type(completions).__name__}; give a list of them")
    model = unwrapped(model)
    require_untouched(model)
    if is_sharded(model):
        _require_some_on_every_rank(model, completions)
    stop_ids = stop_ids_of(model) if stop_ids is None else tuple(stop_ids)
    _require_alike(model, completions, stop_ids)
    asked = [each for each in completions if each.token_ids]
    nothing = torch.empty(0, device=parameters_on(model))
    if not asked and is_sharded(model):
        # The other ranks wait for this one, forward and backward: it computes one token, and gives back none.
        nothing = _of_completions(model, [_Stand()], stop_ids)[0][:0]
    scored = iter(_of_completions(model, asked, stop_ids) if asked else ())
    return [next(scored) if each.token_ids else nothing for each in completions]


def _require_some_on_every_rank(model: Any, completions: Sequence[Scored]) -> None:
    """A rank that gets nothing back has no backward, and the others would wait for it: all refuse together."""
    lacking = torch.tensor([int(not completions)], device=parameters_on(model))
    # What a forward has gathered and left so does not say among whom; resharded, it does, and is gathered again.
    if not (shards := [part for part in model.parameters() if hasattr(part, "device_mesh")]):
        model.reshard()
        shards = [part for part in model.parameters() if hasattr(part, "device_mesh")]
    for group in shards[0].device_mesh.get_all_groups():
        dist.all_reduce(lacking, dist.ReduceOp.MAX, group)
    if lacking.item():
        raise InvalidPrompt(
            f"{'another' if completions else 'this'} rank has no completions, and its backward would be missed; give every "
            "rank one at least, if need be one without tokens"
        )


class _Stand(NamedTuple):
    """A completion for a rank that has none."""

    prompt_token_ids: tuple[int, ...] = (0,)
    token_ids: tuple[int, ...] = (0,)
    sampling: SamplingParams = SamplingParams(max_tokens=1)
    kind: LogprobKind = LogprobKind.RAW


def _require_alike(model: Any, completions: Sequence[Scored], stop_ids: Sequence[int]) -> None:
    ours = {**numeric_fingerprint(model), STOP_IDS: stop_ids_text(stop_ids)}
    for each in completions:
        if theirs := dict(getattr(each, "numeric", {})):
            # What ends a sequence is part of its numbers only where a minimum forbids it.
            if each.sampling.min_tokens == 0:
                theirs[STOP_IDS] = ours[STOP_IDS]
            require_same(theirs, ours)


def _of_completions(model: Any, completions: Sequence[Scored], stop_ids: Sequence[int]) -> list[torch.Tensor]:
    ops_of(model)
    sequences = [_sequence(model, index, each) for index, each in enumerate(completions)]
    starts = [0, *accumulate(len(ids) for ids in sequences)]

    def score(input_ids: torch.Tensor, position_ids: torch.Tensor) -> list[torch.Tensor]:
        output = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return _of_hidden(model, output.last_hidden_state[0], completions, starts, stop_ids)

    device = parameters_on(model)
    token_ids_T = torch.tensor([token for ids in sequences for token in ids], device=device)
    positions_T = torch.cat([torch.arange(len(ids)) for ids in sequences]).to(device)
    call = partial(_as_root_forward, model, score) if is_sharded(model) else score
    with ops_of(model).computing():
        return call(token_ids_T[None], positions_T[None])


def _as_root_forward(
    model: Any, score: Callable[..., list[torch.Tensor]], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    """FSDP2 gathers weights around a call of the whole model: for this one, its forward is `score`."""
    model.forward = score
    try:
        found: list[torch.Tensor] = model(*inputs)
    finally:
        del model.forward
    if wrong := {part.dtype for part in found} - {torch.float32}:
        raise UnsupportedModel(
            f"log-probabilities came out of FSDP2 as {wrong}: its output_dtype rounds them; leave that out of the policy"
        )
    return found


def _of_hidden(
    model: Any,
    hidden_TH: torch.Tensor,
    completions: Sequence[Scored],
    starts: Sequence[int],
    stop_ids: Sequence[int],
) -> list[torch.Tensor]:
    packs = can_pack(model)
    temperatures = [temperature_of(each.sampling, each.kind) if packs else None for each in completions]
    packed = iter(_packed(model, hidden_TH, completions, starts, temperatures))
    most = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
    large = sum(len(each.token_ids) for each in completions) > most
    found = []
    for completion, start, temperature in zip(completions, starts, temperatures, strict=False):
        if temperature is not None:
            found.append(next(packed))
            continue
        first = start + len(completion.prompt_token_ids) - 1
        parts = []
        for begin in range(0, len(completion.token_ids), most):
            inside = slice(begin, min(begin + most, len(completion.token_ids)))
            hidden_RH = hidden_TH[first + inside.start : first + inside.stop]
            arguments = (model, hidden_RH, completion, inside, stop_ids)
            if large and torch.is_grad_enabled():
                # Logits are made again for the backward instead of being kept; the bits are the same.
                parts.append(checkpoint(_of_tokens, *arguments, use_reentrant=False))
            else:
                parts.append(_of_tokens(*arguments))
        found.append(torch.cat(parts))
    return found


def _packed(
    model: Any,
    hidden_TH: torch.Tensor,
    completions: Sequence[Scored],
    starts: Sequence[int],
    temperatures: Sequence[float | None],
) -> tuple[torch.Tensor, ...]:
    """Those whose logits are divided by a temperature and nothing else, in one go."""
    rows, tokens, scales, sizes = list[int](), list[int](), list[float](), list[int]()
    for completion, start, temperature in zip(completions, starts, temperatures, strict=False):
        if temperature is None:
            continue
        first, size = start + len(completion.prompt_token_ids) - 1, len(completion.token_ids)
        rows += range(first, first + size)
        tokens += completion.token_ids
        scales += [temperature] * size
        sizes.append(size)
    if not sizes:
        return ()
    hidden_RH = hidden_TH[torch.tensor(rows, device=hidden_TH.device)]
    return torch.split_with_sizes(packed_logprobs(model, hidden_RH, tokens, scales), sizes)


def _sequence(model: Any, index: int, completion: Scored) -> tuple[int, ...]:
    """Its tokens but for the last, which predicts nothing."""
    if not completion.prompt_token_ids:
        raise InvalidPrompt(f"completion {index} has no prompt; it takes a token to predict the next")
    ids = (*completion.prompt_token_ids, *completion.token_ids)
    if wrong := [token for token in ids if not 0 <= token < model.config.vocab_size]:
        raise InvalidPrompt(
            f"completion {index} has token {wrong[0]}, but the model has {model.config.vocab_size}"
        )
    return ids[:-1]


def _of_tokens(
    model: Any, hidden_RH: torch.Tensor, completion: Scored, inside: slice, stop_ids: Sequence[int]
) -> torch.Tensor:
    logits_RV = head(model, hidden_RH)
    if completion.kind is LogprobKind.RAW:
        logprobs_RV = log_softmax(logits_RV)
    else:
        rows = histories(completion.prompt_token_ids, completion.token_ids)[inside]
        logprobs_RV = processed(logits_RV, completion.sampling, rows, stop_ids)
    tokens_R1 = torch.tensor(completion.token_ids[inside], device=logprobs_RV.device)[:, None]
    return logprobs_RV.gather(-1, tokens_R1)[:, 0]
