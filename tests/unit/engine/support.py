"""What the tests of the engine ask, and what they compare of the answers."""

from collections.abc import Callable
from typing import Any

import torch

from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output, SampleUpdate

Make = Callable[..., Engine]
PROMPT = [5, 6, 7, 8, 9, 10]


def seeded(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 6, "ignore_eos": True, **settings})


def ended(updates: list[SampleUpdate]) -> list[Output]:
    return [update.output for update in updates if update.output is not None]


def finished(engine: Engine) -> list[Output]:
    """Steps until nobody is left."""
    outputs = []
    while engine.has_unfinished:
        outputs += ended(engine.step())
    return outputs


def bits(output: Output) -> tuple[object, ...]:
    return output.token_ids, output.logprobs, output.finish_reason


def changed(engine: Engine, scale: float = 1.25) -> dict[str, torch.Tensor]:
    """Weights of another version."""
    return {name: tensor * scale for name, tensor in engine.model.state_dict().items()}
