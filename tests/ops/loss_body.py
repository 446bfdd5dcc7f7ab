"""What the losses over a divided vocabulary must return: float64 on unsplit tensors, and the error allowed.

The reference is written by log-softmax and differentiated by torch; ops work with maximum and sum. The
bounds are derived, to first order where nothing else is said. u is half the eps of the arithmetic (float32,
or float64, of which the reference has as much error again: u is doubled).

Capped logits c = cap tanh(z / cap) have the relative error 6u, since x (1 - tanh(x)^2) <= tanh(x); their
absolute one is `moved`. A logit that is itself a rounded product adds `off`, its error (0 where logits are
given). With D = M - c: exp(-D) is multiplied up from the largest of a tile, of a rank, of all, in at most
`merges` factors of 3u each, whose differences add up to D: relatively u D + 2 (moved + off) + 4u merges.
A sum of V terms adds V u. `sums` is the relative error of S, the absolute one of log(S); exp(2 off) - 1
bounds what all the logits' errors do to p, whatever their size.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.oracle import digest, lay_out
from tp_kernels import ParallelGroup, split_sizes
from tp_kernels.ops import linear_cross_entropy, vocab_parallel_cross_entropy

IGNORED = -100
linear_module = sys.modules["tp_kernels.ops.linear_cross_entropy"]  # hidden behind its function


@dataclass(frozen=True)
class Case:
    """One loss, by the sizes of the unsplit problem."""

    leading: tuple[int, ...] = (13,)
    vocab: int = 11
    dtype: torch.dtype = torch.float32
    smoothing: float = 0.0
    z_loss: float = 0.0
    cap: float | None = None
    reduction: str = "mean"
    ignored: str = "some"  # "none", "all"
    padded: bool = False  # shards of equal width, padded with NaN
    layout: str = "plain"
    seed: int = 0
    # Of linear_cross_entropy:
    hidden: int = 5
    biased: bool = True
    chunk_rows: int | None = None
    sequence_parallel: bool = False
    frozen: str = ""  # which of "h", "w", "b" need no gradient

    @property
    def rows(self) -> int:
        return math.prod(self.leading)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "soft_cap": self.cap,
            "reduction": self.reduction,
        }

    def shards(self, size: int) -> list[tuple[int, int]]:
        """First word and number of columns of every rank."""
        if self.padded:
            width = -(-self.vocab // size) + 1
            return [(rank * width, width) for rank in range(size)]
        sizes = split_sizes(self.vocab, size)
        return [(sum(sizes[:rank]), sizes[rank]) for rank in range(size)]


def labels_of(case: Case, generator: torch.Generator) -> Tensor:
    """[*leading], with both ends of the vocabulary among them."""
    labels = torch.randint(0, case.vocab, (case.rows,), generator=generator)
    labels[:2] = torch.tensor([case.vocab - 1, 0])[: case.rows]
    if case.ignored == "some":
        labels[2::4] = IGNORED
    elif case.ignored == "all":
        labels[:] = IGNORED
    return labels.view(case.leading)


def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, hidden, weight, bias of all ranks; the upstream gradient of the loss."""
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(case.dtype)

    logits = normal(*case.leading, case.vocab, scale=4)
    labels = labels_of(case, g)
    hidden = normal(*case.leading, case.hidden, scale=1)
    weight, bias = normal(case.vocab, case.hidden, scale=0.5), normal(case.vocab, scale=0.5)
    shape = case.leading if case.reduction == "none" else ()
    upstream = torch.randn(shape, generator=g, dtype=torch.float64)
    return logits, labels, hidden, weight, bias, upstream.to(wide(case.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def unit(case: Case) -> float:
    return torch.finfo(wide(case.dtype)).eps / 2 * (2 if case.dtype == torch.float64 else 1)


def dense(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss in float64 of logits [R, V]; labels [R]."""
    c = logits if case.cap is None else case.cap * torch.tanh(logits / case.cap)
    log_p = c.log_softmax(-1)
    counts = labels != IGNORED
    picked = log_p[torch.arange(len(labels)), labels.where(counts, 0)]
    rows = -(1 - case.smoothing) * picked - case.smoothing * log_p.mean(-1)
    rows = (rows + case.z_loss * c.logsumexp(-1).square()) * counts
    if case.reduction == "none":
        return rows
    if case.reduction == "sum":
        return rows.sum()
    return rows.sum() / counts.sum().clamp(min=1)


def bounds(
    case: Case, z: Tensor, labels: Tensor, d_loss: Tensor, off: Tensor, merges: int
) -> tuple[Tensor, Tensor]:
    """Errors allowed of the loss [R] of every row, and of its gradient [R, V] in the wide dtype.

    z: logits [R, V] in float64; d_loss: [R], the gradient of the loss of every row; off: [R, 1].
    """
    u, e, vocab = unit(case), case.smoothing, case.vocab
    c = z if case.cap is None else case.cap * torch.tanh(z / case.cap)
    moved = 0 * off if case.cap is None else 6 * u * c.abs().amax(-1, keepdim=True)
    largest, lse = c.amax(-1, keepdim=True), c.logsumexp(-1, keepdim=True)
    p, distance = (c - lse).exp(), largest - c
    counts = (labels != IGNORED)[:, None]
    label = torch.zeros_like(c).scatter_(1, labels.where(counts[:, 0], 0)[:, None], 1.0)
    log_s = lse - largest
    sums = (vocab + 4 * merges + 4) * u + u * (p * distance).sum(-1, keepdim=True)
    sums = sums + 2 * moved + torch.expm1(2 * off)
    normaliser = sums + 3 * u * (lse.abs() + largest.abs() + log_s) + off + moved
    miss, mean = (label * distance).sum(-1, keepdim=True), c.mean(-1, keepdim=True)
    size = c.abs().mean(-1, keepdim=True)
    loss = sums + 3 * u * log_s + (1 - e) * 3 * u * miss + 4 * (moved + off)
    loss = loss + e * ((vocab + 5) * u * size + 4 * u * largest.abs())
    loss = loss + case.z_loss * (2 * lse.abs() * normaliser + normaliser**2 + 3 * u * lse**2)
    terms = log_s + miss + e * (largest - mean).abs() + case.z_loss * lse**2
    loss = (loss + 6 * u * terms) * counts

    factor = 1 + 2 * case.z_loss * lse.abs()
    relative = u * distance + 2 * moved + torch.expm1(2 * off) + 4 * u * merges + sums + 10 * u
    inner = p * (factor * relative + 2 * case.z_loss * normaliser * (1 + relative))
    inner = inner + 6 * u * (e / vocab + label + p * factor)
    if case.cap is not None:
        # The slope 1 - tanh^2 has a derivative of at most 0.77 / cap.
        gradient = p * factor + e / vocab + (1 - e) * label
        slope = 1 - (c / case.cap) ** 2
        wrong = 12 * u + 0.77 * off / case.cap
        inner = inner * (slope + wrong) + gradient * (wrong + 2 * u)
    return loss.squeeze(-1), inner * counts * d_loss.abs()[:, None]


def of_rows(case: Case, labels: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of the loss of every row [R], in float64."""
    if case.reduction == "none":
        return upstream.double().reshape(-1)
    counts = (labels != IGNORED).sum().clamp(min=1) if case.reduction == "mean" else 1
    return (upstream.double() / counts).expand(labels.shape)


def allowed_loss(case: Case, value: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """The error of the reduced loss, of R non-negative terms, from those of the rows."""
    if case.reduction == "none":
        return rows.view(case.leading)
    counts = (labels != IGNORED).sum().clamp(min=1) if case.reduction == "mean" else 1
    return rows.sum() / counts + (case.rows + 2) * unit(case) * value.abs()


def close(value: Tensor, exact: Tensor, bound: Tensor, *where: object) -> None:
    assert value.shape == exact.shape, (*where, value.shape, exact.shape)
    if value.dtype.itemsize == 2:
        bound = bound + torch.finfo(value.dtype).smallest_normal
    excess = (value.double() - exact).abs() - 1.02 * bound
    assert bool((excess <= 0).all()), (*where, f"{excess.max():.3g} more than allowed")


def run_logits(cases: list[Case], provider: str = "auto", implementation: str = "auto") -> list:
    """Body of a rank: vocab_parallel_cross_entropy; digests of the losses, which all ranks must share."""
    with ParallelGroup(timeout=30, provider=provider) as group:
        return [check_logits(case, group, implementation) for case in cases]


def check_logits(case: Case, group: ParallelGroup, implementation: str) -> str:
    logits, labels, *_, upstream = draw(case)
    start, width = case.shards(group.size)[group.rank]
    true = logits[..., start : start + width]
    mine = logits.new_full((*case.leading, width), math.nan)
    mine[..., : true.shape[-1]] = true
    mine = lay_out(mine, case.layout).detach().requires_grad_()
    before = mine.detach().clone()
    group.reset_stats()
    options = case.options | ({"start": start} if case.padded else {})
    loss = vocab_parallel_cross_entropy(
        mine, labels, group=group, vocab_size=case.vocab, implementation=implementation, **options
    )
    loss.backward(upstream)
    ran = group.stats()["calls"]["vocab_parallel_cross_entropy"]
    if implementation != "auto":
        assert set(ran) == {implementation if group.size > 1 else "reference"}, (case, ran)
    assert torch.equal(mine.detach().nan_to_num(7), before.nan_to_num(7)), (case, "overwritten")
    assert loss.dtype == wide(case.dtype) and mine.grad.dtype == case.dtype, case

    z = logits.double().reshape(case.rows, case.vocab).requires_grad_()
    flat = labels.reshape(-1)
    exact = dense(case, z, flat)
    exact.backward(upstream.double().view(exact.shape))
    d_loss = of_rows(case, flat, upstream)
    allowed = bounds(case, z.detach(), flat, d_loss, torch.zeros(case.rows, 1).double(), group.size)
    exact = exact.detach()
    value = exact.view(loss.shape)
    close(loss.detach(), value, allowed_loss(case, value, allowed[0], flat), case, group, "loss")
    if case.ignored == "all":
        assert not loss.any() and not mine.grad.any(), (case, "not 0")
    part = slice(start, start + true.shape[-1])
    inner = allowed[1] + torch.finfo(case.dtype).eps / 2 * z.grad.abs()
    grad = mine.grad.reshape(case.rows, width)
    close(grad[:, : true.shape[-1]], z.grad[:, part], inner[:, part], case, group, "gradient")
    assert not grad[:, true.shape[-1] :].any(), (case, "gradient of padding")
    return digest(loss)


def run_linear(cases: list[Case], provider: str = "auto", tile_bytes: int | None = None) -> list:
    """Body of a rank: linear_cross_entropy; digests of losses and gradients that all ranks must share."""
    size = linear_module.TILE_BYTES if tile_bytes is None else tile_bytes
    with (
        patch.object(linear_module, "TILE_BYTES", size),
        ParallelGroup(timeout=30, provider=provider) as group,
    ):
        return [check_linear(case, group) for case in cases]


def linear_leaves(case: Case, group: ParallelGroup) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """hidden, weight and bias of this rank; labels and upstream gradient of all."""
    _, labels, hidden, weight, bias, upstream = draw(case)
    start, width = case.shards(group.size)[group.rank]
    if case.sequence_parallel:
        hidden = hidden.tensor_split(group.size)[group.rank]
    leaves = {"h": hidden, "w": padded_part(weight, start, width)}
    if case.biased:
        leaves["b"] = padded_part(bias, start, width)
    leaves = {
        name: lay_out(leaf, case.layout).detach().requires_grad_(name not in case.frozen)
        for name, leaf in leaves.items()
    }
    return leaves, labels, upstream


def padded_part(whole: Tensor, start: int, width: int) -> Tensor:
    true = whole[start : start + width]
    return torch.cat((true, whole.new_full((width - len(true), *whole.shape[1:]), math.nan)))


def call_linear(
    case: Case, leaves: dict[str, Tensor], labels: Tensor, group: ParallelGroup
) -> Tensor:
    start, _ = case.shards(group.size)[group.rank]
    options = case.options | ({"start": start} if case.padded else {})
    return linear_cross_entropy(
        leaves["h"],
        leaves["w"],
        labels,
        leaves.get("b"),
        group=group,
        vocab_size=case.vocab,
        chunk_rows=case.chunk_rows,
        sequence_parallel=case.sequence_parallel,
        **options,
    )


def check_linear(case: Case, group: ParallelGroup) -> str:
    leaves, labels, upstream = linear_leaves(case, group)
    loss = call_linear(case, leaves, labels, group)
    if loss.requires_grad:
        loss.backward(upstream)
    assert all((leaves[name].grad is None) == (name in case.frozen) for name in leaves), case
    exact, allowed = linear_oracle(case, labels.reshape(-1), group.size)
    start, width = case.shards(group.size)[group.rank]
    true = max(0, min(width, case.vocab - start))
    shared = [loss]
    close(loss.detach(), exact["loss"], allowed["loss"], case, group, "loss")
    for name, leaf in leaves.items():
        if leaf.grad is None:
            continue
        grad, value, bound = leaf.grad, exact[name], allowed[name]
        assert grad.dtype == case.dtype, (case, name)
        if name == "h":
            if case.sequence_parallel:
                value, bound = (t.tensor_split(group.size)[group.rank] for t in (value, bound))
            else:
                shared.append(grad)
        else:
            assert not grad[true:].any(), (case, name, "gradient of padding")
            grad, part = grad[:true], slice(start, start + true)
            value, bound = value[part], bound[part]
        close(grad, value, bound, case, group, name)
    return digest(*shared)


def linear_oracle(
    case: Case, labels: Tensor, size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Unsplit results in float64 and their errors.

    Logits are rounded products: off. d, their gradient, is rounded to the dtype for the products, which are
    rounded once per tile, in sum as if once; of d_hidden each rank rounds its part and all the total.
    """
    _, _, hidden, weight, bias, upstream = draw(case)
    h = hidden.double().reshape(case.rows, case.hidden).requires_grad_()
    w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
    z = h @ w.t() + (b if case.biased else 0)
    z.retain_grad()
    value = dense(case, z, labels)
    value.backward(upstream.double().view(value.shape))
    with torch.no_grad():
        eps = torch.finfo(case.dtype).eps / 2

        def accumulated(terms: int) -> float:  # as in tests/oracle.py
            return 10 * math.sqrt(terms + size) * unit(case)

        a, m = h.abs(), w.abs()
        magnitude = a @ m.t() + (b.abs() if case.biased else 0)
        off = (eps + accumulated(case.hidden)) * magnitude.amax(-1, keepdim=True)
        d_loss = of_rows(case, labels, upstream)
        merges = size + case.vocab
        rows, inner = bounds(case, z, labels, d_loss, off, merges)
        d = z.grad.abs()
        inner, d = inner + eps * (d + inner), d + inner
        exact, value = {"h": h.grad.view_as(hidden), "w": w.grad}, value.view(upstream.shape)
        allowed = {
            "h": inner @ m + (3 * eps + accumulated(case.vocab)) * (d @ m),
            "w": inner.t() @ a + (2 * eps + accumulated(case.rows)) * (d.t() @ a),
            "b": inner.sum(0) + (eps + accumulated(case.rows)) * d.sum(0),
            "loss": allowed_loss(case, value, rows, labels),
        }
        allowed["h"] = allowed["h"].view_as(hidden)
        exact |= {"loss": value, "b": b.grad if case.biased else None}
    return {name: t if t is None else t.detach() for name, t in exact.items()}, allowed


def variants(base: Case) -> list[Case]:
    """Cases that differ from `base` in one option, and some in several."""
    changes: list[dict[str, Any]] = [
        {},
        {"smoothing": 0.1},
        {"z_loss": 0.02},
        {"cap": 3.0},
        {"smoothing": 0.3, "z_loss": 0.01, "cap": 5.0, "reduction": "none"},
        {"reduction": "sum", "smoothing": 1.0},
        {"reduction": "none", "ignored": "none"},
        {"ignored": "all", "smoothing": 0.1, "z_loss": 0.1},
        {"ignored": "all", "reduction": "none", "cap": 2.0},
        {"padded": True, "smoothing": 0.1, "z_loss": 0.01},
        {"padded": True, "vocab": 5, "cap": 4.0, "reduction": "none"},
        {"vocab": 2, "smoothing": 0.2, "z_loss": 0.1},
        {"vocab": 1, "reduction": "sum"},
        {"leading": (0,), "reduction": "sum"},
        {"leading": (3, 0), "smoothing": 0.1},
        {"leading": (), "ignored": "none"},
        {"leading": (3, 2, 4), "layout": "strided", "smoothing": 0.1, "reduction": "none"},
        {"leading": (1,), "vocab": 300, "z_loss": 0.001, "ignored": "none"},
        {"layout": "transposed", "vocab": 17, "cap": 10.0},
    ]
    return [replace(base, seed=seed, **change) for seed, change in enumerate(changes)]


def main_gradients(cases: list[Case]) -> None:
    """Body of a rank: what main_grad held, and the gradient on top; none from autograd."""
    with ParallelGroup(timeout=30) as group:
        for case in cases:
            leaves, labels, upstream = linear_leaves(case, group)
            w = leaves["w"]
            w.main_grad = torch.full(w.shape, 3.0, dtype=torch.float32)
            w.grad_added_to_main_grad = False
            for _ in range(2):
                call_linear(case, leaves, labels, group).backward(upstream)
            assert w.grad_added_to_main_grad and not w.grad.any(), case
            exact, allowed = linear_oracle(case, labels.reshape(-1), group.size)
            start, width = case.shards(group.size)[group.rank]
            part = slice(start, start + width)
            value, bound = 2 * exact["w"][part] + 3, 2 * allowed["w"][part]
            bound = bound + torch.finfo(torch.float32).eps * (value.abs() + 6)
            close(w.main_grad, value, bound, case, group, "main_grad")
            close(leaves["h"].grad, *(2 * t for t in (exact["h"], allowed["h"])), case, "h")
