"""Builds tp_kernels._host and, where nvcc is, tp_kernels._cuda with CMake; the rest is in pyproject.toml."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_tools.options import BuildError, CudaBuild, cuda_build, jobs  # noqa: E402

# What a CMake tree keeps from the first time: if one of them changes, it starts afresh.
KEPT = ("CXX", "CXXFLAGS", "LDFLAGS", "CUDAHOSTCXX", "CUDAFLAGS")


def tool(*names: str) -> str:
    """First of `names` beside this Python or on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            return found
    sys.exit(
        f"error: building tp_kernels needs {' or '.join(names)}, which is not on PATH. Install a "
        "C++17 compiler (g++ 11 or clang++ 14, or later; Debian and Ubuntu: apt install g++) and, "
        "unless pip builds in isolation, `pip install cmake ninja pybind11`. Set CXX to use a "
        "compiler with another name."
    )


def version_of_sources() -> str:
    text = (ROOT / "tp_kernels/__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


class FreshBuild(build):
    """What an earlier build left, such as a module that is gone, would be in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Both modules, in one tree that stays: what has not changed is not compiled again."""

    def build_extensions(self) -> None:
        cuda = decided(headers=True)
        built = isinstance(cuda, CudaBuild)
        print(f"CUDA kernels: {cuda if built else f'not built, {cuda}'}", flush=True)
        tree = ROOT / "build" / f"cmake-{self.plat_name}-{sys.implementation.cache_tag}"
        targets = [ext.name.rpartition(".")[2] for ext in self.extensions]
        for command in (
            self.configuration(tree, cuda),
            [
                *(tool("cmake"), "--build", tree, "--target", *targets),
                *("-j", str(jobs(os.environ))),
            ],
        ):
            if subprocess.run(command).returncode != 0:
                sys.exit("error: building tp_kernels failed; the cause is in the output above")
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name)).resolve()
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / target.name, target)

    def copy_extensions_to_source(self) -> None:
        for stale in (ROOT / "tp_kernels").glob("_cuda.*.so"):
            stale.unlink()
        super().copy_extensions_to_source()

    def configuration(self, tree: Path, cuda: CudaBuild | str) -> list[str | Path]:
        import pybind11

        compiler = os.environ.get("CXX", "").split()
        tool(*(compiler[:1] or ("c++", "g++", "clang++")))
        options = [
            # Given on every run: with build isolation these paths are new each time.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTPK_VERSION={version_of_sources()}",
        ]
        kept = {variable: os.environ.get(variable) for variable in KEPT}
        if isinstance(cuda, CudaBuild):
            images = " ".join(image for one in cuda.architectures for image in one.images)
            options += [
                "-DTPK_CUDA=ON",
                f"-DCMAKE_CUDA_COMPILER={cuda.toolkit.nvcc}",
                f"-DTPK_CUDA_ARCHS={';'.join(one.cmake for one in cuda.architectures)}",
                f"-DTPK_CUDA_IMAGES={images}",
                f"-DTPK_CUTLASS_INCLUDE={cuda.cutlass.include if cuda.cutlass else ''}",
                f"-DTPK_CUTLASS_VERSION={cuda.cutlass.name if cuda.cutlass else ''}",
            ]
            kept["nvcc"] = f"{cuda.toolkit.nvcc} {cuda.toolkit.name}"
        else:
            options.append("-DTPK_CUDA=OFF")
        record = tree / "kept.json"
        before = json.loads(record.read_text()) if record.is_file() else {}
        fresh = [] if before | kept == before else ["--fresh"]
        tree.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(before | kept))
        return [tool("cmake"), *fresh, "-S", ROOT, "-B", tree, "-G", "Ninja", *options]


def decided(*, headers: bool) -> CudaBuild | str:
    try:
        jobs(os.environ)  # refused before minutes of compiling
        return cuda_build(os.environ, headers=headers)
    except BuildError as error:
        sys.exit(f"error: {error}")


# Named here, the sources are in the source distribution.
SOURCES = [
    "CMakeLists.txt",
    *(
        str(path.relative_to(ROOT))
        for folder, pattern in (("csrc", "*.*"), ("build_tools", "*.py"))
        for path in sorted((ROOT / folder).rglob(pattern))
    ),
]

# Without headers: pip asks for the version before it has fetched them.
cuda = decided(headers=False)
modules = ["_host", "_cuda"] if isinstance(cuda, CudaBuild) else ["_host"]
tag = cuda.local_version if isinstance(cuda, CudaBuild) else "cpu"
# Sources can become any of them. pip insists that a wheel has the version of the sources that it chose.
sources = "sdist" in sys.argv or (ROOT / "PKG-INFO").is_file()
setup(
    version=version_of_sources() + f"+{tag}" * (not sources),
    ext_modules=[Extension(f"tp_kernels.{m}", sources=[], depends=SOURCES) for m in modules],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
