"""Backward in two parts, for any module: the gradient of its input now, those of its weights later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023) send the input gradient on before
the weight gradients are computed, which then fill a bubble. Layers of this package do so with
`delay_wgrad=True`. In other modules, products with a parameter (`linear`, `conv1d` to `conv3d`, `matmul` and
`addmm` with a two-dimensional parameter on the right) are replaced while the forward runs by ones that keep
(x, dy) in their backward; everything else, such as norms, gets its gradients with the input. Gradients are
accumulated as autograd does: of a micro-batch, all uses of a parameter are summed in the order of the
backward, then accumulated once, with its hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from tp_kernels.comm.errors import UnsupportedError
from tp_kernels.layers.state import is_dtensor
from tp_kernels.ops._weight_gradient import Pending, WeightGradientQueue


class _Product(NamedTuple):
    """A product with a weight, as one operand of it sees it."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]  # of dy, x, weight
    # Of dy, x and weight, where needed: those of the weight and the bias.
    weight_gradients: Callable[
        [Tensor, Tensor, Tensor, bool, bool], tuple[Tensor | None, Tensor | None]
    ]


class _Call(NamedTuple):
    product: _Product
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradients(
    transposed: bool, dy: Tensor, x: Tensor, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    dy, x = _rows(dy), _rows(x)
    dw = None
    if need_weight:
        dw = x.t().mm(dy) if transposed else dy.t().mm(x)
    return dw, dy.sum(0) if need_bias else None


_LINEAR = _Product(  # weight [N, K]
    F.linear,
    lambda dy, x, w: _rows(dy).mm(w).view(x.shape),
    lambda dy, x, w, need_w, need_b: _weight_gradients(False, dy, x, need_w, need_b),
)
_MATMUL = _Product(  # weight [K, N]
    lambda x, w, b: torch.matmul(x, w) if b is None else torch.addmm(b, x, w),
    lambda dy, x, w: _rows(dy).mm(w.t()).view(x.shape),
    lambda dy, x, w, need_w, need_b: _weight_gradients(True, dy, x, need_w, need_b),
)


def _linear(input: Any, weight: Any, bias: Any = None) -> _Call | None:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return _Call(_LINEAR, input, weight, bias)


def _matmul(*args: Any, **options: Any) -> _Call | None:
    if options or not all(isinstance(x, Tensor) for x in args) or args[1].dim() != 2:
        return None
    return _Call(_MATMUL, args[0], args[1], None) if args[0].dim() >= 2 else None


def _addmm(*args: Any, **options: Any) -> _Call | None:
    if options or len(args) != 3 or args[0].shape != args[2].shape[1:]:
        return None
    return _Call(_MATMUL, args[1], args[2], args[0])


def _convolution(dimensions: int, convolve: Callable[..., Tensor]) -> Callable[..., _Call | None]:
    def call(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Call | None:
        if isinstance(padding, str) or input.dim() != dimensions + 2:
            return None

        def each(value: Any) -> list[int]:
            values = [value] if isinstance(value, int) else list(value)
            return values * dimensions if len(values) == 1 else values

        geometry = (each(stride), each(padding), each(dilation), False, [0] * dimensions, groups)

        def gradients(
            dy: Tensor, x: Tensor, w: Tensor, mask: list[bool]
        ) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], *geometry, mask)

        def input_gradient(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
            dx = gradients(dy, x, w, [True, False, False])[0]
            assert dx is not None
            return dx

        def weight_gradients(
            dy: Tensor, x: Tensor, w: Tensor, need_w: bool, need_b: bool
        ) -> tuple[Tensor | None, Tensor | None]:
            _, dw, db = gradients(dy, x, w, [False, need_w, need_b])
            return dw if need_w else None, db if need_b else None

        product = _Product(
            lambda x, w, b: convolve(x, w, b, stride, padding, dilation, groups),
            input_gradient,
            weight_gradients,
        )
        return _Call(product, input, weight, bias)

    return call


_PRODUCTS: dict[Any, Callable[..., _Call | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    F.conv1d: _convolution(1, F.conv1d),
    F.conv2d: _convolution(2, F.conv2d),
    F.conv3d: _convolution(3, F.conv3d),
}
_DEFERRING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # what they do with their parameters


class _Deferred(torch.autograd.Function):
    """A product whose backward gives the gradient of x and queues those of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # makes autograd record a call without any other gradient
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: _Product,
        owner: SplitBackward,
        parameters: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.owner, ctx.parameters = product, owner, parameters
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a split backward has no second derivative (create_graph=True inside of a stage): use a "
                "schedule that does not split, such as one_f_one_b"
            )
        x, weight = ctx.saved_tensors
        ctx.owner._queue(ctx.product, ctx.parameters, dy, x, weight)
        dx = ctx.product.input_gradient(dy, x, weight) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None, None, None


class _Mode(TorchFunctionMode):
    def __init__(self, owner: SplitBackward, decided: frozenset[int]) -> None:
        super().__init__()
        self._owner, self._decided = owner, decided

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if (
            func is torch.autograd.grad
        ):  # of tensors inside of the module, in a checkpoint that runs again
            with self._owner._not_inside():
                return self._gradients(func, *args, **kwargs)
        parse = _PRODUCTS.get(func)
        call = parse(*args, **kwargs) if parse is not None else None
        if call is not None and self._owner._defers(call, self._decided):
            return self._owner._call(call)
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, Tensor) and first.requires_grad:
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter) and value.requires_grad:
                    how = getattr(func, "__name__", str(func))
                    self._owner._immediate.setdefault(id(value), how)
        return result

    def _gradients(self, func: Any, outputs: Any, inputs: Any, **options: Any) -> Any:
        """torch.autograd.grad with this mode in force: a checkpoint may run again inside of it."""
        keep, create, unused = (
            options.pop(name, None) for name in ("retain_graph", "create_graph", "allow_unused")
        )
        given = options.pop("grad_outputs", None) or [None] * len(outputs)
        if any(options.get(name) for name in ("is_grads_batched", "materialize_grads")):
            raise UnsupportedError(
                f"torch.autograd.grad inside of a stage with {options}: use a schedule that does not split "
                "the backward, such as one_f_one_b"
            )
        roots = [
            (y, torch.ones_like(y) if g is None else g) for y, g in zip(outputs, given, strict=True)
        ]
        with self:
            return _run(
                roots,
                tuple(inputs),
                bool(create) if keep is None else keep,
                bool(create),
                bool(unused),
                False,
            )


class SplitBackward:
    """The weight gradients that the backwards of one module put off.

    The forward runs in `recording()`; its `backward` returns what is left to do, for `deliver`. Forwards
    outside of `recording()` have plain backwards.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.obstacle = _obstacle(module)  # why nothing but delay_wgrad is put off
        self._queued = WeightGradientQueue()
        self._inside = False  # of a backward of the whole module
        self._parameters: set[int] = set()
        self._deferred: set[int] = set()
        # By parameter: a function whose gradient comes with the input.
        self._immediate = dict(_used_elsewhere(module))

    @contextmanager
    def recording(self, decided: frozenset[int] | None = None) -> Iterator[frozenset[int]]:
        """Yields what is decided about this forward, for its backward, which may run it again.

        What is seen of other uses of a parameter counts from the next forward on.
        """
        decided = frozenset(self._immediate) if decided is None else decided
        if self.obstacle:
            yield decided
            return
        self._parameters = {id(p) for p in self.module.parameters()}
        with _Mode(self, decided):
            yield decided

    def backward(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor],
        decided: frozenset[int],
    ) -> list[Pending]:
        """`torch.autograd.backward` of a forward in `recording()`; returns what it has left to do."""
        self._inside = True
        try:
            # Checkpoints of the module run its forward again in here, in the same way: the mode has to be
            # active, which torch.autograd.backward would switch off, being a torch function itself.
            with self.recording(decided):
                run_backward(roots, gradients)
        finally:
            self._inside = False
        return self.take()

    def take(self) -> list[Pending]:
        """Everything that was put off and not taken yet."""
        pending: list[Pending] = []
        for queue in (self._queued, *_queues(self.module)):
            while len(queue):
                pending += queue.take()
        return pending

    def explain(self) -> list[str]:
        """A line for every parameter seen in a forward, and why nothing is put off if nothing is."""
        lines = [] if self.obstacle is None else [f"nothing put off: {self.obstacle}"]
        delaying = {
            id(p)
            for layer in self.module.modules()
            if isinstance(getattr(layer, "delayed", None), WeightGradientQueue)
            for p in layer.parameters(recurse=False)
        }
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                how = "frozen"
            elif id(parameter) in delaying:
                how = "later (delay_wgrad=True)"
            elif id(parameter) in self._deferred:
                how = "later"
            elif id(parameter) in self._immediate:
                how = f"with the input: {self._immediate[id(parameter)]}"
            else:
                how = "with the input"
            lines.append(f"{name}: {how}")
        return lines

    @contextmanager
    def _not_inside(self) -> Iterator[None]:
        before, self._inside = self._inside, False
        try:
            yield
        finally:
            self._inside = before

    def _defers(self, call: _Call, decided: frozenset[int]) -> bool:
        x, weight, bias = call.x, call.weight, call.bias
        return (
            isinstance(weight, Tensor)
            and id(weight) in self._parameters  # what a stage receives is a leaf, too
            and weight.requires_grad
            and not (weight.is_complex() or x.is_complex())
            and type(weight) is nn.Parameter
            and type(x) in (Tensor, nn.Parameter)
            and x is not weight
            and id(weight) not in decided
            and (bias is None or (id(bias) in self._parameters and id(bias) not in decided))
            and not torch._C._are_functorch_transforms_active()
        )

    def _call(self, call: _Call) -> Tensor:
        x, weight, bias = call.x, call.weight.detach(), call.bias
        bias = None if bias is None else bias.detach()
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        later = (call.weight, call.bias)
        self._deferred.update(id(p) for p in later if p is not None and p.requires_grad)
        anchor = torch.empty(0, requires_grad=True)
        return _Deferred.apply(anchor, x, weight, bias, call.product, self, later)

    def _queue(
        self,
        product: _Product,
        parameters: tuple[Tensor, Tensor | None],
        dy: Tensor,
        x: Tensor,
        operand: Tensor,
    ) -> None:
        if not self._inside:  # torch.autograd.grad of some tensors inside of the module
            return
        weight, bias = parameters
        later_bias = bias if bias is not None and bias.requires_grad else None
        versions = x._version, dy._version

        def compute() -> tuple[Tensor | None, Tensor | None]:
            if versions != (x._version, dy._version):
                raise UnsupportedError(
                    "the input of a product with a parameter, or the gradient of its output, was written "
                    "to in place between the input gradient and the weight gradient of a micro-batch; copy "
                    "it, or use a schedule that does not split the backward"
                )
            with torch.no_grad():
                return product.weight_gradients(dy, x, operand, True, later_bias is not None)

        self._queued.put(Pending(torch._C._current_graph_task_id(), weight, later_bias, compute))


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its `__torch_function__`."""
    _run(list(zip(roots, gradients, strict=True)), (), False, False, True, True)


def _run(
    roots: Sequence[tuple[Tensor | GradientEdge, Tensor]],
    inputs: tuple[Any, ...],
    keep: bool,
    create: bool,
    unused: bool,
    accumulate: bool,
) -> Any:
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(root for root, _ in roots),
        tuple(gradient for _, gradient in roots),
        keep,
        create,
        inputs,
        allow_unreachable=unused,
        accumulate_grad=accumulate,
    )


def _queues(module: nn.Module) -> Iterator[WeightGradientQueue]:
    for layer in module.modules():
        delayed = getattr(layer, "delayed", None)
        if isinstance(delayed, WeightGradientQueue):
            yield delayed


def _used_elsewhere(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Parameters that modules of other kinds share, so that hooks would see their gradient in two parts."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    for key, layers in owners.items():
        others = [layer for layer in layers if not isinstance(layer, _DEFERRING)]
        if len(layers) > 1 and others:
            yield key, f"shared with {type(others[0]).__name__}"


def _obstacle(module: nn.Module) -> str | None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for name, layer in module.named_modules():
        shown = f"{name or 'the stage'} ({type(layer).__name__})"
        if getattr(layer, "_compiled_call_impl", None) is not None or (
            dynamo is not None and isinstance(layer, dynamo.OptimizedModule)
        ):
            return f"{shown} is compiled, and a graph computes all of its gradients at once"
    if any(is_dtensor(parameter) for parameter in module.parameters()):
        return "parameters are divided (DTensor), and take their gradients during the backward only"
    return None
