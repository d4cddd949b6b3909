"""What a device must offer: the seam between the model code and CPU or CUDA.

Every op gives a row the same bits whatever rows stand beside it, however many there are, and however many threads
run. Shapes: T tokens, H query heads, C key/value heads, D head size, N outputs, K inputs, S sequences.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch


class HeadShape(NamedTuple):
    """How one attention layer looks at keys."""

    scale: float
    window: int | None
    """A query at position p sees keys p-window+1…p; None sees all."""


class Segments(NamedTuple):
    """Whole sequences, one after another or apart: sequence s is tokens starts[s] to ends[s]-1, from position 0."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]


class Ops(Protocol):
    """One device's ops."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    """Parameters may have these; anything else is refused."""

    def pack(self, weight_NK: torch.Tensor) -> Any:
        """The weight as `linear` wants it; taken anew whenever the weight changes."""
        ...

    def linear(self, x_TK: torch.Tensor, packed: Any, bias_N: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + b, without gradient."""
        ...

    def prove_linear(self, weight_NK: torch.Tensor, packed: Any) -> None:
        """Find a variant of `linear` that holds for this shape on this machine, or raise `Unproven`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As the model family computes it, without gradient."""
        ...

    def activation(self, name: str) -> Any:
        """A differentiable function for `hidden_act`, or None where there is none."""
        ...

    def attend(
        self, q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], segments: Segments, shape: HeadShape
    ) -> torch.Tensor:
        """Causal attention of whole sequences, keys and values [T, C, D], without gradient."""
        ...

    def attend_paged(self, q_THD: torch.Tensor, layer: Any, step: Any, shape: HeadShape) -> torch.Tensor:
        """The same for the tokens of one engine step, keys and values read from pages."""
        ...

    def prove_attention(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """As `prove_linear`."""
        ...

    def log_softmax(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Differentiable, fp32."""
        ...

    def facts(self) -> Mapping[str, str]:
        """What decides the bits, for the numeric fingerprint."""
        ...
