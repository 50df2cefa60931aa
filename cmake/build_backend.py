"""PEP 517 backend: scikit-build-core, plus NVIDIA's compiler packages where CUDA code is asked for without an nvcc."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import build_facts
from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  the hooks that are not overridden below

# All of one CUDA minor: pip alone would mix 13.0's nvcc with a newer nvvm, whose PTX this ptxas refuses.
TOOLKIT = [
    f"{package}==13.0.*"
    for package in (
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]


def _toolkit_requirements() -> list[str]:
    return TOOLKIT if build_facts.architectures() and build_facts.nvcc() is None else []


def get_requires_for_build_wheel(config_settings=None):
    """Build requirements of a wheel: scikit-build-core's own, and the CUDA compiler if it is needed and missing."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *_toolkit_requirements()]


def get_requires_for_build_editable(config_settings=None):
    """The same for an editable install."""
    return [*_backend.get_requires_for_build_editable(config_settings), *_toolkit_requirements()]


def _use_packaged_toolkit() -> None:
    """Point CMake at the compiler that the requirements above brought, if it was brought."""
    if build_facts.nvcc() is not None:
        return
    for root in (Path(p) / "nvidia/cu13" for p in sys.path if p):
        if (root / "bin/nvcc").is_file():
            os.environ["CUDACXX"] = str(root / "bin/nvcc")
            os.environ["CUDAToolkit_ROOT"] = str(root)  # noqa: SIM112  CMake's own name
            # The packages' libraries lie in lib, and this nvcc looks for them in lib64.
            paths = [str(root / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
            os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)
            return


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build a wheel (PEP 517)."""
    _use_packaged_toolkit()
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build an editable wheel (PEP 660)."""
    _use_packaged_toolkit()
    return _backend.build_editable(wheel_directory, config_settings, metadata_directory)
