"""One stage of a pipeline on its rank: forward, backward, weight gradients of one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tp_kernels.comm.errors import TpKernelsError
from tp_kernels.layers.random import RandomStreams
from tp_kernels.ops._weight_gradient import Pending, deliver

from .micro_batches import mapped, tensors_of
from .split_backward import SplitBackward, run_backward
from .stashing import WeightStash


class PipelineError(TpKernelsError):
    """A stage failed, or the ranks of a pipeline do not agree; the message names stage and micro-batch."""


class _InFlight:
    """What is kept of a micro-batch between its forward and its backward, beside the graph.

    The outputs are not: an edge of the graph is enough to start a backward, so their memory is free once the
    next stage has them, unless the graph itself needs it.
    """

    def __init__(
        self, inputs: list[Tensor], outputs: list[Tensor], decided: frozenset[int] | None
    ) -> None:
        self.inputs = inputs
        self.decided = decided  # of a forward whose backward is split
        self.edges: list[GradientEdge] = [get_gradient_edge(output) for output in outputs]
        self.described = [(output.shape, output.dtype) for output in outputs]


class Stage:
    """A module, and its micro-batches that are under way.

    Args:
        module: what the stage computes.
        index: which stage it is.
        checkpointed: its backward computes the forward again instead of keeping activations.
        streams: random streams of its layers, which a checkpoint replays.
        stashed: every backward uses the weights of its forward, whatever the optimizer did in between.
        measured: count the bytes that forwards keep for their backwards.

    Attributes:
        kept_bytes: by micro-batch under way, if `measured`: until its backward has ended, W included.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        *,
        checkpointed: bool = False,
        streams: RandomStreams | None = None,
        stashed: bool = False,
        measured: bool = False,
    ) -> None:
        self.module, self.index = module, index
        self.checkpointed, self.streams, self.measured = checkpointed, streams, measured
        self.split = SplitBackward(module)
        self.stash = WeightStash(module) if stashed else None
        self.kept_bytes: dict[int, int] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._pending: dict[int, list[Pending]] = {}

    def forward(
        self,
        micro_batch: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        split: bool,
        received: Any = (),
        after: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The output of the stage; its backward has to run once.

        Args:
            split: the backward will be in two parts.
            received: of the inputs, what came from the stage before.
            after: a function of the output (the loss) whose result takes its place.
        """
        inputs = _requiring(received)
        if inputs and not self.checkpointed:  # which needs them unchanged
            writable = {id(x): _Writable.apply(x) for x in inputs}
            args, kwargs = mapped(lambda leaf: writable.get(id(leaf), leaf), (tuple(args), kwargs))
        kept = _Kept(self.module) if self.measured else None
        with kept or nullcontext(), self.split.recording() if split else nullcontext() as decided:
            output = self._run(micro_batch, args, kwargs)
            if after is not None:
                output = after(output)
        if kept is not None:
            self.kept_bytes[micro_batch] = kept.nbytes
        self._in_flight[micro_batch] = _InFlight(inputs, _requiring(output), decided)
        return output

    def _run(self, micro_batch: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.stash is None:
            run = partial(self.module, *args, **kwargs)
        else:
            weights = self.stash.take(micro_batch)
            run = partial(functional_call, self.module, weights, tuple(args), kwargs)
        if not self.checkpointed:
            return run()
        if self.streams is not None:
            return self.streams.checkpoint(run)
        return checkpoint(run, use_reentrant=False)

    def trains(self, received: Any) -> bool:
        """Whether a parameter, or something it received, requires a gradient."""
        return any(p.requires_grad for p in self.module.parameters()) or bool(_requiring(received))

    def wants_gradients(self, micro_batch: int) -> bool:
        """Whether any output of its forward requires a gradient; if not, none is sent back."""
        return bool(self._in_flight[micro_batch].edges)

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None], *, split: bool, whole: bool
    ) -> list[Tensor | None] | None:
        """Gradients of the inputs that require one, in their order; None if no input does.

        Args:
            gradients: of every output that requires one, in their order; None counts as zero.
            split: as in the forward.
            whole: compute the weight gradients as well; else `weight_gradients` does.
        """
        kept = self._in_flight.pop(micro_batch)
        if len(gradients) != len(kept.edges):
            raise PipelineError(
                f"{len(gradients)} gradients came back for the {len(kept.edges)} outputs that require one"
            )
        roots, given = [], []
        for edge, gradient, (shape, dtype) in zip(
            kept.edges, gradients, kept.described, strict=True
        ):
            if gradient is None:
                continue
            if gradient.shape != shape or gradient.dtype != dtype:
                raise PipelineError(
                    f"the gradient of an output {tuple(shape)} {dtype} came back as "
                    f"{tuple(gradient.shape)} {gradient.dtype}"
                )
            roots.append(edge)
            given.append(gradient)
        kept.edges.clear()
        pending: list[Pending] = []
        if roots and split:
            assert kept.decided is not None
            pending = self.split.backward(roots, given, kept.decided)
        elif roots:
            run_backward(roots, given)
            pending = self.split.take()  # of layers with delay_wgrad=True
        self._pending[micro_batch] = pending
        if whole:
            self.weight_gradients(micro_batch)
        if not kept.inputs:
            return None
        answers = [x.grad for x in kept.inputs]
        for x in kept.inputs:
            x.grad = None
        return answers

    def weight_gradients(self, micro_batch: int) -> None:
        """What the backward of the micro-batch has left."""
        deliver(self._pending.pop(micro_batch))
        self.kept_bytes.pop(micro_batch, None)
        if self.stash is not None:
            self.stash.give_back(micro_batch)

    def clear(self) -> None:
        """Forget the micro-batches that are under way."""
        self._in_flight.clear()
        self._pending.clear()
        self.kept_bytes.clear()
        self.split.take()
        if self.stash is not None:
            self.stash.clear()


class _Writable(torch.autograd.Function):
    """A received tensor as the output of something, which a stage may overwrite, unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def load_checkpointing() -> None:
    """Import what torch needs for a first checkpoint: seconds, before other ranks wait for this one."""
    checkpoint(torch.sin, torch.zeros(1, requires_grad=True), use_reentrant=False)


def _requiring(value: Any) -> list[Tensor]:
    """Tensors of a value that require a gradient, each once."""
    return list({id(x): x for x in tensors_of(value) if x.requires_grad}.values())


class _Kept:
    """Counts what autograd saves while it is entered: every storage once, parameters not at all."""

    def __init__(self, module: nn.Module) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.nbytes = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return x

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
