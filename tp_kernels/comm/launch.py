"""Start ranks on this machine, for scripts, tests and the command line.

`Ranks` keeps one process per rank alive and calls functions in all of them; `launch` does so once.
Both are for one machine. The ordinary launcher of a job, on one machine or many, is `torchrun`;
nothing here is needed then.

A call and its results travel over private pipes between this process and its own children. The
ranks find each other through a store that this process hosts on the loopback interface.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, popen_forkserver, reduction, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from .errors import (
    CollectiveTimeoutError,
    PeerLostError,
    ShapeError,
    TpKernelsError,
    UnsupportedError,
)
from .rank_process import RankSpec, ready, serve, summary

T = TypeVar("T")

_EXIT_SECONDS = 5.0


class RankError(TpKernelsError):
    """A rank failed while it ran a call.

    Attributes:
        rank: The rank that failed by itself: killed, or the first to raise something other than "a
            peer is lost".
        remote_traceback: Where it raised, as text; empty if the process died.
        outcomes: By rank, what the call returned or the exception it raised. The outcome of a rank
            that died or had to be stopped is a `RankError` that says so.

    The exception that the rank raised is `__cause__`, unless it cannot be pickled.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        remote_traceback: str = "",
        outcomes: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.outcomes = list(outcomes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_error, (str(self), self.rank, self.remote_traceback, self.outcomes)


def _rank_error(message: str, rank: int, remote_traceback: str, outcomes: list[Any]) -> RankError:
    return RankError(message, rank=rank, remote_traceback=remote_traceback, outcomes=outcomes)


@dataclass(frozen=True)
class _Failure:
    """How one rank failed: `exception` is what `outcomes` shows for it."""

    exception: BaseException
    traceback: str
    died: bool = False


class Ranks:
    """`nproc` rank processes on this machine that stay alive between calls.

    Inside a call `torch.distributed` is initialised, and RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE are set:

        def total(x):
            t = torch.tensor(x)
            torch.distributed.all_reduce(t)
            return t.item()

        if __name__ == "__main__":
            with Ranks(2) as ranks:
                print(ranks.run(total, 21.0))  # [42.0, 42.0]

    The guard is needed in a script, as with `multiprocessing`: a rank imports the module that holds
    the function. Idle ranks sleep. They die with this process, however it ends.

    Args:
        nproc: World size; may exceed the number of cores.
        threads: Intra-op threads per rank. Default: the cores this process may use, divided by
            `nproc`, at least 1.
        timeout: Seconds a collective of the default group may wait for a peer.
        backend: Backend of the default process group.
        env: Environment variables to set in the ranks on top of those of this process.

    Raises:
        ShapeError: `nproc` or `threads` is below 1.
        RankError: A rank could not start.
    """

    def __init__(
        self,
        nproc: int,
        *,
        threads: int | None = None,
        timeout: float = 60.0,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
    ) -> None:
        if nproc < 1:
            raise ShapeError(f"Ranks(nproc={nproc}): at least one rank is needed")
        if threads is not None and threads < 1:
            raise ShapeError(f"Ranks(threads={threads}): at least one thread per rank is needed")
        self.size = nproc
        self.threads = threads or max(1, _usable_cores() // nproc)
        self.timeout = timeout
        # Survivors notice a lost peer at once or at their deadline; more patience than that gains
        # nothing.
        self._grace = min(timeout + 2.0, 10.0)
        self._generation = 0
        self._ended = ""
        self._store = _serve_store(timeout)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stop = Finalize(
            self, _stop_ranks, args=(self._processes, self._pipes), exitpriority=100
        )

        multiprocessing.set_forkserver_preload(["torch", "torch.distributed", __name__])
        try:
            for rank in range(nproc):
                spec = RankSpec(
                    rank=rank,
                    size=nproc,
                    threads=self.threads,
                    timeout=timeout,
                    backend=backend,
                    port=self._store.port,
                    environment={**os.environ, **(env or {})},
                    main=_main_module(),
                )
                ours, theirs = multiprocessing.Pipe()
                process = _RankProcess(target=serve, args=(theirs, spec), name=f"rank {rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self.run(ready)
        except BaseException:
            self._end("they did not start")
            raise

    @property
    def usable(self) -> bool:
        """Whether another call can be made: not closed, no rank lost, none had to be stopped."""
        return not self._ended

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [process.pid or 0 for process in self._processes]

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Call `fn(*args, **kwargs)` in every rank and return the results by rank.

        `fn` is a function defined at the top of a module; it, the arguments and the results are
        pickled.

        When a rank raises, the others get the time that their own bounded waits need to notice, and
        are stopped after that. If every rank came back by itself, more calls can be made: they get
        a fresh default group.

        Raises:
            RankError: A rank raised, was killed, or did not come back; see its `outcomes`.
            UnsupportedError: These ranks have ended, or `fn` or an argument cannot be sent to
                another process.
        """
        if self._ended:
            raise UnsupportedError(
                f"run({_name(fn)}): these {self.size} ranks have ended: {self._ended}. "
                f"Make new ones: Ranks({self.size})"
            )
        call = pickle.dumps((self._generation, _dump_call(fn, args, kwargs)))
        try:
            for pipe in self._pipes:
                # A rank that is gone by now is reported by the wait below, with the reason.
                with suppress(OSError):
                    pipe.send_bytes(call)
            outcomes, failures = self._collect()
        except BaseException as error:  # Ctrl-C, the time limit of a test
            self._end(f"a call was interrupted by {type(error).__name__}")
            raise
        if failures:
            self._generation += 1
            rank = _culprit(failures)
            failure = failures[rank]
            raise RankError(
                _report(fn, rank, failures, self.size),
                rank=rank,
                remote_traceback=failure.traceback,
                outcomes=outcomes,
            ) from (None if failure.died else failure.exception)
        return outcomes

    def close(self) -> None:
        """Let the ranks leave and wait for them. Later calls raise; closing twice is fine."""
        self._end("they were closed", patient=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _collect(self) -> tuple[list[Any], dict[int, _Failure]]:
        """Outcomes of the call in flight by rank, and its failures in the order of arrival."""
        outcomes: list[Any] = [None] * self.size
        failures: dict[int, _Failure] = {}
        pending = set(range(self.size))
        deadline: float | None = None

        while pending:
            sources: list[Any] = [self._pipes[rank] for rank in pending]
            sources += [self._processes[rank].sentinel for rank in pending]
            patience = None if deadline is None else max(0.0, deadline - monotonic())
            if not wait(sources, patience):
                break
            for rank in sorted(pending):
                failure: _Failure | None = None
                if self._pipes[rank].poll():
                    try:
                        succeeded, payload = pickle.loads(self._pipes[rank].recv_bytes())
                    except (EOFError, OSError):
                        failure = self._death_of(rank)
                    else:
                        if succeeded:
                            outcomes[rank] = pickle.loads(payload)
                        else:
                            failure = _failure_from(rank, payload)
                elif self._processes[rank].exitcode is not None:
                    failure = self._death_of(rank)
                else:
                    continue
                pending.discard(rank)
                if failure is not None:
                    failures[rank] = failure
                    outcomes[rank] = failure.exception
                    deadline = deadline or monotonic() + self._grace

        if pending:
            first = next(iter(failures))
            for rank in sorted(pending):
                message = (
                    f"rank {rank} was stopped: it did not come back within {self._grace:g} s "
                    f"of the failure of rank {first}"
                )
                outcomes[rank] = RankError(message, rank=rank)
                failures[rank] = _Failure(outcomes[rank], "", died=True)
        lost = [rank for rank, failure in failures.items() if failure.died]
        if lost:
            ranks = ", ".join(map(str, sorted(lost)))
            self._end(f"rank {ranks} was lost in an earlier call", patient=not pending)
        return outcomes, failures

    def _death_of(self, rank: int) -> _Failure:
        process = self._processes[rank]
        process.join(_EXIT_SECONDS)
        code = process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with status {code}"
        return _Failure(RankError(f"rank {rank} {how}", rank=rank), "", died=True)

    def _end(self, reason: str, *, patient: bool = False) -> None:
        if self._ended:
            return
        self._ended = reason
        if not patient:
            for process in self._processes:
                process.kill()
        self._stop()


def launch(
    fn: Callable[..., T],
    nproc: int,
    /,
    *args: Any,
    threads: int | None = None,
    timeout: float = 60.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call `fn(*args)` in `nproc` new rank processes on this machine; return results by rank.

    The options and errors are those of `Ranks` and `Ranks.run`. Starting costs seconds the first
    time in a process and about a tenth of a second after that; keep a `Ranks` for many calls.
    """
    with Ranks(nproc, threads=threads, timeout=timeout, backend=backend, env=env) as ranks:
        return ranks.run(fn, *args)


# In the launching process.


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _RankPopen(popen_forkserver.Popen):
    """Starts a rank by a fork of a process that has torch but no OpenMP threads.

    A fork of this process would copy locks of threads that do not exist in the child, and a spawn
    imports torch every time. The base class also imports the main module again in every child,
    which costs time and fails where the main module has no file; a rank does so when it needs to.
    """

    def _launch(self, process: BaseProcess) -> None:
        preparation = spawn.get_preparation_data(process.name)
        for key in _main_module():
            del preparation[key]
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # The child sees the end of this process as the end of the duplicate.
        self.finalizer = Finalize(self, _close_all, (os.dup(writer), self.sentinel))
        with open(writer, "wb") as stream:
            stream.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _RankProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> _RankPopen:
        return _RankPopen(process)


def _main_module() -> dict[str, str]:
    """Where another process can import the main module from, in the words of `multiprocessing`."""
    data = spawn.get_preparation_data("")
    return {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}


def _serve_store(timeout: float) -> dist.TCPStore:
    # The store is given a bound socket: no port can be lost to another process between choosing and
    # using it, and nothing outside this machine can reach it.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    main = _main_module()
    has_source = "init_main_from_name" in main or (
        "init_main_from_path" in main and os.path.isfile(main["init_main_from_path"])
    )
    if getattr(fn, "__module__", None) == "__main__" and not has_source:
        raise UnsupportedError(
            f"run({_name(fn)}): ranks cannot import {_name(fn)} from an interactive session or "
            "standard input; put it into a module"
        )
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise UnsupportedError(
            f"run({_name(fn)}): only functions defined at the top of a module can be sent to a "
            f"rank, no lambda, closure or local function ({error})"
        ) from error
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise UnsupportedError(
            f"run({_name(fn)}): an argument cannot be pickled: {error}"
        ) from error


def _failure_from(rank: int, payload: bytes) -> _Failure:
    pickled, summary, trace = pickle.loads(payload)
    try:
        exception = pickle.loads(pickled)
    except Exception:
        exception = RankError(f"rank {rank} raised {summary}", rank=rank, remote_traceback=trace)
    return _Failure(exception, trace)


def _culprit(failures: Mapping[int, _Failure]) -> int:
    """The rank to blame: one that died, else the first that did not just lose another rank."""
    consequences = (PeerLostError, CollectiveTimeoutError)
    ranking = {
        rank: 0 if failure.died else 1 if not isinstance(failure.exception, consequences) else 2
        for rank, failure in failures.items()
    }
    return min(ranking, key=ranking.__getitem__)


def _report(
    fn: Callable[..., Any], culprit: int, failures: Mapping[int, _Failure], size: int
) -> str:
    failure = failures[culprit]
    if failure.died:
        headline = str(failure.exception)
    else:
        headline = f"rank {culprit} raised {summary(failure.exception)}"
    lines = [f"{headline} (in {_name(fn)}, {size} ranks)"]
    for rank in sorted(failures.keys() - {culprit}):
        other = failures[rank]
        lines.append(
            f"  {other.exception}"
            if other.died
            else f"  rank {rank} then raised {summary(other.exception)}"
        )
    if failure.traceback:
        lines += ["", f"On rank {culprit}:", failure.traceback.rstrip()]
    return "\n".join(lines)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _stop_ranks(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """Close the pipes, which asks the ranks to leave; kill those that do not. Leaves no zombie."""
    for pipe in pipes:
        pipe.close()
    deadline = monotonic() + _EXIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    processes.clear()
    pipes.clear()
