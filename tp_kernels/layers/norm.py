"""RMSNorm and LayerNorm with the residual added before; whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import ShapeError
from tp_kernels.comm.group import GroupLike, ParallelGroup, as_group
from tp_kernels.ops.norm import layer_norm, rms_norm

from .placement import ParamPlacement, place


class RMSNorm(nn.Module):
    """y = u * weight, u = s / sqrt(mean(s^2) + epsilon) over the last dimension (Zhang and Sennrich, 2019).

    Args:
        hidden: H.
        epsilon: added to the mean of squares.
        group: as in the parallel layers.
        sequence_parallel: x holds this rank's tokens, so that the gradient of the weight is a part, which
            `finalize_gradients` adds over the ranks.
        zero_centered: scale by 1 + weight, which starts at 0.

    forward(x [..., H], residual=None) -> y, or with a residual (y, s): s = x + residual.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    placements: dict[str, ParamPlacement]

    def __init__(
        self,
        hidden: int,
        epsilon: float = 1e-6,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ShapeError(f"{type(self).__name__}({hidden}): the width must be positive")
        self.group: ParallelGroup = as_group(group)
        self.hidden, self.epsilon = hidden, float(epsilon)
        self.sequence_parallel, self.zero_centered = sequence_parallel, zero_centered
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._add("weight")
        self.register_parameter("bias", None)
        self.reset_parameters()

    def _add(self, name: str) -> None:
        partial = self.sequence_parallel
        place(self, name, ParamPlacement(self.group, (self.hidden,), partial_gradient=partial))
        setattr(self, name, nn.Parameter(torch.empty(self.hidden, **self._options)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Scale by 1, add 0."""
        self.weight.fill_(0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return rms_norm(
            x,
            self.weight,
            self.epsilon,
            residual=residual,
            zero_centered=self.zero_centered,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, epsilon={self.epsilon}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, zero_centered={self.zero_centered}"
        )


class LayerNorm(RMSNorm):
    """y = u * weight + bias, u = (s - mean) / sqrt(variance + epsilon) (Ba, Kiros and Hinton, 2016).

    bias: with one; otherwise as RMSNorm.
    """

    def __init__(
        self, hidden: int, epsilon: float = 1e-5, *, bias: bool = True, **options: Any
    ) -> None:
        super().__init__(hidden, epsilon, **options)
        if bias:
            self._add("bias")
            self.reset_parameters()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return layer_norm(
            x,
            self.weight,
            self.bias,
            self.epsilon,
            residual=residual,
            zero_centered=self.zero_centered,
        )
