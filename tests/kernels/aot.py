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
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import aot_local
from tests.kernels.aot_local import AMD, FORMS

TABLE = Path(__file__).with_name("resources.json")
# Shared memory that a block can have, in bytes (CUDA C++ Programming Guide, technical specifications).
ARCHITECTURES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
WORLDS = (2, 8)
PRODUCTS = (
    "linear_reduce_scatter.scatter",
    "linear_all_reduce.one_shot",
    "linear_all_reduce.two_shots",
    "all_gather_linear.gather_and_multiply",
)
BY_SWITCH = "linear_all_reduce.by_switch"
GRADIENT = "all_gather_weight_gradient.gather_and_accumulate"
SIGNALLED, AWAIT = "linear_signalled.multiply_by_groups", "wait_for_group.await_group"
COUNT = "atom.global.gpu.release.add"  # of a tile that is stored
# What multiplies 16-bit matrices.
MATRIX_UNITS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
_TRITON = Path(triton.__file__).parent


@dataclass(frozen=True)
class Configuration:
    """A kernel as it is launched on a GPU: module.function, element type, ranks; 0 if it has no signals.

    Of matrix products also the shape ("few" rows, "many", or "gradient"), whether W is transposed in
    memory, and how many pairs of x and W there are; of kernels without signals the form, see aot_local.py.
    """

    kernel: str
    element: str
    world: int = 0
    shape: str = ""
    transposed: bool = False
    pairs: int = 1
    form: str = ""
    tma: bool = False

    def __str__(self) -> str:
        more = f" W={self.world}" * bool(self.world) + f" {self.form}" * bool(self.form)
        more += f" {self.shape}" * bool(self.shape) + " transposed" * self.transposed
        more += f" x{self.pairs}" * (self.pairs > 1) + " TMA" * self.tma
        return f"{self.kernel} {self.element}{more}"

    @property
    def architectures(self) -> list[int | str]:
        if self.tma or self.kernel == BY_SWITCH:
            return [architecture for architecture in ARCHITECTURES if architecture >= 90]
        return [*ARCHITECTURES] if self.world else [*ARCHITECTURES, *AMD]


def label(architecture: int | str) -> str:
    return architecture if isinstance(architecture, str) else f"sm_{architecture}"


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
        yield Configuration("cross_entropy.combine", "fp32", world)
        yield Configuration("barrier.meet", "i32", world)
    for element in ("fp32", "bf16", "fp16"):
        yield Configuration(AWAIT, element, 1)
        yield from _variants(SIGNALLED, element, 1)
    for kernel, forms in FORMS.items():
        for form in forms:
            for element in ("fp32", "bf16", "fp16"):
                yield Configuration(kernel, element, form=form)


def _products(element: str, world: int) -> Iterator[Configuration]:
    yield Configuration(GRADIENT, element, world, "gradient")
    yield Configuration(BY_SWITCH, element, world, "many")
    if element == "bf16":
        yield Configuration(GRADIENT, element, world, "gradient", tma=True)
    for kernel in PRODUCTS:
        yield from _variants(kernel, element, world)


def _variants(kernel: str, element: str, world: int) -> Iterator[Configuration]:
    yield Configuration(kernel, element, world, "few")
    yield Configuration(kernel, element, world, "many")
    if element == "bf16":
        yield Configuration(kernel, element, world, "many", transposed=True)
        yield Configuration(kernel, element, world, "many", True, 3)
        yield Configuration(kernel, element, world, "few", tma=True)
        yield Configuration(kernel, element, world, "many", tma=True)
        yield Configuration(kernel, element, world, "many", True, tma=True)


@dataclass(frozen=True)
class Compiled:
    """PTX, or the assembly of AMD, and what a block takes."""

    ptx: str
    registers: int
    shared: int
    spilled: int  # bytes of a thread's stack and local memory

    @property
    def resources(self) -> dict[str, int]:
        return {"registers": self.registers, "shared": self.shared}


SIZES = ("count", "part", "rows", "width", "small", "larger", "most", *aot_local.SIZES)
ALIGNED = ("part", "width", "count", "small", "most", "inner", "stride", "unit", *aot_local.ALIGNED)
POINTERS = ("w", "gathered", "other", *aot_local.ELEMENTS)


def build(
    configuration: Configuration,
    architecture: int | str,
    package: str = "tp_kernels.kernels",
    *,
    of_one: bool = False,
    wide: bool = False,
    tiling: Any = None,
) -> Compiled:
    """Compile for an architecture as `Workspace.launch` would, or `_launch.launch`, with aligned arguments.

    of_one: all sizes are 1, which Triton makes constants of; wide: sizes beyond 2^31, which are int64.
    tiling: of a matrix product, instead of the one in TILINGS.
    """
    name, _, function = configuration.kernel.partition(".")
    module = importlib.import_module(f"{package}.{name}")
    workspace = importlib.import_module(f"{package}.workspace")
    shape = workspace.WorkspaceShape(configuration.world or 1)
    itemsize = {"i8": 1, "i16": 2, "i64": 8, "bf16": 2, "fp16": 2}.get(configuration.element, 4)
    warps, block = workspace.WARPS, 32 * workspace.WARPS * 16 // itemsize
    constants: dict[str, Any] = {
        "OPERATION": workspace.OPERATIONS.get(name, 0),
        "WORLD": shape.world,
        "STRIDE": shape.stride,
        "DEPTH": shape.depth,
        "CHUNK": shape.chunk,
        "LANES": 32 * warps,
        "BLOCK": block,
        "SMOOTHED": True,
    }
    options = {"num_warps": warps, "maxnreg": workspace.MOST_REGISTERS}
    pointer = f"*{configuration.element}"
    # Triton finds out which addresses, sizes, widths and strides 16 divides: "/16".
    kinds: dict[str, Any] = {
        "multicast": "i64",
        "table": "*i64/16",
        "record": "*i32/16",
        "timeout": "i64",
        "counters": "*i32/16",
    }
    kinds |= dict.fromkeys(SIZES, "i64" if wide else "i32")
    kinds |= dict.fromkeys(ALIGNED, ("i64" if wide else "i32") + "/16")
    kinds |= dict.fromkeys(POINTERS, f"{pointer}/16")
    kinds |= {key: kind + "/16" * (kind[0] == "*") for key, kind in aot_local.KINDS.items()}
    if configuration.shape:
        gemm = importlib.import_module(f"{package}._gemm")
        tiling = tiling or gemm.TILINGS[architecture, itemsize, configuration.shape]
        constants |= tiling.constants(itemsize) | {"LANES": 32 * tiling.warps}
        constants |= {"ACTIVATION": "gelu_tanh", "ROWS": 256, "ADD": True, "TMA": ""}
        if configuration.tma:
            inner = "inner rows" if configuration.transposed else "inner inner"
            constants["TMA"] = "rows rows" if configuration.kernel == GRADIENT else inner
        options = {"num_warps": tiling.warps, "maxnreg": gemm.REGISTERS}
        options["num_stages"] = tiling.stages
        pairs = configuration.pairs
        several = {key: (kinds[key],) * pairs for key in ("x", "w", "inner", "stride")}
        one = (1,) * pairs
        strides = (one, several["stride"]) if configuration.transposed else (several["stride"], one)
        kinds |= {
            "operands": (
                several["x"],
                several["w"],
                several["inner"],
                several["stride"],
                one,
                *strides,
            ),
            "ws": several["w"],
            "biases": None if of_one else several["x"],
            "outs": several["x"],
            "widths": several["inner"],
            "w_rows": strides[0],
            "w_inners": strides[1],
            "out_row": "i32/16",
            "out_column": 1,
        }
        if name == "all_gather_weight_gradient":
            kinds["out"] = "*fp32/16"
    if configuration.kernel == AWAIT:
        constants["LANES"], options["num_warps"] = module.LANES, module.LANES // 32
    if not configuration.world:
        constants = FORMS[configuration.kernel][configuration.form]
        options = aot_local.options(architecture)
    kernel = getattr(module, function)
    if of_one:
        constants = constants | {size: 1 for size in SIZES if size in kernel.arg_names}
        constants |= {n: None for n in ("bias", "residual", "ds") if n in kernel.arg_names}
    signature, values, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            kind: Any = "constexpr"
            values[index,] = constants[argument]
        else:
            kind = kinds.get(argument, "i32")
            if kernel.params[index].do_not_specialize:
                kind = kind.removesuffix("/16")
            kind = _leaves(kind, (index,), values, attributes)
        signature[argument] = kind
    source = ASTSource(kernel, signature, values, attributes)
    if architecture in AMD:
        target = GPUTarget("hip", architecture, 64)
        result = triton.compile(source, target=target, options=options)
        return Compiled(result.asm["amdgcn"], **aot_local.amd_usage(result))
    target = GPUTarget("cuda", architecture, 32)
    result = triton.compile(source, target=target, options=options)
    usage = _resource_usage(result.asm["cubin"])
    return Compiled(
        result.asm["ptx"],
        usage["REG"],
        result.metadata.shared + usage["SHARED"],
        usage["STACK"] + usage["LOCAL"],
    )


def _leaves(
    kind: Any, path: tuple[int, ...], values: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """The type of an argument, a tuple if it is one, without what is entered for its leaves."""
    if isinstance(kind, tuple):
        return tuple(_leaves(k, (*path, i), values, attributes) for i, k in enumerate(kind))
    if not isinstance(kind, str):
        values[path] = kind
        return "constexpr"
    if kind.endswith("/16"):
        attributes[path] = [["tt.divisibility", 16]]
    return kind.removesuffix("/16")


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = _TRITON / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}


def problems(
    configuration: Configuration, compiled: Compiled, architecture: int | str
) -> list[str]:
    """What must not be in the machine code of a kernel."""
    found = []
    if compiled.spilled:
        found.append(f"{compiled.spilled} bytes of registers are spilled")
    if compiled.shared > (ARCHITECTURES | AMD)[architecture]:
        found.append(f"{compiled.shared} bytes of shared memory")
    if not configuration.world:
        return found + aot_local.problems(configuration.kernel, compiled.ptx)
    moves = configuration.kernel not in ("barrier.meet", AWAIT)
    if moves and not re.search(r"st\.global\.(v4\.b32|v2\.b64)", compiled.ptx):
        found.append("no store of 16 bytes")
    unit = MATRIX_UNITS[architecture]
    if configuration.shape and configuration.element != "fp32" and unit not in compiled.ptx:
        found.append(f"no {unit}")
    if configuration.kernel == SIGNALLED:
        counted, stored = (compiled.ptx.rfind(one) for one in (COUNT, "st.global."))
        if counted < stored:
            found.append(f"no {COUNT} after the stores of a tile")
    wanted = ["cp.async.bulk.tensor", "fence.proxy.async.global"] if configuration.tma else []
    if configuration.kernel == BY_SWITCH:
        wanted += ["multimem.ld_reduce.relaxed.sys", "multimem.st.relaxed.sys"]
    found += [f"no {instruction}" for instruction in wanted if instruction not in compiled.ptx]
    name, _, function = configuration.kernel.partition(".")
    kernel = getattr(importlib.import_module(f"tp_kernels.kernels.{name}"), function)
    for call, instruction in (
        ("publish", "st.release.sys"),
        ("observe", "ld.acquire.sys"),
        ("wait", "ld.acquire.sys"),
    ):
        calls = len(re.findall(rf"\b{call}\(", inspect.getsource(kernel.fn)))
        present = compiled.ptx.count(instruction + ".global.b32")
        if present < calls:
            found.append(f"{present} {instruction} for {calls} times {call}")
    found += [
        f"{match}: neither acquire nor release at system scope"
        for match in re.findall(
            # Fences between proxies are of matrix units and the tensor memory accelerator.
            r"\S*volatile\S*|membar\S*|(?<!\S)fence(?!\.proxy\.)\S*"
            r"|(?<!\S)(?!\S*proxy)\S+\.(?:acquire|release)\.(?:cta|cluster|gpu)\S*",
            compiled.ptx,
        )
    ]
    return found + _unordered(compiled.ptx)


def _unordered(ptx: str) -> list[str]:
    """Signals that are sent before, or seen after, the barrier which makes them those of the whole block."""
    kinds = {
        "release": r"\b(?:st\.release|atom\.\S*\.(?:release|acq_rel))\.",
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


def work(configuration: Configuration) -> list[tuple[str, dict[str, int], list[str]]]:
    """(architecture, resources, problems) of each build of a configuration."""
    results = []
    for architecture in configuration.architectures:
        compiled = build(configuration, architecture)
        found = problems(configuration, compiled, architecture)
        results.append((label(architecture), compiled.resources, found))
    return results


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
    every = [label(architecture) for architecture in (*ARCHITECTURES, *AMD)]
    print(f"{'registers / shared bytes':68}" + "".join(f"{name:>14}" for name in every))
    everything = list(configurations())
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for configuration, builds in zip(everything, pool.map(work, everything), strict=True):
            line, notes = f"{configuration!s:68}", []
            for architecture, resources, found in builds:
                notes += [f"{architecture}: {problem}" for problem in found]
                table.setdefault(architecture, {})[str(configuration)] = resources
                line += f"{'{registers} / {shared}'.format(**resources):>14}"
                old = recorded.get(architecture, {}).get(str(configuration))
                if recorded and old != resources:
                    notes.append(
                        f"{architecture}: recorded is {old}; if this is meant, use --write"
                    )
            print(line, *notes, sep="\n    ", flush=True)
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
