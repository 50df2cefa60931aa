"""SGLang plugin (entry point group ``sglang.srt.plugins``): DeepSeek-V4's attention layer on our kernels.

SGLang calls `register` in every process before it parses its arguments. It registers hooks and touches no CUDA. The
kernels are looked at when the first hooked call comes, and that process then logs one line. docs/sglang.md has the
switches and what is hooked.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("sgl_dsv4_kernels")


def register() -> None:
    """Register our hooks with SGLang. A failure is logged and leaves SGLang as it is; with ``SGL_DSV4_STRICT=1`` it
    ends the process (SystemExit, because SGLang logs and forgets an Exception of a plugin)."""
    from sgl_dsv4_kernels.plugin.options import Options, strict_from_env

    try:
        from sgl_dsv4_kernels.plugin.install import install

        install(Options.from_env())
    except Exception as error:
        if strict_from_env():
            raise SystemExit(f"sgl_dsv4_kernels: SGL_DSV4_STRICT=1, and the plugin cannot start: {error}") from error
        logger.exception("sgl_dsv4_kernels: the plugin cannot start, SGLang runs its own kernels")
