"""Which implementation of an op runs, and why.

Every choice is made from values that are equal on all ranks (op, sizes, dtype, device type, provider,
world size, what ranks told each other), so ranks cannot part ways. "Do not fuse" is an ordinary choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .comm.devices import MOST_RANKS
from .comm.errors import UnsupportedError
from .comm.group import ParallelGroup, as_group
from .comm.host_slot import REDUCIBLE
from .comm.regions import region_obstacle
from .comm.triton_support import triton_obstacle

IMPLEMENTATIONS = ("reference", "chunked", "host", "triton")
OPERATIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear")

# Rows from which pieces are worth a collective each: below, the latency of a second gloo or NCCL call
# exceeds what overlap can hide.
CHUNKED_MIN_ROWS = 256
# Whether the Triton kernels have passed `make gpu-check` on some GPU. Until then nobody gets them unasked.
TRITON_PROVEN = False


@dataclass(frozen=True)
class Choice:
    """What runs for one op and shape. `rejected` says why each other implementation does not."""

    operation: str
    implementation: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.implementation} ({self.reason})"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def choose(
    operation: str,
    group: ParallelGroup,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    implementation: str = "auto",
) -> Choice:
    """The implementation for `rows` rows in total that cross ranks with `width` elements each."""
    asked = group.implementation if implementation == "auto" else implementation
    key = (operation, rows, width, dtype, device, asked)
    choice = group.decisions.get(key)
    if choice is None:
        choice = _decide(operation, group, rows, width, dtype, device, asked)
        if len(group.decisions) > 4096:
            group.decisions.clear()
        group.decisions[key] = choice
    return choice


def explain(
    operation: str,
    *,
    rows: int,
    in_features: int,
    out_features: int | Sequence[int],
    group: ParallelGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    implementation: str = "auto",
) -> Choice:
    """What `operation` would run for x [rows, in_features] and W [out_features, in_features], and why.

    rows are the rows of all ranks together; features are those of the unsplit layer. `print` it.
    Without `group` the answer is for the default process group (one rank if there is none); its first use
    makes a ParallelGroup, which every rank must do.
    """
    if operation not in OPERATIONS:
        raise UnsupportedError(f"explain({operation!r}): known ops are {', '.join(OPERATIONS)}")
    group = as_group(group)
    outs = [out_features] if isinstance(out_features, int) else list(out_features)
    width = in_features if operation in ("all_gather_linear", "copy_linear") else sum(outs)
    return choose(
        operation,
        group,
        rows=rows,
        width=width,
        dtype=dtype,
        device=torch.device(device).type,
        implementation=implementation,
    )


def obstacle(
    implementation: str, group: ParallelGroup, width: int, dtype: torch.dtype, device: str
) -> str | None:
    """Why `implementation` cannot run, or None when it can."""
    if implementation == "host":
        if group.memory is None:
            return group.provider_reason
        if device != "cpu":
            return f"shared memory of this host holds CPU tensors, not {device}"
        if dtype not in REDUCIBLE:
            return f"the engine sums float32, bfloat16 and float16, not {dtype}"
        need = width * dtype.itemsize * group.size
        if need > group.slot.capacity:
            return (
                f"{group.size} rows of {width} need {need} bytes, a window has "
                f"{group.slot.capacity}; construct ParallelGroup(window={need}) or larger"
            )
    if implementation == "triton":
        why_not = triton_obstacle(group.triton_support, device) or region_obstacle(group, device)
        if why_not:
            return why_not
        if dtype not in REDUCIBLE:
            return f"kernels multiply float32, bfloat16 and float16, not {dtype}"
        if group.size > MOST_RANKS:
            return f"{group.size} ranks; kernels exchange data between {MOST_RANKS} at most"
    return None


def _overlap(group: ParallelGroup) -> str:
    """Whether sums are taken while the product goes on."""
    how = "on a thread during" if group.communication_thread else "after"
    return f"sums are taken {how} the product: {group.overlap_reason}"


def _decide(
    operation: str,
    group: ParallelGroup,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    asked: str,
) -> Choice:
    if asked != "auto":
        if asked not in IMPLEMENTATIONS:
            raise UnsupportedError(
                f"{operation}: implementation={asked!r}; known are {', '.join(IMPLEMENTATIONS)}"
            )
        why_not = None if group.size == 1 else obstacle(asked, group, width, dtype, device)
        if why_not:
            raise UnsupportedError(
                f"{operation}: implementation={asked!r} cannot run on rank {group.rank}: {why_not}; "
                "use implementation='auto'"
            )
        if group.size > 1:
            return Choice(operation, asked, "asked for")
    if group.size == 1:
        others = dict.fromkeys(("chunked", "host", "triton"), "one rank: nothing to communicate")
        return Choice(operation, "reference", "one rank: the plain linear layer", others)
    rejected = {}
    if device == "cpu":
        rejected["triton"] = "CPU tensors run in Triton's interpreter, which is for tests"
    else:
        why_not = obstacle("triton", group, width, dtype, device)
        if why_not is None and TRITON_PROVEN:
            rejected["host"] = str(obstacle("host", group, width, dtype, device))
            rejected["chunked"] = "kernels that address the peers are faster than the process group"
            rejected["reference"] = "no overlap"
            return Choice(operation, "triton", "all ranks address each other's memory", rejected)
        rejected["triton"] = why_not or (
            "possible, but never run on a GPU so far: ask for it with implementation='triton', after "
            "`make gpu-check`"
        )
    why_not = obstacle("host", group, width, dtype, device)
    if why_not is None:
        rejected["chunked"] = "shared memory is faster than the process group on one host"
        rejected["reference"] = "no overlap"
        return Choice(operation, "host", f"{group.provider_reason}; {_overlap(group)}", rejected)
    rejected["host"] = why_not
    if rows >= CHUNKED_MIN_ROWS:
        rejected["reference"] = "no overlap"
        return Choice(operation, "chunked", f"{rows} rows are worth overlapping", rejected)
    rejected["chunked"] = f"{rows} rows < {CHUNKED_MIN_ROWS}: one collective is faster"
    return Choice(operation, "reference", "too small to overlap", rejected)
