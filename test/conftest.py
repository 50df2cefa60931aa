"""Shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m pytest` in the repository root puts the source folder, which holds no compiled extension, before the
# installed package.
_ROOT = Path(__file__).resolve().parents[1]
if not (_ROOT / "sgl_dsv4_kernels" / "_C.abi3.so").is_file():
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

try:
    import hypothesis
except ImportError:  # the GPU tests run without it
    pass
else:
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("repeatable")
