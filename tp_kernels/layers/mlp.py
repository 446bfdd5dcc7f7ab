"""ParallelMLP: the feed-forward block, widened by column and narrowed by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import GroupLike, as_group
from tp_kernels.ops._op import ACTIVATIONS, activate
from tp_kernels.ops.elementwise import swiglu

from .linear import ColumnParallelLinear, RowParallelLinear, column_parallel


class ParallelMLP(nn.Module):
    """y = act(x W_gate^T) * (x W_up^T) W_down^T (gated), or act(x W_up^T) W_down^T.

    Args:
        hidden_size, intermediate_size: of the unsplit block; any sizes on any number of ranks.
        activation: "gelu", "gelu_tanh", "silu" or "relu".
        gated: with a gate projection (SwiGLU is gated silu).
        bias: on every projection; the output bias is added once.
        sequence_parallel: input and output are this rank's rows [R_r, ..., H].

    forward(x [..., H], rows=None) -> [..., H]. Two projections share one gather and one reduction.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        group: GroupLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation is None or activation not in ACTIVATIONS:
            known = ", ".join(str(name) for name in ACTIVATIONS if name)
            raise UnsupportedError(f"ParallelMLP: activation={activation!r}; known are {known}")
        self.activation = activation
        options: dict[str, Any] = {
            "group": as_group(group),
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        self.gate_proj = (
            ColumnParallelLinear(hidden_size, intermediate_size, bias, **options) if gated else None
        )
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **options)

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        if self.gate_proj is None:
            (up,) = column_parallel(x, [self.up_proj], rows)
            return self.down_proj(activate(up, self.activation))
        gate, up = column_parallel(x, [self.gate_proj, self.up_proj], rows)
        if self.activation == "silu":
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(activate(gate, self.activation) * up)
