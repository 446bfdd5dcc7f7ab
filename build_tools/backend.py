"""The build backend (PEP 517): that of setuptools, which also asks for CUTLASS where it is needed."""

from __future__ import annotations

import os

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from .options import CUTLASS_REQUIREMENT, HOPPER, BuildError, CudaBuild, cuda_build


def get_requires_for_build_wheel(config_settings: dict[str, object] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + cuda_requirements()


def get_requires_for_build_editable(config_settings: dict[str, object] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + cuda_requirements()


def cuda_requirements() -> list[str]:
    """What only a build with CUDA needs. Its dependencies are not for headers."""
    try:
        build = cuda_build(os.environ, headers=False)
    except BuildError:
        return []  # the build will say so
    wanted = isinstance(build, CudaBuild) and any(a.number == HOPPER for a in build.architectures)
    return [CUTLASS_REQUIREMENT] if wanted and not os.environ.get("CUTLASS_PATH") else []
