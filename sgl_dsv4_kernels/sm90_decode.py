"""Host side of the Hopper decode kernel (csrc/decode/sm90): what it takes, and its launch."""

from __future__ import annotations

import torch

from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.settings import settings

ALIGNMENT = 16
"""Bytes: rows of a cache are read in vectors of this size."""


def missing(device: torch.device) -> str | None:
    """What this device or build lacks, None if nothing."""
    if device.type != "cuda":
        return f"needs a CUDA device, got tensors on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"needs sm_90, {device} is sm_{capability[0]}{capability[1]}"
    if not hasattr(torch.ops.sgl_dsv4_kernels, "sparse_decode_sm90"):
        return "needs a build for 90a-real"
    return None


def unsupported(main: Source, extra: Source | None) -> str | None:
    """Which argument the kernel does not take and why, None if it takes all."""
    for name, source in (("cache", main), ("extra_cache", extra)):
        if source is None:
            continue
        if source.layout is not CacheLayout.V4:
            return f"{name}: backend 'sm90' takes layout v4, got {source.layout.name.lower()}"
        cache = source.cache
        if cache.data_ptr() % ALIGNMENT or (cache.shape[0] > 1 and cache.stride(0) % ALIGNMENT):
            return f"{name}: backend 'sm90' needs data and stride(0) that are multiples of {ALIGNMENT} bytes"
    return None


def choose_block_heads(tokens: int, heads: int, num_splits: int) -> int:
    """Heads that a block computes: 8, 16, 32 (keys as rows of the products) or 64 (heads as rows)."""
    return min(heads, 64)


def _attention(q: torch.Tensor, main: Source, extra: Source | None, softmax_scale: float, num_splits: int) -> tuple:
    """The leading arguments of both ops."""
    tail = (None, None, None) if extra is None else (extra.cache, extra.indices, extra.length)
    pages = (main.page_size, 1 if extra is None else extra.page_size)
    return (q, main.cache, main.indices, main.length, *tail, *pages, softmax_scale, choose_block_heads(*q.shape[:2], num_splits))


def launch(
    q: torch.Tensor,
    main: Source,
    extra: Source | None,
    softmax_scale: float,
    epilogue: tuple,
    result: tuple[torch.Tensor | None, ...],
) -> None:
    """The whole decode in one launch. Shapes are checked by the caller.

    Args:
        epilogue: attn_sink, freqs_cis, positions, code of the output. result: out, lse, scales, amax.
    """
    attention = _attention(q, main, extra, softmax_scale, 1)
    torch.ops.sgl_dsv4_kernels.sparse_decode_sm90(*attention, *epilogue, settings.pdl, *result)


def launch_partial(
    q: torch.Tensor,
    main: Source,
    extra: Source | None,
    softmax_scale: float,
    o_accum: torch.Tensor,
    lse_accum: torch.Tensor,
    *,
    fill_empty: bool,
) -> None:
    """Partials of every split: o_accum [S, T, h, 512], lse_accum [S, T, h]. Shapes are checked by the caller."""
    attention = _attention(q, main, extra, softmax_scale, o_accum.shape[0])
    torch.ops.sgl_dsv4_kernels.sparse_decode_partial_sm90(*attention, fill_empty, settings.pdl, o_accum, lse_accum)
