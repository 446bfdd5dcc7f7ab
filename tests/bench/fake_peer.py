"""A peer for tests: serves as the real ones do, and misbehaves as FAKE_PEER says.

It talks to nobody but the driver: a fake rank knows the inputs of all.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

PLACE = Path(__file__).parents[2] / "tp_kernels" / "bench" / "peer_worker.py"
spec = importlib.util.spec_from_file_location("peer_worker", PLACE)
peer_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer_worker)
slices = peer_worker.slices


class Fake:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.mode = os.environ.get("FAKE_PEER", "good")
        self.versions = {"fake": "1.0"}
        self.calls = 0
        if self.mode == "early":
            print("no luck today", flush=True)
            sys.exit(3)
        if self.mode == "mute":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)

    def meet(self) -> None:
        pass

    def collective(self, case):
        if case["op"] != "all_reduce":
            return "has an all-reduce only"
        numel = case["bytes"] // 4
        out = np.empty(numel, np.float32)

        def call() -> None:
            self.calls += 1
            if self.calls > 8 and self.rank == 1 and self.mode == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            if self.calls > 8 and self.rank == 1 and self.mode == "die":
                print("about to die", flush=True)
                os._exit(3)
            if self.calls > 8 and self.mode == "raise":
                raise ValueError("not today")
            out[:] = sum(slices.pattern(rank, 0, numel) for rank in range(self.world))
            if self.mode == "wrong" and self.rank == 1:
                out[-1] += 0.25

        def check() -> float:
            call()
            return slices.collective_error(
                "all_reduce", numel, self.world, self.rank, "float32", lambda a, b: out[a:b]
            )

        return slices.Work(call, check)


if __name__ == "__main__":
    if os.getpid() != os.getsid(0):
        os.setpgid(0, 0)  # as launchers do with their ranks
    if os.environ.get("FAKE_PEER") == "unwatched":
        peer_worker.end_with = print
    if (os.environ.get("FAKE_PEER"), os.environ["TPK_BENCH_RANK"]) == ("wrong", "0"):
        time.sleep(0.3)  # comes after rank 1
    peer_worker.PEERS = {"fake": Fake, "deepspeed": Fake, "openmpi": Fake}
    peer_worker.main()
