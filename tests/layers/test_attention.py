"""ParallelAttention against float64 attention written pair by pair: output and every gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.attention_oracle import Case, dense, tensors
from tests.oracle import digest
from tp_kernels.comm import ParallelGroup
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import (
    ParallelAttention,
    RotaryOptions,
    finalize_gradients,
    placements,
)

NONE: dict[str, Any] = {"rotary": None}
FREE: dict[str, Any] = {"rotary": None, "causal": False}
CASES = {
    "plain": Case(),
    "no_bias": Case(bias=False, kv_heads=5),
    "mqa": Case(kv_heads=1),
    "four_heads": Case(heads=4, kv_heads=2),
    "sequence_first": Case(batch_first=False),
    "batch_first": Case(batch_first=True),
    "free": Case(options={"causal": False}),
    "window": Case(options={"sliding_window": 3}),
    "free_window": Case(options={"sliding_window": 2, "causal": False}),
    "interleaved": Case(options={"rotary": RotaryOptions(interleaved=True)}),
    "partial": Case(options={"rotary": RotaryOptions(theta=500.0, dim=4)}),
    "partial_interleaved": Case(options={"rotary": RotaryOptions(interleaved=True, dim=2)}),
    "positions": Case(positions="row"),
    "positions_of_each": Case(positions="batch"),
    "qk_norm": Case(options={"qk_norm": "rms"}),
    "qk_norm_zero_centered": Case(options={"qk_norm": "rms_zero_centered"}),
    "alibi": Case(options={"alibi": True, **NONE}),
    "alibi_free": Case(options={"alibi": True, **FREE}, heads=7, kv_heads=3),
    "softcap": Case(heads=7, kv_heads=3, options={"softcap": 0.7}),
    "softcap_window_mask": Case(options={"softcap": 0.7, "sliding_window": 3}, mask="bool"),
    "sinks": Case(options={"sinks": True}),
    "sinks_window": Case(options={"sinks": True, "sliding_window": 2, "scale": 0.3}),
    "sinks_alibi": Case(options={"sinks": True, "alibi": True, **NONE}, mask="added"),
    "scale": Case(options={"scale": 0.9}),
    "mask": Case(mask="bool"),
    "mask_added": Case(mask="added", options={"causal": False}),
    "mask_added_window": Case(mask="added", options={"sliding_window": 3}),
    "mask_of_heads": Case(mask="heads"),
    "mask_of_heads_softcap": Case(mask="heads", options={"softcap": 1.1}),
    "padded": Case(mask="left"),
    "padded_sinks": Case(mask="left", options={"sinks": True}),
    "padded_softcap": Case(mask="left", options={"softcap": 2.0}),
    "padded_alibi": Case(mask="left", options={"alibi": True, **NONE}),
    "cross": Case(context_length=4, options={"context_size": 9, **FREE}),
    "cross_mask": Case(context_length=9, options={"context_size": 9, **FREE}, mask="added"),
    "cross_sequence_first": Case(
        context_length=4, options={"context_size": 9, **FREE}, batch_first=False
    ),
    "cross_batch_first": Case(
        context_length=4, options={"context_size": 9, **FREE}, batch_first=True
    ),
    "cross_qk_norm": Case(
        context_length=5, options={"context_size": 3, "qk_norm": "rms", "sinks": True, **FREE}
    ),
    "packed": Case(batch=1, length=9, packed=(4, 0, 1, 4)),
    "packed_all": Case(
        batch=1,
        length=9,
        packed=(2, 0, 7),
        options={"qk_norm": "rms", "sinks": True, "softcap": 1.5, "sliding_window": 3},
    ),
    "packed_batch_first": Case(batch=1, length=9, packed=(5, 4), batch_first=True),
    "packed_alibi": Case(batch=1, length=9, packed=(5, 4), options={"alibi": True, **FREE}),
    "one_token": Case(length=1),
    "two_tokens": Case(length=2),
    "fused_blocks": Case(options={"fused": True}),
    "fused_groups": Case(options={"fused": True, "layout": "groups"}),
    "fused_groups_even": Case(heads=6, kv_heads=3, options={"fused": True, "layout": "groups"}),
    "fused_groups_mqa": Case(kv_heads=1, options={"fused": True, "layout": "groups"}),
}


def kernel_of(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Unsplit parameters as the layer names and lays them out."""
    found = {n: w for n, w in t.items() if n.endswith(("weight", "bias")) or n == "sinks"}
    if not case.options.get("fused"):
        return found
    for kind in ("weight", "bias") if case.bias else ("weight",):
        parts = [found.pop(f"{name}_proj.{kind}") for name in "qkv"]
        found[f"qkv_proj.{kind}"] = pack(case, parts)
    return found


def pack(case: Case, parts: list[Tensor]) -> Tensor:
    if case.options.get("layout", "blocks") == "blocks":
        return torch.cat(parts)
    q, k, v = (part.split(case.head_dim) for part in parts)
    rows = []
    for kv in range(case.kv_heads):
        rows += [q[h] for h in range(case.heads) if h * case.kv_heads // case.heads == kv]
        rows += [k[kv], v[kv]]
    return torch.cat(rows)


def part_of(x: Tensor, case: Case, group: ParallelGroup) -> Tensor:
    """This rank's input in the layout of the case, of x [b, s, H]."""
    if case.sequence_parallel:
        start, stop = split_range(x.shape[1], group.size, group.rank)
        x = x[:, start:stop]
    first = not case.sequence_parallel if case.batch_first is None else case.batch_first
    return x if first else x.transpose(0, 1)


def build(case: Case, group: ParallelGroup, dtype: torch.dtype) -> ParallelAttention:
    return ParallelAttention(
        case.hidden,
        case.heads,
        case.kv_heads,
        case.head_dim,
        qkv_bias=case.bias,
        output_bias=case.bias,
        group=group,
        sequence_parallel=case.sequence_parallel,
        batch_first=case.batch_first,
        dtype=dtype,
        **case.options,
    )


def run_case(case: Case, group: ParallelGroup, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of this rank, parameters' gathered."""
    t = tensors(case)
    layer = build(case, group, dtype)
    full = kernel_of(case, t)
    assert (
        {name for name, _, _ in placements(layer)}
        == set(full)
        == set(dict(layer.named_parameters()))
    )
    for name, parameter, placement in placements(layer):
        parameter.data.copy_(placement.slice(full[name]))
    inputs = {"x": part_of(t["x"], case, group).to(dtype).clone().requires_grad_()}
    call: dict[str, Any] = {}
    if case.sequence_parallel:
        call["rows"] = case.length
    if case.context_length:
        inputs["context"] = part_of(t["context"], case, group).to(dtype).clone().requires_grad_()
        call["context"] = inputs["context"]
        if case.sequence_parallel:
            call["context_rows"] = case.context_length
    if case.mask:
        mask = t["mask"]
        call["attention_mask"] = mask if mask.dtype == torch.bool else mask.float()
    if case.positions:
        call["position_ids"] = t["positions"]
    if case.packed:
        call["cu_seqlens"] = torch.tensor([0, *case.packed]).cumsum(0).int()
    y = layer(inputs["x"], **call)
    y.backward(part_of(t["dy"], case, group).to(dtype))
    finalize_gradients(layer)
    found = {"y": y.detach()} | {f"d{n}": p.grad for n, p in inputs.items()}
    return found | {f"d{n}": place.gather(p.grad) for n, p, place in placements(layer)}


@cache
def expected(name: str) -> dict[str, Tensor]:
    """Of the unsplit case; the same for all world sizes and with sequence parallelism."""
    case = CASES[name]
    t = tensors(case)
    if case.mask in ("added", "heads"):
        t["mask"] = t["mask"].float().double()  # what the layer was given
    leaves = {
        n: w.requires_grad_()
        for n, w in t.items()
        if n in ("x", "context", "sinks") or n.endswith(("weight", "bias"))
    }
    y = dense(case, t)
    y.backward(t["dy"])
    grads = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in leaves.items()}
    inputs = {f"d{n}": grads[n] for n in ("x", "context") if n in grads}
    return {"y": y.detach()} | inputs | {f"d{n}": w for n, w in kernel_of(case, grads).items()}


def errors(names: list[str], sp: bool, provider: str, dtype: torch.dtype) -> dict[str, Any]:
    """By case: the worst error relative to the largest element of its tensor (at least 1), and the bits."""
    found = {}
    with ParallelGroup(provider=provider, timeout=60) as group:
        for name in names:
            case = CASES[name].with_(sequence_parallel=sp)
            wanted, got = expected(name), run_case(case, group, dtype)
            assert wanted.keys() == got.keys(), (name, wanted.keys() ^ got.keys())
            worst = ("", 0.0)
            for key, tensor in got.items():
                value = wanted[key]
                if key in ("y", "dx", "dcontext"):
                    value = part_of(value, case, group)
                assert tensor.shape == value.shape, (name, key)
                scale = max(
                    float(wanted[key].abs().max()), 1.0
                )  # some are zero: a shift of all keys
                error = (
                    float((tensor.double() - value).abs().max()) / scale if value.numel() else 0.0
                )
                worst = max(worst, (key, error), key=lambda item: item[1])
                assert tensor.isfinite().all(), (name, key)
            whole = [k for k in got if not sp or k not in ("y", "dx", "dcontext")]
            found[name] = (*worst, digest(*(got[k] for k in whole)))
    return found


def check(world: Any, size: int, names: list[str], sp: bool, provider: str, bound: float) -> None:
    dtype = torch.float64 if provider == "none" else torch.float32
    ranks = world(size).run(errors, names, sp, provider, dtype)
    for name in names:
        for rank in ranks:
            assert rank[name][1] < bound, (name, rank[name][:2])
        assert len({rank[name][2] for rank in ranks}) == 1, f"{name}: ranks differ"


HALVES = {"first": [*CASES][::2], "second": [*CASES][1::2]}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_float64(world, size, sp, half):
    """Float64 rounds 1.1e-16 some 100 times along a path, and the oracle as well; fp32 tables are equal."""
    check(world, size, HALVES[half], sp, "none", 2e-14)


@pytest.mark.parametrize("sp", [False, True])
def test_float32_through_shared_memory(world, sp):
    """As above with 6e-8; the softmax is the longest chain, of about 30 roundings that may all add up."""
    check(world, 3, [*CASES], sp, "host", 4e-6)
