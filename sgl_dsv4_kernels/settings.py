"""Switches that are read from the environment once, at import; tests and benchmarks may set the attributes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"


@dataclass
class Settings:
    """Process-wide switches."""

    pdl: bool = field(default_factory=lambda: _flag("SGL_DSV4_PDL", True))
    """SGL_DSV4_PDL: launch with programmatic dependent launch where device and code support it (sm_90 and newer)."""
    sm90: bool = field(default_factory=lambda: _flag("SGL_DSV4_SM90", True))
    """SGL_DSV4_SM90=0: decode in Triton where the Hopper kernel would be the default."""
    check: bool = field(default_factory=lambda: _flag("SGL_DSV4_CHECK", False))
    """SGL_DSV4_CHECK=1: check values (positions, slots, plans) too. Synchronises the device; not for serving."""


settings = Settings()
