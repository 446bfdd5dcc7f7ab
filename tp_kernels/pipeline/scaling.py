"""How the losses of micro-batches become the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tp_kernels.comm.errors import UnsupportedError

IGNORED = -100  # what torch's cross_entropy ignores
SCALES = ("micro_batch", "token", "sum")


class Losses(NamedTuple):
    """What a step returns, the same on every rank.

    total: the loss whose gradient the parameters got, over all replicas; where every micro-batch is an update
        of its own, the mean over updates.
    each: what loss_fn returned for each micro-batch of this replica.
    """

    total: float
    each: tuple[float, ...]


def check(scale: str, count: Any) -> None:
    if scale not in SCALES:
        raise UnsupportedError(f"scale={scale!r}: use one of {', '.join(SCALES)}")
    if count is not None and scale != "token":
        raise UnsupportedError(f'count= has no effect with scale={scale!r}; use scale="token"')


def count_tokens(target: Any) -> int:
    """Elements of an integer target that are not `IGNORED`."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        raise UnsupportedError(
            'scale="token": how many tokens a target has is only known of a tensor of integers; pass count='
        )
    return int((target != IGNORED).sum())


def loss_of(loss_fn: Callable[..., Any] | None, output: Any, target: Any) -> Tensor:
    """The loss of a micro-batch; without a function, the output is it."""
    loss = output if loss_fn is None else loss_fn(output, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        who = "the last stage" if loss_fn is None else "loss_fn"
        raise UnsupportedError(f"{who} returned {what}, not a loss: a tensor of one element")
    return loss


def factors(
    scale: str, micro_batches: int, replicas: int, tokens: Sequence[int], flush: bool
) -> list[float]:
    """What multiplies the loss of each micro-batch: the sum over an update and over replicas is its loss.

    Args:
        tokens: of each micro-batch, over all replicas; for scale="token".
        flush: an update is of all micro-batches, else of one.
    """
    if scale == "sum":
        return [1.0] * micro_batches
    if scale == "micro_batch":
        return [1.0 / ((micro_batches if flush else 1) * replicas)] * micro_batches
    counts = [sum(tokens)] * micro_batches if flush else tokens
    return [1.0 / count if count else 0.0 for count in counts]
