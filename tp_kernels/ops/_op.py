"""What every op shares: argument checks, the torch library, and the way to an implementation.

Public functions normalise their arguments to 2-D rows and lists of weights. Without gradients or tracing
they call the implementation directly; otherwise they go through `torch.ops.tp_kernels.*`, which carry
schema, fake kernel and autograd formula, so torch.compile and checkpointing see one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.dispatch import IMPLEMENTATIONS, choose

library = torch.library.Library("tp_kernels", "DEF")

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor] | None] = {
    None: None,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
}
# Implementations that `group.short` stands in for, where it can.
SHORT = ("auto", "host")
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define `tp_kernels::name`; returns the op overload."""
    library.define(name + schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_kernels::{name}", fake, lib=library)
    if backward is not None:

        def once(ctx: Any, *gradients: Any) -> Any:
            # The communication of a backward has no gradient of its own.
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"tp_kernels::{name} has no second derivative; do not use create_graph=True"
                )
            return backward(ctx, *gradients)

        torch.library.register_autograd(
            f"tp_kernels::{name}", once, setup_context=setup_context, lib=library
        )
    return getattr(torch.ops.tp_kernels, name).default


def run(
    operation: str,
    kernels: Mapping[str, Callable[..., Any]],
    group: ParallelGroup,
    implementation: str,
    rows: int,
    width: int,
    like: Tensor,
    *args: Any,
) -> Any:
    """Dispatch one call: choose from values equal on all ranks, count it, translate faults."""
    name = choose(
        operation, group, rows, width, like.dtype, device_type(like), implementation
    ).implementation
    return group.run(operation, name, kernels[name], group, *args)


def direct(*tensors: Tensor | None) -> bool:
    """True when nothing needs to see an op: no gradient, no tracing, no function transform."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    if torch.is_grad_enabled():
        return not any(t is not None and t.requires_grad for t in tensors)
    return True


def device_type(x: Tensor) -> str:
    """`x.device.type`, which torch makes anew on every call: a third of a microsecond."""
    return "cpu" if x.is_cpu else x.device.type


def check_call(operation: str, group: Any, implementation: str) -> ParallelGroup:
    if not isinstance(group, ParallelGroup):
        raise UnsupportedError(
            f"{operation}: group={group!r}; ops take a ParallelGroup, made once on every rank: "
            "tp_kernels.ParallelGroup(process_group or mesh dimension)"
        )
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise UnsupportedError(
            f"{operation}: implementation={implementation!r}; known are {', '.join(IMPLEMENTATIONS)}"
        )
    return group


def prepare(
    operation: str,
    group: ParallelGroup,
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None,
    activation: str | None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x [..., K], weights and biases as lists (all biases or none), checked, autocast applied."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    if bias is None:
        biases: list[Tensor | None] = [None] * len(weights)
    else:
        biases = [bias] if isinstance(bias, Tensor) else list(bias)
    device = device_type(x)
    autocast = torch.is_autocast_enabled(device)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:  # like F.linear
        cast = torch.get_autocast_dtype(device)
        x = x.to(cast)
        weights = [w.to(cast) for w in weights]
        biases = [None if b is None else b.to(cast) for b in biases]
    dtype, shape = x.dtype, x.shape
    valid = len(shape) > 0 and dtype in FLOATING and 0 < len(weights) == len(biases)
    for w, b in zip(weights, biases, strict=False):
        valid = valid and w.dim() == 2 and w.shape[1] == shape[-1] and w.dtype is dtype
        valid = valid and (b is None or (b.dtype is dtype and b.shape == w.shape[:1]))
    if not valid or weights[0].device != x.device or activation not in ACTIVATIONS:
        _refuse(operation, group, x, weights, biases, activation)
    if bias is None:
        return x, weights, []
    if any(b is not None for b in biases):  # torch lists hold no None
        filled = [
            w.new_zeros(w.shape[0]) if b is None else b.contiguous()
            for w, b in zip(weights, biases, strict=True)
        ]
        return x, weights, filled
    return x, weights, []


def _refuse(
    operation: str,
    group: ParallelGroup,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
) -> NoReturn:
    """Say which argument is wrong; runs before anything is sent."""
    where = f"{operation} on rank {group.rank} of {group.size}"
    if activation not in ACTIVATIONS:
        known = ", ".join(str(name) for name in ACTIVATIONS)
        raise UnsupportedError(f"{where}: activation={activation!r}; known are {known}")
    if x.dim() == 0:
        raise ShapeError(f"{where}: x is a scalar, expected [..., K]")
    if not weights or len(biases) != len(weights):
        raise ShapeError(f"{where}: {len(weights)} weights and {len(biases)} biases")
    if x.dtype not in FLOATING:
        raise UnsupportedError(f"{where}: x has dtype {x.dtype}; supported are {FLOATING}")
    for index, (w, b) in enumerate(zip(weights, biases, strict=True)):
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ShapeError(
                f"{where}: x is {tuple(x.shape)} and weight {index} is {tuple(w.shape)}; expected "
                f"[N, K] with K = {x.shape[-1]}"
            )
        if w.dtype != x.dtype or w.device != x.device:
            raise UnsupportedError(
                f"{where}: x is {x.dtype} on {x.device}, weight {index} is {w.dtype} on {w.device}; "
                "convert one of them, or use torch.autocast"
            )
        if b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype):
            raise ShapeError(
                f"{where}: bias {index} is {tuple(b.shape)} {b.dtype}, expected [{w.shape[0]}] "
                f"{x.dtype}"
            )
    raise UnsupportedError(f"{where}: arguments on different devices")


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K]; K may be zero, which `reshape(-1, K)` refuses."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def finish(y: Tensor, leading: Sequence[int], activation: str | None) -> Tensor:
    """[M, N] -> [*leading, N], activation applied."""
    return activate(y if len(leading) == 1 else y.view(*leading, y.shape[-1]), activation)


def activate(y: Tensor, activation: str | None) -> Tensor:
    function = ACTIVATIONS[activation]
    return y if function is None else function(y)


def activated(
    y: Tensor | tuple[Tensor, ...], activation: str | None
) -> Tensor | tuple[Tensor, ...]:
    """`activate` of an output or of each of several."""
    if activation is None:
        return y
    return (
        activate(y, activation)
        if isinstance(y, Tensor)
        else tuple(activate(z, activation) for z in y)
    )


def transposed(weights: Sequence[Tensor]) -> list[Tensor]:
    """[N, K] -> [K, N] views: the weights of the input gradient."""
    return [w.t() for w in weights]


def bias_gradient(dy: Tensor) -> Tensor:
    """Sum over rows, accumulated in fp32 whatever the dtype."""
    wide = dy.dtype if dy.dtype == torch.float64 else torch.float32
    return dy.sum(0, dtype=wide).to(dy.dtype)
