"""rms_norm and layer_norm, with a residual added before, and their gradients.

    s = round(x + residual)                                    x without a residual
    y = round(u * scale + bias)                                u = (s - mean) * rstd, in RMS norm s * rstd
    rstd = 1 / sqrt(mean((s - mean)^2) + epsilon)              scale = weight, or 1 + weight if zero_centered

    dx = round(rstd * (g - mean(g) - u * mean(g * u)) + ds)    g = dy * scale; without mean(g) in RMS norm
    d_weight = round(sum over rows of dy * u),  d_bias = round(sum over rows of dy)

(Zhang and Sennrich, 2019; Ba, Kiros and Hinton, 2016.) In float32 (float64 for float64), every result rounded
once. dx is the gradient of x and of the residual; ds is that of s, which goes on as the next residual. s, the
weight and two numbers per row are all that backward keeps. Nothing is communicated: where rows are split over
ranks, as under sequence parallelism, d_weight and d_bias are partial sums, for `finalize_gradients` to add.

Without gradients on the CPU, RMS norm takes the short way of elementwise.py, which in 16-bit dtypes rounds u
as well, as transformers does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from . import elementwise
from ._local import alike, blocks, check_rows, choose_local
from ._op import FLOATING, direct, needed, register, rows_of


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    implementation: str = "auto",
) -> Any:
    """RMS norm of x + residual over the last dimension.

    Args:
        x: [..., H], floating, any strides.
        weight: [H], of any floating dtype.
        residual: like x. If its dtype is another one, s and y have the wider of both.
        zero_centered: scale by 1 + weight.
        implementation: "auto", "reference" or "triton", see _local.py.

    Returns:
        y [..., H], or with a residual (y, s): s = x + residual.

    Raises:
        ShapeError: of shapes that do not fit.
        UnsupportedError: of dtypes and devices.
    """
    return _norm(
        "rms_norm", x, residual, weight, None, epsilon, False, zero_centered, implementation
    )


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    implementation: str = "auto",
) -> Any:
    """Layer norm of x + residual; bias: [H] of the dtype of the weight, or None; else as `rms_norm`."""
    return _norm(
        "layer_norm", x, residual, weight, bias, epsilon, True, zero_centered, implementation
    )


def _norm(
    operation: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centered: bool,
    zero_centered: bool,
    implementation: str,
) -> Any:
    check_rows(operation, x, residual=residual)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if vector.shape != x.shape[-1:]:
            raise ShapeError(
                f"{operation}: {name} is {tuple(vector.shape)}, x {tuple(x.shape)}; expected [H] and "
                "[..., H]"
            )
        wrong = vector.dtype not in FLOATING or vector.dtype != weight.dtype
        if wrong or vector.device != x.device:
            raise UnsupportedError(
                f"{operation}: {name} is {vector.dtype} on {vector.device}, x is on {x.device}; "
                "expected one floating dtype for weight and bias"
            )
    x, residual = alike(x, residual)
    plain = implementation == "auto" and x.is_cpu and not (centered or zero_centered)
    if plain and weight.dtype == x.dtype != torch.float64 and direct(x, weight, residual):
        if residual is None:
            return elementwise.rms_norm(x, weight, float(epsilon))
        s = x + residual
        return elementwise.rms_norm(s, weight, float(epsilon)), s
    y, *others = _op(
        x, residual, weight, bias, float(epsilon), centered, zero_centered, implementation
    )
    return y if residual is None else (y, others[-1])


def _scale(weight: Tensor, zero_centered: bool, wide: torch.dtype) -> Tensor:
    weight = weight.to(wide)
    return weight + 1 if zero_centered else weight


def _forward(
    s: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    epsilon: float,
    y: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    part: slice,
) -> None:
    """Fill the rows `part` of y [R, H], rstd and mean [R]."""
    values = s[part].to(scale.dtype)
    if mean is not None:
        y[part], means, roots = torch.native_layer_norm(values, scale.shape, scale, shift, epsilon)
        mean[part], rstd[part] = means.view(-1), roots.view(-1)
        return
    norms = torch.linalg.vector_norm(values, dim=-1)
    root = (norms.square_().div_(s.shape[-1]) + epsilon).rsqrt_()
    rstd[part] = root
    y[part] = (values * root.unsqueeze(-1)).mul_(scale)


def _kernel(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centered: bool,
    zero_centered: bool,
    implementation: str,
) -> list[Tensor]:
    """[y, rstd], then the mean if `centered`, then s if there is a residual."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if choose_local("norm", x, implementation) == "triton":
        import tp_kernels.kernels.norm as kernel

        scale = _scale(weight, True, torch.float32) if zero_centered else weight
        given: dict[str, Any] = {"residual": residual, "epsilon": epsilon}
        if centered:
            y, s, mean, rstd = kernel.layer_norm(x, scale, bias, **given)
        else:
            (y, s, rstd), mean = kernel.rms_norm(x, scale, **given), None
    else:
        s = (x if residual is None else x + residual).contiguous()  # sums go by memory
        scale, shift = _scale(weight, zero_centered, wide), None if bias is None else bias.to(wide)
        y, rstd = torch.empty_like(s), s.new_empty(s.shape[:-1], dtype=wide)
        mean = torch.empty_like(rstd) if centered else None
        outs = rows_of(y), rstd.view(-1), None if mean is None else mean.view(-1)
        for part in blocks(*rows_of(s).shape):
            _forward(rows_of(s), scale, shift, epsilon, *outs, part)
    results = [y, rstd] if mean is None else [y, rstd, mean]
    return results if residual is None else [*results, s]


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centered: bool,
    zero_centered: bool,
    implementation: str,
) -> list[Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_empty(x.shape)
    numbers = [x.new_empty(x.shape[:-1], dtype=wide) for _ in range(1 + centered)]
    return [y, *numbers] if residual is None else [y, *numbers, x.new_empty(x.shape)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, residual, weight, bias, _, ctx.centered, ctx.zero_centered, ctx.how = inputs
    numbers = output[1 : 2 + ctx.centered]
    ctx.mark_non_differentiable(*numbers)
    ctx.save_for_backward(x if residual is None else output[-1], weight, *numbers)
    ctx.with_bias, ctx.with_residual = bias is not None, residual is not None


def _backward(ctx: Any, gradients: list[Any]) -> tuple[Any, ...]:
    s, weight, rstd, *means = ctx.saved_tensors
    dy, ds = gradients[0], gradients[-1] if ctx.with_residual else None
    nothing = (None,) * 4
    if dy is None:  # y was not used
        return ds, ds, None, None, *nothing
    need = needed(ctx)
    vectors = bool(need[2]) or bool(need[3])
    mean = means[0] if means else None
    how = (vectors, ctx.zero_centered, ctx.how)
    dx, d_weight, d_bias = _backward_op(dy, ds, s, weight, rstd, mean, *how)
    return (
        dx,
        dx if ctx.with_residual else None,
        d_weight if need[2] else None,
        d_bias if need[3] and ctx.with_bias else None,
        *nothing,
    )


def _backward_kernel(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    vectors: bool,
    zero_centered: bool,
    implementation: str,
) -> list[Tensor]:
    """[dx, d_weight, d_bias]; those of the vectors are empty if not asked for."""
    wide = rstd.dtype
    if choose_local("norm", s, implementation) == "triton":
        import tp_kernels.kernels.norm as kernel

        scale = _scale(weight, True, wide) if zero_centered else weight
        if mean is None:
            dx, d_weight = kernel.rms_norm_backward(dy, s, scale, rstd, ds=ds)
            d_bias = d_weight.new_zeros(d_weight.shape)
        else:
            dx, d_weight, d_bias = kernel.layer_norm_backward(dy, s, scale, mean, rstd, ds=ds)
        return [dx, *_rounded(d_weight, d_bias.clone(), vectors, weight)]  # rows of one tensor
    scale = _scale(weight, zero_centered, wide)
    rows, ss, dx = rows_of(dy), rows_of(s.contiguous()), s.new_empty(s.shape)
    dss, dxs = None if ds is None else rows_of(ds), rows_of(dx)
    d_weight, d_bias = torch.zeros_like(scale), torch.zeros_like(scale)
    for part in blocks(*ss.shape):
        d, number = rows[part].contiguous().to(wide), rstd.view(-1)[part].unsqueeze(-1)
        values = ss[part].to(wide)
        if mean is not None:
            values = values - mean.view(-1)[part].unsqueeze(-1)
        unit = values * number
        product = d * unit
        if vectors:
            d_weight += product.sum(0)
            d_bias += d.sum(0)
        # Sums, and no product with a vector: its bits depend on where in memory the operands are.
        along = product.mul_(scale).sum(-1, keepdim=True).div_(s.shape[-1])
        d_part = torch.mul(d, scale, out=product)
        level = None if mean is None else d_part.sum(-1, keepdim=True).div_(s.shape[-1])
        d_part.sub_(unit.mul_(along))
        if level is not None:
            d_part.sub_(level)
        d_part.mul_(number)
        dxs[part] = d_part if dss is None else d_part.add_(dss[part])
    return [dx, *_rounded(d_weight, d_bias, vectors, weight)]


def _rounded(d_weight: Tensor, d_bias: Tensor, wanted: bool, weight: Tensor) -> list[Tensor]:
    """In the dtype of the weight, or nothing: outputs of an op, which share no memory."""
    if not wanted:
        return [weight.new_empty(0), weight.new_empty(0)]
    return [d_weight.to(weight.dtype), d_bias.to(weight.dtype)]


def _backward_fake(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    vectors: bool,
    zero_centered: bool,
    implementation: str,
) -> list[Tensor]:
    width = weight.shape[0] if vectors else 0
    return [s.new_empty(s.shape), weight.new_empty(width), weight.new_empty(width)]


_backward_op = register(
    "norm_backward",
    "(Tensor dy, Tensor? ds, Tensor s, Tensor weight, Tensor rstd, Tensor? mean, bool vectors, "
    "bool zero_centered, str implementation) -> Tensor[]",
    _backward_kernel,
    _backward_fake,
)
_op = register(
    "norm",
    "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float epsilon, bool centered, "
    "bool zero_centered, str implementation) -> Tensor[]",
    _kernel,
    _fake,
    _setup,
    _backward,
)
