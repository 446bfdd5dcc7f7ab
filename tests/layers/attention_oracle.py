"""Attention in plain float64 torch, one batch element, head, and query-key pair rule at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tp_kernels.layers import RotaryOptions


@dataclass(frozen=True)
class Case:
    """A layer, its unsplit sizes (which divide by nothing), and the call."""

    heads: int = 5
    kv_heads: int = 2
    head_dim: int = 6
    hidden: int = 11
    batch: int = 2
    length: int = 7
    context_length: int = 0
    bias: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False
    batch_first: bool | None = None
    mask: str = ""  # "bool", "added", "heads", "left"
    positions: str = ""  # "row", "batch"
    packed: tuple[int, ...] = ()

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


def tensors(case: Case) -> dict[str, Tensor]:
    """Unsplit weights by stock name, input, context, gradient of the output, in float64."""
    draw = torch.Generator().manual_seed(case.heads * 100 + case.length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    wide = case.options.get("context_size", case.hidden)
    sizes = {
        "q_proj": (q, case.hidden),
        "k_proj": (kv, wide),
        "v_proj": (kv, wide),
        "o_proj": (case.hidden, q),
    }
    found = {}
    for name, size in sizes.items():
        found[f"{name}.weight"] = normal(*size) / math.sqrt(size[1])
        if case.bias:
            found[f"{name}.bias"] = normal(size[0]) / 3
    if case.options.get("qk_norm"):
        offset = 0 if "zero" in case.options["qk_norm"] else 1
        for name in ("q_norm", "k_norm"):
            found[f"{name}.weight"] = offset + normal(case.head_dim) / 3
    if case.options.get("sinks"):
        found["sinks"] = normal(case.heads)
    found["x"] = normal(case.batch, case.length, case.hidden)
    found["dy"] = normal(case.batch, case.length, case.hidden)
    if case.context_length:
        found["context"] = normal(case.batch, case.context_length, wide)
    total = case.context_length or case.length
    if case.mask == "bool":
        found["mask"] = normal(case.length, total) < 1
    elif case.mask == "added":
        found["mask"] = normal(case.batch, 1, case.length, total)
    elif case.mask == "heads":
        found["mask"] = normal(1, case.heads, case.length, total)
    elif case.mask == "left":  # the last sequence is shorter; its first tokens see nothing
        found["mask"] = torch.ones(case.batch, 1, 1, total, dtype=torch.bool)
        found["mask"][-1, ..., :2] = False
    if case.positions:
        rows = case.batch if case.positions == "batch" else 1
        ids = torch.randint(0, 40, (rows, case.length), generator=draw)
        found["positions"] = ids if case.positions == "batch" else ids[0]
    return found


def dense(case: Case, t: dict[str, Tensor]) -> Tensor:
    """The output [b, s, H]."""
    if case.packed:
        starts = [sum(case.packed[:i]) for i in range(len(case.packed))]
        alone = case.with_(packed=())
        return torch.cat(
            [
                dense(alone.with_(length=n), t | {"x": t["x"][:, start : start + n]})
                for start, n in zip(starts, case.packed, strict=True)
                if n
            ],
            dim=1,
        )
    x = t["x"]
    source = t.get("context", x)
    outputs = [
        torch.cat([_head(case, t, x[b], source[b], b, h) for h in range(case.heads)], -1)
        for b in range(x.shape[0])
    ]
    y = torch.stack(outputs) @ t["o_proj.weight"].T
    return y + t["o_proj.bias"] if case.bias else y


def _head(case: Case, t: dict[str, Tensor], x: Tensor, source: Tensor, b: int, head: int) -> Tensor:
    options = case.options
    shared = head * case.kv_heads // case.heads

    def project(y: Tensor, name: str, index: int) -> Tensor:
        rows = slice(index * case.head_dim, (index + 1) * case.head_dim)
        out = y @ t[f"{name}.weight"][rows].T
        return out + t[f"{name}.bias"][rows] if case.bias else out

    q, k, v = (
        project(x, "q_proj", head),
        project(source, "k_proj", shared),
        project(source, "v_proj", shared),
    )
    if "q_norm.weight" in t:
        zero = "zero" in options["qk_norm"]
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (t[f"{n}_norm.weight"] + zero)
            for y, n in ((q, "q"), (k, "k"))
        )
    rotary = options.get("rotary", RotaryOptions())
    if rotary is not None:
        positions = t.get("positions", torch.arange(x.shape[0]))
        positions = positions[b] if positions.dim() == 2 else positions
        q, k = _turn(q, positions, rotary), _turn(k, positions, rotary)
    scale = options.get("scale") or 1 / math.sqrt(case.head_dim)
    outputs = []
    for i in range(q.shape[0]):
        logits, values = [], []
        for j in range(k.shape[0]):
            score = (q[i] @ k[j]) * scale
            if options.get("softcap"):
                score = options["softcap"] * torch.tanh(score / options["softcap"])
            if options.get("alibi"):
                score = score - slope(head, case.heads) * abs(i - j)
            mask = t.get("mask")
            if mask is not None:
                mask = mask.expand(x.shape[0] and case.batch, case.heads, q.shape[0], k.shape[0])[
                    b, head, i, j
                ]
                if mask.dtype == torch.bool:
                    if not mask:
                        continue
                else:
                    score = score + mask
            causal, window = options.get("causal", True), options.get("sliding_window")
            if causal and j > i:
                continue
            if window and (j <= i - window if causal else abs(i - j) > window):
                continue
            logits.append(score)
            values.append(v[j])
        if not logits:
            outputs.append(0 * v[0])
            continue
        exponents = torch.stack(logits).exp()
        total = exponents.sum()
        if "sinks" in t:
            total = total + t["sinks"][head].exp()
        outputs.append((exponents / total) @ torch.stack(values))
    return torch.stack(outputs)


def _turn(y: Tensor, positions: Tensor, rotary: RotaryOptions) -> Tensor:
    """Pair by pair; angles in fp32, as they are by convention."""
    dim = rotary.dim or y.shape[-1]
    columns = list(y.unbind(-1))
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + dim // 2)
        exponent = torch.tensor(2 * i / dim, dtype=torch.float32)
        angle = positions.float() * (1.0 / rotary.theta**exponent)
        cos, sin = angle.cos().double(), angle.sin().double()
        columns[a], columns[b] = (
            columns[a] * cos - columns[b] * sin,
            columns[b] * cos + columns[a] * sin,
        )
    return torch.stack(columns, -1)


def slope(head: int, heads: int) -> float:
    """Press et al.: geometric from 2^(-8/n) for n a power of two; see the authors' get_slopes for others."""

    def powers(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    def all_of(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return powers(n)
        below = 2 ** math.floor(math.log2(n))
        return powers(below) + all_of(2 * below)[0::2][: n - below]

    return all_of(heads)[head]
