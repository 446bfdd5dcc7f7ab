"""What every op shares: argument checks, the torch library, and the way to an implementation.

Public functions normalise their arguments to 2-D rows and lists of weights and call an `Op`, which carries
schema, fake kernel and autograd formula, so that torch.compile and checkpointing see one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tp_kernels.comm.errors import ShapeError, UnsupportedError
from tp_kernels.comm.group import ParallelGroup
from tp_kernels.dispatch import IMPLEMENTATIONS, choose

if TYPE_CHECKING:
    from ._weight_gradient import Diverted

library = torch.library.Library("tp_kernels", "DEF")

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor] | None] = {
    None: None,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),  # So et al., 2021 (Primer)
}
# Implementations that `group.short` stands in for, where it can.
SHORT = ("auto", "host")
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Op:
    """A call goes by the shortest way that records what has to be recorded.

    Nothing recorded: the kernel. Gradients: an autograd.Function around it, 120 to 330 us faster than torch's
    dispatcher with Python kernels. Compilation, transforms and modes: `torch.ops.tp_kernels`.
    """

    def __init__(
        self,
        overload: Callable[..., Any],
        kernel: Callable[..., Any],
        function: type[torch.autograd.Function] | None,
    ) -> None:
        self._overload, self._kernel, self._function = overload, kernel, function

    def __call__(self, *args: Any, diverted: Diverted | None = None) -> Any:
        """diverted: weight gradients that go elsewhere than to autograd, see _weight_gradient.py."""
        if traced():
            if diverted:
                raise UnsupportedError(
                    f"{self._overload}: main_grad and delayed weight gradients need a plain backward(), not "
                    "function transforms, dispatch modes (selective checkpointing, fake tensors) or tracers"
                )
            if not torch.compiler.is_compiling():
                self._check_traceable(args)
            return self._overload(*args)
        if self._function is not None and torch.is_grad_enabled():
            lengths, flat = _flatten(args)
            if diverted or any(isinstance(t, Tensor) and t.requires_grad for t in flat):
                anchor = diverted.anchor if diverted else None
                result = self._function.apply(lengths, diverted, anchor, *flat)
                return result if isinstance(result, Tensor) else list(result)
        return self._kernel(*args)

    def _check_traceable(self, args: Sequence[Any]) -> None:
        if torch._C._get_tracing_state() is not None:  # knows no lists of row counts
            raise UnsupportedError(f"{self._overload}: torch.jit.trace cannot; use torch.compile")
        transforms, tangents = (
            torch._C._are_functorch_transforms_active(),
            forward_ad._current_level,
        )
        if not transforms and tangents < 0:
            return
        tensors = [t for t in _flatten(args)[1] if isinstance(t, Tensor)]
        # They differentiate every backward again, and one that communicates has no derivative.
        functorch = torch._C._functorch
        if transforms and any(
            functorch.is_gradtrackingtensor(t) or functorch.is_batchedtensor(t) for t in tensors
        ):
            raise UnsupportedError(
                f"{self._overload}: transforms of torch.func (grad, vjp, jvp, vmap) are not supported; "
                "call torch.func.functional_call, then backward() or torch.autograd.grad"
            )
        for t in tensors if tangents >= 0 else ():
            if forward_ad.unpack_dual(t).tangent is not None:  # torch drops it
                raise UnsupportedError(
                    f"{self._overload}: forward-mode differentiation is not supported; use backward()"
                )


def register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Op:
    """Define `tp_kernels::name`. `setup_context` and `backward` ask `needed(ctx)`, not ctx itself."""
    library.define(name + schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_kernels::{name}", fake, lib=library)
    function = None
    if backward is not None and setup_context is not None:

        def once(ctx: Any, *gradients: Any) -> Any:
            # The communication of a backward has no gradient of its own.
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"tp_kernels::{name} has no second derivative; do not use create_graph=True"
                )
            return backward(ctx, *gradients)

        torch.library.register_autograd(
            f"tp_kernels::{name}", once, setup_context=setup_context, lib=library
        )
        function = _function(name, kernel, setup_context, once)
    return Op(getattr(torch.ops.tp_kernels, name).default, kernel, function)


def _function(
    name: str,
    kernel: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """The same op for autograd alone, which sees tensors among its arguments but not in lists."""

    def forward(
        ctx: Any, lengths: Lengths, diverted: Diverted | None, anchor: Tensor | None, *flat: Any
    ) -> Any:
        args = _nest(lengths, flat)
        output = kernel(*args)
        ctx.lengths, ctx.diverted, ctx.single = lengths, diverted, isinstance(output, Tensor)
        ctx.set_materialize_grads(ctx.single)  # those with several outputs know better than zeros
        setup_context(ctx, args, output)
        return output if ctx.single else tuple(output)

    def flat_backward(ctx: Any, *gradients: Any) -> Any:
        results = backward(ctx, gradients[0] if ctx.single else list(gradients))
        return (None, None, None, *_flatten(results)[1])

    body = {"forward": staticmethod(forward), "backward": staticmethod(flat_backward)}
    return type(name, (torch.autograd.Function,), body)


# By argument: how many tensors are in its list, or None for an argument that is no list of tensors.
Lengths = tuple[int | None, ...]


def _flatten(args: Sequence[Any]) -> tuple[Lengths, list[Any]]:
    lengths: list[int | None] = []
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, list) and all(t is None or isinstance(t, Tensor) for t in arg):
            lengths.append(len(arg))
            flat.extend(arg)
        else:
            lengths.append(None)
            flat.append(arg)
    return tuple(lengths), flat


def _nest(lengths: Lengths, flat: Sequence[Any]) -> tuple[Any, ...]:
    values = iter(flat)
    return tuple(
        next(values) if length is None else [next(values) for _ in range(length)]
        for length in lengths
    )


def needed(ctx: Any) -> tuple[Any, ...]:
    """ctx.needs_input_grad by argument, with a list where the argument is one."""
    if hasattr(ctx, "lengths"):
        return _nest(ctx.lengths, ctx.needs_input_grad[3:])
    return tuple(ctx.needs_input_grad)


def diverted(ctx: Any) -> Diverted | None:
    """What was passed as `diverted` to the call."""
    return getattr(ctx, "diverted", None)


def run(
    operation: str,
    kernels: Mapping[str, Callable[..., Any]],
    group: ParallelGroup,
    implementation: str,
    rows: int,
    width: int,
    like: Tensor,
    *args: Any,
) -> Any:
    """Dispatch one call: choose from values equal on all ranks, count it, translate faults."""
    name = choose(
        operation, group, rows, width, like.dtype, device_type(like), implementation
    ).implementation
    return group.run(operation, name, kernels[name], group, *args)


def traced() -> bool:
    """Whether more than reverse-mode autograd has to see ops: a compiler, tracer, transform or mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def direct(*tensors: Tensor | None) -> bool:
    """True when nothing needs to see an op: no gradient, no tracing, no function transform."""
    if traced():
        return False
    if torch.is_grad_enabled():
        return not any(t is not None and t.requires_grad for t in tensors)
    return True


def device_type(x: Tensor) -> str:
    """`x.device.type`, which torch makes anew on every call: a third of a microsecond."""
    return "cpu" if x.is_cpu else x.device.type


def check_call(operation: str, group: Any, implementation: str) -> ParallelGroup:
    if not isinstance(group, ParallelGroup):
        raise UnsupportedError(
            f"{operation}: group={group!r}; ops take a ParallelGroup, made once on every rank: "
            "tp_kernels.ParallelGroup(process_group or mesh dimension)"
        )
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise UnsupportedError(
            f"{operation}: implementation={implementation!r}; known are {', '.join(IMPLEMENTATIONS)}"
        )
    group.check_open(operation)
    return group


def prepare(
    operation: str,
    group: ParallelGroup,
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None,
    activation: str | None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x [..., K], weights and biases as lists (all biases or none), checked, autocast applied."""
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    if bias is None:
        biases: list[Tensor | None] = [None] * len(weights)
    else:
        biases = [bias] if isinstance(bias, Tensor) else list(bias)
    device = device_type(x)
    autocast = torch.is_autocast_enabled(device)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:  # like F.linear
        cast = torch.get_autocast_dtype(device)
        x = x.to(cast)
        weights = [w.to(cast) for w in weights]
        biases = [None if b is None else b.to(cast) for b in biases]
    x, weights = x.resolve_neg(), [w.resolve_neg() for w in weights]
    biases = [None if b is None else b.resolve_neg() for b in biases]
    dtype, shape, place = x.dtype, x.shape, x.device
    valid = len(shape) > 0 and dtype in FLOATING and 0 < len(weights) == len(biases)
    for w, b in zip(weights, biases, strict=False):
        valid = valid and w.dim() == 2 and w.shape[1] == shape[-1] and w.dtype is dtype
        valid = valid and (b is None or (b.dtype is dtype and b.shape == w.shape[:1]))
        valid = valid and w.device == place and (b is None or b.device == place)
    if not valid or activation not in ACTIVATIONS:
        _refuse(operation, group, x, weights, biases, activation)
    if bias is None:
        return x, weights, []
    if any(b is not None for b in biases):  # torch lists hold no None
        filled = [
            w.new_zeros(w.shape[0]) if b is None else b.contiguous()
            for w, b in zip(weights, biases, strict=True)
        ]
        return x, weights, filled
    return x, weights, []


def _refuse(
    operation: str,
    group: ParallelGroup,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
) -> NoReturn:
    """Say which argument is wrong; runs before anything is sent."""
    where = f"{operation} on rank {group.rank} of {group.size}"
    if activation not in ACTIVATIONS:
        known = ", ".join(str(name) for name in ACTIVATIONS)
        raise UnsupportedError(f"{where}: activation={activation!r}; known are {known}")
    if x.dim() == 0:
        raise ShapeError(f"{where}: x is a scalar, expected [..., K]")
    if not weights or len(biases) != len(weights):
        raise ShapeError(f"{where}: {len(weights)} weights and {len(biases)} biases")
    if x.dtype not in FLOATING:
        raise UnsupportedError(f"{where}: x has dtype {x.dtype}; supported are {FLOATING}")
    for index, (w, b) in enumerate(zip(weights, biases, strict=True)):
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ShapeError(
                f"{where}: x is {tuple(x.shape)} and weight {index} is {tuple(w.shape)}; expected "
                f"[N, K] with K = {x.shape[-1]}"
            )
        if w.dtype != x.dtype or w.device != x.device:
            raise UnsupportedError(
                f"{where}: x is {x.dtype} on {x.device}, weight {index} is {w.dtype} on {w.device}; "
                "convert one of them, or use torch.autocast"
            )
        if b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype):
            raise ShapeError(
                f"{where}: bias {index} is {tuple(b.shape)} {b.dtype}, expected [{w.shape[0]}] "
                f"{x.dtype}"
            )
        if b is not None and b.device != x.device:
            raise UnsupportedError(f"{where}: x is on {x.device}, bias {index} on {b.device}")
    raise AssertionError("nothing is wrong with the arguments")


def rows_of(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K]; K may be zero, which `reshape(-1, K)` refuses."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def finish(y: Tensor, leading: Sequence[int], activation: str | None) -> Tensor:
    """[M, N] -> [*leading, N], activation applied."""
    return activate(y if len(leading) == 1 else y.view(*leading, y.shape[-1]), activation)


def activate(y: Tensor, activation: str | None) -> Tensor:
    function = ACTIVATIONS[activation]
    return y if function is None else function(y)


def activated(
    y: Tensor | tuple[Tensor, ...], activation: str | None
) -> Tensor | tuple[Tensor, ...]:
    """`activate` of an output or of each of several."""
    if activation is None:
        return y
    return (
        activate(y, activation)
        if isinstance(y, Tensor)
        else tuple(activate(z, activation) for z in y)
    )


def transposed(weights: Sequence[Tensor]) -> list[Tensor]:
    """[N, K] -> [K, N] views: the weights of the input gradient."""
    return [w.t() for w in weights]


def bias_gradient(dy: Tensor) -> Tensor:
    """Sum over rows, accumulated in fp32 whatever the dtype."""
    wide = dy.dtype if dy.dtype == torch.float64 else torch.float32
    return dy.sum(0, dtype=wide).to(dy.dtype)
