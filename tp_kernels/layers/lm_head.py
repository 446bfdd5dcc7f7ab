"""ParallelLMHead: logits, loss and likeliest words from a table divided by vocabulary.

Any vocabulary on any number of ranks: the division may be uneven and ranks may have no words, so that no
padding is needed that could leak into losses, checkpoints or sampled words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.collectives import all_gather
from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import GroupLike
from tp_kernels.ops import gather_rows, linear_cross_entropy

from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, refuse_rows


class ParallelLMHead(ColumnParallelLinear):
    """Logits of a table [V, H] whose words are divided over ranks.

    Args:
        hidden_size, vocab_size: H and V.
        bias: [V], divided like the words.
        gather_output: return all logits [..., V] on every rank; else those of this rank's words, as
            `vocab_parallel_cross_entropy` takes them.
        sequence_parallel: hidden is this rank's rows; logits are of all rows.
        batch_first: under sequence parallelism hidden is [b, s_r, H]; default: [s_r, b, H].
        out_dtype: of the logits.

    forward(hidden [..., H], rows=None, weight=None) -> [..., V] or [..., V_r]; rows: s under sequence
    parallelism, default s_r * W; weight: as of ColumnParallelLinear. `loss` and `argmax` need no logits of
    other ranks, and `loss` has none in memory.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        group: GroupLike = None,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        batch_first: bool | None = None,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            vocab_size,
            bias,
            group=group,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            batch_first=batch_first,
            out_dtype=out_dtype,
            device=device,
            dtype=dtype,
        )

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the table of `embedding`: one parameter, one gradient, one optimizer state."""
        if embedding.group is not self.group or (
            (embedding.num_embeddings, embedding.embedding_dim)
            != (self.out_features, self.in_features)
        ):
            raise ShapeError(
                f"ParallelLMHead({self.in_features}, {self.out_features}) and "
                f"VocabParallelEmbedding({embedding.num_embeddings}, {embedding.embedding_dim}) have "
                "tables or groups that differ: they cannot be one"
            )
        self.weight = embedding.weight

    def loss(
        self, hidden: Tensor, labels: Tensor, *, weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """`ops.linear_cross_entropy` of hidden [..., H] and labels [...] of all rows; options are its."""
        swap = self.sequence_parallel and self.batch_first
        loss = linear_cross_entropy(
            hidden.transpose(0, 1) if swap else hidden,
            self.used_weight(weight),
            labels.transpose(0, 1) if swap else labels,
            self.bias,
            group=self.group,
            vocab_size=self.out_features,
            sequence_parallel=self.sequence_parallel,
            **options,
        )
        return loss.transpose(0, 1) if swap and loss.dim() else loss

    @torch.no_grad()
    def argmax(
        self, hidden: Tensor, rows: int | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Likeliest words [...] of hidden [..., H], on every rank; of equal ones the first.

        Exchanges a value and an index per row, not logits. Arguments as of `forward`.
        """
        if self.sequence_parallel:
            hidden = gather_rows(hidden, group=self.group, rows=rows, dim=int(self.batch_first))
        else:
            refuse_rows(self, rows)
        logits = torch.nn.functional.linear(hidden, self.used_weight(weight), self.bias)
        ((start, _),) = self.placements["weight"].pieces()
        best = hidden.new_zeros(1, 2, *hidden.shape[:-1], dtype=torch.float64)  # holds both exactly
        best[:, 0] = -torch.inf
        if logits.shape[-1]:
            index = logits.argmax(-1, keepdim=True)
            best[0, 0] = logits.gather(-1, index).squeeze(-1)
            best[0, 1] = index.squeeze(-1) + start
        values, words = all_gather(best, self.group).unbind(1)
        largest = (values == values.amax(0)) | values.isnan()
        return torch.where(largest, words, torch.inf).amin(0).long()
