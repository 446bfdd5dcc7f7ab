"""One rank of a peer: DeepSpeed's shared-memory all-reduce or Open MPI, in an interpreter of its own.

Runs as a script, without this package: the peers' environment has torch, numpy and the peers only. The
driver's socket brings one request a line and takes one reply a line, as JSON. Between requests a rank
blocks in a read, so a peer that spins does so in its own turn only.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tp_kernels.bench import products, slices
else:

    def _beside(name: str) -> Any:
        """A file of this directory as a module; on the path its neighbours would hide other modules."""
        place = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"bench_{name}", place)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    slices = _beside("slices")


class DeepSpeed:
    """`inference_all_reduce_` of DeepSpeed's shared-memory extension, in place."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_SIZE=str(world),
            DS_ACCELERATOR="cpu",
        )
        import deepspeed
        import torch
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        module = ShareMemCommBuilder().load(verbose=False)
        module.initialize(world, rank)
        # 2: AVX-512, which its bfloat16 needs; 1: AVX2, enough for float32.
        self.level = module.vector_kernel_level() if hasattr(module, "vector_kernel_level") else 1
        self.all_reduce = torch.ops.deepspeed.inference_all_reduce_
        self.token = torch.zeros(16)
        self.versions = {"deepspeed": deepspeed.__version__, "deepspeed torch": torch.__version__}

    def meet(self) -> None:
        self.all_reduce(self.token)

    def collective(self, case: dict[str, Any]) -> slices.Work | str:
        dtype = case["dtype"]
        if case["op"] != "all_reduce":
            return "has an all-reduce only"
        if self.level < (1 if dtype == "float32" else 2):
            return f"its {dtype} needs AVX-512" if self.level else "needs AVX2"
        buffers = slices.Buffers(case, self.rank, self.world, in_place=True)
        return buffers.work(lambda: self.all_reduce(buffers.x))

    def summed(self, y: Any) -> tuple[Callable[[], Any], Any]:
        """A call that sums `y` over the ranks, and the tensor that holds the sum."""
        return lambda: self.all_reduce(y), y


class OpenMPI:
    """mpi4py on Open MPI, buffers only."""

    def __init__(self, rank: int, world: int) -> None:
        import mpi4py
        import torch  # noqa: F401  # now: it takes longer than a request may
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.world = self.comm.rank, self.comm.size
        library = MPI.Get_library_version().split(",")[0].removeprefix("Open MPI v")
        self.versions = {"openmpi": library, "mpi4py": mpi4py.__version__}

    def meet(self) -> None:
        self.comm.Barrier()

    def collective(self, case: dict[str, Any]) -> slices.Work | str:
        if case["dtype"] != "float32":
            return f"MPI has no {case['dtype']}"
        # Out of place: its usual form.
        buffers = slices.Buffers(case, self.rank, self.world, in_place=False)
        x, out, counts = buffers.x.numpy(), buffers.out.numpy(), buffers.counts
        if buffers.op == "all_reduce":
            return buffers.work(lambda: self.comm.Allreduce(x, out, self.mpi.SUM))
        if buffers.op == "reduce_scatter":
            return buffers.work(lambda: self.comm.Reduce_scatter(x, out, counts, self.mpi.SUM))
        starts = [sum(counts[:rank]) for rank in range(self.world)]
        whole = [out, counts, starts, self.mpi.FLOAT]
        return buffers.work(lambda: self.comm.Allgatherv(x, whole))

    def summed(self, y: Any) -> tuple[Callable[[], Any], Any]:
        """A call that sums `y` over the ranks, and the tensor that holds the sum."""
        total = y.clone()
        source, target = y.view(-1).numpy(), total.view(-1).numpy()
        return lambda: self.comm.Allreduce(source, target, self.mpi.SUM), total


PEERS: dict[str, Callable[[int, int], Any]] = {"deepspeed": DeepSpeed, "openmpi": OpenMPI}


def linear_all_reduce(peer: Any, rows: int, hidden: int) -> slices.Work:
    """torch.mm, then the peer's all-reduce: what a user of the peer has, without overlap."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    counts = slices.split_sizes(hidden, peer.world)
    start = sum(counts[: peer.rank])
    whole_x, whole_w = products.random(1, rows, hidden), products.random(2, hidden, hidden)
    x = whole_x[:, start : start + counts[peer.rank]].contiguous()
    w = whole_w[:, start : start + counts[peer.rank]].contiguous()
    del whole_x, whole_w
    y = torch.empty(rows, hidden)
    add, total = peer.summed(y)

    def call() -> None:
        torch.mm(x, w.t(), out=y)
        add()

    def check() -> float:
        total.fill_(float("nan"))
        call()
        whole_x, whole_w = products.random(1, rows, hidden), products.random(2, hidden, hidden)
        return products.product_error(total, whole_x, whole_w.t())

    return slices.Work(call, check)


def prepare(peer: Any, case: dict[str, Any]) -> slices.Work | str:
    if "bytes" in case:
        found: slices.Work | str = peer.collective(case)
        return found
    if (case["op"], case["pass"], case["dtype"]) != ("linear_all_reduce", "forward", "float32"):
        return "float32 linear_all_reduce forward only"
    if not TYPE_CHECKING:
        global products
        products = _beside("products")
    return linear_all_reduce(peer, case["rows"], case["hidden"])


def serve(peer: Any, stream: Any) -> bool:
    """Answer requests; True when the driver says goodbye, False when it is gone."""
    work: slices.Work | None = None
    for line in stream:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if request["do"] == "prepare":
                made = prepare(peer, request["case"])
                reply["why_not"] = made if isinstance(made, str) else None
                work = None if isinstance(made, str) else made
            elif request["do"] == "slice":
                assert work is not None
                reply["seconds"] = slices.timed_calls(
                    work, request["calls"], request["warm"], peer.meet
                )
                reply["error"] = work.check() if request["check"] else None
            elif request["do"] == "finish":
                work = None
            else:
                return True
        except Exception as failure:
            reply = {"failed": f"{type(failure).__name__}: {failure}"}
        with suppress(OSError):
            send(stream, reply)
    return False


def send(stream: Any, reply: dict[str, Any]) -> None:
    stream.write((json.dumps(reply) + "\n").encode())
    stream.flush()


def end_with(driver: int, directory: str) -> None:
    """When the driver is gone, clean up after it, also in the middle of a call."""
    try:
        gone = os.pidfd_open(driver)
        poll = select.poll()
        poll.register(gone, select.POLLIN)
        poll.poll()
    except OSError:
        if os.path.exists(f"/proc/{driver}"):
            return
    clean_up(directory)


def clean_up(directory: str) -> NoReturn:
    """Remove what the driver made for its peers, and end."""
    for name in glob.glob(f"/dev/shm/*{Path(directory).name}*"):
        if os.path.isfile(name):
            with suppress(OSError):  # another rank was faster
                os.unlink(name)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main() -> None:
    settings = json.loads(os.environ["TPK_BENCH_PEER"])
    threading.Thread(
        target=end_with, args=(settings["driver"], settings["directory"]), daemon=True
    ).start()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(settings["socket"])
    stream = connection.makefile("rwb")
    try:
        rank = int(os.environ.get("TPK_BENCH_RANK", "0"))
        peer = PEERS[settings["name"]](rank, settings["world"])
    except ImportError as failure:
        send(stream, {"failed": f"not installed here: {failure}"})
        return
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"][peer.rank])
    send(stream, {"rank": peer.rank, "world": peer.world, "versions": peer.versions})
    if not serve(peer, stream):
        clean_up(settings["directory"])


if __name__ == "__main__":
    main()
