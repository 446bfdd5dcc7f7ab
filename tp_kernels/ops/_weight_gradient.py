"""Weight gradients that do not go through autograd: added to `weight.main_grad`, or computed later.

`weight.main_grad` is a buffer of the shape of the weight, float32 or of its dtype, that collects gradients
over micro-batches without rounding each of them (Megatron-LM's name for it). Delayed gradients are queued by
the backward, which then computes input gradients only, and are computed when asked for: schedules of
pipelines fill their bubbles with them (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tp_kernels.comm.errors import ShapeError, UnsupportedError

from ._op import bias_gradient

# Of a call: which weight gradients to compute, and the main_grad of each that has one -> the others.
Compute = Callable[[Sequence[bool], Sequence[Tensor | None]], list[Tensor]]

_order = itertools.count()


def main_grad_of(weight: Tensor) -> Tensor | None:
    """`weight.main_grad`, or None without one.

    Raises:
        ShapeError, UnsupportedError: one that cannot take the gradient of `weight`.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return None
    if main.shape != weight.shape:
        raise ShapeError(f"main_grad is {tuple(main.shape)}, its weight {tuple(weight.shape)}")
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if main.dtype not in (wide, weight.dtype) or main.device != weight.device:
        raise UnsupportedError(
            f"main_grad is {main.dtype} on {main.device}, its weight {weight.dtype} on {weight.device}; "
            f"expected {wide} or the weight's dtype on its device"
        )
    return main


def elsewhere(
    weight: Tensor | Sequence[Tensor],
    delay: WeightGradientQueue | Sequence[WeightGradientQueue] | None,
) -> bool:
    """Whether some gradient of a call goes elsewhere than to autograd."""
    if not torch.is_grad_enabled():
        return False
    weights = [weight] if isinstance(weight, Tensor) else weight
    return delay is not None or any(getattr(w, "main_grad", None) is not None for w in weights)


def uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call that a compiler leaves as it is: buffers and queues are written outside of its graphs."""
    from ._uncompiled import call  # with all of torch's compiler, and Triton

    return call(function, *args, **options)


@dataclass
class Pending:
    """Gradients of one weight and its bias that one step of one backward pass has left to do."""

    backward: int  # which pass
    weight: Tensor | None
    bias: Tensor | None
    compute: Callable[[], tuple[Tensor | None, Tensor | None]]  # no gradient: it is in main_grad
    order: int = field(default_factory=lambda: next(_order))


class WeightGradientQueue:
    """Of one layer; first in, first out by backward pass. A copy or pickle of it is empty."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def __reduce__(self) -> tuple[type[WeightGradientQueue], tuple[()]]:
        return type(self), ()

    def put(self, pending: Pending) -> None:
        self._pending.append(pending)

    def take(self) -> list[Pending]:
        """Everything of the oldest backward pass."""
        taken: list[Pending] = []
        while self._pending and self._pending[0].backward == (taken or self._pending)[0].backward:
            taken.append(self._pending.popleft())
        return taken


class Diverted:
    """What becomes of the gradients of one call whose weights have a main_grad or are delayed."""

    def __init__(
        self,
        operation: str,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor | None] | None,
        delay: WeightGradientQueue | Sequence[WeightGradientQueue] | None,
    ) -> None:
        """delay: a queue for each weight if its gradient (and that of its bias) is delayed."""
        weights = [weight] if isinstance(weight, Tensor) else list(weight)
        biases = [bias] if isinstance(bias, Tensor) else list(bias or [])
        queues = [delay] if isinstance(delay, WeightGradientQueue) else list(delay or [])
        if queues and len(queues) != len(weights):
            raise ShapeError(f"{operation}: {len(queues)} queues for {len(weights)} weights")
        self.queues = queues
        self.weights: list[Tensor | None] = [
            w if w.requires_grad and (queues or main_grad_of(w) is not None) else None
            for w in weights
        ]
        self.biases = [b if queues and b is not None and b.requires_grad else None for b in biases]
        for t in (*self.weights, *self.biases):
            if queues and t is not None and not t.is_leaf:
                raise UnsupportedError(
                    f"{operation}: a delayed gradient of a tensor that was computed (shape "
                    f"{tuple(t.shape)}); it can only be accumulated into a leaf, such as a parameter"
                )
        # Autograd calls the hooks of a tensor with None if it gets none of its gradient: out of its sight.
        self.operands = [
            w if taken is None or self._announced(w) else w.detach()
            for w, taken in zip(weights, self.weights, strict=True)
        ]
        self.bias_operands = (
            None
            if bias is None
            else [
                b if taken is None or b is None else b.detach()
                for b, taken in zip(biases, self.biases, strict=True)
            ]
        )
        self.anchor = torch.empty(0, requires_grad=True)  # makes autograd record the call

    def __bool__(self) -> bool:
        """Whether any gradient is wanted."""
        return any(t is not None for t in (*self.weights, *self.biases))

    def _announced(self, weight: Tensor) -> bool:
        """Data-parallel wrappers that look at this attribute wait for the hooks of the weight."""
        return not self.queues and hasattr(weight, "grad_added_to_main_grad")

    def now(self, needed: Sequence[bool]) -> list[bool]:
        """Which weight gradients the backward has to compute."""
        if self.queues:
            return list(needed)
        return [need or w is not None for need, w in zip(needed, self.weights, strict=True)]

    def main_grads(self) -> list[Tensor | None]:
        """What the backward has to add to, by weight."""
        if self.queues:
            return [None] * len(self.weights)
        return [None if w is None else main_grad_of(w) for w in self.weights]

    def answers(self, dws: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        """What the backward returns to autograd as gradients of the weights."""
        answers: list[Tensor | None] = []
        for w, dw, need in zip(self.weights, dws, needed, strict=True):
            if w is not None and need:
                _announce(w)
                answers.append(torch.zeros_like(w))  # adds nothing, whoever adds it
            else:
                answers.append(dw if need else None)
        return answers

    def later(self, compute: Compute, x: Tensor, dys: Sequence[Tensor]) -> None:
        """Queue what is delayed. x, dys: what it is computed of; dys [R, N_i] of all rows."""
        if not self.queues:
            return
        wanted = [w is not None for w in self.weights]

        unchanged = _unchanged([x, *dys])

        def together() -> list[Tensor]:
            unchanged()
            return compute(wanted, [None if w is None else main_grad_of(w) for w in self.weights])

        shared = _Once(together)
        for index, queue in enumerate(self.queues):
            w, b = self.weights[index], self.biases[index] if self.biases else None
            if w is None and b is None:
                continue
            dy = dys[index] if b is not None else None
            one = _one(shared, index, w, dy, unchanged)
            queue.put(Pending(torch._C._current_graph_task_id(), w, b, one))


def deliver(pending: Iterable[Pending]) -> None:
    """Compute queued gradients in the order of their backward and give them to autograd or main_grad.

    Like autograd, which accumulates the sum of what one backward pass makes of a parameter, and calls hooks
    once.
    """
    pending = sorted(pending, key=lambda p: p.order)
    parameters = [t for p in pending for t in (p.weight, p.bias) if t is not None]
    left = Counter(id(t) for t in parameters)
    sums: dict[int, Tensor] = {}
    for p in pending:
        for t, gradient in zip((p.weight, p.bias), p.compute(), strict=True):
            if t is None:
                continue
            if gradient is not None:
                before = sums.get(id(t))
                gradient = gradient.to(t.dtype)
                sums[id(t)] = gradient if before is None else before + gradient
            left[id(t)] -= 1
            if left[id(t)] == 0 and id(t) in sums:
                torch.autograd.backward([t], [sums.pop(id(t))])


def _unchanged(kept: Sequence[Tensor]) -> Callable[[], None]:
    """What refuses to go on where one of these was written to since now, as autograd does."""
    versions = [t._version for t in kept]

    def check() -> None:
        if [t._version for t in kept] != versions:
            raise UnsupportedError(
                "backward_dw: the input of a layer with delay_wgrad=True, or the gradient of its output, was "
                "written to in place since the backward; copy it, or call backward_dw() before"
            )

    return check


def _one(
    shared: _Once,
    index: int,
    weight: Tensor | None,
    dy: Tensor | None,
    unchanged: Callable[[], None],
) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
    """Computation of the gradients of weight `index` and, of `dy`, of its bias."""

    def compute() -> tuple[Tensor | None, Tensor | None]:
        dw = None
        if weight is not None:
            dw = shared.take(index)
            if main_grad_of(weight) is not None:
                announced = hasattr(weight, "grad_added_to_main_grad")
                dw = torch.zeros_like(weight) if announced else None
                _announce(weight)
        if dy is None:
            return dw, None
        unchanged()
        return dw, bias_gradient(dy)

    return compute


def _announce(weight: Any) -> None:
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


class _Once:
    """Gradients of all weights of a call, computed when the first is asked for: they may share a gather."""

    def __init__(self, compute: Callable[[], list[Tensor]]) -> None:
        self._compute: Callable[[], list[Tensor]] | None = compute
        self._results: dict[int, Tensor] = {}

    def take(self, index: int) -> Tensor:
        if self._compute is not None:
            self._results = dict(enumerate(self._compute()))
            self._compute = None
        return self._results.pop(index)
