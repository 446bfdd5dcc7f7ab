"""Messages from one rank of a group to another: CPU tensors and bytes of any size, in order.

In host memory every ordered pair of ranks has a ring of cells with credits (csrc/host/ring.h): a message
that fits into free cells is sent without its receiver, a longer one moves as the receiver reads. Through a
process group the same calls have the same meaning and cost more.
Limits: CPU tensors; no gradients (wrap the calls for those); a message carries no shapes or dtypes, only a
tag, a size and bytes, in which its sender may describe the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from .errors import GroupMismatchError, PeerLostError, ShapeError, UnsupportedError
from .group import ParallelGroup
from .process_group_p2p import ProcessGroupPair
from .symmetric_memory import SymmetricMemory

_WIRE_TAGS = 0x5450_0000  # far from what others use with the same process group

Data: TypeAlias = "Tensor | bytes | bytearray | memoryview"
Tensors = TypeVar("Tensors", bound=Sequence[Tensor])


class Message(NamedTuple):
    """A message that has begun to arrive."""

    tag: int
    nbytes: int  # left to read


class _Pair(Protocol):
    """Both directions between this rank and a peer; memory is contiguous and sizes are in bytes."""

    def send(self, parts: list[Tensor | np.ndarray], tag: int) -> None: ...

    def poll(self) -> bool: ...

    def peek(self, tag: int | None) -> tuple[int, int]: ...

    def read(self, out: list[Tensor], tag: int | None, whole: bool) -> int: ...


class P2PChannel:
    """Sends and receives between the ranks of a group. Construction is collective over the group.

    Args:
        group: the ranks; peers are numbered as in the group.
        cells, cell_bytes: of the ring of every ordered pair of ranks, equal on all ranks. A ring holds
            `cells * cell_bytes` bytes that were sent and not received; a message takes at least a cell.

    Attributes:
        provider: "host" (shared memory) or "none" (the process group), and `provider_reason` why.

    One thread may send to a peer while another receives from it; two that do the same raise RuntimeError.
    Every wait has the deadline of the group. An error other than ShapeError or UnsupportedError is for
    good: the channel and the group are broken on this rank, and peers that wait for it are told.

    Raises:
        GroupMismatchError: the ranks disagree about `cells` or `cell_bytes`.
        CollectiveTimeoutError: a rank did not construct the channel in time.
    """

    def __init__(
        self, group: ParallelGroup, *, cells: int = 16, cell_bytes: int = 32 << 10
    ) -> None:
        if not (1 <= cells <= 65536 and 1 <= cell_bytes <= 1 << 40):
            raise UnsupportedError(
                f"cells={cells}, cell_bytes={cell_bytes}: use 1 to 65536 cells of 1 to 2^40 bytes"
            )
        self.group = group
        self.memory: SymmetricMemory | None = None
        self.provider, self.provider_reason = group.provider, group.provider_reason
        self.seconds = 0.0  # spent in blocking calls: waiting and copying
        self._closed = False
        self._broken = ""  # why nothing more is possible
        self._pairs: dict[int, _Pair] = {}
        self._sending = [Lock() for _ in range(group.size)]
        self._receiving = [Lock() for _ in range(group.size)]
        if group.size > 1:
            self._meet(group, cells, cell_bytes)
        self._implementation = "host" if self.provider == "host" else "process_group"
        group.channels.add(self)

    def _meet(self, group: ParallelGroup, cells: int, cell_bytes: int) -> None:
        assert group.rendezvous is not None
        rendezvous = group.rendezvous.corner("p2p")
        sizes = rendezvous.exchange("sizes", f"{cells} cells of {cell_bytes} bytes")
        other = [rank for rank, size in enumerate(sizes) if size != sizes[group.rank]]
        if other:
            raise GroupMismatchError(
                f"rank {group.rank} asks for a channel with {sizes[group.rank]}, rank {other[0]} for "
                f"{sizes[other[0]]}; every rank of the group must make the same channel"
            )
        peers = [peer for peer in range(group.size) if peer != group.rank]
        if group.memory is not None:
            try:
                self.memory = memory = SymmetricMemory(
                    rendezvous,
                    slots=0,
                    ring_cells=cells,
                    ring_cell_bytes=cell_bytes,
                    timeout=group.timeout,
                )
            except UnsupportedError as error:  # raised on all ranks or on none
                self.provider, self.provider_reason = "none", str(error)
            else:
                for peer in peers:
                    self._pairs[peer] = _HostPair(*memory.ring(peer), group.timeout)
                return
        wire_tag = _WIRE_TAGS + rendezvous.next_index()  # messages of two channels must not meet
        for peer in peers:
            self._pairs[peer] = ProcessGroupPair(group, peer, wire_tag, cells, cell_bytes)

    def send(self, data: Data | Sequence[Data], peer: int, tag: int = 0) -> None:
        """Send one message to `peer`: the bytes of `data`, one after the other.

        Args:
            data: CPU tensors of any shape, dtype and stride, and bytes; also none. They may be changed
                after the return.
            tag: any number below 2^64 that the receiver can ask for.

        Returns once the rest of the message fits into the ring. Raises PeerLostError or
        CollectiveTimeoutError if the peer does not make room for it.
        """
        if not 0 <= tag < 1 << 64:
            raise UnsupportedError(f"send: tag={tag}: use a number from 0 to 2^64 - 1")
        items = [data] if isinstance(data, (Tensor, bytes, bytearray, memoryview)) else data
        parts = [_part(item) for item in items]
        self._run("send", peer, self._sending, "send", parts, tag)

    def poll(self, peer: int) -> bool:
        """Whether a message from `peer` has begun to arrive, without waiting for it.

        Raises PeerLostError if none has and none can come any more (through a process group only if the
        peer is a process of this host that has ended).
        """
        return self._run("poll", peer, self._receiving, "poll")

    def peek(self, peer: int, *, tag: int | None = None) -> Message:
        """Wait for the next message from `peer`: its tag and the bytes left to read. It stays there.

        Raises as `recv` does.
        """
        return Message(*self._run("recv", peer, self._receiving, "peek", tag))

    @overload
    def recv(self, peer: int, out: None = None, *, tag: int | None = None) -> Tensor: ...

    @overload
    def recv(self, peer: int, out: Tensor, *, tag: int | None = None) -> Tensor: ...

    @overload
    def recv(self, peer: int, out: Tensors, *, tag: int | None = None) -> Tensors: ...

    def recv(self, peer: int, out: Any = None, *, tag: int | None = None) -> Any:
        """Wait for the next message from `peer` and receive it, or what `recv_part` has left of it.

        Args:
            out: CPU tensors to fill, of any shape, dtype and stride; together they have the size of the
                message. None: a new uint8 tensor [nbytes].
            tag: the tag that the message must have; None: any.

        Returns `out`, or the new tensor.

        Raises:
            ShapeError: `out` has another size; the message stays there, to be received with the right one.
            GroupMismatchError: the message has another tag.
            PeerLostError: the peer died, failed or left.
            CollectiveTimeoutError: it sent nothing, or not the rest of the message, in time.
        """
        if out is None:
            out = torch.empty(self.peek(peer, tag=tag).nbytes, dtype=torch.uint8)
        return self._read(peer, out, tag, whole=True)

    @overload
    def recv_part(self, peer: int, out: Tensor, *, tag: int | None = None) -> Tensor: ...

    @overload
    def recv_part(self, peer: int, out: Tensors, *, tag: int | None = None) -> Tensors: ...

    def recv_part(self, peer: int, out: Any, *, tag: int | None = None) -> Any:
        """Receive the next bytes of a message, such as a description of the rest, which stays there.

        Like `recv`, but `out` may be smaller than the message. Once nothing is left the message is over.
        """
        return self._read(peer, out, tag, whole=False)

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on; those who wait for it raise at once."""
        self.group.fail(reason)

    def close(self) -> None:
        """Leave in order; may be called twice.

        In host memory it waits for nobody: peers still receive what was sent. A process group delivers
        nothing after a process has ended, so there it waits until the peers have received what was sent,
        and raises as `send` does if they do not.
        """
        try:
            for peer, pair in self._pairs.items():
                if isinstance(pair, ProcessGroupPair) and not (self._closed or self._broken):
                    self._run("send", peer, self._sending, "flush")
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave and wait for nobody; the end of the group does this to its channels."""
        self._closed = True
        if self.memory is not None:
            self.memory.close()
        for pair in self._pairs.values():
            if isinstance(pair, ProcessGroupPair):
                pair.leave()

    def __enter__(self) -> P2PChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()

    def __repr__(self) -> str:
        return (
            f"P2PChannel(rank {self.group.rank} of {self.group.size}, provider={self.provider}: "
            f"{self.provider_reason})"
        )

    def _read(self, peer: int, out: Any, tag: int | None, whole: bool) -> Any:
        targets = [out] if isinstance(out, Tensor) else list(out)
        places = [_place(target) for target in targets]
        left = self._run("recv", peer, self._receiving, "read", places, tag, whole)
        size = sum([place.nbytes for place in places])
        if size > left or (whole and size != left):
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in targets)
            raise ShapeError(
                f"recv: the message from rank {peer} to rank {self.group.rank} has {left} bytes left to "
                f"read, not {size} as asked for with [{shapes}]; peek() tells the size beforehand"
            )
        for target, place in zip(targets, places, strict=True):
            if place is not target:
                target.detach().copy_(place)
        return out

    def _run(self, operation: str, peer: int, locks: list[Lock], method: str, *args: Any) -> Any:
        pair = self._pairs.get(peer)
        if pair is None:
            raise UnsupportedError(
                f"{operation}: rank {peer!r} is not a peer of rank {self.group.rank} in a group of "
                f"{self.group.size}"
            )
        if self._closed:
            raise UnsupportedError(f"{operation}: this channel of '{self.group.name}' is closed")
        if self._broken:
            raise PeerLostError(f"{operation}: this channel is broken since {self._broken}")
        lock = locks[peer]
        if not lock.acquire(False):
            raise RuntimeError(
                f"{operation}: another thread is in a call in this direction with rank {peer}; "
                "messages of two threads would have no order"
            )
        start = perf_counter()
        try:
            call = getattr(pair, method)
            return self.group.run(operation, self._implementation, call, *args, peer=peer)
        except (ShapeError, UnsupportedError):
            raise
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self.group.fail(self._broken)
            raise
        finally:
            self.seconds += perf_counter() - start
            lock.release()


class _HostPair:
    """The two rings between this rank and a peer."""

    def __init__(self, sender: Any, receiver: Any, timeout: float) -> None:
        self._sender = sender
        self._receiver = receiver
        self._timeout = timeout
        self.poll = receiver.poll

    def send(self, parts: list[Tensor | np.ndarray], tag: int) -> None:
        self._sender.send([_span(part) for part in parts], tag, self._timeout)

    def peek(self, tag: int | None) -> tuple[int, int]:
        return self._receiver.peek(tag, self._timeout)

    def read(self, out: list[Tensor], tag: int | None, whole: bool) -> int:
        return self._receiver.read([_span(t) for t in out], tag, whole, self._timeout)


def _span(part: Tensor | np.ndarray) -> tuple[int, int]:
    if isinstance(part, Tensor):
        return part.data_ptr(), part.nbytes
    return part.__array_interface__["data"][0], part.nbytes


def _part(data: Data) -> Tensor | np.ndarray:
    """Contiguous memory with the bytes of `data`; `data` itself where it is contiguous."""
    if isinstance(data, Tensor):
        if _is_plain(data):
            return data
        return _checked("send", data).detach().contiguous().resolve_conj().resolve_neg()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    raise UnsupportedError(f"send: {type(data).__name__}: send tensors and bytes, or lists of them")


def _place(target: Tensor) -> Tensor:
    """Contiguous memory for `target`; `target` itself where it is contiguous."""
    if not isinstance(target, Tensor):
        raise UnsupportedError(f"recv: {type(target).__name__}: receive into tensors")
    if _is_plain(target):
        return target
    _checked("recv", target)
    if any(
        size > 1 and step == 0 for size, step in zip(target.shape, target.stride(), strict=True)
    ):
        raise ShapeError(
            f"recv: elements of a tensor {tuple(target.shape)} with strides {target.stride()} share "
            "memory; receive into one of its own"
        )
    return torch.empty(target.shape, dtype=target.dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether the bytes of `x` are its memory from the first to the last."""
    return (
        x.is_cpu
        and x.layout is torch.strided
        and x.is_contiguous()
        and not (x.is_conj() or x.is_neg() or x.is_quantized)
    )


def _checked(operation: str, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized:
        raise UnsupportedError(
            f"{operation}: a {x.layout} tensor {x.dtype} on {x.device}: channels move dense CPU tensors; "
            "copy it with .cpu() or .to_dense()"
        )
    return x
