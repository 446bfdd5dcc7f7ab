"""VocabParallelCrossEntropy: the loss of a head that keeps its logits divided, as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.ops import vocab_parallel_cross_entropy


class VocabParallelCrossEntropy(nn.Module):
    """`ops.vocab_parallel_cross_entropy` with its options, where nn.CrossEntropyLoss was.

    forward(logits [..., V_r], labels [...]) -> loss, the same bits on every rank.
    """

    def __init__(self, vocab_size: int, *, group: GroupLike = None, **options: Any) -> None:
        super().__init__()
        self.group: ParallelGroup = as_group(group)
        self.vocab_size, self.options = vocab_size, options

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, labels, group=self.group, vocab_size=self.vocab_size, **self.options
        )

    def extra_repr(self) -> str:
        return ", ".join([str(self.vocab_size), *(f"{k}={v}" for k, v in self.options.items())])
