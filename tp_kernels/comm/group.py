"""ParallelGroup: the ranks that work together, how they reach each other, and what ran.

A group is an object, passed explicitly. Everything a group needs (memory, slots, counters, decisions)
hangs off it, so two groups, two threads or two tests never meet. Two tables are kept per process: names of
live groups, because torch's dispatcher carries plain values only, and the group that layers over one
process group share.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .cores import Cores, spare_cores
from .cuda_support import CudaSupport
from .devices import DeviceIdentity
from .errors import CollectiveTimeoutError, TpKernelsError, UnsupportedError
from .faults import (
    error_from_host,
    error_from_kernel,
    error_from_process_group,
    is_transport_failure,
    origin,
)
from .host_slot import HostSlot
from .process_group import ProcessGroupTransport
from .rendezvous import Rendezvous, construction_index
from .short_way import ShortWay
from .symmetric_memory import HOST_OBSTACLE, SymmetricMemory, _host, host_obstacle
from .topology import HostIdentity
from .triton_support import TritonSupport

GroupLike: TypeAlias = "ParallelGroup | dist.ProcessGroup | DeviceMesh | None"
T = TypeVar("T")

_HostFault: type[Exception] = _host.Fault if _host is not None else TpKernelsError
# What the functions of `ShortWay` count as, if not as "host".
_SHORT_WAY = {"copy_linear": "local"}
_SINGLE = "tp_kernels:single:"  # begins the names of groups without torch.distributed
_shared: dict[str, ParallelGroup] = {}  # by process group: what `as_group` made
_groups: weakref.WeakValueDictionary[str, ParallelGroup] = weakref.WeakValueDictionary()


class ParallelGroup:
    """The ranks of one tensor-parallel group. Construction is collective over the group.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh (`mesh["tp"]`), or None for the default
            group. Without torch.distributed, None is a group of one rank.
        provider: "auto" uses host shared memory where all ranks can map it and the process group
            otherwise, with the reason in `provider_reason`; "host" insists; "none" never shares memory, nor
            that of GPUs, which "auto" and "host" use for the CUDA device that is current by now.
        timeout: seconds any wait may last before it raises. Shared memory names the rank waited for; a
            process group does so at the deadline, or at once for ranks of this host that died. For CUDA
            tensors its own timeout counts, since only the device waits.
        implementation: force one implementation of every op ("reference", "chunked", "host", "triton",
            "cuda").
        check: compare op, dtype and shape over the ranks before every process-group collective and every
            kernel that addresses peers. "auto" does so for CPU tensors; host memory always compares, at no
            cost.
        window: bytes of one shared buffer; longer messages move in pieces of this size.
        communication_thread: whether a thread of its own sums what peers have published while this rank
            computes. "auto" does so where the affinity masks leave every rank a core for it. True or
            False insist, on all ranks alike. Sums have the same bits. Without shared memory there is none:
            `communication_thread` of the group is False, `overlap_reason` says why.

    Raises:
        UnsupportedError: this process is not in `group`, or `provider="host"` is impossible.
        CollectiveTimeoutError: a rank did not construct the group in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        provider: str = "auto",
        timeout: float = 60.0,
        implementation: str = "auto",
        check: bool | str = "auto",
        window: int = 2 << 20,
        communication_thread: bool | str = "auto",
    ) -> None:
        if provider not in ("auto", "host", "none"):
            raise UnsupportedError(f"provider={provider!r}: use 'auto', 'host' or 'none'")
        if implementation not in ("auto", "reference", "chunked", "host", "triton", "cuda"):
            raise UnsupportedError(
                f"implementation={implementation!r}: use 'auto', 'reference', 'chunked', 'host', "
                "'triton' or 'cuda'"
            )
        if not timeout > 0:
            raise UnsupportedError(f"timeout={timeout}: use a positive number of seconds")
        if window < 64:
            raise UnsupportedError(f"window={window}: use 64 bytes or more")
        if communication_thread not in ("auto", True, False):
            raise UnsupportedError(
                f"communication_thread={communication_thread!r}: use 'auto', True or False"
            )
        self.timeout = float(timeout)
        self.implementation = implementation
        self.process_group = _process_group(group)
        self.ranks: list[int] = (
            [0] if self.process_group is None else dist.get_process_group_ranks(self.process_group)
        )
        self.size: int = len(self.ranks)
        self.rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        self.identities = [HostIdentity.current()]
        # Of every rank; of a rank alone, none is needed.
        self.triton_support: list[TritonSupport] = []
        self.cuda_support: list[CudaSupport] = []
        self.devices: list[DeviceIdentity] = []
        self.memory: SymmetricMemory | None = None
        self.slot: HostSlot  # with `memory`: for this group's own operations, one after the other
        self.short = ShortWay()
        self._memories: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()  # of `new_memory`
        self._transport: ProcessGroupTransport | None = None
        self.decisions: dict[Any, Any] = {}  # what dispatch chose, by shape: see dispatch.py
        self.group_sizes: dict[tuple[object, ...], int] = {}  # measured: see planning/groups.py
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)  # by (op, implementation)
        self._closed = False
        # Of P2PChannel; they fail and close with the group.
        self.channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self.workspaces: dict[str, Any] = {}  # of kernels, by kind of device: see ops/_workspace.py

        self.communication_thread = communication_thread is True
        self.overlap_reason = "communication_thread was given"
        self._obstacle: str | None = None
        self.rendezvous: Rendezvous | None = None
        if self.process_group is None:
            self.name = f"{_SINGLE}{id(self):x}"
        else:
            self.name = self._meet(
                self.process_group, provider, check, window, communication_thread
            )
        self.provider_reason = self._provider_reason(provider)
        if self.memory is None:
            self.communication_thread, self.overlap_reason = False, self.provider_reason
        self.provider = "host" if self.memory is not None else "none"
        _groups[self.name] = self

    def _meet(
        self,
        pg: dist.ProcessGroup,
        provider: str,
        check: bool | str,
        window: int,
        communication_thread: bool | str,
    ) -> str:
        store = dist.distributed_c10d._get_process_group_store(pg)
        index = construction_index(store, self.rank)
        name = f"tp_kernels:{pg.group_name}:{index}"
        self.rendezvous = rendezvous = Rendezvous(store, name, self.rank, self.size, self.timeout)
        hello = rendezvous.exchange("identity", HostIdentity.current().to_json())
        self.identities = [HostIdentity.from_json(text) for text in hello]
        refused = "provider='none' was asked for" if provider == "none" else None
        if refused:
            mine = DeviceIdentity(missing=refused)
        else:
            mine = DeviceIdentity.current(torch.device("cuda"))
        facts = (TritonSupport.current(), CudaSupport.current(), mine)
        support = json.dumps([HOST_OBSTACLE, *(fact.to_json() for fact in facts)])
        told = [json.loads(text) for text in rendezvous.exchange("kernels", support)]
        self.triton_support = [TritonSupport.from_json(triton) for _, triton, _, _ in told]
        self.cuda_support = [CudaSupport.from_json(cuda) for _, _, cuda, _ in told]
        self.devices = [DeviceIdentity.from_json(device) for _, _, _, device in told]
        self._transport = ProcessGroupTransport(pg, self.rank, self.size, self.timeout, check)
        self._obstacle = refused or (
            "one rank"
            if self.size == 1
            else host_obstacle(self.identities, [why for why, *_ in told])
        )
        if self._obstacle is None:
            try:
                self.memory = SymmetricMemory(rendezvous, capacity=window, timeout=self.timeout)
                self.slot = self.memory.slots[0]
            except UnsupportedError as error:  # raised on all ranks or on none
                self._obstacle = str(error)
        if self.memory is not None:  # all of it on one host, so that core numbers mean the same
            answers = [
                json.loads(answer)
                for answer in rendezvous.exchange(
                    "cores", json.dumps([Cores.current().to_json(), communication_thread])
                )
            ]
            if any(wanted != communication_thread for _, wanted in answers):
                raise UnsupportedError(
                    f"rank {self.rank}: the ranks ask for different communication_thread: "
                    f"{[wanted for _, wanted in answers]}"
                )
            if communication_thread == "auto":
                self.communication_thread, self.overlap_reason = spare_cores(
                    [Cores.from_json(cores) for cores, _ in answers]
                )
            this = weakref.ref(self)  # or the functions would keep the group alive

            def fail(failure: BaseException, operation: str) -> NoReturn:
                group = this()
                if group is None:
                    raise failure
                group.fail_with(failure, operation, _SHORT_WAY.get(operation, "host"))

            self.short = ShortWay(
                self.slot,
                fail,
                communication_thread=self.communication_thread,
                layers=self.implementation in ("auto", "host"),
            )
        if provider == "host" and self.memory is None and self.size > 1:
            raise UnsupportedError(
                f"rank {self.rank}: provider='host' is not possible: {self._obstacle}; "
                "use provider='auto' to fall back to the process group"
            )
        return name

    def _provider_reason(self, provider: str) -> str:
        if self.process_group is None:
            return "one rank without torch.distributed"
        if self.memory is not None:
            return f"all {self.size} ranks share this host"
        return str(self._obstacle)

    @staticmethod
    def by_name(name: str) -> ParallelGroup:
        """The live group called `name` (what torch ops carry instead of the object)."""
        group = _groups.get(name)
        if group is None:
            raise UnsupportedError(
                f"no ParallelGroup named {name!r} is alive in this process; keep a reference to the "
                "group for as long as its layers and graphs are used"
            )
        return group

    def new_memory(self, **options: Any) -> SymmetricMemory:
        """Another region of this group, which fails and closes with it. Collective."""
        if self.memory is None or self.rendezvous is None:
            raise UnsupportedError(f"no shared memory: {self.provider_reason}")
        memory = SymmetricMemory(self.rendezvous.corner("memory"), **options)
        self._memories.add(memory)
        return memory

    @property
    def transport(self) -> ProcessGroupTransport:
        """The process group, for what does not go through shared memory."""
        assert self._transport is not None
        return self._transport

    def run(
        self,
        operation: str,
        implementation: str,
        function: Callable[..., T],
        *args: Any,
        peer: int | None = None,
    ) -> T:
        """Call an implementation: count it, and turn transport faults into this package's errors.

        peer: the only rank that the operation waits for, if it is one.
        """
        self.check_open(operation)
        self.calls[operation, implementation] += 1
        try:
            return function(*args)
        except BaseException as failure:
            self.fail_with(failure, operation, implementation, peer)

    def check_open(self, operation: str) -> None:
        if self._closed:
            raise UnsupportedError(f"{operation}: group '{self.name}' is closed") from None

    def fail_with(
        self,
        failure: BaseException,
        operation: str,
        implementation: str,
        peer: int | None = None,
    ) -> NoReturn:
        """Raise what `failure` of an operation means, and tell the peers if they have to know."""
        self.check_open(operation)
        error: Exception
        if isinstance(failure, CollectiveTimeoutError):  # of a kernel, whose signals are lost
            error = error_from_kernel(failure, self, operation)
        elif isinstance(failure, TpKernelsError):
            raise failure
        elif isinstance(failure, _HostFault):
            error = error_from_host(failure, self, operation)
        elif is_transport_failure(failure):
            error = error_from_process_group(failure, self, operation, peer)
        else:
            if implementation != "local":  # the peers wait for what this rank has not sent
                self.fail(f"{operation}: {type(failure).__name__}: {failure}")
            raise failure
        self.fail(f"{operation}: {error}")
        raise error from None

    def check(self) -> None:
        """Raise if a kernel of this group has given up waiting; waits for the current CUDA stream.

        A call of an op reports only what has been heard of the kernels before it: call this before results
        leave a GPU, or after replays of a graph.

        Raises:
            CollectiveTimeoutError, PeerLostError: results since then are undefined, and the group is lost.
        """
        self.check_open("check")
        for workspace in self.workspaces.values():
            try:
                workspace.check()
            except CollectiveTimeoutError as failure:
                self.fail_with(failure, "check", "triton")

    def stats(self) -> dict[str, Any]:
        """`calls`: op -> implementation -> count; `seconds`: spent in blocking communication."""
        self._count_short()
        calls: dict[str, dict[str, int]] = {}
        for (operation, implementation), count in self.calls.items():
            calls.setdefault(operation, {})[implementation] = count
        seconds = 0.0
        if self.memory is not None:
            seconds += sum(slot.seconds for slot in self.memory.slots)
        if self._transport is not None:
            seconds += self._transport.seconds
        seconds += sum(channel.seconds for channel in self.channels)
        return {"calls": calls, "seconds": seconds}

    def _count_short(self) -> None:
        for operation, count in self.short.counts(reset=True).items():
            if count:
                self.calls[operation, _SHORT_WAY.get(operation, "host")] += count

    def reset_stats(self) -> None:
        self.calls.clear()
        self.short.counts(reset=True)
        if self.memory is not None:
            for slot in self.memory.slots:
                slot.reset_seconds()
        if self._transport is not None:
            self._transport.seconds = 0.0
        for channel in self.channels:
            channel.seconds = 0.0

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on, so that they need not wait for it.

        Where that is because another rank failed, what that rank said: there is room for 180 characters.
        """
        reason = origin(reason)
        for memory in (self.memory, *self._memories):
            if memory is not None:
                memory.fail(reason[:180])
        for channel in self.channels:
            if channel.memory is not None:
                channel.memory.fail(reason[:180])

    def close(self) -> None:
        """Leave the group in order. Local: it waits for nobody and may be called twice."""
        self._closed = True
        self._count_short()
        self.short = ShortWay()
        _groups.pop(self.name, None)
        for channel in self.channels:
            channel.leave()
        for workspace in self.workspaces.values():
            workspace.close()
        for memory in (self.memory, *self._memories):
            if memory is not None:
                memory.close()

    def __repr__(self) -> str:
        return (
            f"ParallelGroup(rank {self.rank} of {self.size}, provider={self.provider}: "
            f"{self.provider_reason})"
        )

    def __enter__(self) -> ParallelGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelGroup:
        return self  # a copied module still works in the same group

    def __reduce__(self) -> Any:
        return _group_of_pickle, (self.name, self.rank, self.size)


def _group_of_pickle(name: str, rank: int, size: int) -> ParallelGroup:
    """The group that a pickled module works in: the live one of its name, as it was for this rank."""
    group = _groups.get(name)
    initialized = dist.is_available() and dist.is_initialized()
    if group is None and name.startswith(_SINGLE) and not initialized:
        return ParallelGroup()  # one rank is like another
    if group is None or (group.rank, group.size) != (rank, size):
        here = "there is none" if group is None else f"this is rank {group.rank} of {group.size}"
        raise UnsupportedError(
            f"unpickling what belongs to rank {rank} of {size} of ParallelGroup '{name}': {here} in this "
            "process. A group is not pickled, only its name: construct the groups in the same order first, "
            "or build the module and load a state (full_state_dict, save_sharded) on any number of ranks"
        )
    return group


def as_group(group: GroupLike) -> ParallelGroup:
    """`group` itself if it is a ParallelGroup, else the one that layers over this process group share.

    Made on first use, which is collective: a model's layers then share one region and one slot.
    """
    if isinstance(group, ParallelGroup):
        return group
    process_group = _process_group(group)
    if process_group is None:
        return ParallelGroup()
    shared = _shared.get(process_group.group_name)
    if shared is None or shared._closed or shared.process_group is not process_group:
        shared = _shared[process_group.group_name] = ParallelGroup(process_group)
    return shared


def _process_group(group: Any) -> dist.ProcessGroup | None:
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UnsupportedError(
                f"a ParallelGroup needs one mesh dimension, got {group.mesh_dim_names}; "
                'select it by name, for example mesh["tp"]'
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):  # what callers pass is not always what we ask for
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise UnsupportedError(
                "this process is not a member of the group (new_group returned NON_GROUP_MEMBER); "
                "only members may construct a ParallelGroup over it"
            )
        raise UnsupportedError(
            f"group={group!r} of type {type(group).__name__}: pass a ParallelGroup, a ProcessGroup, "
            "a one-dimensional DeviceMesh or None"
        )
    if dist.get_rank(group) < 0:
        raise UnsupportedError("this process is not a member of the group")
    return group
