"""DeepSeek-V4 attention kernels for SGLang.

See docs/ for the cache layout, and each function's docstring for shapes and dtypes. Importing needs no GPU and does not
touch CUDA.
"""

from sgl_dsv4_kernels import _extension

_extension.load()  # before anything that names torch.ops.sgl_dsv4_kernels

# ruff: noqa: E402
from sgl_dsv4_kernels import reference
from sgl_dsv4_kernels._extension import build_info
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.ops import (
    DecodeOutput,
    combine_splits,
    compress_norm_rope_store,
    norm_rope_store,
    query_norm_rope,
    sparse_decode,
    sparse_decode_partial,
)
from sgl_dsv4_kernels.settings import settings

__all__ = [
    "CacheLayout",
    "DecodeOutput",
    "build_info",
    "combine_splits",
    "compress_norm_rope_store",
    "norm_rope_store",
    "query_norm_rope",
    "reference",
    "settings",
    "sparse_decode",
    "sparse_decode_partial",
]
