"""How much may run at once, what happens to KV at a weight swap, and what has been counted so far."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zerodrift.core import require
from zerodrift.core.errors import EngineError, InvalidValue, OutOfBlocks

_RULES = {
    "block_size": "it counts tokens per KV block",
    "num_blocks": "it counts KV blocks",
    "max_num_seqs": "it counts sequences that run together",
    "max_num_batched_tokens": "it counts tokens per step",
    "max_waiting": "it counts requests that wait",
    "decode_rounds": "it counts tokens that a sequence may decode in one step",
}

MAX_NUM_SEQS = 256
MOST_ROUNDS = 64
"""Results of so many rounds lie on the device at once."""


class KVPolicy(StrEnum):
    """What becomes of KV when the weights change."""

    RECOMPUTE = "recompute"
    """Nothing of the old weights is looked at again: what is reported is exactly the new weights' doing."""
    KEEP = "keep"
    """Sequences in flight go on with the KV they have; their lineage says so, and no block of theirs is shared."""
    DRAIN = "drain"
    """Sequences in flight come to their end under the old weights first, and new ones wait: no output has two versions."""


class PausePolicy(StrEnum):
    """What a pause does with requests that have not ended."""

    KEEP = "keep"
    DRAIN = "drain"
    ABORT = "abort"


def swap_policy(kv: str, *, in_flight: bool) -> KVPolicy:
    """What a swap does with KV now."""
    policy = require.one_of(KVPolicy, "kv", kv)
    if policy is KVPolicy.DRAIN and in_flight:
        raise EngineError(
            "requests are in flight, which a drain lets end first; step() until has_unfinished is false, or share the "
            "engine through EngineLoop, which waits for them"
        )
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that a schedule has to respect. None of them changes a bit of any result."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    prefix_caching: bool = True
    decode_rounds: int = 1
    """Tokens that each sequence decodes in a step in which all do nothing else. Who ends early wastes the rest."""

    def __post_init__(self) -> None:
        """Sizes under which nothing could move are refused."""
        require.instance(InvalidValue, "enable_prefix_caching", self.prefix_caching, bool)
        for name, rule in _RULES.items():
            require.whole(InvalidValue, name, getattr(self, name), f"{rule}, one at least", 1)
        if self.decode_rounds > MOST_ROUNDS:
            raise InvalidValue(
                f"decode_rounds is {self.decode_rounds}; {MOST_ROUNDS} at most run without a look"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidValue(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs={self.max_num_seqs}; "
                "every sequence that runs needs a token per step"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def check_room(self, prompt_tokens: int, max_tokens: int) -> None:
        """A request that would not fit even alone is refused."""
        # The last token is drawn and never forwarded.
        needed = self.blocks_for(prompt_tokens + max_tokens - 1)
        if needed > self.num_blocks:
            raise OutOfBlocks(
                f"{prompt_tokens} prompt tokens and max_tokens={max_tokens} need {needed} KV blocks of "
                f"{self.block_size} tokens, but there are {self.num_blocks}; raise num_blocks or shorten the request"
            )


def default_limits(
    *,
    on_gpu: bool,
    block_size: int | None,
    num_blocks: int | None,
    max_num_seqs: int | None,
    decode_rounds: int | None,
    max_num_batched_tokens: int,
    **others: Any,
) -> Limits:
    """What was given, and else what suits the device; one block where the caller has yet to count them."""
    return Limits(
        block_size=(64 if on_gpu else 16) if block_size is None else block_size,
        num_blocks=1 if num_blocks is None else num_blocks,
        max_num_seqs=min(MAX_NUM_SEQS, max_num_batched_tokens) if max_num_seqs is None else max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decode_rounds=(8 if on_gpu else 1) if decode_rounds is None else decode_rounds,
        **others,
    )


@dataclass(slots=True)
class Counters:
    """What happened since the scheduler was made."""

    steps: int = 0
    forwarded_tokens: int = 0
    """Tokens that went through the model, recomputed ones included."""
    sampled_tokens: int = 0
    entropy_sum: float = 0.0
    """Of the distributions that were sampled, in nats."""
    preemptions: int = 0
    queried_tokens: int = 0
    """Tokens whose prefix was looked up in the cache."""
    reused_tokens: int = 0
    """Those that were found there."""
