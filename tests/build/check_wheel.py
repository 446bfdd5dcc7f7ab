"""Gates of a wheel: what is in it, and that it works where it is installed. `make wheel-check` runs this.

TP_KERNELS_WHEEL is the file. Environments are new ones outside the source tree. Where torch is needed, it is
the one that runs this, found through a path; with CUDA_TORCH=1 one with CUDA is installed, as a user would.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import tp_kernels
from build_tools.options import CudaBuild, cuda_build
from tests.build import machine_code

ROOT = Path(__file__).parents[2]
WHEEL = Path(os.environ.get("TP_KERNELS_WHEEL") or "none.whl").resolve()
CUDA_TORCH = "torch==2.14.1"
MIB = 1 << 20
NEEDED = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|librt|libdl|ld-linux-[\w-]+)\.so\.\d+")
# The oldest glibc for which the compilers of a supported Debian or Ubuntu make it: Ubuntu 22.04.
NEWEST_POLICY = (2, 35)
# What of the suite runs from the installed package: every room, and the modules that only a build can break.
SMOKE = (
    "comm/test_host.py",
    "comm/test_collectives.py",
    "comm/test_cuda_support.py",
    "ops/test_linear_all_reduce.py",
    "layers/test_modules.py",
    "cli/test_cuda_report.py",
)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(WHEEL).extractall(folder)
    return folder


@pytest.fixture(scope="session")
def modules(unpacked) -> dict[str, Path]:
    found = unpacked.rglob("*.so")
    return {path.name.partition(".")[0]: path for path in found}


@pytest.fixture(scope="session")
def built() -> CudaBuild | None:
    """What this wheel should have been built for, as its name says."""
    tag = re.search(r"\+(\w+)-", WHEEL.name)
    assert tag
    environment = dict(os.environ, TP_KERNELS_CUDA="0" if tag[1] == "cpu" else "1")
    build = cuda_build(environment)
    return build if isinstance(build, CudaBuild) else None


def test_name_says_what_it_is(built):
    tag = built.local_version if built else "cpu"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    version = re.escape(f"{tp_kernels.__version__}+{tag}")
    machine = os.uname().machine
    name = rf"tp_kernels-{version}-{python}-{python}-manylinux_(\d+)_(\d+)_{machine}\.whl"
    match = re.fullmatch(name, WHEEL.name)
    assert match, WHEEL.name
    assert (int(match[1]), int(match[2])) <= NEWEST_POLICY


def test_auditwheel_agrees():
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", WHEEL], capture_output=True, text=True, check=True
    )
    policy = re.search(r'platform tag:\s+"(manylinux_\d+_\d+)_', shown.stdout.replace("\n", " "))
    assert policy and policy[1] in WHEEL.name, shown.stdout


def test_files_are_those_of_the_package(unpacked, modules, built):
    tracked = subprocess.check_output(["git", "ls-files", "tp_kernels"], cwd=ROOT, text=True)
    found = {str(f.relative_to(unpacked)) for f in unpacked.rglob("*") if f.is_file()}
    package = {name for name in found if ".dist-info/" not in name and not name.endswith(".so")}
    assert package == {name for name in tracked.split() if name.endswith((".py", "py.typed"))}
    assert set(modules) == ({"_host", "_cuda"} if built else {"_host"})
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {path.name for path in modules.values()} == {f"{name}{suffix}" for name in modules}


def test_modules_need_nothing_special(modules):
    for name, path in modules.items():
        with path.open("rb") as file:
            elf = ELFFile(file)
            tags = list(elf.get_section_by_name(".dynamic").iter_tags())
            needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
            assert needed and all(map(NEEDED.fullmatch, needed)), (name, needed)
            assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
            assert elf.get_section_by_name(".symtab") is None, f"{name} is not stripped"
            symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
        undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
        # Of torch, and of the driver, which a machine may not have.
        foreign = [one for one in undefined if re.search(r"torch|c10|^THP|2at|^cu[A-Z]|^nccl", one)]
        assert not foreign, (name, foreign)
        exported = {
            symbol.name
            for symbol in symbols
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }
        assert exported == {f"PyInit_{name}"}


def test_images_are_those_promised(modules, built):
    if built is None:
        pytest.skip("a wheel without CUDA")
    expected = {image for one in built.architectures for image in one.images}
    assert set(machine_code.images(modules["_cuda"])) == expected


def test_size(built):
    limit = 60 if built and built.cutlass else 10
    assert WHEEL.stat().st_size <= limit * MIB


def environment(folder: Path, *packages: str, torch: bool) -> Path:
    """A new environment with the wheel; torch: also what is installed here, through a path. Its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    if torch:
        here, there = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars={"base": folder})
        (Path(there) / "torch_of_tests.pth").write_text(f"{here}\n")
    offline = () if packages else ("--no-index",) if torch else ("--no-index", "--no-deps")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", *offline]
    subprocess.run([*pip, WHEEL, *packages], check=True)
    return python


def run(python: Path, *arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TP_KERNELS", "PYTEST"))}
    command = [python, *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("venv") / "venv", torch=True)


def test_without_torch(tmp_path):
    python = environment(tmp_path / "venv", torch=False)
    done = run(python, "-c", "import tp_kernels", cwd=tmp_path)
    assert done.returncode != 0
    assert "ImportError: tp_kernels needs torch 2.11 or later, which is not installed" in done.stderr


@pytest.mark.timeout(600)
def test_suite_runs_from_the_wheel(installed, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    where = run(installed, "-c", "import tp_kernels; print(tp_kernels.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed.parents[1])), where.stdout + where.stderr
    files = [f"tests/{name}" for name in SMOKE]
    done = run(installed, "-m", "pytest", "-q", "-rs", *files, cwd=tmp_path)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_doctor_says_what_is_installed(installed, tmp_path, built):
    done = run(installed, "-m", "tp_kernels.cli", "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["usable"] and report["built"]["_host"]["built"]
    if built is None:
        assert report["cuda"]["problem"].startswith("_cuda is not built: install a wheel +cu")
    else:
        assert report["cuda"]["built"]["cuda"] == built.toolkit.name
        assert "not loadable" not in (report["cuda"]["problem"] or "")


@pytest.mark.timeout(600)
def test_sources_build_the_same(tmp_path):
    """As pip does where it finds no wheel that fits: without git, and with the version of the sources."""
    clean = dict(os.environ, TP_KERNELS_CUDA="0", PIP_NO_CACHE_DIR="1")
    built = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check"]
    subprocess.run([*built, "--outdir", tmp_path, ROOT], check=True, env=clean, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"tp_kernels-{tp_kernels.__version__}.tar.gz"
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    needed = [name for name in tracked if name.startswith(("csrc/", "build_tools/", "tp_kernels/"))]
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert set(needed) <= names, set(needed) - names
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    found = ["--no-index", "--find-links", tmp_path, "--wheel-dir", tmp_path, "tp_kernels"]
    subprocess.run([*pip, *found], check=True, env=clean)
    (wheel,) = tmp_path.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".so"))}
    shipped = {name for name in zipfile.ZipFile(WHEEL).namelist() if name.endswith((".py", ".so"))}
    assert files == {name for name in shipped if "/_cuda." not in name}


@pytest.mark.skipif("CUDA_TORCH" not in os.environ, reason="CUDA_TORCH=1 is not set")
@pytest.mark.timeout(1800)
def test_beside_a_torch_with_cuda(tmp_path):
    python = environment(tmp_path / "venv", CUDA_TORCH, torch=False)
    program = (
        "import torch, tp_kernels, tp_kernels._cuda as cuda; "
        "print([torch.version.cuda, torch.cuda.is_available(), cuda.device_info()['devices']])"
    )
    done = run(python, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, available, devices = ast.literal_eval(done.stdout)
    assert version and available == bool(devices)
    report = run(python, "-m", "tp_kernels.cli", "doctor", "--json", cwd=tmp_path)
    assert report.returncode == 0 and json.loads(report.stdout)["usable"], report.stderr
