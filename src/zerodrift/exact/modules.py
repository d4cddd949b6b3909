"""What `prepare` puts in the place of a model's own modules: same parameters, same names, exact forward.

A linear keeps being an `nn.Linear` whose class is exchanged: parameters, tied weights, hooks and state dict stay as
they are, and `restore` gives the class back.
"""

from typing import Any

import torch
from torch import nn

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.ops.interface import NormGain, Ops


class Pack:
    """A weight in the layout of an op, made anew when the weight has changed."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.frozen = False
        """Nobody writes to the weight any more: an engine's own copy."""
        self._packed: Any = None
        self._key: tuple[int, int] | None = None
        self._places: tuple[int, int] | None = None

    def of(self, weight_NK: torch.Tensor) -> Any:
        """The packed weight. Writes through `.data`, and what FSDP2 gathers into the same memory, do not count as a
        change to torch: wherever somebody may write, the numbers are looked at too."""
        # Every in-place op counts the version up: optimizers, load_state_dict, copy_. Tensors of inference mode have none.
        key = (weight_NK.data_ptr(), 0 if weight_NK.is_inference() else weight_NK._version)  # noqa: SLF001
        places = _bits_by_place(weight_NK) if self.ops.copies and not self.frozen else None
        if weight_NK.dtype not in self.ops.dtypes:
            raise UnsupportedModel(
                f"a weight arrives as {weight_NK.dtype}; exact mode computes in {self.ops.dtypes}: switch off mixed "
                "precision, which rounds parameters, or load the model in that dtype for engine and trainer alike"
            )
        if key != self._key or places != self._places:
            self._packed, self._key, self._places = self.ops.pack(weight_NK), key, places
        return self._packed

    def drop(self) -> None:
        """Forget the packed weight."""
        self._packed, self._key, self._places = None, None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pack":
        return Pack(self.ops)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        how: tuple[Ops, Any, torch.dtype | None],
    ) -> torch.Tensor:
        ops, packed, dtype = how
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.has_bias = bias_N is not None
        return ops.linear(x_TK, packed, bias_N, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN = grads[0].to(weight_NK.dtype)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if need_x else None,
            grad_TN.T @ x_TK if need_weight else None,
            grad_TN.sum(0) if need_bias and ctx.has_bias else None,
            None,
        )


def exact_linear(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    pack: Pack,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x Wᵀ + b by exact ops, in `dtype` instead of that of x where given."""
    if x.dtype is not weight_NK.dtype:
        raise UnsupportedModel(f"{x.dtype} activations meet {weight_NK.dtype} weights; exact mode mixes none")
    x_TK = x.reshape(-1, x.shape[-1])
    # Inside of an autograd function gradients are off: what they mean for the packing is asked before.
    ops, packed = pack.ops, pack.of(weight_NK)
    out_TN = (
        _Linear.apply(x_TK, weight_NK, bias_N, (ops, packed, dtype))  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled()
        else ops.linear(x_TK, packed, bias_N, dtype)
    )
    return out_TN.view(*x.shape[:-1], -1)


class ExactLinear(nn.Linear):
    """An `nn.Linear` that computes with exact ops. Never constructed: `prepare` exchanges the class."""

    exact_pack: Pack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b."""
        return self.rounded_to(x, None)

    def rounded_to(self, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """x Wᵀ + b in `dtype` instead of that of x: a head keeps its sums in fp32."""
        return exact_linear(x, self.weight, self.bias, self.exact_pack, dtype)


class _Norm(torch.autograd.Function):
    """Exact forward; the backward is that of the formula, in fp32, in one kernel where the device has it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, how: tuple[float, bool, Any]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_H)
        ctx.how = eps, one_plus, ops = how
        out: torch.Tensor = ops.rms_norm(x, NormGain(weight_H, eps, one_plus))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_H = ctx.saved_tensors
        eps, one_plus, ops = ctx.how
        if ops.rms_norm_backward is not None:
            return (*ops.rms_norm_backward(x, NormGain(weight_H, eps, one_plus), grads[0]), None)
        wide, grad = x.float(), grads[0].float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed, along = wide * scale, grad * (weight_H.float() + one_plus)
        grad_x = scale * (along - normed * (along * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight_H.dtype), None


class ExactNorm:
    """What an RMS norm's class is mixed with where the device has a norm of its own."""

    weight: torch.Tensor
    exact_eps_name: str
    """Families call it by one of two names."""
    exact_one_plus: bool
    exact_ops: Ops

    @property
    def exact_gain(self) -> NormGain:
        """For kernels that norm on their way."""
        return NormGain(self.weight, getattr(self, self.exact_eps_name), self.exact_one_plus)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / √(mean x² + ε) times the gain."""
        weight_H, eps, one_plus = self.exact_gain
        out: torch.Tensor = _Norm.apply(x, weight_H, (eps, one_plus, self.exact_ops))  # type: ignore[no-untyped-call]
        return out


def exchange_norm(module: Any, ops: Ops, *, one_plus: bool) -> None:
    """Make a norm exact in place."""
    module.exact_ops, module.exact_one_plus = ops, one_plus
    module.exact_eps_name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    module.__class__ = type("ExactRMSNorm", (ExactNorm, type(module)), {})


def give_back_norm(module: Any) -> None:
    """Undo `exchange_norm`."""
    del module.exact_ops, module.exact_eps_name, module.exact_one_plus
    module.__class__ = type(module).__bases__[1]


class ExactActivation(nn.Module):
    """In the place of `act_fn`."""

    def __init__(self, original: nn.Module, function: Any) -> None:
        super().__init__()
        # In a tuple: as a submodule it would show up in the tree.
        self.original = (original,)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation."""
        return self.function(x)  # type: ignore[no-any-return]


def _bits_by_place(weight_NK: torch.Tensor) -> tuple[int, int]:
    """Sums of the elements' bits by row and by column, each weighted by its place: rows that trade places show too.

    Whole numbers, so that the order of summation does not matter.
    """
    words_NK = weight_NK.detach().view(torch.int32 if weight_NK.element_size() == 4 else torch.int16)
    rows, columns = (_by_place(words_NK.sum(dim=dim, dtype=torch.int64)) for dim in (1, 0))
    return rows, columns


def _by_place(sums: torch.Tensor) -> int:
    return int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())
