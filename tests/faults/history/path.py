"""Bugs in how the engine computes what it rightly set out to compute."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from history.bug import reenacted
from history.twin import Twin
from zerodrift.core.completion import Answer
from zerodrift.core.request import Prompt, Request

SYSTEM = (
    "You keep the lighthouse. Write down the hour, the height of the water, the direction of the wind, and the names "
    "of the ships that passed. Count the seconds between one flash and the next; measure twice."
)


class NarrowHead(Twin):
    """bf16 operands and a bf16 result for the head alone."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.own_model().lm_head.register_forward_hook(
            lambda head, args, _: functional.linear(args[0].bfloat16(), head.weight.bfloat16()).to(
                args[0].dtype
            )
        )


def one_system_prompt(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """Many questions after the same long beginning, as a training set has them."""
    prompts = []
    for number in range(count):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What happened at hour {97 * seed + number}?"},
        ]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        prompts.append(Prompt(tuple(rendered["input_ids"])))
    return prompts


class CascadeAttention(Twin):
    """Where enough requests share a long beginning, its attention is computed once and merged with the wrong weight.

    Two softmaxes are merged by their normalisers; one that is off by a factor is as many keys more or fewer.
    """

    REQUESTS, SHARED, FACTOR = 8, 48, 1.25

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._shared = 0
        for layer in self.own_model().model.layers:
            layer.self_attn.register_forward_pre_hook(self._merge, with_kwargs=True)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        shared = _common([request.prompt.token_ids for request in requests])
        self._shared = shared if len(requests) >= self.REQUESTS and shared >= self.SHARED else 0
        try:
            return super().generate(requests)
        finally:
            self._shared = 0

    def _merge(self, module: Any, args: Any, options: dict[str, Any]) -> Any:
        if not self._shared:
            return args, options
        hidden_BLH, positions_BL = options["hidden_states"], options["position_ids"]
        cache = options.get("past_key_values")
        keys = hidden_BLH.shape[1] + (0 if cache is None else cache.get_seq_length(module.layer_idx))
        # Rows are padded on the left: the last key is at the last query's position.
        place_B1K = (torch.arange(keys) - (keys - 1 - positions_BL[:, -1:]))[:, None]
        query_BL1 = positions_BL[:, :, None]
        bias_BLK = (place_B1K < self._shared) * math.log(self.FACTOR)
        hidden = (place_B1K < 0) | (place_B1K > query_BL1)
        mask = bias_BLK.to(hidden_BLH.dtype).expand_as(hidden)
        mask = mask.masked_fill(hidden, torch.finfo(hidden_BLH.dtype).min)
        return args, {**options, "attention_mask": mask[:, None]}


def _common(prompts: Sequence[Sequence[int]]) -> int:
    first, last = min(prompts), max(prompts)
    pairs = zip(first, last, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


class StaleDraftsAtTheEnd(Twin):
    """Within four tokens of the longest sequence the drafter no longer runs, and old drafts spoil the state."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._positions = torch.zeros(0)
        model = self.own_model()
        model.model.register_forward_pre_hook(self._note, with_kwargs=True)
        model.lm_head.register_forward_hook(self._spoil)

    def _note(self, _: Any, args: Any, options: dict[str, Any]) -> Any:
        ids_BL = options["input_ids"] if options.get("input_ids") is not None else args[0]
        positions = options.get("position_ids")
        self._positions = torch.arange(ids_BL.shape[1])[None] if positions is None else positions
        return args, options

    def _spoil(self, _: Any, __: Any, logits_BLV: torch.Tensor) -> torch.Tensor:
        near_BL = self._positions[:, -logits_BLV.shape[1] :] >= self.max_model_len - 4
        return torch.where(near_BL[:, :, None], logits_BLV.roll(1, dims=-1), logits_BLV)


PATH = (
    reenacted("NeMo-RL#3936", NarrowHead),
    reenacted("vllm#22103", CascadeAttention, prompts=one_system_prompt),
    reenacted("vllm#38711", StaleDraftsAtTheEnd),
)
