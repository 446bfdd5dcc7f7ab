"""A case of the parity suite: one layer with its options, on some ranks in some dtype.

The layer runs on ranks (`compute`), the dense reference in the test's own process (`reference`), and `check`
compares them element by element: every part that a rank holds of the outputs, of the gradients of the inputs
and of the gradients of the parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.dense import Rounding, sensitivity
from tp_kernels import ParallelGroup
from tp_kernels.comm.layout import split_range
from tp_kernels.layers import (
    backward_dw,
    finalize_gradients,
    gradient_of,
    placements,
    use_main_grads,
)

# Axes of every layer: float64 goes through the process group, the others through shared memory.
WORLDS = (1, 2, 3, 4)
MODES = (False, True)  # sequence parallelism
DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# A dense run is disturbed by about this, far above float64 and far below what makes second orders count.
U = 1e-7
RUNS = 16
# A rounding is uniform in u |y| and not normal with that deviation, so that its own is at most 0.6 of the
# drawn one. Sixteen runs underestimate a deviation by a factor of 3 with a probability of 4e-6; 12 times the
# scatter is then still 7 deviations of what an arithmetic loses.
SIGMAS = 12.0

Options = SimpleNamespace
Cut = Callable[[Tensor, int], Tensor]
"""From an unsplit tensor, what a rank has of it, in the layout in which the layer takes or returns it."""


@dataclass(frozen=True)
class Part:
    """How an input or output is divided.

    Attributes:
        cut: see above.
        copies: what several ranks have are separate copies, each with a gradient of its own, of which the
            layer takes the sum. Else they are the same thing, with the same bits, and so is its gradient.
    """

    cut: Cut
    copies: bool = False


@dataclass(frozen=True)
class Case:
    layer: str
    world: int
    sp: bool
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.").replace("float", "f")
        rest = "-".join(f"{name}={value}" for name, value in self.options)
        return f"{self.layer}-{self.world}{'-sp' if self.sp else ''}-{dtype}-{rest}"


@dataclass(frozen=True)
class Setting:
    """Where a layer is built."""

    group: ParallelGroup
    sp: bool
    dtype: torch.dtype
    o: Options

    @property
    def common(self) -> dict[str, Any]:
        return {"group": self.group, "sequence_parallel": self.sp, "dtype": self.dtype}

    @property
    def batch_first(self) -> bool:
        wanted = getattr(self.o, "batch_first", None)
        return not self.sp if wanted is None else wanted

    def layout(self, t: Tensor) -> Tensor:
        """[b, s, ...] as the layer wants it."""
        return t if self.batch_first else t.transpose(0, 1)

    def tokens(self, t: Tensor, rank: int) -> Tensor:
        """This rank's tokens of [b, s, ...] under sequence parallelism, else all of them."""
        if self.sp:
            start, stop = split_range(t.shape[1], self.group.size, rank)
            t = t[:, start:stop]
        return self.layout(t)

    def features(self, t: Tensor, rank: int) -> Tensor:
        """This rank's part of all tokens' features, divided evenly."""
        start, stop = split_range(t.shape[-1], self.group.size, rank)
        return self.layout(t[..., start:stop])

    def all(self, t: Tensor, rank: int) -> Tensor:
        return self.layout(t)


@dataclass(frozen=True)
class Entry:
    """One layer of the suite.

    Attributes:
        options: values of every axis.
        parameters: shapes of the unsplit parameters by name. Norms are drawn around one.
        inputs: shapes of the unsplit inputs that are differentiated, by name.
        dense: (rounding, options, parameters, inputs) -> outputs by name, in float64.
        build: the sharded layer.
        call: (setting, layer, this rank's parts of the inputs) -> this rank's parts of the outputs by name.
        parts: how inputs and outputs are divided.
        allowed: which combinations of options exist.
        wide: outputs are in fp32 where the layer is in bf16.
    """

    options: Mapping[str, Sequence[Any]]
    parameters: Callable[[Options], dict[str, tuple[int, ...]]]
    inputs: Callable[[Options], dict[str, tuple[int, ...]]]
    dense: Callable[[Rounding, Options, dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
    build: Callable[[Setting], nn.Module]
    call: Callable[[Setting, Any, dict[str, Tensor]], dict[str, Tensor]]
    parts: Callable[[Setting], dict[str, Part]]
    allowed: Callable[[Case, Options], bool] = lambda case, o: True
    wide: bool = False


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values by name, in float64 but with the bits of bf16: every dtype starts from the same numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 2 and not name.startswith("input"):
        x = x / shape[-1] ** 0.5
    if "norm" in name and name.endswith("weight"):
        x = 1 + x / 4
    return x.bfloat16().double()


Values = dict[str, tuple[Tensor, Tensor]]


@lru_cache(maxsize=64)
def reference(layer: str, options: tuple[tuple[str, Any], ...]) -> Values:
    """Per result: its value in float64, and its sensitivity to rounding."""
    from tests.parity.entries import ENTRIES

    entry, o = ENTRIES[layer], Options(**dict(options))
    exact = dense_run(entry, o, Rounding())
    runs = [dense_run(entry, o, Rounding(U, seed)) for seed in range(1, RUNS + 1)]
    return {
        name: (value, sensitivity([run[name] for run in runs], value, U))
        for name, value in exact.items()
    }


def dense_run(entry: Entry, o: Options, rounding: Rounding) -> dict[str, Tensor]:
    leaves = {
        kind: {name: draw(f"{kind} {name}", s).requires_grad_() for name, s in shapes.items()}
        for kind, shapes in (("parameter", entry.parameters(o)), ("input", entry.inputs(o)))
    }
    outputs = entry.dense(rounding, o, leaves["parameter"], leaves["input"])
    torch.autograd.backward(list(outputs.values()), [probe(n, y) for n, y in outputs.items()])
    results = {f"output {name}": y.detach() for name, y in outputs.items()}
    for kind, tensors in leaves.items():
        for name, leaf in tensors.items():
            assert leaf.grad is not None, f"{kind} {name} has no gradient"
            results[f"{kind} {name}"] = leaf.grad
    return results


def probe(name: str, y: Tensor) -> Tensor:
    """The gradient of an unsplit output."""
    return draw(f"input gradient {name}", tuple(y.shape))


@dataclass
class Held:
    """What one rank holds of a result: values, and their places in the flattened unsplit tensor."""

    values: Tensor
    index: Tensor
    equal: bool  # whether what several ranks hold has to have equal bits


def compute(case: Case, shapes: dict[str, tuple[int, ...]]) -> dict[str, Held]:
    """Body of a rank. shapes: of the unsplit results."""
    from tests.parity.entries import ENTRIES

    entry, o = ENTRIES[case.layer], Options(**dict(case.options))
    provider = "none" if case.dtype == torch.float64 else "host"
    with ParallelGroup(provider=provider, timeout=60) as group:
        setting = Setting(group, case.sp, case.dtype, o)
        module = entry.build(setting)
        load(module, entry.parameters(o))
        gradients_go = getattr(o, "gradients", "to grad")
        if gradients_go == "to main_grad":
            use_main_grads(module)
        parts, rank = entry.parts(setting), group.rank
        leaves = {}
        for name, shape in entry.inputs(o).items():
            mine = parts[name].cut(draw(f"input {name}", shape), rank).contiguous()
            leaves[name] = mine.to(case.dtype).requires_grad_()
        outputs = entry.call(setting, module, leaves)
        dtype = torch.promote_types(case.dtype, torch.float32) if entry.wide else case.dtype
        gradients = []
        for name, y in outputs.items():
            assert y.dtype == dtype, f"{name}: {y.dtype}"
            shape = shapes[f"output {name}"]
            gradient = parts[name].cut(draw(f"input gradient {name}", shape), rank).to(dtype)
            if parts[name].copies:  # the dense output has its gradient once
                index = parts[name].cut(positions(shape), rank)
                earlier = [parts[name].cut(positions(shape), r).flatten() for r in range(rank)]
                gradient = gradient * ~torch.isin(index, torch.cat([index.new_empty(0), *earlier]))
            gradients.append(gradient)
        torch.autograd.backward(list(outputs.values()), gradients)
        if gradients_go == "later":
            backward_dw(module)
        finalize_gradients(module)
        results = {}
        for kind, tensors in (("output", outputs), ("input", leaves)):
            for name, t in tensors.items():
                index = parts[name].cut(positions(shapes[f"{kind} {name}"]), rank)
                values = t.detach() if kind == "output" else t.grad
                results[f"{kind} {name}"] = Held(values, index, not parts[name].copies)
        for name, parameter, placement in placements(module):
            index = placement.slice(positions(placement.shape))
            results[f"parameter {name}"] = Held(gradient_of(parameter), index, True)
        return results


@torch.no_grad()
def load(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    found = {name: (parameter, place) for name, parameter, place in placements(module)}
    assert found.keys() == shapes.keys(), (sorted(found), sorted(shapes))
    assert len(list(module.parameters())) == len(found), "a parameter without placement"
    for name, (parameter, place) in found.items():
        assert place.shape == shapes[name], (name, place.shape, shapes[name])
        parameter.copy_(place.slice(draw(f"parameter {name}", shapes[name])))


def positions(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def check(case: Case, ranks: Sequence[dict[str, Held]]) -> float:
    """Compare what all ranks hold; returns the largest share of a bound that was used."""
    values = reference(case.layer, case.options)
    u = torch.finfo(case.dtype).eps / 2
    used = 0.0
    for rank in ranks:
        assert rank.keys() == values.keys(), sorted(rank.keys() ^ values.keys())
    for name, (value, scatter) in values.items():
        bound = SIGMAS * u * scatter.flatten()
        seen = torch.zeros(value.numel(), dtype=torch.bool)
        bits = torch.zeros(value.numel(), dtype=torch.float64)
        for number, rank in enumerate(ranks):
            held = rank[name]
            where = f"{case}: {name} on rank {number}"
            assert held.values is not None, f"{where}: no gradient"
            assert held.values.shape == held.index.shape, f"{where}: {held.values.shape}"
            index, got = held.index.flatten(), held.values.double().flatten()
            error = (got - value.flatten()[index]).abs()
            excess = ~(error <= bound[index])
            assert not excess.any(), (
                f"{where}: {int(excess.sum())} of {len(index)} elements, by up to "
                f"{float((error / bound[index]).nan_to_num(torch.inf).max()):.3g} times the bound"
            )
            if held.equal:
                again = seen[index]
                assert torch.equal(bits[index][again], got[again]), f"{where}: other bits"
                bits[index] = got
            seen[index] = True
            if len(index):
                used = max(used, float((error / bound[index].clamp_min(1e-300)).max()))
        assert seen.all(), f"{case}: {name}: {int((~seen).sum())} elements that no rank holds"
    return used
