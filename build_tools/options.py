"""What is built, decided from the environment: with CUDA or without, for which GPUs, in how many jobs.

Nothing here compiles anything. docs/building.md lists the variables.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOME = Path("/usr/local/cuda")
OLDEST_ARCHITECTURE = 80  # the first with bfloat16
HOPPER = 90  # what the CUTLASS products are written for
OLDEST_TOOLKIT = (12, 8)  # the first that compiles for all of these
# 90a rather than 90: there is no other device of 9.x that code for 90 would add, and one list serves all
# files. PTX of the newest is for devices yet to come.
DEFAULT_ARCHITECTURES = "80;90a;100;120+PTX"
OLDEST_CUTLASS = (4, 0)
CUTLASS_REQUIREMENT = "nvidia-cutlass>=4.2,<5"
# The most that one compiler was seen to take is 0.45 GB.
MEMORY_PER_JOB = 1 << 30


class BuildError(Exception):
    """What was asked for cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Architecture:
    """A GPU to compile for: 10 * major + minor, "a" or "f" for its own features, with PTX for later ones."""

    number: int
    features: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.number}{self.features}" + "+PTX" * self.ptx

    @property
    def cmake(self) -> str:
        return f"{self.number}{self.features}" + ("" if self.ptx else "-real")

    @property
    def images(self) -> list[str]:
        name = f"{self.number}{self.features}"
        return [f"sm_{name}"] + [f"compute_{name}"] * self.ptx


@dataclass(frozen=True)
class Toolkit:
    """A compiler for CUDA: its version as (major, minor) and the architectures that it knows."""

    nvcc: Path
    version: tuple[int, int]
    architectures: frozenset[int]

    @classmethod
    def of(cls, nvcc: Path) -> Toolkit:
        try:
            version = re.search(r"release (\d+)\.(\d+)", _output(nvcc, "--version"))
            known = re.findall(r"sm_(\d+)", _output(nvcc, "--list-gpu-code"))
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"{nvcc} cannot be used: {error}") from error
        if version is None:
            raise BuildError(f"{nvcc} --version does not name a CUDA release")
        return cls(nvcc, (int(version[1]), int(version[2])), frozenset(map(int, known)))

    @property
    def name(self) -> str:
        return "{}.{}".format(*self.version)


@dataclass(frozen=True)
class Cutlass:
    include: Path
    version: tuple[int, int, int]

    @property
    def name(self) -> str:
        return "{}.{}.{}".format(*self.version)


@dataclass(frozen=True)
class CudaBuild:
    """cutlass: None where no Hopper device is asked for, whose products are then left out."""

    toolkit: Toolkit
    architectures: tuple[Architecture, ...]
    cutlass: Cutlass | None

    @property
    def local_version(self) -> str:
        return "cu{}{}".format(*self.toolkit.version)

    def __str__(self) -> str:
        images = [image for one in self.architectures for image in one.images]
        products = "with" if self.cutlass else "without"
        return (
            f"CUDA {self.toolkit.name} ({self.toolkit.nvcc}), {' '.join(images)}, "
            f"{products} Hopper products"
        )


def cuda_build(environment: Mapping[str, str], *, headers: bool = True) -> CudaBuild | str:
    """What to build for CUDA, or why nothing is.

    headers: look for those of CUTLASS too, if they are needed.
    """
    asked = environment.get("TP_KERNELS_CUDA", "auto")
    if asked == "0":
        return "TP_KERNELS_CUDA=0"
    version = re.fullmatch(r"(\d+)\.(\d+)", asked)
    if asked not in ("auto", "1") and not version:
        raise BuildError(
            f"TP_KERNELS_CUDA={asked}: use auto (build the CUDA kernels where nvcc is found), 0, 1, "
            "or the version that the toolkit must have, like 13.0"
        )
    found, looked = find_nvcc(environment, asked if version else "")
    if not found:
        if asked == "auto":
            return f"nvcc is not installed: it is not in {looked}"
        raise BuildError(
            f"TP_KERNELS_CUDA={asked}, but nvcc is not in {looked}. Install the CUDA toolkit, point "
            "CUDA_HOME at it or CUDACXX at its nvcc, or build without CUDA kernels: TP_KERNELS_CUDA=0"
        )
    toolkits = [Toolkit.of(nvcc) for nvcc in found]
    toolkit = next((one for one in toolkits if not version or one.name == asked), None)
    if toolkit is None:
        have = ", ".join(f"{one.nvcc} (CUDA {one.name})" for one in toolkits)
        raise BuildError(
            f"TP_KERNELS_CUDA={asked}, but there is only {have}. Point CUDA_HOME at CUDA {asked}, or ask "
            "for what there is"
        )
    if toolkit.version < OLDEST_TOOLKIT:
        raise BuildError(
            f"{toolkit.nvcc} is of CUDA {toolkit.name}; the kernels need {'{}.{}'.format(*OLDEST_TOOLKIT)} "
            "or later. Point CUDA_HOME at a later one, or set TP_KERNELS_CUDA=0"
        )
    chosen = architectures(environment, toolkit)
    needs_cutlass = headers and any(one.number == HOPPER for one in chosen)
    return CudaBuild(toolkit, chosen, find_cutlass(environment) if needs_cutlass else None)


def find_nvcc(environment: Mapping[str, str], version: str = "") -> tuple[list[Path], str]:
    """Every nvcc, best first, and where it was looked for.

    A variable that points to it is decisive, also if it is wrong.
    """
    if environment.get("CUDACXX"):
        given = environment["CUDACXX"]
        found = shutil.which(given, path=environment.get("PATH", ""))
        return ([Path(found)] if found else []), f"CUDACXX={given}"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            found = shutil.which("nvcc", path=str(Path(environment[variable]) / "bin"))
            return ([Path(found)] if found else []), f"{variable}={environment[variable]}"
    homes = [f"{DEFAULT_HOME}/bin"] + [f"{DEFAULT_HOME}-{version}/bin"] * bool(version)
    every = [shutil.which("nvcc", path=path) for path in (environment.get("PATH", ""), *homes)]
    looked = f"CUDACXX, CUDA_HOME, CUDA_PATH (not set), PATH, {', '.join(homes)}"
    return [Path(found) for found in every if found], looked


def architectures(environment: Mapping[str, str], toolkit: Toolkit) -> tuple[Architecture, ...]:
    """Those asked for, each known to the compiler."""
    variable = "TP_KERNELS_CUDA_ARCHS"
    if environment.get(variable):
        chosen = parse_architectures(environment[variable], variable)
        for one in chosen:
            if one.number < OLDEST_ARCHITECTURE:
                raise BuildError(
                    f"{variable}: the kernels need {OLDEST_ARCHITECTURE} (compute capability 8.0) "
                    f"or later, not {one}"
                )
    elif environment.get("TORCH_CUDA_ARCH_LIST"):
        # Images with torch set it for torch's own kernels, also to devices that ours do not run on.
        variable = "TORCH_CUDA_ARCH_LIST"
        listed = parse_architectures(environment[variable], variable)
        chosen = tuple(one for one in listed if one.number >= OLDEST_ARCHITECTURE)
        if not chosen:
            raise BuildError(
                f"{variable}={environment[variable]} has nothing from 8.0 on, which the kernels need. "
                "Set TP_KERNELS_CUDA_ARCHS, or TP_KERNELS_CUDA=0"
            )
    else:
        chosen = parse_architectures(DEFAULT_ARCHITECTURES, "default")
    for one in chosen:
        if one.number not in toolkit.architectures:
            known = [n for n in sorted(toolkit.architectures) if n >= OLDEST_ARCHITECTURE]
            raise BuildError(
                f"{variable}: CUDA {toolkit.name} cannot compile for {one}. Use a toolkit that can, or "
                f"choose from {' '.join(map(str, known))}"
            )
    return chosen


def parse_architectures(text: str, variable: str) -> tuple[Architecture, ...]:
    """ "80;90a;120+PTX" or "8.0 9.0a 12.0+PTX"."""
    found = {}
    for entry in re.split(r"[;,\s]+", text.strip(";, \t\n")):
        match = re.fullmatch(r"(\d{1,2})\.?(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise BuildError(
                f"{variable}: '{entry}' is no architecture. Write a list like 80;90a;120+PTX or "
                "8.0;9.0a;12.0+PTX"
            )
        one = Architecture(int(match[1] + match[2]), match[3], match[4] is not None)
        found[one.number, one.features] = one
    return tuple(found.values())


def find_cutlass(environment: Mapping[str, str]) -> Cutlass:
    given = environment.get("CUTLASS_PATH")
    if given:
        places = [Path(given) / "include", Path(given)]
        looked = f"CUTLASS_PATH={given}"
    else:
        package = importlib.util.find_spec("cutlass_library")
        roots = list(package.submodule_search_locations or []) if package else []
        places = [Path(root) / "source/include" for root in roots]
        looked = "the Python package nvidia-cutlass" + " (not installed)" * (package is None)
    for include in places:
        header = include / "cutlass/version.h"
        if header.is_file():
            numbers = dict(re.findall(r"#define CUTLASS_(\w+) (\d+)", header.read_text()))
            major, minor, patch = (int(numbers[part]) for part in ("MAJOR", "MINOR", "PATCH"))
            if (major, minor) < OLDEST_CUTLASS:
                raise BuildError(f"{include} is CUTLASS {major}.{minor}; 4.0 or later is needed")
            return Cutlass(include, (major, minor, patch))
    hopper = "TP_KERNELS_CUDA_ARCHS without 90, as '80;100;120+PTX'"
    raise BuildError(
        f"the Hopper products need the headers of CUTLASS, which are not in {looked}. Get them with "
        f"`pip install --no-deps '{CUTLASS_REQUIREMENT}'`, point CUTLASS_PATH at a clone of CUTLASS 4, "
        f"or leave the products out: {hopper}"
    )


def jobs(environment: Mapping[str, str]) -> int:
    """How many compilers run at once: MAX_JOBS, else what cores and memory allow."""
    given = environment.get("MAX_JOBS")
    if given:
        if not given.isdecimal() or int(given) == 0:
            raise BuildError(f"MAX_JOBS={given}: use a number from 1")
        return int(given)
    return max(1, min(len(os.sched_getaffinity(0)), memory() // MEMORY_PER_JOB))


def memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of this machine, or of the container that `limit` is about."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(machine, int(text)) if text.isdecimal() else machine


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
