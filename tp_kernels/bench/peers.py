"""Other libraries as contestants: processes of their own environment, started, asked and ended.

They run `peer_worker.py` in the environment that `make bench-peers` makes. Every rank holds a connection to a
Unix socket of this process in a directory that only this user can enter. However a peer ends, its processes
and its shared memory are gone afterwards.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Self

from tp_kernels.comm.errors import UnsupportedError

from .pool import cores_of
from .timing import ContestantLost, RankSlice

START_SECONDS = 120.0
SLICE_SECONDS = 60.0
_LEAVE_SECONDS = 5.0
_WORKER = Path(__file__).with_name("peer_worker.py")
_SHARED = Path("/dev/shm")

# Variables that would bring settings of this process, or of a launcher around it, into a peer.
_FOREIGN = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "PYTHON"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "VIRTUAL_ENV"),
)


def find_environment(directory: Path | None = None) -> Path | None:
    """The Python of the peers' environment: of `directory`, else of .venv-peers in the checkout or here."""
    checkout = Path(__file__).parents[2]
    places = [directory] if directory else [checkout / ".venv-peers", Path(".venv-peers")]
    for place in places:
        # Not resolved: the link's place is what makes it the Python of that environment.
        python = (place / "bin" / "python").absolute()
        if python.exists():
            return python
    return None


class Peer:
    """The ranks of one peer for one world size.

    Args:
        name: what `peer_worker.py` calls it.
        commands: the processes to start: one per rank, or one launcher.
        cores: cores of each rank, or None to leave them to the scheduler.

    Raises:
        ContestantLost: a rank did not come up.
    """

    ours = False

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        world: int,
        *,
        threads: int = 1,
        cores: Sequence[set[int]] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        slice_seconds: float = SLICE_SECONDS,
    ) -> None:
        self.name = name
        self.world = world
        self.versions: dict[str, str] = {}
        self._slice_seconds = slice_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_Rank] = []
        self._rank_handles: list[int] = []
        self._ended = False
        # In memory, because Open MPI keeps its segments in it.
        parent = _SHARED if os.access(_SHARED, os.W_OK | os.X_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="tpk-bench-", dir=parent))
        try:
            self._start(commands, threads, cores, environment or {}, start_seconds)
        except BaseException:
            self.close(patient=False)
            raise

    # As a contestant.

    def prepare(self, case: Mapping[str, Any]) -> str | None:
        return self._ask({"do": "prepare", "case": dict(case)})[0]["why_not"]

    def slice(self, calls: int, warm: int, check: bool) -> list[RankSlice]:
        replies = self._ask({"do": "slice", "calls": calls, "warm": warm, "check": check})
        return [RankSlice(reply["seconds"], reply["error"]) for reply in replies]

    def finish(self) -> None:
        self._ask({"do": "finish"})

    def close(self, patient: bool = True) -> None:
        """End every process, by force where it does not leave, and remove what they left."""
        if self._ended:
            return
        self._ended = True
        if patient:
            with suppress(OSError):
                for rank in self._ranks:
                    rank.send({"do": "leave"})
            deadline = monotonic() + _LEAVE_SECONDS
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - monotonic()))
        # A launcher gives its ranks process groups of their own: they are ended by their handles.
        for handle in self._rank_handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        for process in self._processes:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in self._ranks:
            with suppress(OSError):
                rank.close()
        self._remove_segments()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(patient=kind is None)

    def _start(
        self,
        commands: Sequence[Sequence[str]],
        threads: int,
        cores: Sequence[set[int]] | None,
        environment: Mapping[str, str],
        patience: float,
    ) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._directory / "socket"))
        listener.listen(self.world)
        settings = {
            "name": self.name,
            "world": self.world,
            "socket": str(self._directory / "socket"),
            "directory": str(self._directory),
            "driver": os.getpid(),
            "cores": [sorted(some) for some in cores] if cores else None,
        }
        with listener, open(self._directory / "log", "wb") as log:
            for rank, command in enumerate(commands):
                variables = {
                    **clean_environment(os.environ, self._directory),
                    **environment,
                    "OMP_NUM_THREADS": str(threads),
                    "OPENBLAS_NUM_THREADS": str(threads),
                    "TPK_BENCH_PEER": json.dumps(settings),
                    "TPK_BENCH_RANK": str(rank),
                    # What DeepSpeed names its segments after, and where Open MPI puts its own.
                    "MASTER_ADDR": self._directory.name,
                    "MASTER_PORT": "0",
                    "OMPI_MCA_btl_sm_backing_directory": str(self._directory),
                }
                try:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C reaches this process only, which ends them
                        env=variables,
                    )
                except OSError as failure:
                    raise ContestantLost(f"cannot be started: {failure}") from failure
                self._processes.append(process)
            deadline = monotonic() + patience
            while len(self._ranks) < self.world:
                if not _readable(listener, min(deadline, monotonic() + 0.2)):
                    self._check_alive()
                    if monotonic() > deadline:
                        raise ContestantLost(
                            f"{len(self._ranks)} of {self.world} ranks came up in {patience:g} s"
                            + self._last_words()
                        )
                    continue
                connection, _ = listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self._rank_handles.append(os.pidfd_open(int.from_bytes(credentials[:4], "little")))
                connection.settimeout(self._slice_seconds)  # for a reply that stops half way
                self._ranks.append(_Rank(connection))
            hellos = self._receive(deadline)
        order = sorted(range(self.world), key=lambda index: hellos[index]["rank"])
        if [hellos[index]["rank"] for index in order] != list(range(self.world)):
            raise ContestantLost(f"ranks {[hello['rank'] for hello in hellos]} came up")
        self._ranks = [self._ranks[index] for index in order]
        self.versions = hellos[0]["versions"]
        self._remove_segments()  # mapped by all by now; a name outlives a process that is killed

    def _ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send `request` to every rank; their replies by rank, within the time of a slice."""
        try:
            for rank in self._ranks:
                rank.send(request)
            return self._receive(monotonic() + self._slice_seconds)
        except BaseException as failure:
            # Its ranks may wait for each other for ever.
            text = self._last_words() if isinstance(failure, OSError) else ""
            self.close(patient=False)
            if isinstance(failure, OSError):
                raise ContestantLost(f"a rank ended{text}") from failure
            raise

    def _receive(self, deadline: float) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < self.world:
            waiting = [one for rank, one in enumerate(self._ranks) if rank not in replies]
            ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - monotonic()))
            if not ready:
                late = sorted(set(range(self.world)) - replies.keys())
                raise ContestantLost(f"timed out: no answer of rank {late} in time")
            for one in ready:
                rank = self._ranks.index(one)
                line = one.receive()
                if not line:
                    raise ContestantLost(f"rank {rank} ended{self._last_words()}")
                replies[rank] = json.loads(line)
                if "failed" in replies[rank]:
                    raise ContestantLost(f"rank {rank}: {replies[rank]['failed']}")
        return [replies[rank] for rank in range(self.world)]

    def _check_alive(self) -> None:
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended:
            raise ContestantLost(f"a process ended with status {ended[0]}{self._last_words()}")

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = (self._directory / "log").read_text(errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip(" -\t")]
            if words:
                return ": " + " / ".join(words[-3:])
        return ""

    def _remove_segments(self) -> None:
        for segment in _SHARED.glob(f"*_{self._directory.name}_*"):
            segment.unlink(missing_ok=True)


class Peers:
    """The peers that can be had here, and a record of those that did not run.

    Args:
        directory: the peers' environment; default: where `make bench-peers` puts it.
        without: names of contestants to leave out.
        slice_seconds: a peer that takes longer for one slice is ended.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        without: Sequence[str] = (),
        slice_seconds: float = SLICE_SECONDS,
    ) -> None:
        self.python = find_environment(directory)
        if directory is not None and self.python is None:
            raise UnsupportedError(
                "--peers: there is no bin/python in that directory; make it with: make bench-peers"
            )
        self.without = tuple(without)
        self.not_run: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self._slice_seconds = slice_seconds

    def start(
        self, stack: ExitStack, names: Sequence[str], world: int, threads: int, bind: bool
    ) -> list[Peer]:
        """Those of `names` that come up, alive until `stack` unwinds; the others are noted."""
        started = []
        for name in names:
            if name in self.without:
                continue
            if self.python is None:
                self.note(world, {name: "not installed: make bench-peers"})
                continue
            usable = sorted(os.sched_getaffinity(0))
            cores = [cores_of(rank, threads, usable) for rank in range(world)] if bind else None
            command, variables = commands(name, self.python, world)
            try:
                peer = Peer(
                    name,
                    command,
                    world,
                    threads=threads,
                    cores=cores,
                    environment=variables,
                    slice_seconds=self._slice_seconds,
                )
            except ContestantLost as failure:
                self.note(world, {name: str(failure)})
                continue
            started.append(stack.enter_context(peer))
            self.versions |= peer.versions
        return started

    def note(self, world: int, lost: Mapping[str, str]) -> None:
        """Record contestants that did not run, or not to the end, and why."""
        for name, why in lost.items():
            self.not_run.append({"contestant": name, "world": world, "why": why})


def clean_environment(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """`environment` without what belongs to this process or to a launcher around it."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_FOREIGN)}
    return {"HOME": str(directory), **kept, "TMPDIR": str(directory)}


def commands(name: str, python: Path, world: int) -> tuple[list[list[str]], dict[str, str]]:
    """How to start the ranks of a peer with the Python of the peers' environment; variables to set."""
    # -P: the directory of the script, full of modules, is not searched for imports.
    worker = [str(python), "-P", str(_WORKER)]
    binaries = python.parent
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "TORCH_EXTENSIONS_DIR": str(binaries.parent / "extensions"),
    }
    if name != "openmpi":
        return [worker] * world, variables
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = [str(binaries / "mpirun"), "-n", str(world)]
    # Ranks bind themselves, as all contestants do.
    return [[*launcher, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *worker]], variables


def _readable(source: Any, deadline: float) -> bool:
    return bool(select.select([source], [], [], max(0.0, deadline - monotonic()))[0])


class _Rank:
    """The connection to one rank: one request, one reply, each a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._replies = connection.makefile("rb")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, request: Mapping[str, Any]) -> None:
        self._connection.sendall((json.dumps(request) + "\n").encode())

    def receive(self) -> bytes:
        """The next line; empty when the rank has ended."""
        return self._replies.readline()

    def close(self) -> None:
        self._replies.close()
        self._connection.close()
