"""How the losses of micro-batches become the loss of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tp_kernels.comm.errors import UnsupportedError

IGNORED = -100  # what torch's cross_entropy ignores
SCALES = ("micro_batch", "token", "sum")


def count_tokens(target: Any) -> int:
    """Elements of an integer target that are not `IGNORED`."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        raise UnsupportedError(
            'scale="token": how many tokens a target has is only known of a tensor of integers; pass count='
        )
    return int((target != IGNORED).sum())


def factor(scale: str, micro_batches: int, replicas: int, tokens: int) -> float:
    """What multiplies each loss, so that the sum over micro-batches and replicas is the loss of the step."""
    if scale == "micro_batch":
        return 1.0 / (micro_batches * replicas)
    if scale == "token":
        return 1.0 / tokens if tokens else 0.0
    return 1.0
