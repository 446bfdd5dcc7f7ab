"""Builds tp_kernels._host with CMake; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


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


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        compiler = os.environ.get("CXX", "").split()
        cmake = tool("cmake")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "host"
        configure = [
            *(cmake, "-S", ROOT, "-B", build, "-G", "Ninja"),
            # Given on every run: with build isolation these paths are new each time.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTPK_VERSION={self.distribution.get_version()}",
        ]
        tool(*(compiler[:1] or ("c++", "g++", "clang++")))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        for command in (configure, [cmake, "--build", build, "--target", "_host", "-j", jobs]):
            if subprocess.run(command).returncode != 0:
                sys.exit("error: building tp_kernels failed; the cause is in the output above")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / target.name, target)


# Named here, the sources are in the source distribution.
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*"))

setup(
    ext_modules=[Extension("tp_kernels._host", sources=[], depends=["CMakeLists.txt", *SOURCES])],
    cmdclass={"build_ext": CMakeBuild},
)
