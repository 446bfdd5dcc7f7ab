"""What is built is decided from the environment, and what cannot be built is refused with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tp_kernels
from build_tools import backend, options
from build_tools.options import BuildError, CudaBuild, cuda_build, jobs, parse_architectures

ROOT = Path(tp_kernels.__file__).parents[1]


def toolkit(folder: Path, version: str, known: str = "80 86 90 100 120") -> str:
    """A folder with an nvcc that answers as that of `version` would."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    codes = "\n".join(f"sm_{one}" for one in known.split())
    nvcc.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo 'release {version}, V{version}.1' || echo '{codes}'\n"
    )
    nvcc.chmod(0o755)
    return str(folder)


@pytest.fixture
def cutlass(tmp_path) -> str:
    header = tmp_path / "cutlass/include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
    )
    return str(tmp_path / "cutlass")


@pytest.fixture
def here(tmp_path, cutlass, monkeypatch) -> dict[str, str]:
    """An environment with one toolkit, 13.0, and CUTLASS."""
    monkeypatch.setattr(options, "DEFAULT_HOME", tmp_path / "none")
    return {"CUDA_HOME": toolkit(tmp_path / "cuda", "13.0"), "CUTLASS_PATH": cutlass}


def built(environment: dict[str, str]) -> CudaBuild:
    build = cuda_build(environment)
    assert isinstance(build, CudaBuild), build
    return build


def names(build: CudaBuild) -> list[str]:
    return [str(one) for one in build.architectures]


def test_default(here, cutlass):
    build = built(here)
    assert names(build) == ["80", "90a", "100", "120+PTX"]
    assert [one.cmake for one in build.architectures] == ["80-real", "90a-real", "100-real", "120"]
    assert build.architectures[-1].images == ["sm_120", "compute_120"]
    assert build.local_version == "cu130"
    assert build.cutlass == options.Cutlass(Path(cutlass) / "include", (4, 2, 1))
    assert "with Hopper products" in str(build)


def test_other_toolkit(here, tmp_path):
    here["CUDA_HOME"] = toolkit(tmp_path / "other", "12.8")
    build = built(here)
    assert build.local_version == "cu128" and len(build.architectures) == 4


@pytest.mark.parametrize("asked", ["auto", "1", "13.0"])
def test_asked_and_found(here, asked):
    assert built(here | {"TP_KERNELS_CUDA": asked}).toolkit.version == (13, 0)


def test_not_asked_or_not_found(here, tmp_path):
    assert cuda_build(here | {"TP_KERNELS_CUDA": "0"}) == "TP_KERNELS_CUDA=0"
    absent = cuda_build(here | {"CUDA_HOME": str(tmp_path)})
    assert absent == f"nvcc is not installed: it is not in CUDA_HOME={tmp_path}"


REFUSED = [
    ({"TP_KERNELS_CUDA": "yes"}, "TP_KERNELS_CUDA=yes: use auto"),
    ({"TP_KERNELS_CUDA": "1", "CUDA_HOME": "/nowhere"}, "nvcc is not in CUDA_HOME=/nowhere. Install"),
    ({"TP_KERNELS_CUDA": "1", "CUDACXX": "nvcc-9"}, "nvcc is not in CUDACXX=nvcc-9"),
    ({"TP_KERNELS_CUDA": "12.9"}, "there is only .*cuda/bin/nvcc .CUDA 13.0.. Point CUDA_HOME at"),
    ({"TP_KERNELS_CUDA_ARCHS": "75"}, "need 80 .compute capability 8.0. or later, not 75"),
    ({"TP_KERNELS_CUDA_ARCHS": "80;Hopper"}, "'Hopper' is no architecture. Write a list like"),
    ({"TP_KERNELS_CUDA_ARCHS": ";"}, "'' is no architecture"),
    ({"TP_KERNELS_CUDA_ARCHS": "80,90b"}, "'90b' is no architecture"),
    ({"TP_KERNELS_CUDA_ARCHS": "130"}, "CUDA 13.0 cannot compile for 130. Use .* 80 86 90 100 120"),
    ({"TORCH_CUDA_ARCH_LIST": "7.0 7.5+PTX"}, "has nothing from 8.0 on"),
    ({"CUTLASS_PATH": "/nowhere"}, "not in CUTLASS_PATH=/nowhere.*pip install --no-deps 'nvidia-cut"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(here, given, message):
    with pytest.raises(BuildError, match=message):
        cuda_build(here | given)


def test_toolkit_that_is_too_old(here, tmp_path):
    here["CUDA_HOME"] = toolkit(tmp_path / "old", "12.4")
    with pytest.raises(BuildError, match=r"is of CUDA 12.4; the kernels need 12.8 or later"):
        cuda_build(here)


@pytest.mark.parametrize("text", ["exit 1", "echo hello"])
def test_nvcc_that_is_none(here, tmp_path, text):
    (tmp_path / "cuda/bin/nvcc").write_text(f"#!/bin/sh\n{text}\n")
    with pytest.raises(BuildError, match=r"cuda/bin/nvcc .*(cannot be used|does not name)"):
        cuda_build(here)


def test_cutlass_is_needed_for_hopper_only(here, tmp_path):
    del here["CUTLASS_PATH"]
    without = built(here | {"TP_KERNELS_CUDA_ARCHS": "80;100"})
    assert without.cutlass is None and "without Hopper products" in str(without)
    header = tmp_path / "cutlass/include/cutlass/version.h"
    header.write_text(header.read_text().replace("MAJOR 4", "MAJOR 3"))
    with pytest.raises(BuildError, match=r"is CUTLASS 3.2; 4.0 or later"):
        cuda_build(here | {"CUTLASS_PATH": str(tmp_path / "cutlass/include")})


def test_places_where_nvcc_is_looked_for(here, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "DEFAULT_HOME", tmp_path / "default")
    on_path = toolkit(tmp_path / "on_path", "12.8")
    toolkit(tmp_path / "default", "13.1")
    toolkit(tmp_path / "default-12.9", "12.9")
    del here["CUDA_HOME"]
    for given, version in (
        ({}, (13, 1)),
        ({"PATH": f"{on_path}/bin"}, (12, 8)),
        ({"PATH": f"{on_path}/bin", "TP_KERNELS_CUDA": "12.9"}, (12, 9)),
        ({"PATH": f"{on_path}/bin", "CUDA_PATH": str(tmp_path / "cuda")}, (13, 0)),
        ({"PATH": f"{on_path}/bin", "CUDACXX": str(tmp_path / "cuda/bin/nvcc")}, (13, 0)),
    ):
        assert built(here | given).toolkit.version == version, given


def test_architectures_of_torch(here):
    listed = {"TORCH_CUDA_ARCH_LIST": "5.2 7.5;8.0 8.6 9.0+PTX"}
    assert names(built(here | listed)) == ["80", "86", "90+PTX"]
    assert names(built(here | listed | {"TP_KERNELS_CUDA_ARCHS": "100f, 8.0"})) == ["100f", "80"]


def test_architectures_are_named_once():
    assert [str(one) for one in parse_architectures("80;80+PTX 9.0a", "x")] == ["80+PTX", "90a"]


@pytest.mark.parametrize(("limit", "expected"), [("max", 8), (str(3 << 30), 3), (str(1 << 20), 1)])
def test_jobs_by_cores_and_memory(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1 << 30}.get(name, 16))
    (tmp_path / "memory.max").write_text(limit)
    found = options.memory(tmp_path / "memory.max")
    monkeypatch.setattr(options, "memory", lambda: found)
    assert jobs({}) == expected
    assert jobs({"MAX_JOBS": "7"}) == 7


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_jobs_refused(given):
    with pytest.raises(BuildError, match=f"MAX_JOBS={given}: use a number from 1"):
        jobs({"MAX_JOBS": given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [options.CUTLASS_REQUIREMENT]),
        ({"TP_KERNELS_CUDA": "0"}, []),
        ({"TP_KERNELS_CUDA": "nonsense"}, []),
        ({"TP_KERNELS_CUDA_ARCHS": "80"}, []),
        ({"CUTLASS_PATH": "/somewhere"}, []),
    ],
)
def test_cutlass_is_fetched_where_it_is_needed(here, monkeypatch, given, expected):
    del here["CUTLASS_PATH"]
    monkeypatch.setattr(os, "environ", here | given)
    assert backend.cuda_requirements() == expected


def test_a_build_says_what_is_wrong(tmp_path):
    environment = os.environ | {"TP_KERNELS_CUDA": "1", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode != 0
    message = done.stderr.decode()
    assert message.startswith(f"error: TP_KERNELS_CUDA=1, but nvcc is not in CUDA_HOME={tmp_path}")
    assert "Traceback" not in message


def test_version_says_what_was_built(tmp_path):
    def version(**given: str) -> str:
        command = [sys.executable, "setup.py", "--version"]
        environment = os.environ | given
        return subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip()

    assert version(TP_KERNELS_CUDA="0") == f"{tp_kernels.__version__}+cpu"
    home = toolkit(tmp_path, "12.9")
    assert version(CUDA_HOME=home, CUDACXX="") == f"{tp_kernels.__version__}+cu129"
