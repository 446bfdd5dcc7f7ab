"""Embedding divided by vocabulary; any vocabulary on any number of ranks, no padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.ops import reduce_from_ranks, reduce_scatter_rows

from .linear import even_ranges
from .placement import ParamPlacement, place


class VocabParallelEmbedding(nn.Module):
    """Rows of the table [V, H] divided over ranks; each token is looked up by the rank that holds it.

    Args:
        num_embeddings, embedding_dim: V and H; any V, also fewer words than ranks.
        padding_idx: its row takes no gradient, as in nn.Embedding.
        scale: multiplies the result, as in Gemma (sqrt(H)).
        sequence_parallel: return this rank's rows only.
        batch_first: ids are [b, s]; else [s, b]. Matters under sequence parallelism alone, which divides s:
            default False there.

    forward(ids [...], equal on all ranks) -> [..., H] on every rank, with the exact bits of the unsplit
    lookup (all other summands are zero); under sequence parallelism [s_r, b, H], or [b, s_r, H], with
    s_r = split_sizes(s, W)[rank]. Ids outside 0..V-1 raise ShapeError.
    """

    placements: dict[str, ParamPlacement]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: GroupLike = None,
        scale: float | None = None,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group: ParallelGroup = as_group(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ShapeError(
                    f"VocabParallelEmbedding: padding_idx={padding_idx} is outside the vocabulary "
                    f"0..{num_embeddings - 1}"
                )
            padding_idx %= num_embeddings  # as torch's, counted from the end
        self.padding_idx, self.scale = padding_idx, scale
        self.sequence_parallel = sequence_parallel
        self.batch_first = not sequence_parallel if batch_first is None else batch_first
        self.ranges = even_ranges(num_embeddings, self.group.size)
        placement = ParamPlacement(self.group, (num_embeddings, embedding_dim), 0, self.ranges)
        place(self, "weight", placement)
        self.weight = nn.Parameter(torch.empty(placement.local_shape(), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Embedding's initialisation of the unsplit table, of which each rank keeps its part."""
        if not self.weight.is_meta:
            options: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
            table = nn.Embedding(
                self.num_embeddings, self.embedding_dim, self.padding_idx, **options
            )
            self.load_dense(table.weight)

    @torch.no_grad()
    def load_dense(self, weight: Tensor) -> None:
        """Take this rank's rows of the unsplit table [V, H]."""
        self.weight.copy_(self.placements["weight"].slice(weight))

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                raise ShapeError(
                    f"VocabParallelEmbedding: token ids {low}..{high} are outside the vocabulary "
                    f"0..{self.num_embeddings - 1}"
                )
        if self.sequence_parallel and ids.dim() <= self.batch_first:
            raise ShapeError(
                f"VocabParallelEmbedding: ids {tuple(ids.shape)} have no sequence to divide over ranks; "
                f"batch_first={self.batch_first}"
            )
        rows = self._lookup(ids)
        if self.sequence_parallel:
            rows = reduce_scatter_rows(rows, group=self.group, dim=int(self.batch_first))
        else:
            rows = reduce_from_ranks(rows, group=self.group)
        return rows if self.scale is None else rows * self.scale

    def _lookup(self, ids: Tensor) -> Tensor:
        """[..., H] with zeros for the words of other ranks."""
        if self.group.size == 1:
            return nn.functional.embedding(ids, self.weight, self.padding_idx)
        start, stop = self.ranges[self.group.rank]
        mine = (ids >= start) & (ids < stop)
        if stop == start:  # fewer words than ranks; keep the parameter in the graph
            rows = self.weight.sum() + self.weight.new_zeros(*ids.shape, self.embedding_dim)
        else:
            rows = nn.functional.embedding(torch.where(mine, ids - start, 0), self.weight)
            if self.padding_idx is not None:  # its row takes no gradient, as in nn.Embedding
                rows = torch.where((ids != self.padding_idx).unsqueeze(-1), rows, rows.detach())
            rows = torch.where(mine.unsqueeze(-1), rows, rows.new_zeros(()))
        return rows

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rank {self.group.rank} of "
            f"{self.group.size}"
        )
