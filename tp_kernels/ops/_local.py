"""Ops that stay on one rank: which implementation runs them, and why.

"reference" is the torch formula, on any device. "host" is C++ for CPU tensors, where it is measurably faster.
"triton" is the kernel of the same name in tp_kernels.kernels, for CUDA tensors, and for CPU tensors where
Triton interprets. Ranks may choose differently: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from tp_kernels import dispatch
from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.host_slot import REDUCIBLE
from tp_kernels.comm.symmetric_memory import HOST_OBSTACLE
from tp_kernels.comm.triton_support import TritonSupport

from ._op import FLOATING, device_type

# Elements of a block: 128 KiB in float32.
BLOCK = 1 << 15
IMPLEMENTATIONS = {
    "dropout": ("host", "triton", "reference"),
    "gated": ("triton", "reference"),
    "rotary": ("triton", "reference"),
    "norm": ("triton", "reference"),
}


def explain_local(
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    implementation: str = "auto",
) -> dispatch.Choice:
    """What runs `operation` ("dropout", "gated", "rotary" or "norm") on such tensors, and why.

    Raises:
        UnsupportedError: of names that are none, and where `implementation` cannot run.
    """
    known = IMPLEMENTATIONS.get(operation)
    if known is None:
        names = ", ".join(IMPLEMENTATIONS)
        raise UnsupportedError(f"explain_local({operation!r}): known ops are {names}")
    if implementation != "auto" and implementation not in known:
        raise UnsupportedError(
            f"{operation}: implementation={implementation!r}; known are auto, {', '.join(known)}"
        )
    kind = device if isinstance(device, str) else device.type
    return _choose(operation, dtype, kind.partition(":")[0], implementation)


def choose_local(operation: str, x: Tensor, implementation: str) -> str:
    """The name of what runs `operation` on x."""
    choice = explain_local(
        operation, dtype=x.dtype, device=device_type(x), implementation=implementation
    )
    return choice.implementation


@cache
def _choose(operation: str, dtype: torch.dtype, device: str, asked: str) -> dispatch.Choice:
    if asked != "auto":
        why_not = _obstacle(asked, dtype, device)
        if why_not:
            raise UnsupportedError(
                f"{operation}: implementation={asked!r} cannot run: {why_not}; "
                "use implementation='auto'"
            )
        return dispatch.Choice(operation, asked, "asked for")
    rejected: dict[str, str] = {}
    for name in IMPLEMENTATIONS[operation][:-1]:
        why_not = _obstacle(name, dtype, device)
        if why_not is None and name == "triton":
            if device == "cpu":
                why_not = "CPU tensors run in Triton's interpreter, which is for tests"
            elif not dispatch.TRITON_PROVEN:
                why_not = (
                    "possible, but never run on a GPU so far: ask for it with "
                    "implementation='triton', after `make gpu-check`"
                )
        if why_not is None:
            return dispatch.Choice(operation, name, f"fused, for {device} tensors", rejected)
        rejected[name] = why_not
    return dispatch.Choice(operation, "reference", "operations of torch", rejected)


def _obstacle(name: str, dtype: torch.dtype, device: str) -> str | None:
    if name == "reference":
        return None
    if dtype not in REDUCIBLE:
        return f"kernels take float32, bfloat16 and float16, not {dtype}"
    if name == "host":
        if device != "cpu":
            return f"it is for CPU tensors, not {device}"
        return HOST_OBSTACLE
    return TritonSupport.current().obstacle(device)


def check_rows(operation: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse x [..., H] of no floating dtype, and others of other shapes or on other devices."""
    if x.dtype not in FLOATING:
        raise UnsupportedError(f"{operation}: x has dtype {x.dtype}; supported are {FLOATING}")
    if x.dim() == 0:
        raise ShapeError(f"{operation}: x is a scalar, expected [..., H]")
    for name, other in others.items():
        if other is None:
            continue
        if other.shape != x.shape:
            raise ShapeError(
                f"{operation}: {name} is {tuple(other.shape)}, expected {tuple(x.shape)} as x"
            )
        if other.dtype not in FLOATING or other.device != x.device:
            raise UnsupportedError(
                f"{operation}: {name} is {other.dtype} on {other.device}, x {x.dtype} on {x.device}"
            )


def alike(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and what is added to it in one dtype, the wider one, as torch's sum; autocast mixes them."""
    if residual is None or residual.dtype == x.dtype:
        return x, residual
    wide = torch.promote_types(x.dtype, residual.dtype)
    return x.to(wide), residual.to(wide)


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Rows by so many that intermediate results stay in the cache of a core.

    New memory of the size of activations costs more to get than to fill.
    """
    step = max(1, BLOCK // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def widen(x: Tensor) -> Tensor:
    """In the dtype of intermediate results: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()
