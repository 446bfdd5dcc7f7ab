"""Compiles every candidate of the tuner for the GPUs it is for: `python -m tests.kernels.aot --candidates`.

What holds for all kernels (aot.problems) holds for them. Besides, they fit where their family runs, all
programs of a launch at once, and multiply with the instructions of the built-in choice.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from tests.kernels import aot
from tp_kernels.kernels._gemm import FEW_ROWS, TILINGS, Tiling
from tp_kernels.planning import Hardware, ShapeClass, candidates
from tp_kernels.planning.tilings import SIZES

ELEMENTS = {2: "bf16", 4: "fp32"}
# Ranks for which a kernel is largest: sums are unrolled.
WORLD = max(aot.WORLDS)
# Shared memory in bytes: of a block, and of a multiprocessor, where a block takes 1 KiB more than it asks
# for. 80 also runs on 8.6, 8.9 and 12.0, which have less.
SHARED = {80: (99 << 10, 100 << 10), 90: (227 << 10, 228 << 10), 100: (227 << 10, 228 << 10)}
REGISTERS = 65536  # of a multiprocessor
MULTIPLY = re.compile(
    r"\b(?:(?:mma\.sync|wgmma\.mma_async)\.[\w.]+|tcgen05\.mma\.[\w.:]+|fma\.rn\.f32\w*)"
)


def choices(architecture: int, itemsize: int, kind: str) -> tuple[Tiling, ...]:
    """What a tuner would try; the first is the built-in choice."""
    operation = "all_gather_weight_gradient" if kind == "gradient" else "all_gather_linear"
    rows = FEW_ROWS if kind == "few" else 2 * FEW_ROWS
    shape = ShapeClass(operation, 1, itemsize, WORLD, rows, 4096, 4096)
    return candidates(Hardware("", architecture), shape)


def instructions(ptx: str) -> set[str]:
    """What multiplies, without M and N."""
    return {re.sub(r"m\d+n\d+(k\d+)", r"\1", found) for found in MULTIPLY.findall(ptx)}


def check(architecture: int, itemsize: int, kind: str, kernel: str) -> list[tuple[str, list[str]]]:
    """Every different candidate of a kernel, with what is wrong about it."""
    tilings = choices(architecture, itemsize, kind)
    block, processor = SHARED[architecture]
    processors = TILINGS[architecture, itemsize, kind].programs
    configuration = aot.Configuration(kernel, ELEMENTS[itemsize], WORLD, kind)
    usual = instructions(aot.build(configuration, architecture).ptx)  # however it is loaded
    # Of equal code the most programs count; another order of tiles is not worth a compilation.
    most: dict[Tiling, int] = {}
    for tiling in tilings[1:]:
        code = replace(tiling, programs=0, group=tilings[0].group, senders=0)
        if tiling.programs != tilings[0].programs or code != replace(
            tilings[0], programs=0, senders=0
        ):
            most[code] = max(most.get(code, 0), tiling.programs)
    lines = []
    for code, programs in most.items():
        as_loaded = replace(configuration, tma=code.tma)
        compiled = aot.build(as_loaded, architecture, tiling=code)
        found = aot.problems(as_loaded, compiled, architecture)
        if instructions(compiled.ptx) != usual:
            found.append(f"{instructions(compiled.ptx)}; the built-in choice has {usual}")
        if compiled.shared > block:
            found.append(f"{compiled.shared} bytes of shared memory, at most {block}")
        together = -(-programs // processors)
        registers = -(-compiled.registers // 8) * 8 * 32 * code.warps
        if together * max(registers / REGISTERS, (compiled.shared + 1024) / processor) > 1:
            found.append(f"{programs} programs are not resident on {processors} processors")
        line = f"{code.block_m} x {code.block_n} x {code.block_k}, {code.warps} warps"
        what = f"sm_{architecture} {configuration} {line}, {code.stages} stages"
        lines.append((f"{what}: {compiled.registers} / {compiled.shared}", found))
    return lines


def main() -> int:
    compiled = bad = 0
    cases = [
        (*key, kernel)
        for key in SIZES
        for kernel in ([aot.GRADIENT] if key[2] == "gradient" else aot.PRODUCTS)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        for lines in processes.map(check, *zip(*cases, strict=True)):
            for line, notes in lines:
                print(line, flush=True)
                for note in notes:
                    print(f"    {note}")
                compiled, bad = compiled + 1, bad + len(notes)
    print(f"{compiled} candidates compiled, {bad} problems")
    return 1 if bad else 0
