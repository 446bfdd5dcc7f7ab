"""Grid: the groups of a rank where tensor, pipeline and data parallelism are used together."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch.distributed as dist

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup


class Grid:
    """The ranks of torch.distributed as data x pipeline x tensor. Made by all of them alike.

    Rank (d * pipeline + s) * tensor + t is tensor rank t of stage s of replica d: ranks of a tensor group are
    neighbours, since they communicate most.

    Args:
        pipeline, tensor, data: sizes, whose product is the number of ranks.
        options: of every ParallelGroup (provider, timeout, ...).

    Attributes:
        pipeline, tensor, data: ParallelGroups of this rank: of its replica and tensor rank, of its stage, of
            those that hold the same weights.

    Raises:
        ShapeError: another number of ranks than the product.
        UnsupportedError: torch.distributed is not initialised.
    """

    def __init__(self, pipeline: int, tensor: int = 1, data: int = 1, **options: Any) -> None:
        if not dist.is_initialized():
            raise UnsupportedError("Grid: call torch.distributed.init_process_group first")
        world = dist.get_world_size()
        if min(pipeline, tensor, data) < 1 or pipeline * tensor * data != world:
            raise ShapeError(
                f"Grid(pipeline={pipeline}, tensor={tensor}, data={data}) is of {pipeline * tensor * data} "
                f"ranks; there are {world}"
            )

        def rank_of(d: int, s: int, t: int) -> int:
            return (d * pipeline + s) * tensor + t

        lines = [
            [
                [rank_of(d, s, t) for s in range(pipeline)]
                for d in range(data)
                for t in range(tensor)
            ],
            [
                [rank_of(d, s, t) for t in range(tensor)]
                for d in range(data)
                for s in range(pipeline)
            ],
            [
                [rank_of(d, s, t) for d in range(data)]
                for s in range(pipeline)
                for t in range(tensor)
            ],
        ]
        self._process_groups = []
        rank = dist.get_rank()
        for kind in lines:
            for ranks in kind:  # every rank makes all groups, in one order
                made = dist.new_group(ranks)
                if rank in ranks:
                    self._process_groups.append(made)
        groups = [ParallelGroup(made, **options) for made in self._process_groups]
        self.pipeline, self.tensor, self.data = groups

    def close(self) -> None:
        """Leave the groups in order."""
        for group in (self.pipeline, self.tensor, self.data):
            group.close()
        for made in self._process_groups:
            dist.destroy_process_group(made)
        self._process_groups = []

    def __enter__(self) -> Grid:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = f"pipeline={self.pipeline.size}, tensor={self.tensor.size}, data={self.data.size}"
        at = f"stage rank {self.pipeline.rank}, tensor rank {self.tensor.rank}, replica {self.data.rank}"
        return f"Grid({sizes}; {at})"
