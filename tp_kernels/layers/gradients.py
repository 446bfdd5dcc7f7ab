"""Gradients of parameters that are divided over ranks: completed, clipped; and how many parameters there are.

Everything reads `ParamPlacement`, never a name, and takes `gradient_of(parameter)`: its `main_grad` if there
is one, else its `grad`. Order of a step: backward, `backward_dw` if weight gradients are delayed,
`finalize_gradients`, `clip_grad_norm_`, optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import pairwise
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp_kernels.comm.collectives import all_gather, all_reduce
from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.ops._weight_gradient import (
    Pending,
    WeightGradientQueue,
    deliver,
    main_grad_of,
)

from .placement import ParamPlacement, Piece, placements
from .state import is_dtensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Its `main_grad` if there is one, else its `grad`.

    Raises:
        UnsupportedError: a part of the gradient is in each of them.
    """
    main = main_grad_of(parameter)
    if main is None:
        return parameter.grad
    if parameter.grad is not None and parameter.grad is not main:
        raise UnsupportedError(
            f"a parameter {tuple(parameter.shape)} has gradients in main_grad and in grad; add grad to "
            "main_grad after each backward, as hooks of use_main_grads(model) do"
        )
    return main


def use_main_grads(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give each trainable parameter a `main_grad` of `dtype` (float64 if it is float64), filled with zeros.

    The linear ops add weight gradients there; what autograd accumulates otherwise (biases, norms,
    embeddings) is moved there by hooks. Called again: fills with zeros. An optimizer that reads `grad`
    needs `main_grads_to_grads(module)` in front of its step. Every backward adds to them, also one that
    asks for other gradients only (`backward(inputs=)`, `torch.autograd.grad`).
    """
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        main = main_grad_of(parameter)
        if main is not None:
            main.zero_()
            parameter.grad = None
            continue
        wide = torch.float64 if parameter.dtype == torch.float64 else dtype
        buffer = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
        parameter.main_grad = buffer  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_move_to_main_grad)


def main_grads_to_grads(module: nn.Module) -> None:
    """Set `grad` of each parameter to its `main_grad`, rounded to its dtype: what most optimizers read.

    The last thing before `optimizer.step()`; `use_main_grads(module)` afterwards starts anew.
    """
    for parameter in module.parameters():
        main = main_grad_of(parameter)
        if main is not None:
            parameter.grad = main if main.dtype == parameter.dtype else main.to(parameter.dtype)


def _move_to_main_grad(parameter: Any) -> None:
    main = main_grad_of(parameter)
    if parameter.grad is not None and main is not None:  # the buffer may have been taken away
        main.add_(parameter.grad)
        parameter.grad = None


def backward_dw(module: nn.Module) -> None:
    """Compute the weight and bias gradients that the layers with `delay_wgrad=True` have put off.

    Of each layer what its oldest backward pass has left, if anything: call it once per micro-batch, in the
    order of their backwards. (A segment of a reentrant checkpoint is a pass of its own.) Accumulates like
    autograd, hooks included, in the same order and with the same bits. On all ranks alike: layers with
    gathered="redo" communicate.
    """
    pending: list[Pending] = []
    for name, layer in _delaying(module):
        if is_dtensor(layer.weight):
            raise UnsupportedError(
                f"delay_wgrad=True in {_shown(name, layer)} under fully_shard, which takes gradients "
                "during the backward only; use delay_wgrad=False"
            )
        pending += layer.delayed.take()
    deliver(pending)


def _delaying(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if isinstance(getattr(layer, "delayed", None), WeightGradientQueue):
            yield name, layer


def _shown(name: str, layer: nn.Module) -> str:
    return f"{name or 'the module itself'} ({type(layer).__name__})"


def _refuse_pending(operation: str, module: nn.Module) -> None:
    waiting = [_shown(name, layer) for name, layer in _delaying(module) if len(layer.delayed)]
    if waiting:
        raise UnsupportedError(
            f"{operation}: weight gradients are still delayed in {', '.join(waiting)}; call "
            "backward_dw(model) once for each backward pass first"
        )


def finalize_gradients(module: nn.Module) -> None:
    """Sum the gradients that the ranks hold in parts. Call once after backward, on every rank.

    Touches partial gradients only: parameters used for a part of the work (norms under sequence
    parallelism, q/k norms), and of divided ones what several ranks hold (KV heads). One all-reduce per group
    and dtype, which sums in fp32 in rank order and rounds once. A parameter without gradient counts as zero
    on its rank; one without gradient on all ranks gets none.

    Raises:
        UnsupportedError: delayed weight gradients, or gradients in `grad` and `main_grad`.
    """
    _refuse_pending("finalize_gradients", module)
    buckets: dict[tuple[str, torch.dtype], list[tuple[nn.Parameter, ParamPlacement]]] = {}
    for _, parameter, placement in placements(module):
        if placement.needs_reduction and parameter.requires_grad:
            main = main_grad_of(parameter)
            dtype = parameter.dtype if main is None else main.dtype
            buckets.setdefault((placement.group.name, dtype), []).append((parameter, placement))
    for (_, dtype), members in buckets.items():
        _reduce_bucket(members, dtype)


def _reduce_bucket(
    members: Sequence[tuple[nn.Parameter, ParamPlacement]], dtype: torch.dtype
) -> None:
    parameter, placement = members[0]
    shapes = [_shape_of_sum(place) for _, place in members]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(sizes) + len(members), dtype=dtype, device=parameter.device)
    *sums, there = flat.split([*sizes, len(members)])
    gradients = [gradient_of(parameter) for parameter, _ in members]
    wholes = [None if gradient is None else _undivided(gradient) for gradient in gradients]
    for index, (whole, (_, place)) in enumerate(zip(wholes, members, strict=True)):
        if whole is not None:
            there[index] = 1
            for part, own in _parts(place, sums[index].view(shapes[index]), whole):
                part.copy_(own)
    all_reduce(flat, placement.group, out=flat)
    for index, (parameter, place) in enumerate(members):
        gradient, whole = gradients[index], wholes[index]
        if whole is None:
            if not there[index]:
                continue
            whole = torch.zeros(place.local_shape(), dtype=dtype, device=flat.device)
        for part, own in _parts(place, sums[index].view(shapes[index]), whole):
            own.copy_(part)
        if gradient is None:
            parameter.grad = _divided(whole, parameter)
        elif gradient is not whole:
            gradient.copy_(_divided(whole, gradient))


def _undivided(gradient: Any) -> Tensor:
    """What FSDP2 divides over other ranks than ours, whole (collective over those)."""
    return gradient.full_tensor() if is_dtensor(gradient) else gradient


def _divided(full: Tensor, like: Any) -> Tensor:
    """A tensor that all ranks of the mesh hold, as FSDP2 divides `like`, if it does. Nothing is sent."""
    if not is_dtensor(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def _shape_of_sum(place: ParamPlacement) -> tuple[int, ...]:
    """Of what several ranks hold of an unsplit parameter: all of one that is not divided."""
    if place.dim is None:
        return place.shape
    length = sum(stop - start for start, stop in _shared(_all_pieces(place)))
    return (*place.shape[: place.dim], length, *place.shape[place.dim + 1 :])


def _parts(place: ParamPlacement, total: Tensor, local: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the sum [_shape_of_sum] and of this rank's tensor that belong together."""
    dim = place.dim
    if dim is None:
        yield total, local
        return
    position = 0
    for start, stop in _shared(_all_pieces(place)):
        at = 0
        for first, last in place.pieces():
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield (
                    total.narrow(dim, position + low - start, high - low),
                    local.narrow(dim, at + low - first, high - low),
                )
            at += last - first
        position += stop - start


def _all_pieces(place: ParamPlacement) -> tuple[tuple[Piece, ...], ...]:
    return tuple(place.pieces(rank) for rank in range(place.group.size))


@lru_cache
def _shared(pieces: tuple[tuple[Piece, ...], ...]) -> tuple[Piece, ...]:
    """What more than one rank holds, in order, of the pieces of each."""
    edges = sorted({edge for held in pieces for piece in held for edge in piece})
    shared: list[Piece] = []
    for low, high in pairwise(edges):
        holders = sum(any(a <= low and high <= b for a, b in held) for held in pieces)
        if holders > 1 and shared and shared[-1][1] == low:
            shared[-1] = (shared[-1][0], high)
        elif holders > 1:
            shared.append((low, high))
    return tuple(shared)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm over the unsplit model is at most `max_norm`. Collective.

    What `torch.nn.utils.clip_grad_norm_` does to the unsplit model: every element counts once, however many
    ranks hold it. Call it after `finalize_gradients`.

    Args:
        model: a module or several (chunks of a pipeline stage). Not bare parameters, which do not say where
            they are placed. Parameters without placement count as equal on all ranks.
        max_norm, norm_type, error_if_nonfinite: as torch's; norm_type positive, also infinite.

    Returns:
        The norm before, float32 (float64 if a parameter is), 0-dimensional; the same bits on all ranks.

    Raises:
        UnsupportedError: bare parameters, another norm_type, delayed weight gradients.
        RuntimeError: the norm is nan or infinite and error_if_nonfinite, on all ranks alike.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(module, nn.Module) for module in modules):
        raise UnsupportedError(
            "clip_grad_norm_: a parameter alone does not say which part of what it is; pass the model"
        )
    if not norm_type > 0:
        raise UnsupportedError(f"clip_grad_norm_: norm_type={norm_type} is not positive")
    for module in modules:
        _refuse_pending("clip_grad_norm_", module)
    parameters = [
        (parameter, placement)
        for parameter, placement in _unique(modules)
        if parameter.requires_grad
    ]
    norm = _total_norm(parameters, float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(norm)}, so they "
            "cannot be clipped; error_if_nonfinite=False scales them nevertheless"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter, _ in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            local = _local(gradient)
            local.mul_(scale.to(local.device))
    return norm


def count_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Elements of the parameters of the unsplit model, tied ones once."""
    return sum(
        torch.Size(parameter.shape if placement is None else placement.shape).numel()
        for parameter, placement in _unique([model])
        if parameter.requires_grad or not trainable_only
    )


def _unique(modules: Sequence[nn.Module]) -> list[tuple[nn.Parameter, ParamPlacement | None]]:
    """Every parameter once, with its placement if it has one."""
    found: dict[int, tuple[nn.Parameter, ParamPlacement | None]] = {}
    placed = {
        id(parameter): place for module in modules for _, parameter, place in placements(module)
    }
    for module in modules:
        for parameter in module.parameters():
            found[id(parameter)] = (parameter, placed.get(id(parameter)))
    return list(found.values())


def _total_norm(
    parameters: Sequence[tuple[nn.Parameter, ParamPlacement | None]], order: float
) -> Tensor:
    """Norm of all gradients; their powers are summed in float64."""
    groups = {place.group.name: place.group for _, place in parameters if place is not None}
    everywhere = next(iter(groups), "")  # counts what is not placed
    device = parameters[0][0].device if parameters else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.float64, device=device)
    # By group, and by what FSDP2 divides further: (mesh, its dimensions that divide).
    totals: dict[str, dict[Any, Tensor]] = {name: {} for name in [*groups] or [everywhere]}
    for parameter, place in parameters:
        name = everywhere if place is None else place.group.name
        mesh = _mesh_of(parameter, place)
        total = totals[name].setdefault(mesh, zero)
        for view in _counted(parameter, place, groups.get(name), divided=mesh is not None):
            wide = torch.float64 if view.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(view, order, dtype=wide).to(device).double()
            total = torch.maximum(total, norm) if order == inf else total + norm**order
        totals[name][mesh] = total
    result = zero
    for name, by_mesh in totals.items():
        own = zero
        for mesh, total in by_mesh.items():
            for dim in mesh[1] if mesh is not None else ():
                total = _summed(_gathered(total, mesh[0].get_group(dim)), order)
            own = _summed([own, total], order)
        if name:
            own = _summed(all_gather(own.view(1), groups[name]).unbind(), order)
        result = _summed([result, own], order)
    double = any(parameter.dtype == torch.float64 for parameter, _ in parameters)
    result = result if order == inf else result ** (1.0 / order)
    return result if double else result.float()


def _counted(
    parameter: nn.Parameter,
    place: ParamPlacement | None,
    group: ParallelGroup | None,
    divided: bool,
) -> list[Tensor]:
    """Views of the gradient that this rank counts."""
    gradient = gradient_of(parameter)
    if gradient is None:
        return []
    if place is None or place.dim is None:  # equal on all ranks
        return [_local(gradient)] if group is None or group.rank == 0 else []
    if divided:
        return [_local(gradient)]
    return place.owned_views(_undivided(gradient))


def _mesh_of(parameter: Any, place: ParamPlacement | None) -> Any:
    """(mesh, dimensions) over which the gradient that a rank counts is divided further; None: over none.

    What several of our ranks hold is gathered before it is counted: its parts differ between them.
    """
    if not is_dtensor(parameter) or (place is not None and place.overlapping):
        return None
    dims = [dim for dim, how in enumerate(parameter.placements) if how.is_shard()]
    return parameter.device_mesh, tuple(dims)


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if is_dtensor(gradient) else gradient


def _gathered(total: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(total) for _ in range(group.size())]
    dist.all_gather(parts, total, group=group)
    return parts


def _summed(parts: Sequence[Tensor], order: float) -> Tensor:
    """In the order of the ranks."""
    return reduce(torch.maximum if order == inf else torch.add, parts)
