"""What the ops must return: float64 on unsplit tensors, the part of each rank, and the error allowed.

The bound is derived, not tuned. A result is a sum of K products (plus a bias). A rank accumulates its
products in fp32 (float64 for float64) and rounds the partial sum to the dtype, once per weight; ranks
are summed in fp32 and the total is rounded once. With n weights, to first order and elementwise,

    |y - y64| <= ((n + 1) u + 10 sqrt(K) u32) (|x| |W|^T + |b|),    u = eps(dtype) / 2

The second term: K roundings that are independent with mean zero stay below t sqrt(K) u32 except with
probability 2 K exp(-t^2 / 2) (Higham & Mary, "A new approach to probabilistic rounding error analysis",
SIAM J. Sci. Comput. 41, 2019); t = 10 leaves 1e-20 per element. The factor 1.02 is for terms of second
order, and every rounding may also lose half of the smallest subnormal number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import tp_kernels
from tp_kernels import ParallelGroup
from tp_kernels.comm import barrier

# The dimension of each tensor that is divided over the ranks; None: every rank holds all of it.
SPLIT: dict[str, dict[str, int | None]] = {
    "all_gather_linear": {"x": 0, "w": 0, "b": 0, "y": -1},
    "copy_linear": {"x": None, "w": 0, "b": 0, "y": -1},
    "linear_all_reduce": {"x": -1, "w": 1, "b": None, "y": None},
    "linear_reduce_scatter": {"x": -1, "w": 1, "b": None, "y": 0},
}
OPERATIONS = tuple(SPLIT)
SEVERAL_WEIGHTS = ("all_gather_linear", "copy_linear")
HALVES = (torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "transposed", "expanded", "offset", "strided")


@dataclass(frozen=True)
class Case:
    """One call of an op and its backward, by the sizes of the unsplit problem."""

    op: str
    leading: tuple[int, ...] = (5,)
    inner: int = 7
    outs: tuple[int, ...] = (6,)
    biased: tuple[bool, ...] = (True,)
    dtype: torch.dtype = torch.float32
    implementation: str = "reference"
    layout: str = "plain"
    gathered: str = "keep"
    frozen: str = ""  # which of "x", "w", "b" need no gradient
    unused: bool = False  # nothing depends on the last output
    seed: int = 0

    @property
    def rows(self) -> int:
        return math.prod(self.leading)


@dataclass(frozen=True)
class Tensors:
    """The arguments of a case and the gradients of its outputs, of all ranks or of one."""

    x: Tensor
    ws: list[Tensor]
    bs: list[Tensor | None]
    dys: list[Tensor]

    def on(self, device: str) -> Tensors:
        x, *rest = [copy_to(t, device) for t in (self.x, *self.ws, *self.dys)]
        n = len(self.ws)
        bs = [None if b is None else copy_to(b, device) for b in self.bs]
        return Tensors(x, rest[:n], bs, rest[n:])

    def leaves(self, frozen: str) -> Tensors:
        def leaf(name: str, t: Tensor) -> Tensor:
            return t.detach().requires_grad_(name not in frozen)

        return replace(
            self,
            x=leaf("x", self.x),
            ws=[leaf("w", w) for w in self.ws],
            bs=[None if b is None else leaf("b", b) for b in self.bs],
        )


def unsplit(case: Case) -> Tensors:
    """The arguments of all ranks together, the same wherever this is called."""
    generator = torch.Generator().manual_seed(case.seed)
    expanded = case.layout == "expanded"

    def draw(*shape: int, equal_rows: bool = False) -> Tensor:
        drawn = shape if not equal_rows else (*[1] * (len(shape) - 1), shape[-1])
        values = torch.randn(drawn, generator=generator, dtype=torch.float64).to(case.dtype)
        return values.expand(shape)

    x = draw(*case.leading, case.inner, equal_rows=expanded)
    ws = [draw(out, case.inner, equal_rows=expanded) for out in case.outs]
    bs = [draw(out) if b else None for out, b in zip(case.outs, case.biased, strict=True)]
    dys = [draw(*case.leading, out, equal_rows=expanded) for out in case.outs]
    if case.unused:
        dys[-1] = torch.zeros_like(dys[-1])
    return Tensors(x, ws, bs, dys)


def part(t: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    return t if dim is None else t.tensor_split(size, dim)[rank]


def shard(case: Case, size: int, rank: int) -> Tensors:
    """The arguments of one rank, in the memory layout of the case."""
    whole, split = unsplit(case), SPLIT[case.op]

    def mine(name: str, t: Tensor) -> Tensor:
        return lay_out(part(t, split[name], size, rank), case.layout)

    return Tensors(
        mine("x", whole.x),
        [mine("w", w) for w in whole.ws],
        [None if b is None else mine("b", b) for b in whole.bs],
        [mine("y", dy) for dy in whole.dys],
    )


def lay_out(t: Tensor, layout: str) -> Tensor:
    """Equal values in other memory: `expanded` tensors are drawn that way and stay as they are."""
    if layout == "plain":
        return t.contiguous()
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset":
        memory = t.new_full((t.numel() + 3,), math.nan)
        return memory[3:].view(t.shape).copy_(t)
    if layout == "strided":
        memory = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), math.nan)
        return memory[..., ::2].copy_(t)
    return t


def copy_to(t: Tensor, device: torch.device | str) -> Tensor:
    """Equal values on a device with equal strides and offset, what lies between full of NaN."""
    if t.numel() == 0:
        return t.to(device)
    reach = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    filling = math.nan if t.is_floating_point() else 0
    memory = torch.full((t.storage_offset() + reach + 1,), filling, dtype=t.dtype, device=device)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)


def call(case: Case, args: Tensors, group: ParallelGroup, **extra: Any) -> list[Tensor]:
    """The outputs of the op for the arguments of this rank."""
    if case.op == "all_gather_linear":
        extra = {"rows": case.leading[0], "gathered": case.gathered} | extra
    single = len(args.ws) == 1
    out = getattr(tp_kernels, case.op)(
        args.x,
        args.ws[0] if single else args.ws,
        args.bs[0] if single else args.bs if any(case.biased) else None,
        group=group,
        **{"implementation": case.implementation} | extra,
    )
    return [out] if isinstance(out, Tensor) else list(out)


def compute(
    case: Case, group: ParallelGroup, poisoned: bool = False, device: str = "cpu"
) -> dict[str, Tensor]:
    """Outputs y0, y1, ... and gradients dx, dw0, ..., db0, ... of this rank, computed on `device`.

    Not for a layout with strides of 0 on another device than the CPU.
    """
    args = shard(case, group.size, group.rank)
    if device != "cpu":
        args = args.on(device)
    args = args.leaves(case.frozen)
    if poisoned:
        poison(group)
    ys = call(case, args, group)
    if poisoned:
        poison(group)
    used = [(y, dy) for y, dy in zip(ys, args.dys, strict=True) if y.requires_grad]
    if case.unused:
        used = used[:-1]
    if used:
        torch.autograd.backward(*zip(*used, strict=True))
    results = {f"y{i}": y.detach() for i, y in enumerate(ys)}
    leaves = {"dx": args.x}
    leaves |= {f"dw{i}": w for i, w in enumerate(args.ws)}
    leaves |= {f"db{i}": b for i, b in enumerate(args.bs) if b is not None}
    for name, leaf in leaves.items():
        assert not (name[1] in case.frozen and leaf.grad is not None), f"{name} of a frozen tensor"
        if leaf.grad is not None:
            results[name] = leaf.grad
    return {name: result.cpu() for name, result in results.items()}


def expected(case: Case, size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Per result of all ranks together: its value in float64, and the error allowed."""
    whole = unsplit(case)
    x, ws, dys = whole.x.double(), [w.double() for w in whole.ws], [d.double() for d in whole.dys]
    flat, rows, n = x.reshape(case.rows, case.inner), case.rows, len(ws)
    answers = {}

    def answer(name: str, value: Tensor, magnitude: Tensor, terms: int, roundings: int) -> None:
        finfo, wide = torch.finfo(case.dtype), torch.promote_types(case.dtype, torch.float32)
        accumulation = 10 * math.sqrt(terms + size) * torch.finfo(wide).eps / 2
        if case.dtype == torch.float64:
            accumulation *= 2  # the oracle rounds as well
        relative = 1.02 * (roundings * finfo.eps / 2 + accumulation)
        tiny = size * roundings * finfo.smallest_normal * finfo.eps
        answers[name] = value, relative * magnitude + tiny

    dx, magnitude = torch.zeros_like(flat), torch.zeros_like(flat)
    for i, (w, b, dy) in enumerate(zip(ws, whole.bs, dys, strict=True)):
        y, y_magnitude = x @ w.t(), x.abs() @ w.t().abs()
        if b is not None:
            y, y_magnitude = y + b.double(), y_magnitude + b.double().abs()
        answer(f"y{i}", y, y_magnitude, case.inner, 2)
        dy = dy.reshape(rows, w.shape[0])
        answer(f"dw{i}", dy.t() @ flat, dy.t().abs() @ flat.abs(), rows, 1)
        if b is not None:
            answer(f"db{i}", dy.sum(0), dy.abs().sum(0), rows, 1)
        dx, magnitude = dx + dy @ w, magnitude + dy.abs() @ w.abs()
    answer("dx", dx.view_as(x), magnitude.view_as(x), sum(case.outs), n + 1)
    return answers


def split_of(case: Case, name: str) -> int | None:
    """The divided dimension of a result: that of the argument whose gradient it is, or of y."""
    return SPLIT[case.op]["y" if name[0] == "y" else name[1]]


def check(case: Case, results: dict[str, Tensor], group: ParallelGroup) -> dict[str, str]:
    """Compare with float64; returns a digest of each result that must be the same on all ranks."""
    digests = {}
    answers = expected(case, group.size)
    for name, result in results.items():
        dim = split_of(case, name)
        value, bound = (part(t, dim, group.size, group.rank) for t in answers[name])
        assert result.shape == value.shape, f"{case}: {name} is {result.shape} not {value.shape}"
        assert result.dtype == case.dtype, f"{case}: {name} is {result.dtype}"
        excess = (result.double() - value).abs() - bound
        assert bool((excess <= 0).all()), (
            f"{case} on {group}: {name} is off by {excess.max():.3g} more than allowed at "
            f"{(~(excess <= 0)).nonzero()[:3].tolist()}"
        )
        if dim is None:
            digests[name] = digest(result)
    present = {name for name in answers if name in results}
    wanted = {name for name in answers if name[0] == "y" or name[1] not in case.frozen}
    assert present == wanted, f"{case}: got {sorted(present)}, expected {sorted(wanted)}"
    return digests


def digest(*tensors: Tensor) -> str:
    """Equal for tensors of equal bits, shapes and dtypes."""
    state = hashlib.sha256()
    for t in tensors:
        state.update(f"{t.dtype} {tuple(t.shape)}".encode())
        state.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def poison(group: ParallelGroup) -> None:
    """Fill this rank's shared buffers with NaN of every dtype while nobody reads them."""
    if group.memory is None:
        return
    barrier(group)
    slot = group.slot
    for index in range(len(slot._bytes[group.rank])):
        slot.view(group.rank, index, (slot.capacity,), torch.uint8).fill_(0xFF)
    for own in group.workspaces.values():
        if not hasattr(own, "workspace"):
            continue  # has no buffers between calls
        own._region.settle()
        shape = own.workspace.shape
        signals = shape.stride - shape.depth * shape.world * shape.chunk  # they come first
        own.workspace.local.view(shape.channels, shape.stride)[:, signals:] = 0xFF
        own._region.settle()
    barrier(group)


def run_cases(
    cases: Sequence[Case], provider: str = "auto", window: int = 8192, poisoned: bool = True
) -> list[dict[str, str]]:
    """Body of a rank: every case against float64, and the implementation that ran."""
    digests = []
    options: dict[str, Any] = {"provider": provider, "window": window, "timeout": 30}
    with (
        ParallelGroup(**options, communication_thread=False) as plain,
        ParallelGroup(**options, communication_thread=True) as threaded,
    ):
        for index, case in enumerate(cases):
            group = threaded if index % 2 else plain
            group.reset_stats()
            digests.append(check(case, compute(case, group, poisoned), group))
            ran = set(group.stats()["calls"][case.op])
            local = "reference" if group.size == 1 else case.implementation
            assert ran == {"local" if case.op == "copy_linear" else local}, (case, ran)
    return digests


def draw_cases(op: str, size: int, seed: int, each: int) -> Iterator[Case]:
    """`each` random cases for every pair of dtype and implementation that exists."""
    random = Random(f"{op} {size} {seed}")
    pairs = [(d, i) for d in (torch.float32, *HALVES) for i in ("reference", "chunked", "host")]
    pairs += [(torch.float64, i) for i in ("reference", "chunked")]
    for dtype, implementation in pairs:
        for _ in range(each):
            n = random.choice((1, 1, 2, 3)) if op in SEVERAL_WEIGHTS else 1
            biased = random.choice(((True,) * n, (False,) * n, (False, True, True)[-n:]))
            yield Case(
                op,
                leading=draw_leading(random),
                inner=draw_width(random),
                outs=tuple(draw_width(random) for _ in range(n)),
                biased=biased,
                dtype=dtype,
                implementation=implementation,
                layout=random.choice(LAYOUTS),
                gathered=random.choice(("keep", "redo")),
                frozen=random.choice(("", "", "", "x", "w", "b", "xb", "wb", "xw", "xwb")),
                unused=n > 1 and random.random() < 0.2,
                seed=random.randrange(1 << 30),
            )


def draw_leading(random: Random) -> tuple[int, ...]:
    rows = random.choice((0, 1, 2, 3, 5, 64, 65, 128, 129, random.randint(0, 257)))
    if rows > 24 or random.random() < 0.5:
        return (rows,)
    return (rows, *random.choice(((3,), (1,), (2, 3), (0,))))


def draw_width(random: Random) -> int:
    return random.choice((1, 2, 3, 8, 17, 32, random.randint(1, 70)))
