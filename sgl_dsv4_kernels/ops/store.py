"""Store ops: RMSNorm(512) + RoPE(last 64) + quantise + write one row into the paged KV cache."""

from __future__ import annotations

import torch

from sgl_dsv4_kernels.checks import check_stride, check_tensor, freqs_as_float
from sgl_dsv4_kernels.layout import HEAD_DIM, CacheLayout
from sgl_dsv4_kernels.reference import store as reference
from sgl_dsv4_kernels.settings import settings

_INDEX = (torch.int32, torch.int64)
PLAN_BYTES = 16
"""Bytes of one of SGLang's DecodePlan / CompressPlan records."""


def norm_rope_store(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    page_size: int,
    layout: CacheLayout | str = CacheLayout.V4,
    tokens_per_block: int | None = None,
) -> None:
    """Normalise, rotate, quantise and store one latent row per token (SGLang's ``fused_k_norm_rope_flashmla``).

    On CUDA the bytes are those of SGLang 0.5.17. The unrounded fp32 values are quantised. The scale of 64 values is
    ``2^ceil(log2(max(amax, 1e-4) / 448))``, stored as UE8M0.

    Args:
        kv: [T, 512] bf16 or fp32, stride(1) = 1, stride(0) free.
        weight: [512], dtype of ``kv``: the RMSNorm weight.
        eps: added to the mean square.
        freqs_cis: [P, 32] complex64, or [P, 64] fp32 with (cos, sin) interleaved; contiguous.
        positions: [T] int32 or int64, a row of ``freqs_cis`` each. A row whose position is outside [0, P) writes
            nothing; ``SGL_DSV4_CHECK=1`` makes that a ValueError.
        slots: [T] int32 or int64; page = slot // page_size. A slot that is negative or past the cache's end writes
            nothing. Rows that name the same slot: which one wins is undefined.
        cache: [pages, >= layout.page_bytes(page_size)], a dtype of one byte, stride(1) = 1, stride(0) and storage
            offset free. Bytes outside the stored rows and their scales keep their value.
        page_size: tokens a page, a power of two.
        layout: a CacheLayout or its lower-case name.
        tokens_per_block: rows of a CUDA block: 1, 4, or None to choose by T and the SM count. Same bytes either way.

    Raises:
        TypeError: a dtype (or type) other than above. ValueError: a shape, stride, device or value other than above.
        RuntimeError: the build holds no code for this device, or the launch failed.
    """
    freqs, layout = _check_common(kv, weight, freqs_cis, slots, cache, page_size, layout, tokens_per_block)
    tokens = kv.shape[0]
    check_tensor("positions", positions, shape=(tokens,), dtype=_INDEX, device=kv.device)
    check_stride("positions", positions, 0, 1)
    check_tensor("slots", slots, shape=(tokens,))
    if settings.check:
        _check_values("positions", positions, freqs.shape[0], (slots >= 0) & (slots < cache.shape[0] * page_size))
    torch.ops.sgl_dsv4_kernels.norm_rope_store(
        kv,
        weight,
        float(eps),
        freqs,
        positions,
        slots,
        cache,
        page_size,
        layout.code,
        tokens_per_block or 0,
        settings.pdl,
    )


def compress_norm_rope_store(
    kv: torch.Tensor,
    plan: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    page_size: int,
    compress_ratio: int,
    is_decode: bool,
    layout: CacheLayout | str = CacheLayout.V4,
    tokens_per_block: int | None = None,
) -> None:
    """Store compressed latent rows, as a plan says (SGLang's ``compress_norm_rope_store``, head size 512).

    Like `norm_rope_store`, but the nope part is rounded to bf16 before amax and quantisation, and position and slot
    come from ``plan``: record i belongs to row i of ``kv``; its RoPE position is ``seq_len - compress_ratio``.

    Args:
        kv: [N, 512] fp32 or bf16, stride(1) = 1, stride(0) free.
        plan: [N, 16] uint8, contiguous, 16-byte aligned: DecodePlan or CompressPlan records. u32 seq_len at byte 0; in
            a CompressPlan u16 ragged_id at byte 4, and seq_len 0xffffffff marks an invalid record.
        weight, eps, freqs_cis, cache, page_size, layout, tokens_per_block: as in `norm_rope_store`.
        slots: decode: [N] int32 or int64, slot of row i; extend: [>= 1 entries], slot of row i at index ragged_id.
        compress_ratio: tokens that one compressed row stands for (4 or 128 in DeepSeek-V4).
        is_decode: DecodePlan records: a row is stored only when seq_len is a multiple of ``compress_ratio``. Else
            CompressPlan records: every valid one is stored.
        A row whose position is below 0 (seq_len 0) or at or past P, whose slot is outside the cache, or whose ragged_id
        is outside ``slots``, writes and reads nothing.

    Raises:
        As `norm_rope_store`.
    """
    freqs, layout = _check_common(kv, weight, freqs_cis, slots, cache, page_size, layout, tokens_per_block)
    tokens = kv.shape[0]
    check_tensor("plan", plan, shape=(tokens, PLAN_BYTES), dtype=torch.uint8, device=kv.device)
    check_stride("plan", plan, 1, 1)
    check_stride("plan", plan, 0, PLAN_BYTES)
    if tokens and not torch.compiler.is_compiling() and plan.storage_offset() % PLAN_BYTES:
        offset = plan.storage_offset()
        raise ValueError(f"plan: expected a storage offset that is a multiple of {PLAN_BYTES}, got {offset}")
    if isinstance(compress_ratio, bool) or not isinstance(compress_ratio, int) or compress_ratio < 1:
        raise ValueError(f"compress_ratio: expected a positive int, got {compress_ratio!r}")
    if is_decode:
        check_tensor("slots", slots, shape=(tokens,))
    if settings.check:
        rows = reference.resolve_plan(plan, slots, compress_ratio, is_decode)
        in_cache = (rows.positions >= 0) & (rows.slots >= 0) & (rows.slots < cache.shape[0] * page_size)
        _check_values("plan's seq_len - compress_ratio", rows.positions, freqs.shape[0], rows.wanted & in_cache)
    torch.ops.sgl_dsv4_kernels.compress_norm_rope_store(
        kv,
        plan,
        weight,
        float(eps),
        freqs,
        slots,
        cache,
        page_size,
        compress_ratio,
        bool(is_decode),
        layout.code,
        tokens_per_block or 0,
        settings.pdl,
    )


def _check_common(
    kv: torch.Tensor,
    weight: torch.Tensor,
    freqs_cis: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    page_size: int,
    layout: CacheLayout | str,
    tokens_per_block: int | None,
) -> tuple[torch.Tensor, CacheLayout]:
    """Check what both entries share; returns freqs_cis as [P, 64] fp32, and the layout."""
    check_tensor("kv", kv, shape=("tokens", HEAD_DIM), dtype=(torch.bfloat16, torch.float32))
    check_stride("kv", kv, 1, 1)
    check_tensor("weight", weight, shape=(HEAD_DIM,), dtype=kv.dtype, device=kv.device)
    check_stride("weight", weight, 0, 1)
    freqs = freqs_as_float(freqs_cis, kv.device)
    check_tensor("slots", slots, shape=("slots",), dtype=_INDEX, device=kv.device)
    check_stride("slots", slots, 0, 1)
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: expected a power of two, got {page_size!r}")
    check_tensor("cache", cache, shape=("pages", "page bytes"), device=kv.device)
    if cache.element_size() != 1:
        raise TypeError(f"cache: expected a dtype of one byte (torch.uint8, torch.float8_e4m3fn), got {cache.dtype}")
    check_stride("cache", cache, 1, 1)
    layout = CacheLayout.parse(layout)
    needed = layout.page_bytes(page_size)
    if cache.shape[1] < needed:
        raise ValueError(f"cache: expected at least {needed} bytes a page of {page_size} tokens, got {cache.shape[1]}")
    if cache.shape[0] > 1 and cache.stride(0) < needed:
        raise ValueError(f"cache: expected stride(0) >= {needed}, got {cache.stride(0)}")
    if tokens_per_block not in (None, 1, 4):
        raise ValueError(f"tokens_per_block: expected None, 1 or 4, got {tokens_per_block!r}")
    return freqs, layout


def _check_values(name: str, positions: torch.Tensor, num_positions: int, stored: torch.Tensor) -> None:
    """Checked mode: every stored row's position lies in the table. Synchronises."""
    bad = (stored & ((positions < 0) | (positions >= num_positions))).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"{name}: expected values in [0, {num_positions}), the rows of freqs_cis, got {int(positions[row])} in row "
            f"{row} ({bad.shape[0]} rows in all)"
        )


def register(library: torch.library.Library) -> None:
    """Register the CPU implementations and the fakes. The CUDA implementations are compiled."""
    implementations = {
        "norm_rope_store": reference.norm_rope_store_op,
        "compress_norm_rope_store": reference.compress_norm_rope_store_op,
    }
    for name, implementation in implementations.items():
        library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"{library.ns}::{name}", lambda *args: None)
