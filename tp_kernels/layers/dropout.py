"""ParallelDropout: dropout whose mask is that of the unsplit tensor, on every rank and world size."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.comm.layout import split_range
from tp_kernels.ops.dropout import dropout

from .random import RandomStreams, draw_key


class ParallelDropout(nn.Module):
    """x / (1 - p) on a share 1 - p of the elements, 0 elsewhere, plus the residual, while training.

    The mask is a function of the key and of (batch, token, feature), so it does not depend on how many ranks
    there are, on sequence parallelism or on the layout.

    Args:
        p: probability of an element to be zeroed, in [0, 1].
        group: as in the parallel layers.
        sequence_parallel: x holds this rank's tokens; see batch_first.
        batch_first: x is [b, s, H], otherwise [s, b, H]. Default: not under sequence parallelism.
        streams: keys are drawn from the stream "same" of these, and nothing is sent. Without, from torch's
            default generator on rank 0, which each call sends to the others (8 bytes).

    forward(x, residual=None, rows=None) -> like x. x: [b, s, H] or [s, b, H], without sequence parallelism
    any shape; rows: s under sequence parallelism, default s_r * W.

    Raises:
        ShapeError: x has not this rank's share of `rows`. Without them it cannot be seen: tokens that do not
            divide need rows=.
        UnsupportedError: p is no probability; `rows` without sequence parallelism.
    """

    def __init__(
        self,
        p: float,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        streams: RandomStreams | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UnsupportedError(f"ParallelDropout: p={p}; expected a probability, 0 to 1")
        self.p = float(p)
        self.group: ParallelGroup = as_group(group)
        self.sequence_parallel = sequence_parallel
        self.batch_first = not sequence_parallel if batch_first is None else batch_first
        self.streams = streams

    def forward(self, x: Tensor, residual: Tensor | None = None, rows: int | None = None) -> Tensor:
        start, size = self._place(x, rows)
        if not self.training or self.p == 0:
            return x if residual is None else x + residual
        with nullcontext() if self.streams is None else self.streams.fork("same"):
            key = draw_key(x.device, self.group if self.streams is None else None)
        if self.batch_first or x.dim() != 3:
            return dropout(
                x, self.p, key=key, dim=x.dim() - 2, start=start, size=size, residual=residual
            )
        x = x.transpose(0, 1)
        residual = None if residual is None else residual.transpose(0, 1)
        y = dropout(x, self.p, key=key, dim=1, start=start, size=size, residual=residual)
        return y.transpose(0, 1)

    def _place(self, x: Tensor, rows: int | None) -> tuple[int, int | None]:
        """Where this rank's tokens start, and how many there are."""
        if not self.sequence_parallel:
            if rows is not None:
                raise UnsupportedError("rows= has a meaning only under sequence_parallel=True")
            return 0, None
        if x.dim() not in (2, 3):
            raise ShapeError(
                f"ParallelDropout: x is {tuple(x.shape)}; under sequence parallelism expected three "
                "dimensions, or [tokens, H]"
            )
        mine = x.shape[1 if self.batch_first and x.dim() == 3 else 0]
        rank, world = self.group.rank, self.group.size
        size = mine * world if rows is None else rows
        start, stop = split_range(size, world, rank)
        if stop - start != mine:
            raise ShapeError(
                f"ParallelDropout: rank {rank} of {world} holds {mine} tokens, but its share of "
                f"rows={rows} is {stop - start}"
            )
        return start, size

    def extra_repr(self) -> str:
        return (
            f"p={self.p}, sequence_parallel={self.sequence_parallel}, batch_first={self.batch_first}, "
            f"streams={self.streams is not None}"
        )
