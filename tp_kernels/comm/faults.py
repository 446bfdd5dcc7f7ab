"""Turns what a transport reports into an error that names who waited for whom."""

from __future__ import annotations

import re
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeGuard

from .errors import (
    CollectiveTimeoutError,
    GroupMismatchError,
    PeerLostError,
    TpKernelsError,
)
from .host_slot import OPERATION_NAMES
from .topology import HostIdentity, process_state

if TYPE_CHECKING:
    from .group import ParallelGroup

# A dying process closes its connections before it is seen to have ended.
LAST_BREATH_SECONDS = 0.5
_REPORT_SECONDS = 1.0  # ranks come to the same deadline at slightly different times

_BEFORE_ORIGIN = re.compile(r".*(?=\brank \d+ failed: )", re.DOTALL)
_TRANSPORT_WORDS = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Timed out|timed out|timeout|Broken pipe|"
    r"Socket|unreachable",
)


def is_transport_failure(failure: BaseException) -> TypeGuard[RuntimeError]:
    """True for what torch.distributed raises when a peer is gone or late, not for bad arguments."""
    return isinstance(failure, RuntimeError) and bool(_TRANSPORT_WORDS.search(str(failure)))


def origin(reason: str) -> str:
    """Of why a rank failed, the part that the first rank to fail said, with its name."""
    return _BEFORE_ORIGIN.sub("", reason, count=1)


def error_from_host(fault: Any, group: ParallelGroup, operation: str) -> TpKernelsError:
    slot = f"slot {fault.slot}, " if fault.slot >= 0 else ""
    where = (
        f"{operation}: rank {group.rank} of group '{group.name}' waited for rank {fault.peer} "
        f"({slot}expected epoch {fault.expected}, seen {fault.seen})"
    )
    if fault.kind == "mismatch" and not slot:
        return tag_mismatch(group, operation, fault.detail)
    if fault.kind == "mismatch":
        return GroupMismatchError(
            f"{operation}: ranks {group.rank} and {fault.peer} of group '{group.name}' called with "
            f"different arguments: {_name_operations(fault.detail)}; every rank of the group must "
            "make the same calls with the same shapes and dtypes in the same order"
        )
    if fault.kind == "timeout":
        return CollectiveTimeoutError(
            f"{where}, which did not arrive within {group.timeout:g} s: {fault.detail}"
        )
    return PeerLostError(f"{where}: {fault.detail}")


def tag_mismatch(group: ParallelGroup, operation: str, detail: str) -> GroupMismatchError:
    return GroupMismatchError(
        f"{operation}: rank {group.rank} of group '{group.name}': {detail}; messages from one rank to "
        "another arrive in the order in which they are sent"
    )


def error_from_process_group(
    failure: Exception, group: ParallelGroup, operation: str, peer: int | None = None
) -> TpKernelsError:
    """The process group does not say which rank it waited for: look at those on this host.

    peer: the only rank that the operation waits for, if it is one.
    """
    where = f"{operation}: rank {group.rank} of group '{group.name}'"
    text = str(failure).splitlines()[0]
    late = re.search(r"[Tt]imed? ?out", text)
    dead, stopped = suspects(group.identities, group.rank, peer)
    patience = 0.0 if late else LAST_BREATH_SECONDS
    while not dead and patience > 0:
        sleep(0.01)
        patience -= 0.01
        dead, stopped = suspects(group.identities, group.rank, peer)
    if dead:
        return PeerLostError(f"{where} lost {_ranks(dead)} (process ended): {text}")
    if stopped:
        return CollectiveTimeoutError(f"{where} waited for {_ranks(stopped)} (stopped): {text}")
    if late:
        absent = not_waiting(group, operation) if peer is None else [peer]
        whom = f"{_ranks(absent)} did not arrive" if absent else "all ranks wait, for each other"
        return CollectiveTimeoutError(
            f"{where} waited longer than {group.timeout:g} s for a rank of {group.ranks}; {whom}: {text}"
        )
    whom = f"another rank of {group.ranks}" if peer is None else f"rank {peer}"
    return PeerLostError(f"{where} lost the connection to {whom}: {text}")


def error_from_kernel(
    failure: CollectiveTimeoutError, group: ParallelGroup, operation: str
) -> TpKernelsError:
    """A kernel knows whom it waited for, but not what has become of that rank."""
    where = f"{operation}: rank {group.rank} of group '{group.name}'"
    dead, stopped = suspects(group.identities, group.rank)
    if dead:
        return PeerLostError(f"{where} lost {_ranks(dead)} (process ended): {failure}")
    if stopped:
        return CollectiveTimeoutError(f"{where} waited for {_ranks(stopped)} (stopped): {failure}")
    return CollectiveTimeoutError(f"{where}: {failure}")


def not_waiting(group: ParallelGroup, operation: str) -> list[int]:
    """Ranks that do not report to have waited in vain too: those the others have waited for."""
    rendezvous = group.rendezvous
    if rendezvous is None:
        return []
    try:
        rendezvous.put(f"waited/{group.rank}", operation)
        give_up = monotonic() + _REPORT_SECONDS
        while True:
            absent = [rank for rank in range(group.size) if not rendezvous.has(f"waited/{rank}")]
            if not absent or monotonic() > give_up:
                return absent
            sleep(0.02)
    except RuntimeError:  # the store has gone with the process that kept it
        return []


def suspects(
    identities: list[HostIdentity], rank: int, only: int | None = None
) -> tuple[list[int], list[int]]:
    """Ranks on this host whose process has ended, and ranks whose process is stopped."""
    dead, stopped = [], []
    for peer, identity in enumerate(identities):
        if only not in (None, peer):
            continue
        if peer == rank or not identities[rank].same_processes(identity):
            continue
        state = process_state(identity.pid)
        if state in (None, "Z", "X"):
            dead.append(peer)
        elif state in ("T", "t"):
            stopped.append(peer)
    return dead, stopped


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _name_operations(detail: str) -> str:
    return re.sub(r"\bop (\d+)", lambda m: f"op {OPERATION_NAMES.get(int(m[1]), m[1])}", detail)
