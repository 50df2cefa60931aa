"""SGLang plugin: DeepSeek-V4's attention layer on our kernels.

SGLang calls `sgl_dsv4_plugin.register` (the entry point), which calls `register` here. It registers hooks and touches
no CUDA. The kernels are looked at when the first hooked call comes, and that process then logs one line. docs/sglang.md
has the switches and what is hooked.
"""

from __future__ import annotations


def register() -> None:
    """Register the hooks that the environment asks for. Raises what goes wrong."""
    from sgl_dsv4_kernels.plugin.install import install
    from sgl_dsv4_kernels.plugin.options import Options

    install(Options.from_env())
