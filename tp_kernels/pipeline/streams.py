"""Streams of a device, as far as messages between stages need them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tp_kernels import native


class Streams(Protocol):
    """A kind of device. A stream of None is the current one."""

    def new(self) -> Any:
        """A stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Where `stream` is the current one, for the calls below without a stream."""

    def record(self, stream: Any = None) -> Any:
        """An event: all that `stream` has been given so far."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let `stream` go on when the event is over."""

    def over(self, event: Any) -> bool:
        """Whether an event is over."""

    def keep(self, tensor: Tensor, stream: Any = None) -> None:
        """The memory of a tensor is in use until what `stream` has been given so far is done."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for what the current stream writes."""

    def visible(self, count: int) -> Tensor:
        """int32 [count], zero, that the host reads while streams write it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """In the current stream."""

    def wait_for(
        self, flag: Tensor, count: int, record: Tensor, timeout: float, rank: int, peer: int
    ) -> None:
        """As native.wait_for, in the current stream."""

    def write_flag(self, flag: Tensor, count: int) -> None:
        """As native.write_flag, in the current stream."""


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream or self._current())
        return event

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        (stream or self._current()).wait_event(event)

    def over(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        tensor.record_stream(stream or self._current())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def visible(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def wait_for(
        self, flag: Tensor, count: int, record: Tensor, timeout: float, rank: int, peer: int
    ) -> None:
        native.wait_for(
            flag, count, record, timeout=timeout, operation="pipeline", rank=rank, peer=peer
        )

    def write_flag(self, flag: Tensor, count: int) -> None:
        native.write_flag(flag, count)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)
