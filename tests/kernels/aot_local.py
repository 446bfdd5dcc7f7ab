"""Kernels without signals as aot.py compiles them: their forms and the types of their arguments."""

from __future__ import annotations

import re
from typing import Any

from tp_kernels.kernels._launch import REGISTERS, TILE, WARPS, tiling
from tp_kernels.kernels.gated import ACTIVATIONS
from tp_kernels.kernels.norm import SUMMED
from tp_kernels.kernels.rotary import tiling as rotary_tiling
from tp_kernels.kernels.sum_parts import BLOCK

# Rows of several tiles, and heads of 128 elements.
ROW = tiling(4096)
HEADS = rotary_tiling(32, 64)
SUMS = {"ROWS": TILE // SUMMED, "COLUMNS": SUMMED}

# By kernel and form: constants, where None means that an argument is not given.
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "dropout.drop": {
        "grouped": {"GROUPED": True} | ROW,
        "each": {"GROUPED": False, "residual": None} | ROW,
    },
    "gated.forward": {a: {"ACTIVATION": a} | ROW for a in ACTIVATIONS},
    "gated.backward": {a: {"ACTIVATION": a} | ROW for a in ACTIVATIONS},
    "rotary.turn": {
        "halves": {"INVERSE": False, "INTERLEAVED": False} | HEADS,
        "pairs": {"INVERSE": True, "INTERLEAVED": True} | HEADS,
    },
    "norm.forward": {"rms": {"bias": None, "mean": None} | ROW, "layer": ROW},
    "norm.backward": {"rms": {"mean": None} | ROW, "layer": ROW},
    "norm.sum_rows": {
        "rms": {"mean": None, "BIAS": False} | SUMS,
        "layer": {"BIAS": True} | SUMS,
    },
    "norm.sum_parts": {"": {"COLUMNS": SUMMED}},
    "sum_parts.add_in_order": {
        "": {"WORLD": 8, "BLOCK": BLOCK},
        "no bias": {"WORLD": 8, "BLOCK": BLOCK, "bias": None},
    },
    "cross_entropy.measure": {"": {"BLOCK": ROW["COLUMNS"]}},
    "cross_entropy.gradient": {"": ROW},
}

KINDS = {"labels": "*i64", "epsilon": "fp32", "smoothing": "fp32", "z_loss": "fp32"}
KINDS |= {"key": "*i64", "first": "i64", "least": "i64", "scale": "fp32"}
KINDS |= dict.fromkeys(("mean", "rstd", "parts", "measures", "loss", "saved", "d_loss"), "*fp32")
ELEMENTS = (
    "gate", "up", "dy", "d_gate", "d_up", "cos", "sin", "x", "y", "s", "ds", "dx", "weight", "bias",
    "residual", "logits", "out",
)  # fmt: skip

SIZES = (
    "columns", "tokens", "heads", "half", "rest", "span", "vocab", "start",
    "step", "step_row", "step_outer",
)  # fmt: skip
# What 16 divides where rows and heads are of such sizes.
ALIGNED = [
    "columns", "half", "rest", "cos_token", "cos_batch", "part_row",
    *(f"{t}_{what}" for t in "xy" for what in ("batch", "token", "head")),
    *(f"{t}_row" for t in ("gate", "up", "dy", "d", "residual", "s", "ds", "logits")),
]  # fmt: skip

# Local data share of a workgroup in bytes (AMD CDNA 3 instruction set architecture, section 1).
AMD = {"gfx942": 64 << 10}


def amd_usage(result: Any) -> dict[str, int]:
    """What a block takes, from the metadata of its kernel.

    See LLVM, User Guide for AMDGPU Backend, code object V3 metadata. Registers are counted in all; bytes of
    scratch memory are those of spilled ones as well.
    """
    lines = re.findall(r"(?m)^\s+\.(\w+): +(\d+)$", result.asm["amdgcn"])
    usage = {key: int(value) for key, value in lines}
    return {
        "registers": usage["vgpr_count"],
        "shared": result.metadata.shared + usage["group_segment_fixed_size"],
        "spilled": usage["private_segment_fixed_size"]
        + 4 * (usage["vgpr_spill_count"] + usage["sgpr_spill_count"]),
    }


def options(architecture: int | str) -> dict[str, int]:
    """Of the compiler, as `_launch.launch` gives them."""
    return {"num_warps": WARPS} | ({} if architecture in AMD else {"maxnreg": REGISTERS})


def problems(kernel: str, assembly: str) -> list[str]:
    """Accesses that are not of 16 bytes where they could be; sums of parts are too small for them."""
    wide = r"ld\.global\.v4\.b32|_load_dwordx[24]"  # AMD: half a head is 8 bytes for each of 256 threads
    found = [] if kernel == "norm.sum_parts" or re.search(wide, assembly) else ["no wide load"]
    return found + sorted(set(re.findall(r"\S*atomic\S*", assembly)))
