"""A model with every kind of parameter that state can have, and its unsplit values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tp_kernels.comm import ParallelGroup, split_range
from tp_kernels.layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelLMHead,
    ParallelTransformerBlock,
    ParamPlacement,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    finalize_gradients,
    placements,
)
from tp_kernels.layers.placement import place

# Unsplit shapes by stock name. 7, 5, 11 and 13 divide by no world size; 5 query heads on 2 KV heads.
SHAPES = {
    "embed.weight": (13, 6),
    "head.weight": (13, 6),  # tied
    "column.weight": (7, 6),
    "column.bias": (7,),
    "row.weight": (6, 7),
    "row.bias": (6,),  # whole
    "narrow.weight": (2, 6),  # fewer features than ranks
    "narrow.bias": (2,),
    "packed.weight": (10, 6),  # rows q (6) | k (4), each divided
    "packed.mixed": (3, 6),  # columns in MIXED
    "packed.scale": (),  # whole, a scalar
    "qkv.q_proj.weight": (10, 6),
    "qkv.k_proj.weight": (4, 6),  # heads that several ranks hold
    "qkv.v_proj.weight": (4, 6),
    "norm.weight": (6,),  # no placement
    "norm.bias": (6,),
    "norm.running_mean": (6,),
    "norm.running_var": (6,),
}


# By world size, columns of every rank: parts that overlap in parts, out of order, and none.
MIXED = {
    1: ((0, 6),),
    2: ((0, 4), (2, 6)),
    3: ((0, 4), (2, 6), ((5, 6), (0, 3))),
    4: ((0, 4), (2, 5), (3, 3), ((3, 6), (1, 2))),
}


class Packed(nn.Module):
    """A weight of two blocks of rows, each divided over the ranks; odd columns; and a whole scalar."""

    def __init__(self, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        blocks = [
            [split_range(6, group.size, r), split_range(4, group.size, r)]
            for r in range(group.size)
        ]
        ranges = tuple((q, (k[0] + 6, k[1] + 6)) for q, k in blocks)
        place(self, "weight", ParamPlacement(group, (10, 6), 0, ranges))
        place(self, "mixed", ParamPlacement(group, (3, 6), 1, MIXED[group.size]))
        place(self, "scale", ParamPlacement(group, (), partial_gradient=True))
        for name, placement in self.placements.items():
            setattr(self, name, nn.Parameter(torch.zeros(placement.local_shape(), dtype=dtype)))
        self.seen = torch.tensor(0)

    def get_extra_state(self) -> Tensor:
        return self.seen.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state


class Counting(nn.Identity):
    """Extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state


class Everything(nn.Module):
    def __init__(self, group: ParallelGroup, dtype: torch.dtype, tied: bool = True) -> None:
        super().__init__()
        options = {"group": group, "dtype": dtype}
        self.embed = VocabParallelEmbedding(13, 6, **options)
        self.column = ColumnParallelLinear(6, 7, **options)
        self.row = RowParallelLinear(7, 6, **options)
        self.narrow = ColumnParallelLinear(6, 2, **options)
        self.packed = Packed(group, dtype)
        self.qkv = QKVParallelLinear(6, 5, 2, 2, **options)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.counting = Counting()
        self.head = ParallelLMHead(6, 13, **options)
        if tied:
            self.head.weight = self.embed.weight


def unsplit(dtype: torch.dtype, seed: int = 0, tied: bool = True) -> dict[str, object]:
    """The same unsplit state in every process, by stock name."""
    draw = torch.Generator().manual_seed(seed)
    state: dict[str, object] = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }
    if tied:
        state["head.weight"] = state["embed.weight"]
    state["norm.num_batches_tracked"] = torch.tensor(seed + 3)
    state["packed._extra_state"] = torch.tensor(seed + 5)
    state["counting._extra_state"] = {"calls": seed + 7}
    return state


def equal(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    """The same names with the same bits."""
    return a.keys() == b.keys() and all(
        torch.equal(value, b[name]) if isinstance(value, Tensor) else value == b[name]
        for name, value in a.items()
    )


class Transformer(nn.Module):
    """Two blocks with most options that change parameters, between a table and the head tied to it."""

    def __init__(self, group: ParallelGroup, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"group": group, "dtype": dtype}
        sizes = (10, 5, 7, 2, 4)
        self.embed = VocabParallelEmbedding(13, 10, padding_idx=1, **options)
        self.first = ParallelTransformerBlock(
            *sizes,
            norm_position="sandwich",
            zero_centered=True,
            dropout=0.25,
            attention={
                "fused": True,
                "layout": "groups",
                "qkv_bias": True,
                "qk_norm": "rms",
                "dropout": 0.25,
            },
            mlp={"packed": "interleaved", "bias": True},
            **options,
        )
        self.second = ParallelTransformerBlock(
            *sizes,
            norm="layer",
            dropout=0.25,
            attention={"sinks": True, "output_bias": True},
            mlp={"packed": "blocks", "activation": "gelu"},
            cross_attention={},
            **options,
        )
        self.norm = LayerNorm(10, **options)
        self.head = ParallelLMHead(10, 13, bias=True, **options)
        self.head.tie(self.embed)

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, V]."""
        embedded = self.embed(ids)
        return self.head(self.norm(self.second(self.first(embedded), context=embedded)))


def step(model: nn.Module) -> dict[str, Tensor]:
    """Logits and gathered gradients of one training step, the same tokens and random numbers each time."""
    draw = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 13, (3, 4), generator=draw)
    torch.manual_seed(9)
    model.zero_grad()
    logits = model(ids)
    logits.square().sum().backward()
    finalize_gradients(model)
    return {"logits": logits.detach()} | {
        n: place.gather(p.grad) for n, p, place in placements(model)
    }
