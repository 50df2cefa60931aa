"""The public operations. Registers their CPU implementations and fakes with torch."""

import torch

from sgl_dsv4_kernels._extension import build_info
from sgl_dsv4_kernels.ops import decode, query, store
from sgl_dsv4_kernels.ops.decode import DecodeOutput, combine_splits, sparse_decode, sparse_decode_partial
from sgl_dsv4_kernels.ops.query import query_norm_rope
from sgl_dsv4_kernels.ops.store import compress_norm_rope_store, norm_rope_store

COMPILED = ("norm_rope_store", "compress_norm_rope_store", "combine_splits", "query_norm_rope")
"""Ops whose CUDA implementation is in the extension, if that was built with CUDA code."""


def _without_cuda_code(*arguments: object) -> None:
    """What a build without CUDA code runs for CUDA tensors."""
    raise RuntimeError(
        "sgl_dsv4_kernels: this build holds no CUDA code, and the tensors are on a GPU. Build it on a machine with a "
        "GPU, or with SGL_DSV4_CUDA_ARCHS naming the architectures (90a-real for an H100 or H200)."
    )


_library = torch.library.Library("sgl_dsv4_kernels", "IMPL")  # registrations live as long as this object
store.register(_library)
decode.register(_library)
query.register(_library)
if build_info()["cuda"] == "none":
    for _name in COMPILED:
        _library.impl(_name, _without_cuda_code, "CUDA")

__all__ = [
    "DecodeOutput",
    "combine_splits",
    "compress_norm_rope_store",
    "norm_rope_store",
    "query_norm_rope",
    "sparse_decode",
    "sparse_decode_partial",
]
