"""Gates of the module _cuda as it was compiled: images, registers, matrix units, the order of signals."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from build_tools.options import DEFAULT_ARCHITECTURES, CudaBuild, cuda_build, parse_architectures
from tests.build import machine_code
from tests.build.machine_code import Function

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> CudaBuild:
    found = cuda_build(os.environ)
    if not isinstance(found, CudaBuild):
        pytest.skip(found)  # "nvcc is not installed: ..."
    return found


@pytest.fixture(scope="module")
def native(build) -> ModuleType:
    return importlib.import_module("tp_kernels._cuda")


@pytest.fixture(scope="module")
def file(native) -> Path:
    return Path(native.__file__)


@pytest.fixture(scope="module")
def functions(file) -> list[Function]:
    return machine_code.functions(file)


@pytest.fixture(scope="module")
def images(build) -> list[str]:
    return [image for one in build.architectures for image in one.images]


@pytest.fixture(scope="module")
def products(build) -> list[str]:
    """Images of matrix products."""
    return ["sm_90a"] if build.cutlass else []


def test_images_are_those_promised(build, native, file, images):
    assert set(machine_code.images(file)) == set(images)
    info = native.build_info()
    assert info["archs"].split() == images
    assert info["cuda"].startswith(build.toolkit.name)


def test_promise():
    chosen = parse_architectures(DEFAULT_ARCHITECTURES, "")
    promised = [image for one in chosen for image in one.images]
    assert promised == ["sm_80", "sm_90a", "sm_100", "sm_120", "compute_120"]


def test_every_kernel_is_in_every_image(native, functions, images, products):
    """But for products, which are of one."""
    assert native.build_info()["gemm_archs"].split() == products
    where: dict[str, set[str]] = {}
    for one in functions:
        where.setdefault(one.name, set()).add(one.image)
    machine = {image for image in images if image.startswith("sm_")}
    wanted = [machine, set(products)] if products else [machine]
    assert all(found in wanted for found in where.values()), where
    assert all(one in where.values() for one in wanted)


def test_nothing_is_spilled_and_signals_are_in_order(functions):
    found = {f"{one.image} {one.name}": machine_code.problems(one) for one in functions}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_products_use_the_matrix_units(functions, products):
    elsewhere = {one.name for one in functions if one.image != "sm_90a"}
    only_hopper = [one for one in functions if one.name not in elsewhere]
    assert bool(only_hopper) == bool(products)
    without = [f.name for f in only_hopper if not any(one.startswith("HGMMA") for one in f.code)]
    assert without == []


def test_kernels_take_what_is_recorded(build, file):
    recorded = machine_code.read_table(build.toolkit.name)
    if not recorded:
        pytest.skip("resources.json is of another CUDA")
    taken = machine_code.table(file)
    common = taken.keys() & recorded.keys()
    assert common
    for image in common:
        meant = "if this is meant: python -m tests.build.machine_code"
        assert taken[image] == recorded[image], f"{image}; {meant}"


SOUND = (
    *("STG.E.128", "BAR.SYNC.DEFER_BLOCKING", "MEMBAR.ALL.SYS", "ERRBAR", "STG.E.STRONG.SYS"),
    *("LDG.E.STRONG.SYS", "CCTL.IVALL", "STG.E", "BAR.RED.OR.DEFER_BLOCKING", "LDG.E.128"),
)


def judged(*code: str, local: int = 0) -> str:
    return "; ".join(machine_code.problems(Function("sm_90a", "kernel", 32, 0, local, code)))


def test_sound_code_has_no_problem():
    assert judged(*SOUND) == ""


def test_tensor_loads_of_what_a_flag_announced_need_their_fence():
    fence = "FENCE.VIEW.ASYNC.G"
    sound = ("LDG.E.STRONG.SYS", "CCTL.IVALL", fence, "UTMALDG.2D")
    assert judged(*sound) == ""
    assert "UTMALDG.2D after a flag was read" in judged(*(one for one in sound if one != fence))


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("MEMBAR.ALL.SYS", "a signal without a fence before it"),
        ("BAR.SYNC.DEFER_BLOCKING", "a signal after STG.E.128 without a barrier between"),
        ("CCTL.IVALL", "LDG.E.128 after a flag was read without emptying the cache between"),
        ("BAR.RED.OR.DEFER_BLOCKING", "LDG.E.128 after a flag was read without a barrier between"),
    ],
)
def test_what_is_missing_is_found(missing, problem):
    assert problem in judged(*(one for one in SOUND if one != missing))


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("STG.E.STRONG.GPU", "a store at a scope that other devices do not see"),
        ("LDG.E.128.CONSTANT", "data of others read as if it never changed"),
        ("ATOMG.E.ADD.S32.STRONG.GPU", "a signal without a fence before it"),
    ],
)
def test_what_is_added_is_found(added, problem):
    assert problem in judged(*SOUND, added)


def test_spills_are_found():
    assert "8 bytes of registers are spilled" in judged(local=8)
    assert judged("STG.E.128", "STG.E.STRONG.SYS").startswith("a signal after STG.E.128 without a fe")
    assert judged("LDG.E.STRONG.SYS") == "a flag is read and the cache not emptied"


# What a change of a source, or a flag of the compiler, makes of a kernel.
MUTANTS = [
    ("release.sys", "relaxed.sys", "a signal without a fence before it"),
    ("release.sys", "release.gpu", "a store at a scope that other devices do not see"),
    ("acquire.sys", "relaxed.sys", "without emptying the cache"),
    ("__syncthreads();", "", "a signal after"),
    ("__syncthreads_or(value)", "value", "after a flag was read without a barrier"),
]


def compiled(build: CudaBuild, folder: Path) -> list[Function]:
    cubin = folder / "kernel.cubin"
    command = [build.toolkit.nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3"]
    paths = [f"-I{folder}/csrc/include", f"-I{folder}/csrc/cuda", "-o", cubin]
    subprocess.run([*command, *paths, folder / "csrc/cuda/all_gather.cu"], check=True)
    machine_code.functions.cache_clear()
    return machine_code.functions(cubin)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "instead", "problem"), MUTANTS, ids=lambda text: text[:24])
def test_mutant_is_found(build, tmp_path, text, instead, problem):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    device = tmp_path / "csrc/cuda/device.h"
    source = device.read_text()
    assert text in source
    device.write_text(source.replace(text, instead))
    found = [one for kernel in compiled(build, tmp_path) for one in machine_code.problems(kernel)]
    assert any(problem in one for one in found), found


@pytest.mark.slow
def test_spills_of_a_compiler_are_found(build, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    kernels = compiled(build, tmp_path)
    assert kernels and not any(machine_code.problems(one) for one in kernels)
    source = tmp_path / "csrc/cuda/all_gather.cu"
    source.write_text(source.read_text().replace("(kMostThreads, 1)", "(kMostThreads, 4)"))
    cramped = compiled(build, tmp_path)
    assert any("spilled" in one for kernel in cramped for one in machine_code.problems(kernel))
