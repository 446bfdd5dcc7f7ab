"""Measures what the loss of an output head takes in memory: with the logits materialised, and without.

    python bench/loss_memory.py --out loss_memory.json

Forward and backward of `vocab_parallel_cross_entropy(copy_linear(...))` and of `linear_cross_entropy`, each
in ranks of its own. Two counts, of the rank that needs most, both beyond inputs and gradients: bytes of
tensors alive at a time (torch's profiler) and growth of the resident set (VmHWM), which also sees what
libraries of products allocate. `share` is the larger of the two in units of the logits in float32, of which a
rank has rows x vocabulary / world; seconds are of one step, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tp_kernels import ParallelGroup, copy_linear, launch, split_sizes
from tp_kernels.bench.allocation import peak_bytes
from tp_kernels.bench.environment import environment
from tp_kernels.comm import barrier
from tp_kernels.ops import linear_cross_entropy, vocab_parallel_cross_entropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all options": {"label_smoothing": 0.1, "z_loss": 1e-4, "soft_cap": 30.0},
}


def measure(
    fused: bool, dtype: str, rows: int, vocab: int, hidden: int, options: dict[str, Any]
) -> dict[str, float]:
    """Bytes and seconds of this rank."""
    torch.manual_seed(0)
    with ParallelGroup(timeout=600) as group:  # a product of this size may take minutes
        words = split_sizes(vocab, group.size)[group.rank]
        h = torch.randn(rows, hidden).to(DTYPES[dtype]).requires_grad_()
        w = (torch.randn(words, hidden) / hidden**0.5).to(DTYPES[dtype]).requires_grad_()
        labels = torch.randint(0, vocab, (rows,))
        common = {"group": group, "vocab_size": vocab, **options}

        def step() -> None:
            if fused:
                loss = linear_cross_entropy(h, w, labels, **common)
            else:
                logits = copy_linear(h, w, group=group)
                loss = vocab_parallel_cross_entropy(logits, labels, **common)
            loss.backward()

        barrier(group)
        resident, seconds = grown(step)
        gradients = h.grad.nbytes + w.grad.nbytes
        h.grad = w.grad = None
        barrier(group)
        return {
            "tensors": peak_bytes(step) - gradients,
            "resident": resident - gradients,
            "seconds": seconds,
        }


def grown(step: Callable[[], None]) -> tuple[int, float]:
    """Growth of the resident set at its peak, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at what is resident now
    before, start = status("VmRSS"), perf_counter()
    step()
    return status("VmHWM") - before, perf_counter() - start


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path, help="also write a JSON file")
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    logits = given.rows * split_sizes(given.vocab, given.world)[0] * 4
    print(f"{given.rows} rows x {given.vocab} words on {given.world} ranks, hidden {given.hidden}")
    print(f"logits in float32: {logits / 2**20:.0f} MiB a rank")
    print(f"{'':32}{'tensors':>10}{'resident':>10}{'share':>8}{'seconds':>9}")
    records = []
    for dtype in DTYPES:
        for variant, options in VARIANTS.items():
            for fused in (False, True):
                sizes = (given.rows, given.vocab, given.hidden)
                ranks = launch(measure, given.world, fused, dtype, *sizes, options)
                worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
                worst["share"] = max(worst["tensors"], worst["resident"]) / logits
                name = "linear_cross_entropy" if fused else "materialised"
                records.append({"loss": name, "dtype": dtype, "options": variant, **worst})
                label = f"{name[:20]} {dtype[:8]} {variant}"
                print(
                    f"{label:32}{worst['tensors'] / 2**20:10.0f}{worst['resident'] / 2**20:10.0f}"
                    f"{worst['share']:8.3f}{worst['seconds']:9.1f}",
                    flush=True,
                )
    if given.out:
        sizes = {name: getattr(given, name) for name in ("world", "rows", "vocab", "hidden")}
        report = {"environment": environment(), **sizes, "logits": logits, "results": records}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {given.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
