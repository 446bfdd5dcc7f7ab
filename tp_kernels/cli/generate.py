"""`tp-kernels generate`: on the ranks of torchrun, or on ranks of its own."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tp_kernels import Ranks, ShapeError
from tp_kernels.integrations.checkpoint import stock_checkpoint

from .progress import converted, progress_bars
from .worker import Question, Source, print_answer


def run(
    model: str,
    prompt: str,
    *,
    tp: int | None = None,
    system: str | None = None,
    max_new_tokens: int = 64,
    sequence_parallel: bool = False,
    threads: int | None = None,
) -> None:
    """Print the answer of `model` to `prompt`; options as in the help text of the command."""
    question = Question(prompt, system, max_new_tokens)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _under_torchrun(model, question, tp, sequence_parallel, threads)
        return
    with progress_bars() as bars:
        source = Source(converted(model, bars), sequence_parallel=sequence_parallel)
    with Ranks(tp or 2, threads=threads) as ranks:
        ranks.run(print_answer, source, question)


def _under_torchrun(
    model: str, question: Question, tp: int | None, sequence_parallel: bool, threads: int | None
) -> None:
    size = int(os.environ["WORLD_SIZE"])
    if tp not in (None, size):
        raise ShapeError(f"--tp {tp}: torchrun started {size} processes; leave --tp out")
    if threads is not None:
        torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    try:
        # One rank of each machine converts, and the others find its result.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with progress_bars() as bars:
                converted(model, bars)
        dist.barrier()
        source = Source(stock_checkpoint(model), sequence_parallel=sequence_parallel)
        print_answer(source, question)
    finally:
        dist.destroy_process_group()
