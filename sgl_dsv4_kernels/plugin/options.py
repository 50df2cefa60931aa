"""The plugin's switches, read from the environment when SGLang loads the plugin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

KERNELS = ("off", "store", "decode", "store,decode", "decode,fused", "all")
"""``fused``: the decode also normalises and rotates the query. ``all``: store, decode and that."""


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"


@dataclass(frozen=True)
class Options:
    """Raises ValueError for a value that a variable does not take."""

    kernels: str = "all"
    """SGL_DSV4_KERNELS: which hooks, one of KERNELS."""
    verify: bool = False
    """SGL_DSV4_VERIFY=1: shadow mode. SGLang's kernels serve, ours run beside them, the results are compared."""
    strict: bool = False
    """SGL_DSV4_STRICT=1: an unforeseen fallback is an error."""
    decode_max_tokens: int | None = None
    """SGL_DSV4_DECODE_MAX_TOKENS: most rows of a decode on our kernel, instead of choice.py's table."""
    dump_dir: str | None = None
    """SGL_DSV4_DUMP_DIR: where shadow mode puts the inputs of a mismatch (default: the temporary folder)."""

    def __post_init__(self) -> None:
        if self.kernels not in KERNELS:
            raise ValueError(f"SGL_DSV4_KERNELS: expected one of {' | '.join(KERNELS)}, got {self.kernels!r}")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Options:
        env = os.environ if environment is None else environment
        most = env.get("SGL_DSV4_DECODE_MAX_TOKENS") or None
        if most is not None and not most.isdecimal():
            raise ValueError(f"SGL_DSV4_DECODE_MAX_TOKENS: expected a number of rows, got {most!r}")
        return cls(
            kernels=env.get("SGL_DSV4_KERNELS") or "all",
            verify=_flag(env, "SGL_DSV4_VERIFY"),
            strict=_flag(env, "SGL_DSV4_STRICT"),
            decode_max_tokens=None if most is None else int(most),
            dump_dir=env.get("SGL_DSV4_DUMP_DIR") or None,
        )

    def wants(self, part: str) -> bool:
        """Whether hooks of ``part`` ("store", "decode" or "fused") are wanted."""
        words = self.kernels.split(",")
        return part in words or "all" in words
