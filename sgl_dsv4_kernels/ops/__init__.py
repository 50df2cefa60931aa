"""The public operations. Registers their CPU implementations and fakes with torch."""

from sgl_dsv4_kernels.ops import decode, store
from sgl_dsv4_kernels.ops.decode import DecodeOutput, combine_splits, sparse_decode, sparse_decode_partial
from sgl_dsv4_kernels.ops.store import compress_norm_rope_store, norm_rope_store

store.register()
decode.register()

__all__ = [
    "DecodeOutput",
    "combine_splits",
    "compress_norm_rope_store",
    "norm_rope_store",
    "sparse_decode",
    "sparse_decode_partial",
]
