"""The public operations. Registers their CPU implementations and fakes with torch."""

from sgl_dsv4_kernels.ops import store
from sgl_dsv4_kernels.ops.store import compress_norm_rope_store, norm_rope_store

store.register()

__all__ = ["compress_norm_rope_store", "norm_rope_store"]
