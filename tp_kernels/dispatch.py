"""Which implementation of an op runs, and why.

Every choice is made from values that are equal on all ranks (op, sizes, dtype, device type, provider,
world size, what ranks told each other), so ranks cannot part ways. "Do not fuse" is an ordinary choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .comm.cuda_support import Kernel, native_obstacle
from .comm.devices import MOST_RANKS
from .comm.errors import UnsupportedError
from .comm.group import ParallelGroup, as_group
from .comm.group_size import GATHERS, counts_of, measured_key, rows_of_group
from .comm.host_slot import REDUCIBLE
from .comm.regions import region_obstacle
from .comm.triton_support import first_obstacle, triton_obstacle

IMPLEMENTATIONS = ("reference", "chunked", "host", "triton", "cuda")
OPERATIONS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "copy_linear")

# Rows from which pieces are worth a collective each: below, the latency of a second gloo or NCCL call
# exceeds what overlap can hide.
CHUNKED_MIN_ROWS = 256
# Whether the Triton kernels, and the overlap with the process group, have passed `make gpu-check` on some
# GPU. Until then nobody gets them unasked.
TRITON_PROVEN = False
CUDA_PROVEN = False
# Of a rank's rows, that the copy engine of a GPU brings to its peers; larger ones go another way.
STAGED_BYTES = 32 << 20
# Of a sum: up to here its latency counts, and nothing of it would be hidden. A guess.
DECODE_BYTES = 1 << 20


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
    if implementation in ("triton", "cuda"):
        if implementation == "triton":
            why_not = triton_obstacle(group.triton_support, device)
            why_not = why_not or region_obstacle(group, device)
        else:
            why_not = first_obstacle(group.triton_support, device)
        if why_not:
            return why_not
        if dtype not in REDUCIBLE:
            return f"kernels multiply float32, bfloat16 and float16, not {dtype}"
        if implementation == "triton" and group.size > MOST_RANKS:
            return f"{group.size} ranks; kernels exchange data between {MOST_RANKS} at most"
    return None


def _overlap(group: ParallelGroup) -> str:
    """Whether sums are taken while the product goes on."""
    how = "on a thread during" if group.communication_thread else "after"
    return f"sums are taken {how} the product: {group.overlap_reason}"


def direct_obstacle(
    operation: str, group: ParallelGroup, rows: int, width: int, dtype: torch.dtype, device: str
) -> str | None:
    """Why "cuda" sends rows through the process group and not straight to its peers, or None.

    Equal on all ranks. rows, width: as of `choose`; see ops/_peers.py.
    """
    sums = operation.removesuffix(".backward") in ("linear_all_reduce", "copy_linear")
    why_not = _native_obstacle(group, "simt" if sums else "gemm", device)
    if why_not:
        return why_not
    if group.size > MOST_RANKS:
        return f"{group.size} ranks; kernels exchange data between {MOST_RANKS} at most"
    nbytes = rows * width * dtype.itemsize
    if sums:
        if nbytes > DECODE_BYTES:
            return f"a sum of {nbytes} bytes, more than {DECODE_BYTES}, is worth overlapping"
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Hopper products take bfloat16 and float16, not {dtype}"
    if operation in GATHERS:
        if width % 8:
            return f"rows of {width} elements do not all begin on 16 bytes, as Hopper products need"
        staged = -(-rows // group.size) * width * dtype.itemsize
        if staged > STAGED_BYTES:
            return (
                f"{staged} bytes of rows on a rank, more than the {STAGED_BYTES} of staging memory"
            )
    return None


def _native_obstacle(group: ParallelGroup, kernel: Kernel, device: str) -> str | None:
    if device == "cpu":
        return "CPU tensors have no kernels in CUDA C++"
    return (
        native_obstacle(group.cuda_support, kernel)
        or triton_obstacle(group.triton_support, device)  # a workspace has room for its tiles
        or region_obstacle(group, device)
    )


def _how(
    operation: str, group: ParallelGroup, rows: int, width: int, dtype: torch.dtype, device: str
) -> str:
    """How "cuda" runs it."""
    why_not = direct_obstacle(operation, group, rows, width, dtype, device)
    if why_not is None:
        if operation in GATHERS:
            return "the copy engine brings the rows of the peers to products of _cuda"
        return "kernels of _cuda write straight to the memory of the peers"
    return f"{_by_groups(operation, group, rows, width, dtype, device)}; not to peers: {why_not}"


def _by_groups(
    operation: str, group: ParallelGroup, rows: int, width: int, dtype: torch.dtype, device: str
) -> str:
    """How the process group takes part."""
    counts = counts_of(operation, rows, group.size)
    size = rows_of_group(group, operation, counts, width, dtype, device)
    measured = measured_key(operation, counts, width, dtype, device) in group.group_sizes
    travels = f"{-(-max(counts) // size)} groups of {size} rows{' (measured)' * measured}"
    if operation in GATHERS:
        return f"the process group gathers {travels}, products follow it"
    why_not = "CPU tensors" if device == "cpu" else native_obstacle(group.cuda_support, "gemm")
    engine = (
        f"the Triton kernel ({why_not})"
        if why_not
        else "the Hopper kernels of _cuda, where they can"
    )
    return f"the process group sends {travels}; products by {engine}"


def _decide(
    operation: str,
    group: ParallelGroup,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    asked: str,
) -> Choice:
    call = operation, group, rows, width, dtype, device
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
            how = f"; {_how(*call)}" if asked == "cuda" else ""
            return Choice(operation, asked, f"asked for{how}")
    if group.size == 1:
        names = ("chunked", "host", "triton", "cuda")
        others = dict.fromkeys(names, "one rank: nothing to communicate")
        return Choice(operation, "reference", "one rank: the plain linear layer", others)
    rejected = {}
    if device == "cpu":
        for name in ("triton", "cuda"):
            rejected[name] = "CPU tensors run in Triton's interpreter, which is for tests"
    else:
        found = _on_gpu(call, rejected)
        if found is not None:
            return found
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


def _on_gpu(
    call: tuple[str, ParallelGroup, int, int, torch.dtype, str], rejected: dict[str, str]
) -> Choice | None:
    """The choice for kernels of a GPU, or None and why not in `rejected`."""
    operation, group, rows, width, dtype, device = call
    direct = direct_obstacle(*call) is None
    candidates = [("triton", TRITON_PROVEN), ("cuda", CUDA_PROVEN)]
    for name, proven in reversed(candidates) if direct else candidates:
        why_not = obstacle(name, group, width, dtype, device)
        if why_not is None and not proven:
            why_not = (
                f"possible, but never run on a GPU so far: ask for it with implementation={name!r}, "
                "after `make gpu-check`"
            )
        if why_not is None and name == "cuda" and not direct and rows < CHUNKED_MIN_ROWS:
            why_not = f"{rows} rows < {CHUNKED_MIN_ROWS}: one collective is faster"
        if why_not:
            rejected[name] = why_not
            continue
        rejected["host"] = str(obstacle("host", group, width, dtype, device))
        rejected["reference"] = "no overlap"
        if name == "cuda" and not direct:
            rejected["chunked"] = "pieces would wait for products of their own"
            return Choice(operation, name, _how(*call), rejected)
        rejected["chunked"] = "kernels that address the peers are faster than the process group"
        if name == "cuda":
            rejected.setdefault("triton", "the kernels of _cuda are made for this architecture")
            return Choice(operation, name, _how(*call), rejected)
        rejected.setdefault("cuda", str(direct_obstacle(*call)))
        return Choice(operation, name, "all ranks address each other's memory", rejected)
    return None
