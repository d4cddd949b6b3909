"""oneDNN's prepacked linear: one order of summation for every number of rows, if there are enough of them.

Which is enough depends on the machine: 1 on AVX2, 2 on AVX-512 where K exceeds 1,024; with K = 20,000 and N = 30 two
threads share out K and no number helps. So it is asked of each shape and number of threads (`proof`).
Shapes: T rows, N outputs, K inputs.
"""

import torch


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """oneDNN's blocked layout. Without a batch hint: with hint 1, one row takes another path."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), None)  # noqa: SLF001
    return packed


def linear(
    x_TK: torch.Tensor, packed: torch.Tensor, bias_N: torch.Tensor | None, min_rows: int
) -> torch.Tensor:
    """x Wᵀ + b, computed with at least `min_rows` rows."""
    rows = x_TK.shape[0]
    if rows < min_rows:
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, min_rows - rows))
    out_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
        x_TK, packed, bias_N, "none", [], ""
    )
    return out_TN[:rows]
