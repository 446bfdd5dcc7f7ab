"""The short way into the engine: C functions that take tensors as they are and answer with new ones.

They answer None where the ordinary way has to be gone: another device, dtype or layout, gradients, an active
transform, mode or autocast. Both ways make the same rounds and give the same bits, so that every rank chooses
for itself. See csrc/host/short_way.h for why they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .host_slot import OPERATIONS, REDUCIBLE, HostSlot
from .symmetric_memory import _host

# Up to so many rows a reducing product is one round of the engine, whichever way each rank multiplies.
SHORT_ROWS = 16
# Below this many rows a product is bound by reading the weight: gather first and read it once.
GATHER_FIRST_ROWS = 64


def _few_rows() -> dict[torch.dtype, int]:
    """Up to these, at most SHORT_ROWS, `_host.product` was faster than torch with one thread.

    With weights in the cache or not; AVX-512, with matrix units that torch uses for the 16-bit dtypes.
    """
    try:
        there = _host is not None and _host.has_product()
    except ValueError:  # TP_KERNELS_ISA names none; whoever makes a group is told
        there = False
    return {torch.float32: 16, torch.bfloat16: 8, torch.float16: 8} if there else {}


FEW_ROWS = _few_rows()

# Of torch; the functions are of C, as short as they come.
_TORCH = {
    "tensor": torch.Tensor,
    "parameter": torch.nn.Parameter,
    "transforms_active": torch._C._are_functorch_transforms_active,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "tracing_state": torch._C._get_tracing_state,
    "is_neg": torch.Tensor.is_neg,
    "autocast_enabled": torch._C._is_any_autocast_enabled,
    "grad_enabled": torch.is_grad_enabled,
    "forward_ad": torch.autograd.forward_ad,
    "num_threads": torch.get_num_threads,
    "linear": torch.nn.functional.linear,
}
# A torch without DLPack's C exchange API goes the ordinary way.
AVAILABLE: bool = _host is not None and _host.set_torch(_TORCH)


def _ordinary(*_: Any) -> None:
    return None


# Element-wise, without a slot; arguments as in ops/elementwise.py.
rms_norm: Callable[..., Any] = _host.rms_norm if AVAILABLE else _ordinary
swiglu: Callable[..., Any] = _host.swiglu if AVAILABLE else _ordinary
rotary: Callable[..., Any] = _host.rotary if AVAILABLE else _ordinary

_LINEAR = ("linear_all_reduce", "linear_reduce_scatter", "all_gather_linear", "copy_linear")
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


class ShortWay:
    """The functions on one slot, positional arguments only; without a slot they always answer None."""

    linear_all_reduce: Callable[..., Any]  # (x, weight, bias)
    linear_reduce_scatter: Callable[..., Any]  # (x, weight, bias)
    copy_linear: Callable[..., Any]  # (x, weights, biases)
    all_gather_linear: Callable[..., Any]  # (x, weights, biases, rows)
    all_reduce: Callable[..., Any]  # (x, out); out may be x
    reduce_scatter: Callable[..., Any]  # (x, out)
    all_gather: Callable[..., Any]  # (x, rows, out)

    def __init__(
        self,
        slot: HostSlot | None = None,
        fail: Callable[[BaseException, str], NoReturn] | None = None,
        *,
        communication_thread: bool = False,
        layers: bool = True,
    ) -> None:
        """fail: raises what a failure of a function, given by name, means.

        layers: whether linear layers may go this way.
        """
        functions: dict[str, Callable[..., Any]] = {}
        self._counts: Callable[[bool], dict[str, int]] = lambda reset: {}
        if slot is not None and AVAILABLE:
            functions, self._counts = _host.short_way(
                slot.raw,
                fail,
                communication_thread,
                SHORT_ROWS,
                GATHER_FIRST_ROWS,
                [FEW_ROWS.get(dtype, 0) for dtype in REDUCIBLE],
                [OPERATIONS[name] for name in _LINEAR[:3]],
            )
        for name in (*_LINEAR, *_COLLECTIVES):
            allowed = layers or name in _COLLECTIVES
            setattr(self, name, functions.get(name, _ordinary) if allowed else _ordinary)

    def counts(self, reset: bool = False) -> dict[str, int]:
        """Calls by function that did not answer None, since the last reset."""
        return self._counts(reset)
