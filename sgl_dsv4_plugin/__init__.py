"""Entry point of group ``sglang.srt.plugins``.

A package of its own, because importing sgl_dsv4_kernels loads the compiled extension and reads the environment, which
can fail: SGLang would log that and serve on its own kernels even where SGL_DSV4_STRICT=1 forbids it. And with
SGL_DSV4_KERNELS=off nothing is imported.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("sgl_dsv4_kernels")


def register() -> None:
    """Register our hooks with SGLang, which calls this in every process before it parses its arguments.

    A failure is logged and leaves SGLang as it is; with ``SGL_DSV4_STRICT=1`` it ends the process (SystemExit, because
    SGLang logs and forgets an Exception of a plugin).
    """
    if os.environ.get("SGL_DSV4_KERNELS") == "off":
        logger.info("sgl_dsv4_kernels: SGL_DSV4_KERNELS=off, SGLang runs its own kernels")
        return
    try:
        from sgl_dsv4_kernels.plugin import register as register_hooks

        register_hooks()
    except Exception as error:
        if os.environ.get("SGL_DSV4_STRICT") == "1":
            raise SystemExit(f"sgl_dsv4_kernels: SGL_DSV4_STRICT=1, and the plugin cannot start: {error}") from error
        logger.exception("sgl_dsv4_kernels: the plugin cannot start, SGLang runs its own kernels")
