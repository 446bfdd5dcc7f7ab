"""Rounds of a slot that the engine's thread reads while the next ones are computed."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from tp_kernels.comm.host_slot import HostSlot


class RoundReader:
    """Sums published rounds into their outputs, all of them by the end of the `with` block."""

    def __init__(self, operation: str, slot: HostSlot) -> None:
        self._operation, self._slot = operation, slot
        self._alive: list[Tensor | None] = []  # what the thread reads and writes

    def add(
        self, out: Tensor, offset: int | None, bias: Tensor | None, keep: Tensor | None = None
    ) -> None:
        """The round just published: its elements from `offset` into `out`; None: all, on every rank."""
        self._alive += [out, bias, keep]
        self._slot.reduce_later(out, offset, bias)

    def __enter__(self) -> RoundReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._slot.join()
        finally:
            # Nothing to do after a `join`. Otherwise the outputs are about to go away.
            self._slot.abandon(f"{self._operation}: {type(error).__name__}: {error}")
