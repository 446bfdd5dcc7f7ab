"""Measures what csrc/host/tuning.cpp holds: which way of reducing is fastest, by world and size.

    python bench/tune_collectives.py --world 2 4 8

Prints microseconds (median over calls of the slowest rank) of an all-reduce of float32 in one and in two
shots, for several sizes of pieces. Thresholds change no result, only how long it takes.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from tp_kernels import SymmetricMemory, launch
from tp_kernels.comm.rendezvous import Rendezvous

NEVER = (1 << 63) - 1
KiB, MiB = 1 << 10, 1 << 20
SIZES = [4 * KiB, 16 * KiB, 32 * KiB, 64 * KiB, 128 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB]
PIECES = [64 * KiB, 128 * KiB, 256 * KiB, 512 * KiB]
ROUNDS = 3


def measure() -> list[tuple[int, int, int, list[float]]]:
    """(bytes, piece, shots, seconds of every call) on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    results = []
    memories = {
        piece: SymmetricMemory(
            Rendezvous(store, f"tune/{piece}", rank, world, 60.0),
            capacity=2 * MiB,
            tuning=(NEVER, NEVER, piece, NEVER),
        )
        for piece in PIECES
    }
    for nbytes in SIZES:
        x = torch.ones(nbytes // 4)
        out = torch.empty_like(x)
        calls = max(5, min(500, 64 * MiB // nbytes))
        taken: dict[tuple[int, int], list[float]] = {}
        for _ in range(ROUNDS):
            for piece, memory in memories.items():
                if piece > PIECES[0] and piece // 2 >= nbytes:
                    continue  # the same as the next smaller one
                raw = memory.slots[0].raw
                for shots in (1, 2):
                    times = taken.setdefault((piece, shots), [])
                    for call in range(calls + 2):
                        start = perf_counter()
                        raw.all_reduce(x.data_ptr(), out.data_ptr(), x.numel(), 0, shots=shots)
                        if call >= 2:
                            times.append(perf_counter() - start)
        results += [(nbytes, piece, shots, times) for (piece, shots), times in taken.items()]
    for memory in memories.values():
        memory.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2])
    for world in parser.parse_args().world:
        print(f"world {world}: bytes, then one/two shots in us by size of piece")
        by_rank = launch(measure, world)
        rows: dict[int, list[str]] = {}
        for one in zip(*by_rank, strict=True):
            nbytes, piece, shots, _ = one[0]
            slowest = [max(times) for times in zip(*(times for *_, times in one), strict=True)]
            text = f"{median(slowest) * 1e6:.1f}"
            rows.setdefault(nbytes, []).append(
                f"   {piece // KiB} KiB: {text}" if shots == 1 else f" / {text}"
            )
        for nbytes, cells in rows.items():
            print(f"{nbytes:>9}{''.join(cells)}")


if __name__ == "__main__":
    main()
