"""What a device must offer: the seam between the model code and CPU or CUDA.

Every op gives a row the same bits whatever rows stand beside it, however many there are, and however many threads
run. Shapes: T tokens, H query heads, C key/value heads, D head size, N outputs, K inputs, S sequences.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch


class HeadShape(NamedTuple):
    """How one attention layer looks at keys."""

    scale: float
    window: int | None
    """A query at position p sees keys p-window+1…p; None sees all."""


class NormGain(NamedTuple):
    """What an RMS norm multiplies its rows by, and what it adds to their mean square."""

    weight_H: torch.Tensor
    eps: float
    one_plus: bool = False
    """The gain is 1 + weight, and only the result is rounded (Gemma); else weight, on rows that are rounded before."""


class Segments(NamedTuple):
    """Whole sequences, one after another or apart: sequence s is tokens starts[s] to ends[s]-1, from position 0."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]


class Query(NamedTuple):
    """Tokens of one sequence in this step."""

    begin: int
    end: int
    first: int
    """Position of the first of them."""
    table_J: torch.Tensor
    """Blocks that cover positions 0 to the last."""

    @property
    def last(self) -> int:
        """Position of the last token."""
        return self.first + self.end - self.begin - 1


class RowOp(NamedTuple):
    """An op that works on rows and is used as it is."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    columns: int
    dtype: torch.dtype | None = None
    """Of its rows; None where they are the parameters'."""


RowOps = Mapping[str, RowOp]


class Parts(NamedTuple):
    """What a model is made of, for the proof at start-up."""

    linears: Sequence[tuple[Any, torch.Tensor | None]]
    """Packed weight and bias of each."""
    head_dim: int
    row_ops: RowOps
    group: int = 1
    """Query heads of one kv head."""
    windows: tuple[int | None, ...] = (None,)
    """Of all layers, each once."""
    grouped: Sequence[tuple[torch.Tensor, int]] = ()
    """Weights of experts, [E, N, K], where the device multiplies by all of them at once; and how many a token has."""


class ExpertRows(Enum):
    """Where a product of experts finds its rows, and where it leaves them."""

    TOKENS_TO_GROUPS = "each token's row, once for every expert it goes to; results stand by expert"
    GROUPS_TO_PAIRS = "rows that stand by expert; results stand by token, then by place among its experts"


class ExpertOps(Protocol):
    """Of one device. Pairs P are (token, one of its experts); `groups` are pairs by expert, on the device alone."""

    def route(
        self, logits_TE: torch.Tensor, count: int, *, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of the `count` likeliest experts, likeliest first; of two equals the lower number."""
        ...

    def groups(self, experts_TK: torch.Tensor, num_experts: int) -> Any:
        """Pairs by expert. Nothing is read back, so that a captured step may do it."""
        ...

    def product(
        self,
        x: torch.Tensor,
        weight_ENK: torch.Tensor,
        groups: Any,
        rows: ExpertRows,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x Wᵀ of each pair with the weight of its expert, [P, N]: K in order, whoever goes the same way."""
        ...

    def grad_of_rows(
        self, grad_PN: torch.Tensor, weight_ENK: torch.Tensor, groups: Any, rows: ExpertRows
    ) -> torch.Tensor:
        """Gradient of a product's x."""
        ...

    def grad_of_weight(
        self, grad_PN: torch.Tensor, x: torch.Tensor, groups: Any, rows: ExpertRows
    ) -> torch.Tensor:
        """Gradient of a product's weight, [E, N, K]; 0 for experts that nobody went to."""
        ...

    def combine(self, made_PH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Rows that stand by token, times their weights, added in order of place; fp32 sums, rounded once."""
        ...


class Ops(Protocol):
    """One device's ops. Without gradient, unless said otherwise."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    """Parameters may have these; anything else is refused."""

    copies: bool
    """Whether `pack` makes a copy, which can then be older than the weight."""
    rms_norm: Callable[[torch.Tensor, NormGain], torch.Tensor] | None
    """x / √(mean x² + ε) times the gain; None where the model's own holds."""
    rms_norm_backward: (
        Callable[[torch.Tensor, NormGain, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    )
    """Gradients of x and of the weight, from x, gain and the gradient of the result; None where the formula is enough."""
    experts: "ExpertOps | None"
    """Products of all experts at once; None where one expert after another is enough."""
    attend_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None
    """dQ, dK, dV from q, k, v, out and the log-sums that `attend` was told to keep, from dO, segments and shape; None where
    the plain formula is enough."""
    reads_unwritten: bool
    """Whether attention multiplies what lies in a page beyond a sequence's end, by 0: then it must be finite."""
    fuses: bool
    """Whether it has `heads`, `add_norm` and `gated` for `FusedLayers`."""

    def computing(self) -> AbstractContextManager[None]:
        """What a whole forward is computed inside of: settings of the process that would cost much to set per product."""
        ...

    def prove(self, parts: Parts) -> None:
        """Find variants that hold for these shapes on this machine, or raise `Unproven`."""
        ...

    def pack(self, weight_NK: torch.Tensor) -> Any:
        """The weight as `linear` wants it; taken anew whenever the weight changes."""
        ...

    def linear(
        self, x_TK: torch.Tensor, packed: Any, bias_N: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x Wᵀ + b, rounded once, to `dtype` or that of x."""
        ...

    def activation(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A differentiable function for `hidden_act`, or None where there is none."""
        ...

    def attend(
        self,
        q_THD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        shape: HeadShape,
        *sums_TH: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention of whole sequences, keys and values [T, C, D]; log-sums are kept where there is an `attend_backward`."""
        ...

    def plan(
        self, queries: list[Query], block_size: int, num_kv_heads: int, windows: Collection[int | None]
    ) -> Any:
        """What the layers of one engine step share; `windows` are those of the layers."""
        ...

    def attend_paged(
        self, q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], step: Any, shape: HeadShape
    ) -> torch.Tensor:
        """The same for the tokens of one engine step, keys and values in pages [blocks, C, block_size, D]."""
        ...

    def facts(self) -> Mapping[str, str]:
        """What decides the bits, for the numeric fingerprint."""
        ...
