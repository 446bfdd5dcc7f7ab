"""Compiles every kernel for the GPUs it claims, without one, and reads what came out.

    python -m tests.kernels.aot            compare all configurations with resources.json, print the table
    python -m tests.kernels.aot --write    write resources.json instead
    python -m tests.kernels.aot --candidates    compile what the tuner may choose; see aot_candidates.py

Triton carries the assemblers, so a machine without CUDA gets the machine code that a GPU would run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TABLE = Path(__file__).with_name("resources.json")
# Shared memory that a block can have, in bytes (CUDA C++ Programming Guide, technical specifications).
ARCHITECTURES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
WORLDS = (2, 8)
PRODUCTS = ("linear_reduce_scatter.scatter", "linear_all_reduce.one_shot")
# What multiplies 16-bit matrices.
MATRIX_UNITS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
_TRITON = Path(triton.__file__).parent


@dataclass(frozen=True)
class Configuration:
    """A kernel as it is launched on a GPU: module.function, element type, ranks.

    Of matrix products also the rows, "few" or "many", and whether W is transposed in memory.
    """

    kernel: str
    element: str
    world: int
    rows: str = ""
    transposed: bool = False

    def __str__(self) -> str:
        more = f" {self.rows} rows" * bool(self.rows) + " transposed" * self.transposed
        return f"{self.kernel} {self.element} W={self.world}{more}"


def configurations() -> Iterator[Configuration]:
    for world in WORLDS:
        for element in ("fp32", "bf16", "fp16"):
            yield Configuration("all_reduce.one_shot", element, world)
            yield Configuration("all_reduce.two_shots", element, world)
            yield Configuration("reduce_scatter.scatter", element, world)
            yield Configuration("all_reduce_rms_norm.one_shot", element, world)
            yield Configuration("all_reduce_rms_norm.two_shots", element, world)
            yield from _products(element, world)
        for element in ("i8", "i16", "i32", "i64"):
            yield Configuration("all_gather.gather", element, world)


def _products(element: str, world: int) -> Iterator[Configuration]:
    for kernel in PRODUCTS:
        yield Configuration(kernel, element, world, "few")
        yield Configuration(kernel, element, world, "many")
        if element == "bf16":
            yield Configuration(kernel, element, world, "many", transposed=True)


@dataclass(frozen=True)
class Compiled:
    """PTX and what a block takes."""

    ptx: str
    registers: int
    shared: int
    spilled: int  # bytes of a thread's stack and local memory

    @property
    def resources(self) -> dict[str, int]:
        return {"registers": self.registers, "shared": self.shared}


SIZES = ("count", "part", "rows", "width", "small", "larger", "most")


def build(
    configuration: Configuration,
    architecture: int,
    package: str = "tp_kernels.kernels",
    *,
    of_one: bool = False,
    wide: bool = False,
    tiling: Any = None,
) -> Compiled:
    """Compile for sm_<architecture> as `Workspace.launch` would, with aligned arguments.

    of_one: all sizes are 1, which Triton makes constants of; wide: sizes beyond 2^31, which are int64.
    tiling: of a matrix product, instead of the one in TILINGS.
    """
    name, _, function = configuration.kernel.partition(".")
    module = importlib.import_module(f"{package}.{name}")
    workspace = importlib.import_module(f"{package}.workspace")
    shape = workspace.WorkspaceShape(configuration.world)
    itemsize = {"i8": 1, "i16": 2, "i64": 8, "bf16": 2, "fp16": 2}.get(configuration.element, 4)
    warps, block = workspace.WARPS, 32 * workspace.WARPS * 16 // itemsize
    constants: dict[str, Any] = {
        "OPERATION": workspace.OPERATIONS[name],
        "WORLD": shape.world,
        "STRIDE": shape.stride,
        "DEPTH": shape.depth,
        "CHUNK": shape.chunk,
        "LANES": 32 * warps,
        "BLOCK": block,
    }
    options = {"num_warps": warps, "maxnreg": workspace.MOST_REGISTERS}
    if configuration.rows:
        gemm = importlib.import_module(f"{package}._gemm")
        tiling = tiling or gemm.TILINGS[architecture, itemsize, configuration.rows]
        constants |= tiling.constants(itemsize) | {"LANES": 32 * tiling.warps}
        constants |= {"x_inner": 1, "w_row" if configuration.transposed else "w_inner": 1}
        options = {"num_warps": tiling.warps, "maxnreg": gemm.REGISTERS}
        options["num_stages"] = tiling.stages
    kernel = getattr(module, function)
    if of_one:
        constants |= {size: 1 for size in SIZES if size in kernel.arg_names}
        constants |= {name: None for name in ("bias", "residual") if name in kernel.arg_names}
    pointer = f"*{configuration.element}"
    kinds = {"table": "*i64", "record": "*i32", "timeout": "i64", "epsilon": "fp32"}
    kinds |= dict.fromkeys(SIZES, "i64" if wide else "i32")
    kinds |= dict.fromkeys(("x", "w", "out", "y", "s", "bias", "residual", "weight"), pointer)
    signature = {
        argument: "constexpr" if argument in constants else kinds.get(argument, "i32")
        for argument in kernel.arg_names
    }
    # What Triton finds out about addresses, sizes, widths and strides that 16 divides.
    names = ["part", "width", "count", "small", "most", "inner", "x_row", "w_row", "w_inner"]
    aligned = {a for a, kind in signature.items() if kind[0] == "*"} | set(names)
    aligned -= {a for a, kind in signature.items() if kind == "constexpr"}
    aligned -= {kernel.arg_names[p.num] for p in kernel.params if p.do_not_specialize}
    position = {argument: index for index, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        {(position[a],): value for a, value in constants.items() if a in position},
        {(position[a],): [["tt.divisibility", 16]] for a in aligned & signature.keys()},
    )
    target = GPUTarget("cuda", architecture, 32)
    result = triton.compile(source, target=target, options=options)
    usage = _resource_usage(result.asm["cubin"])
    return Compiled(
        result.asm["ptx"],
        usage["REG"],
        result.metadata.shared + usage["SHARED"],
        usage["STACK"] + usage["LOCAL"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = _TRITON / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}


def problems(configuration: Configuration, compiled: Compiled, architecture: int) -> list[str]:
    """What must not be in the machine code of a kernel with signals."""
    found = []
    if compiled.spilled:
        found.append(f"{compiled.spilled} bytes of registers are spilled")
    if compiled.shared > ARCHITECTURES[architecture]:
        found.append(f"{compiled.shared} bytes of shared memory")
    if not re.search(r"st\.global\.(v4\.b32|v2\.b64)", compiled.ptx):
        found.append("no store of 16 bytes")
    unit = MATRIX_UNITS[architecture]
    if configuration.rows and configuration.element != "fp32" and unit not in compiled.ptx:
        found.append(f"no {unit}")
    name, _, function = configuration.kernel.partition(".")
    kernel = getattr(importlib.import_module(f"tp_kernels.kernels.{name}"), function)
    for call, instruction in (("publish", "st.release.sys"), ("observe", "ld.acquire.sys")):
        wanted = len(re.findall(rf"\b{call}\(", inspect.getsource(kernel.fn)))
        present = compiled.ptx.count(instruction + ".global.b32")
        if present < wanted:
            found.append(f"{present} {instruction} for {wanted} times {call}")
    found += [
        f"{match}: neither acquire nor release at system scope"
        for match in re.findall(
            # Fences of the matrix units are of registers and shared memory.
            r"\S*volatile\S*|membar\S*|(?<!\S)fence(?!\.proxy\.async\.shared)\S*"
            r"|\S+\.(?:acquire|release)\.(?:cta|cluster|gpu)\S*",
            compiled.ptx,
        )
    ]
    return found + _unordered(compiled.ptx)


def _unordered(ptx: str) -> list[str]:
    """Signals that are sent before, or seen after, the barrier which makes them those of the whole block."""
    kinds = {
        "release": r"\bst\.release\.",
        "acquire": r"\bld\.acquire\.",
        "barrier": r"\bbar\.sync\b",
        "store": r"\bst\.global\.",
        "load": r"\bld\.global\.",
    }
    events = [kind for line in ptx.splitlines() for kind in kinds if re.search(kinds[kind], line)]
    found = []
    for place, kind in enumerate(events):
        before = [one for one in events[:place] if one in ("barrier", "store")]
        if kind == "release" and before[-1:] == ["store"]:
            found.append("a release without a barrier after the stores")
        if kind == "acquire" and events[place + 1] in ("load", "store"):
            found.append("loads after an acquire without a barrier")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="compile every kernel for every architecture")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--candidates", action="store_true", help="those of the tuner instead")
    arguments = parser.parse_args()
    if arguments.candidates:
        return importlib.import_module("tests.kernels.aot_candidates").main()
    write = arguments.write
    recorded = {} if write else read_table()
    table: dict[str, dict[str, dict[str, int]]] = {}
    bad = 0
    print(f"{'registers / shared bytes':40}" + "".join(f"{f'sm_{a}':>14}" for a in ARCHITECTURES))
    for configuration in configurations():
        line, notes = f"{configuration!s:40}", []
        for architecture in ARCHITECTURES:
            compiled = build(configuration, architecture)
            notes += problems(configuration, compiled, architecture)
            row = table.setdefault(f"sm_{architecture}", {})
            row[str(configuration)] = compiled.resources
            line += f"{f'{compiled.registers} / {compiled.shared}':>14}"
            old = recorded.get(f"sm_{architecture}", {}).get(str(configuration))
            if recorded and old != compiled.resources:
                notes.append(f"sm_{architecture}: recorded is {old}; if this is meant, use --write")
        print(line)
        for note in notes:
            print(f"    {note}")
        bad += len(notes)
    if write:
        content = {"triton": triton.__version__, "resources": table}
        TABLE.write_text(json.dumps(content, indent=1) + "\n")
    if not recorded and not write:
        print(f"{TABLE.name} is of another Triton than {triton.__version__}: not compared")
    print(f"{sum(map(len, table.values()))} kernels compiled, {bad} problems")
    return 1 if bad else 0


def read_table() -> dict[str, dict[str, dict[str, int]]]:
    """Recorded resources by architecture and configuration; empty if they are of another Triton."""
    content = json.loads(TABLE.read_text())
    return content["resources"] if content["triton"] == triton.__version__ else {}


if __name__ == "__main__":
    sys.exit(main())
