"""Loads the compiled extension. Nothing here touches CUDA."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_C.abi3.so")


def load() -> None:
    """Load the extension's ops into ``torch.ops.sgl_dsv4_kernels``. Raises ImportError with the way to build it."""
    if not LIBRARY.is_file():
        raise ImportError(
            f"sgl_dsv4_kernels: the compiled extension {LIBRARY.name} is missing beside {Path(__file__).name}. Install "
            "the package (pip install . in its source folder) and import it from elsewhere than the source folder."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"sgl_dsv4_kernels: {LIBRARY} does not load beside torch {torch.__version__} (needs 2.10 or newer): {error}"
        ) from error


def build_info() -> dict[str, str]:
    """What the binary is: ``cuda`` (version or "none"), ``architectures`` (built for), ``torch`` (headers' version)."""
    lines = torch.ops.sgl_dsv4_kernels.build_info().splitlines()
    return dict(line.split("=", 1) for line in lines)
