"""Measure what layers cost on real input: seconds of forward and backward, bytes kept and passed on.

Every layer runs by itself on the input that it has in the model, so masks and tables that a model makes once
per forward count for no layer. The rounds go over all layers in turn: a slow moment of the machine hits all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from .plan import LayerCost

MODES = ("train", "forward", "prefill", "decode")
Clock = Callable[[], float]
Progress = Callable[[int, int], None]


def profile_layers(
    modules: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    sample: Any,
    *,
    repeats: int = 5,
    warmup: int = 1,
    backward: bool = True,
    names: Sequence[str] | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> list[LayerCost]:
    """The costs of modules that follow each other, for one micro-batch.

    Args:
        sample: input of the first one: a tuple as positional arguments, a dict as keyword arguments,
            anything else as one argument; what a module returns is the input of the next in the same way.
        repeats, warmup: rounds over all layers; the median of `repeats` counts, after `warmup` others.
        backward: also the gradients of inputs and parameters, and the bytes kept for them. False: forwards in
            inference mode only.
        clock: seconds so far; default: `time.perf_counter` once all GPUs have finished. `time.thread_time`
            does not count what others do on a busy machine, and only one thread of this process.
        progress: called with (calls made, calls in total).

    Parameters keep their gradients, modules their mode; buffers that a forward updates are updated.
    For models of transformers see `profile_units`.
    """
    layers: list[nn.Module] = list(modules)
    if not layers or repeats < 1 or warmup < 0:
        raise ShapeError(
            f"{len(layers)} layers, repeats={repeats}, warmup={warmup}: nothing to measure"
        )
    probes = []
    value = sample
    for index, layer in enumerate(layers):
        name = names[index] if names else f"{index} {type(layer).__name__}"
        args, kwargs = _arguments(value)
        probe = _Probe(
            name, layer, args, kwargs, list(layer.parameters()), "all" if index else "given"
        )
        probes.append(probe)
        with torch.no_grad():
            value = layer(*args, **kwargs)
        probe.output_bytes = _bytes_of(value)
    return _measure(probes, repeats, warmup, backward, clock or _now, progress)


def profile_units(
    units: Iterable[Any],
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    mode: str = "train",
    repeats: int = 5,
    warmup: int = 1,
    clock: Clock | None = None,
    progress: Progress | None = None,
    count: int | None = None,
) -> list[LayerCost]:
    """The costs of the units of a causal language model: embedding, each decoder layer, head.

    Args:
        units: `CausalLMStage` of one unit each, in order: a list (`split_layers(model, range(units + 1))`),
            which is measured in turns; or an iterator, whose units are measured and let go one by one, so
            that the model need not fit into this process.
        input_ids: [batch, sequence] of one micro-batch.
        mode: "train" forward and backward; the others in inference mode: "forward" of all logits; "prefill"
            of a prompt and the logits of its last token, "decode" of one token after it, both with
            `activation_bytes` of the KV cache at that time.
        clock: as in `profile_layers`.
        count: of the units, if they are an iterator; for `progress`.
    """
    if mode not in MODES:
        raise UnsupportedError(f"mode={mode!r}: use one of {', '.join(MODES)}")
    if repeats < 1 or warmup < 0 or input_ids.dim() != 2:
        raise ShapeError(
            f"input_ids {tuple(input_ids.shape)}, repeats={repeats}, warmup={warmup}: use [batch, sequence] "
            "and at least one repeat"
        )
    chain = _Chain(input_ids, attention_mask, mode)
    together = isinstance(units, Sequence)
    probes, costs = [], []
    for unit in units:
        probe = chain.probe(unit)
        if together:
            probes.append(probe)
            continue
        costs += _measure([probe], repeats, warmup, mode == "train", clock or _now, None)
        if progress is not None:
            progress(len(costs), count or 0)
    if together:
        return _measure(probes, repeats, warmup, mode == "train", clock or _now, progress)
    return costs


@dataclass
class _Probe:
    """A layer with the arguments that it has in the model."""

    name: str
    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    parameters: list[nn.Parameter]
    wanted: str = "first"  # floating inputs that get gradients: the "first", "all", or as "given"
    before: Callable[[], None] = lambda: None  # a call, outside of the measured time
    output_bytes: int = 0
    activation_bytes: int = 0
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def cost(self) -> LayerCost:
        return LayerCost(
            self.name,
            median(self.forward),
            median(self.backward) if self.backward else 0.0,
            sum(parameter.nbytes for parameter in self.parameters),
            self.activation_bytes,
            self.output_bytes,
        )

    def infer(self, clock: Clock) -> float:
        """Seconds of a forward."""
        self.before()
        with torch.inference_mode():
            start = clock()
            self.call(*self.args, **self.kwargs)
            return clock() - start

    def train(self, clock: Clock) -> tuple[float, float]:
        """Seconds of a forward and of its backward."""
        self.before()
        args, kwargs, sources = self._with_gradients()
        start = clock()
        out = self.call(*args, **kwargs)
        middle = clock()
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if not results or not sources:
            return middle - start, 0.0
        ones = [torch.ones_like(x) for x in results]
        begin = clock()
        torch.autograd.grad(results, sources, ones, allow_unused=True)
        return middle - start, clock() - begin

    def count_kept(self) -> None:
        """Bytes that the forward keeps for the backward: storages, each once, without parameters."""
        self.before()
        args, kwargs, _ = self._with_gradients()
        own = {p.untyped_storage().data_ptr() for p in self.parameters}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            out = self.call(*args, **kwargs)
        self.activation_bytes = sum(kept.values())
        del out  # until here, so that no storage takes the place of another

    def _with_gradients(self) -> tuple[Sequence[Any], dict[str, Any], list[Tensor]]:
        leaves, structure = tree_flatten((list(self.args), self.kwargs))
        sources: list[Tensor] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            if {"first": index == 0, "all": True, "given": leaf.requires_grad}[self.wanted]:
                leaves[index] = leaf.detach().requires_grad_()
                sources.append(leaves[index])
        args, kwargs = tree_unflatten(leaves, structure)
        return args, kwargs, [*sources, *(p for p in self.parameters if p.requires_grad)]


def _measure(
    probes: list[_Probe],
    repeats: int,
    warmup: int,
    backward: bool,
    clock: Clock,
    progress: Progress | None,
) -> list[LayerCost]:
    total, done = len(probes) * (repeats + warmup), 0
    for turn in range(warmup + repeats):
        for probe in probes:
            if backward:
                forward_seconds, backward_seconds = probe.train(clock)
            else:
                forward_seconds, backward_seconds = probe.infer(clock), 0.0
            if turn >= warmup:
                probe.forward.append(forward_seconds)
                probe.backward.append(backward_seconds)
            done += 1
            if progress is not None:
                progress(done, total)
    if backward:
        for probe in probes:
            probe.count_kept()
    return [probe.cost for probe in probes]


class _Chain:
    """Leads a batch through the units of a model, and finds what the layer in each is called with."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, mode: str) -> None:
        self.mode = mode
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        # A model without padding sees no mask, as in the runner and the decoder.
        self.value = {
            "inputs": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions,
        }
        step = mask.new_ones(len(mask), 1)
        self.step = {
            "inputs": input_ids[:, -1:],
            "attention_mask": None if attention_mask is None else torch.cat([mask, step], 1),
            "position_ids": positions[:, -1:] + 1,
        }

    def probe(self, unit: Any) -> _Probe:
        """A probe of the layer of `unit`, or of the whole unit if it has none; leads the batch on."""
        layer = unit.only_layer()
        name = (
            f"layer {unit.layers.start}" if unit.layers else "embedding" if unit.first else "head"
        )
        parameters = list(unit.parameters())
        calls: list[tuple[Any, dict[str, Any]]] = []
        with torch.no_grad():
            if self.mode in ("train", "forward"):
                self.value, arguments = self._pass(unit, layer, self.value, None, calls)
            else:
                cache = unit.new_cache()
                self.value, arguments = self._pass(unit, layer, self.value, cache, calls)
                if self.mode == "decode":
                    saved = [copy.copy(one) for one in cache.layers]
                    self.step, arguments = self._pass(unit, layer, self.step, cache, calls)
        passed = self.step if self.mode == "decode" else self.value
        args, kwargs = calls[-1] if layer else ((), arguments)
        probe = _Probe(name, layer or unit, args, kwargs, parameters)
        probe.output_bytes = _bytes_of(passed["inputs"] if isinstance(passed, dict) else passed)
        if self.mode in ("prefill", "decode"):
            probe.activation_bytes = sum(
                _bytes_of([one.keys, one.values]) for one in cache.layers if one.keys is not None
            )
            start = [] if self.mode == "prefill" else saved
            probe.before = partial(_restore, cache, unit.new_cache, start)
        return probe

    def _pass(
        self, unit: Any, layer: nn.Module | None, value: Any, cache: Any, calls: list[Any]
    ) -> tuple[Any, dict[str, Any]]:
        arguments = value | {"cache": cache, "last_token": cache is not None}
        if layer is None:
            return unit(**arguments), arguments
        hook = layer.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        try:
            return unit(**arguments), arguments
        finally:
            hook.remove()


def _restore(cache: Any, fresh: Callable[[], Any], saved: list[Any]) -> None:
    """What a call has added to a cache leaves it again."""
    cache.layers = [copy.copy(one) for one in saved] if saved else fresh().layers


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, tuple):
        return value, {}
    return ((), value) if isinstance(value, dict) else ((value,), {})


def _bytes_of(value: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, Tensor))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
