"""Reading rounds of a slot while the next ones are computed: on the engine's thread, or in between."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from tp_kernels.comm.group import ParallelGroup


class RoundReader:
    """Sums published rounds into their outputs, all of them by the end of the `with` block.

    Without a thread, a round is read when the next one has been published: peers have had the time of
    one product to publish theirs, and this rank's product never waits for its own reading.
    """

    def __init__(self, operation: str, group: ParallelGroup) -> None:
        self._operation, self._slot = operation, group.slot
        self._threaded = group.communication_thread
        self._unread: tuple[Tensor, int | None, Tensor | None] | None = None

    def add(self, out: Tensor, offset: int | None, bias: Tensor | None) -> None:
        """The round just published: its elements from `offset` into `out`; None: all, on every rank."""
        if self._threaded:
            self._slot.reduce_later(out, offset, bias)
            return
        self._read()
        self._unread = (out, offset, bias)

    def _read(self) -> None:
        if self._unread is None:
            return
        (out, offset, bias), self._unread = self._unread, None
        if offset is None:
            self._slot.reduce_all(out, bias)
        else:
            self._slot.reduce(out, offset, bias)
        self._slot.finish()

    def __enter__(self) -> RoundReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._threaded:
            if kind is None:
                self._read()
            return
        try:
            if kind is None:
                self._slot.join()
        finally:
            # Nothing to do after a `join`. Otherwise the outputs are about to go away.
            self._slot.abandon(f"{self._operation}: {type(error).__name__}: {error}")
