"""A region of equal size on every rank that every rank of the group can address.

Providers: `host` (a shared segment, CPU tensors, all ranks on one host). Where no provider fits, the
group works through its process group and says why.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import BuildError, UnsupportedError
from .host_slot import HostSlot
from .rendezvous import Rendezvous
from .topology import HostIdentity

# Of the module that this package was written for: kInterface in csrc/host/bindings.h.
INTERFACE = 1


def load_host() -> tuple[Any, str | None]:
    """Module `_host` and None, or None and why it cannot be used."""
    try:
        module = importlib.import_module("tp_kernels._host")
    except ModuleNotFoundError:
        return None, "tp_kernels._host is not built"
    except ImportError as error:
        return None, f"tp_kernels._host cannot be loaded: {error}"
    built = getattr(module, "INTERFACE", 0)
    if built != INTERFACE:  # messages of one would never arrive at the other
        return None, (
            f"tp_kernels._host was built with interface {built}, this package needs {INTERFACE}: build "
            "it again (`make venv`, or `python setup.py build_ext --inplace`)"
        )
    return module, None


_host, HOST_OBSTACLE = load_host()


class Shape(NamedTuple):
    """What a region holds; the same on all ranks. The sizes are those of csrc/include/tpk/layout.h."""

    world: int
    slots: int
    capacity: int
    buffers: int
    ring_cells: int
    ring_cell_bytes: int
    ring_reach: int
    ring_far_cells: int

    def sizes(self) -> dict[str, int]:
        """As arguments of the engine."""
        return {name: size for name, size in self._asdict().items() if size or name == "slots"}


class SymmetricMemory:
    """A host region with `slots` slots; made collectively by all ranks of a group.

    Each slot gives every rank `buffers` buffers of `capacity` bytes. Capacity is fixed here; calls move
    longer messages in pieces, so nothing ever grows. Two operations in flight must use two slots.
    With `ring_cells`, every ordered pair of ranks also has a ring of that many cells of
    `ring_cell_bytes` bytes for messages; `slots` may then be 0. With `ring_reach`, rings of ranks that are
    further apart, the last being next to the first, have `ring_far_cells` cells.
    The segment has mode 0600, a random name that exists only until all ranks have mapped it, and its
    pages are reserved when it is made: a full /dev/shm is an error here, never a SIGBUS later.
    tuning: thresholds of rank 0 instead of the measured ones (csrc/host/tuning.h); for studies.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        slots: int = 1,
        capacity: int = 2 << 20,
        buffers: int = 3,
        ring_cells: int = 0,
        ring_cell_bytes: int = 0,
        ring_reach: int = 0,
        ring_far_cells: int = 0,
        timeout: float | None = None,
        tuning: tuple[int, int, int, int] | None = None,
    ) -> None:
        if _host is None:
            raise BuildError(str(HOST_OBSTACLE))
        self.rank, self.world = rendezvous.rank, rendezvous.size
        self.timeout = rendezvous.timeout if timeout is None else timeout
        rings = ring_cells, ring_cell_bytes, ring_reach, ring_far_cells
        shape = Shape(self.world, slots, capacity, buffers, *rings)
        self._segment = _map_segment(rendezvous, shape, tuning)
        self._domain = _host.Domain(self._segment, self.rank, timeout=self.timeout, **shape.sizes())
        self._domain.join()
        self._domain.open_peers(self.timeout)
        self.slots = [
            HostSlot(
                _host.Slot(self._domain, index), self._segment, self.world, buffers, self.timeout
            )
            for index in range(slots)
        ]

    @property
    def tuning(self) -> dict[str, int]:
        """Sizes in bytes from which collectives go another way, agreed by all ranks."""
        return dict(self._domain.tuning)

    def ring(self, peer: int) -> tuple[Any, Any]:
        """This rank's ends of the rings to and from `peer`, which are taken once: here or by `ring_set`."""
        return _host.RingSender(self._domain, peer), _host.RingReceiver(self._domain, peer)

    def ring_set(self, peers: list[int]) -> Any:
        """This rank's ends of the rings with several peers, moved together (csrc/host/ring_set.h)."""
        return _host.RingSet(self._domain, peers)

    def fail(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on; those who wait for it raise at once."""
        self._domain.fail(reason)

    def close(self) -> None:
        """Leave in order. Not a collective: a peer that still needs this rank gets PeerLostError."""
        self._domain.close()


def host_obstacle(identities: Sequence[HostIdentity], modules: Sequence[str | None]) -> str | None:
    """Why the ranks with these identities cannot use a host region, or None when they can.

    modules: `HOST_OBSTACLE` of every rank.
    """
    for rank, why in enumerate(modules):
        if why:
            return why if len(set(modules)) == 1 else f"rank {rank}: {why}"
    for rank, identity in enumerate(identities[1:], start=1):
        obstacle = identities[0].obstacle(identity)
        if obstacle:
            return f"ranks 0 and {rank}: {obstacle}"
    return None


def _map_segment(
    rendezvous: Rendezvous, shape: Shape, tuning: tuple[int, int, int, int] | None
) -> Any:
    """Rank 0 creates, all map, rank 0 unlinks; either all ranks hold the segment or all raise."""
    nbytes = _host.layout_bytes(**shape.sizes())
    segment, error = None, ""
    if rendezvous.rank == 0:
        name = f"/tpk-{secrets.token_hex(8)}"
        try:
            segment = _host.Segment.create(name, nbytes)
            _host.Domain.format(segment, **shape.sizes(), tuning=tuning)
        except OSError as failure:
            error = str(failure)
        rendezvous.put("segment", json.dumps({"name": name, "shape": shape, "error": error}))
    else:
        offer = json.loads(rendezvous.get("segment", owner=0))
        error = offer["error"]
        if not error and tuple(offer["shape"]) != shape:
            error = f"rank 0 asked for {Shape(*offer['shape'])}, not {shape}"
        if not error:
            try:
                segment = _host.Segment.open(offer["name"], nbytes)
            except OSError as failure:
                error = str(failure)
    try:
        errors = rendezvous.exchange("mapped", error)
    finally:
        if rendezvous.rank == 0 and segment is not None:
            segment.unlink()
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failed:
        raise UnsupportedError("no shared segment: " + "; ".join(failed))
    return segment
