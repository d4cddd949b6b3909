"""Causes of layer `trainer`: the engine is right; the trainer's forward is not."""

from zerodrift.core.causes.entry import cause

TRAINER = (
    cause(
        "trainer/packing",
        "Packed sequences leak into each other in the trainer's forward.",
        "pass position ids and a block-diagonal mask, or do not pack",
    ),
    cause(
        "trainer/autocast",
        "The trainer's forward runs in less precision than its weights.",
        "disable autocast around the logprob forward, at least for the head",
    ),
    cause(
        "trainer/precision",
        "The trainer's forward runs in less precision than the reference: its weights are narrow, or autocast narrows them.",
        "load the trainer's weights in float32 and score without autocast, or audit in the trainer's precision "
        "(--precision bf16)",
    ),
    cause(
        "trainer/micro-batch",
        "The trainer's numbers depend on how sequences are batched or padded.",
        "pass the attention mask and position ids of the unpadded sequence",
    ),
    cause(
        "trainer/positions",
        "The trainer's position ids are shifted.",
        "count positions from the first real token",
    ),
)
