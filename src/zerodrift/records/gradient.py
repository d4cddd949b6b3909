"""What is said of the gradient of one batch: by the engine's numbers beside by true ones."""

import msgspec


class GradientPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some of the tokens, and what they add to the gradient."""

    kind: str
    """`all`, `position` or `log p`."""
    label: str
    tokens: int
    mean_abs: float
    """Mean |Δ| of engine against truth."""
    clip_changed: float
    """Share of tokens that one set of numbers clips and the other does not."""
    cosine: float | None = None
    norm_ratio: float | None = None
    """Length by the engine's numbers over length by true ones. None, both, where a side has no gradient."""


class GradientRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One batch."""

    step: int
    rollouts: int
    groups: int
    without_advantage: int
    """Groups whose rewards are all equal: they add nothing, by any numbers."""
    epsilon_low: float
    epsilon_high: float
    whole: GradientPart
    error: float | None
    """Length of the difference of the two gradients, over that of the true one."""
    noise: float | None
    """The same for a fresh draw of as many prompts: standard error of the true gradient, from the spread of its groups."""
    parts: tuple[GradientPart, ...] = ()
    assumed: tuple[str, ...] = ()
    message: str
