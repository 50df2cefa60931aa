"""Plain-torch twin of the store kernels.

Bit for bit the CUDA kernel's arithmetic, except for rsqrt: the GPU's is an approximation (within 1 ulp here and there),
this one is correctly rounded. A row's codes can therefore differ where a value lies on a rounding boundary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, NUM_SCALES, QUANT_GROUP, ROPE_DIM, CacheLayout

E4M3_MAX = 448.0
INVALID_SEQ_LEN = 0xFFFFFFFF
"""``seq_len`` of a CompressPlan record that stands for no row."""
AMAX_FLOOR = 1e-4


class PlannedRows(NamedTuple):
    """What a plan says of each row: position [N] int64, slot [N] int64 (-1 if unknown), wanted [N] bool."""

    positions: torch.Tensor
    slots: torch.Tensor
    wanted: torch.Tensor


def resolve_plan(plan: torch.Tensor, slots: torch.Tensor, compress_ratio: int, is_decode: bool) -> PlannedRows:
    """Read SGLang's 16-byte plan records.

    Args:
        plan: [N, 16] uint8. slots: [N] (decode) or [M] (extend), int32 or int64. compress_ratio: tokens per row.
        is_decode: DecodePlan records, else CompressPlan.
    """
    words = plan.contiguous().view(torch.int32).to(torch.int64)
    seq_len = words[:, 0] & 0xFFFFFFFF
    wanted = seq_len != INVALID_SEQ_LEN
    if is_decode:
        wanted = wanted & (seq_len % compress_ratio == 0)
        index = torch.arange(plan.shape[0], device=plan.device)
    else:
        index = words[:, 1] & 0xFFFF
        wanted = wanted & (index < slots.shape[0])
    row_slots = torch.full_like(seq_len, -1)
    row_slots[wanted] = slots[index[wanted]].to(torch.int64)
    return PlannedRows(seq_len - compress_ratio, row_slots, wanted)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 fused multiply-add. The product is exact in fp64, the sum rounds twice in about one case of 2^29."""
    return (a.double() * b.double() + c.double()).float()


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """[..., 512] fp32 -> [...]: pair sums, then a butterfly over 32 pairs (16, 8, 4, 2, 1) and 8 groups (4, 2, 1)."""
    real, imag = x[..., 0::2], x[..., 1::2]
    total = fma(imag, imag, real * real).unflatten(-1, (8, 32))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    total = total.squeeze(-1)
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total.squeeze(-1)


def norm_rope(kv: torch.Tensor, weight: torch.Tensor, eps: float, freqs: torch.Tensor) -> torch.Tensor:
    """RMSNorm and RoPE of the last 64 values.

    Args:
        kv: [N, 512]. weight: [512]. eps: added to the mean square.
        freqs: [N, 64] (cos, sin) interleaved, one row per row of ``kv``.

    Returns: [N, 512]. fp64 inputs are computed in fp64 throughout (the truth that errors are measured against),
        anything else in fp32 in the kernel's order of operations.
    """
    if kv.dtype == torch.float64:
        x = kv * torch.rsqrt(kv.square().mean(-1, keepdim=True) + eps) * weight.double()
        rotated = torch.view_as_complex(x[:, NOPE_DIM:].unflatten(-1, (-1, 2))) * torch.view_as_complex(
            freqs.double().unflatten(-1, (-1, 2))
        )
        return torch.cat([x[:, :NOPE_DIM], torch.view_as_real(rotated).flatten(-2)], -1)
    x = kv.float()
    mean = fma(_sum_of_squares(x), torch.tensor(1.0 / HEAD_DIM), torch.tensor(eps, dtype=torch.float32))
    norm = mean.double().rsqrt().float()
    x = x * norm[:, None] * weight.float()
    real, imag = x[:, NOPE_DIM::2], x[:, NOPE_DIM + 1 :: 2]
    cos, sin = freqs[:, 0::2], freqs[:, 1::2]
    rotated = torch.stack([fma(real, cos, -(imag * sin)), fma(real, sin, imag * cos)], -1).flatten(-2)
    return torch.cat([x[:, :NOPE_DIM], rotated], -1)


def quantize_nope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 448] fp32 -> e4m3 codes [N, 448] uint8 and UE8M0 scale bytes [N, 7] uint8.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)). A NaN is ignored by amax and becomes code 0x7e; an infinite amax gives
    scale byte 255 and, as in SGLang's kernel, a factor of -inf.
    """
    groups = x.unflatten(-1, (NUM_SCALES, QUANT_GROUP))
    amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1).clamp(min=AMAX_FLOOR)
    # By a tensor: torch on CUDA multiplies by the reciprocal of a number, which rounds otherwise.
    bits = (amax / torch.full_like(amax, E4M3_MAX)).view(torch.int32)
    exponent = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0).to(torch.int32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    scaled = groups * inverse[..., None]
    scaled = torch.where(scaled.isnan(), E4M3_MAX, scaled.clamp(-E4M3_MAX, E4M3_MAX))
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), exponent.to(torch.uint8)


def _bf16_bytes(x: torch.Tensor) -> torch.Tensor:
    """[N, k] fp32 -> [N, 2 k] uint8: rounded to nearest even; every NaN is 0x7fff, as the GPU writes it."""
    bits = x.bfloat16().contiguous().view(torch.int16)
    return torch.where(x.isnan(), 0x7FFF, bits).to(torch.int16).view(torch.uint8)


def _row_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype != torch.uint8 else cache


def _write_rows(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, page_size: int, layout: CacheLayout) -> None:
    """Write normalised, rotated fp32 rows x [N, 512] (nope part already rounded as the entry asks) at slots [N]."""
    pages = _row_bytes(cache)
    page, offset = slots // page_size, slots % page_size

    def put(start: torch.Tensor, values: torch.Tensor) -> None:
        pages[page[:, None], start[:, None] + torch.arange(values.shape[1], device=values.device)] = values

    row = offset * layout.data_bytes
    if layout is CacheLayout.BF16:
        put(row, _bf16_bytes(x))
        return
    codes, scales = quantize_nope(x[:, :NOPE_DIM])
    put(row, codes)
    put(row + NOPE_DIM, _bf16_bytes(x[:, NOPE_DIM:]))
    put(layout.scale_offset(page_size) + offset * layout.scale_bytes, scales)


def dequantize_rows(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    page_size: int,
    layout: CacheLayout | str = CacheLayout.V4,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Read rows back: [..., 512] of ``dtype`` for slots [...] (all inside the cache).

    A code is e4m3, its scale 2^(byte - 127); code 0x7f / 0xff and scale byte 255 give NaN.
    """
    layout = CacheLayout.parse(layout)
    pages = _row_bytes(cache)
    slots = slots.to(torch.int64)
    page, offset = slots // page_size, slots % page_size

    def take(start: torch.Tensor, count: int) -> torch.Tensor:
        return pages[page[..., None], start[..., None] + torch.arange(count, device=pages.device)].contiguous()

    row = offset * layout.data_bytes
    if layout is CacheLayout.BF16:
        return take(row, layout.data_bytes).view(torch.bfloat16).to(dtype)
    codes = take(row, NOPE_DIM).view(torch.float8_e4m3fn).to(torch.float64).unflatten(-1, (NUM_SCALES, QUANT_GROUP))
    exponents = take(layout.scale_offset(page_size) + offset * layout.scale_bytes, NUM_SCALES).to(torch.float64)
    scales = torch.where(exponents == 255, torch.nan, torch.exp2(exponents - 127.0))
    rope = take(row + NOPE_DIM, ROPE_DIM * 2).view(torch.bfloat16).to(torch.float64)
    return torch.cat([(codes * scales[..., None]).flatten(-2), rope], -1).to(dtype)


def _store(
    kv: torch.Tensor,
    rows: PlannedRows,
    weight: torch.Tensor,
    eps: float,
    freqs: torch.Tensor,
    cache: torch.Tensor,
    page_size: int,
    layout: int,
    round_nope: bool,
) -> None:
    stored = rows.wanted & (rows.positions >= 0) & (rows.positions < freqs.shape[0])
    stored &= (rows.slots >= 0) & (rows.slots < cache.shape[0] * page_size)
    x = norm_rope(kv[stored], weight, eps, freqs[rows.positions[stored]])
    if round_nope:
        x[:, :NOPE_DIM] = x[:, :NOPE_DIM].bfloat16().float()
    _write_rows(cache, rows.slots[stored], x, page_size, CacheLayout.from_code(layout))


def norm_rope_store_op(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    page_size: int,
    layout: int,
    tokens_per_block: int,
    pdl: bool,
) -> None:
    """CPU implementation of the op ``norm_rope_store``; arguments as `sgl_dsv4_kernels.norm_rope_store` passes them."""
    wanted = torch.ones_like(slots, dtype=torch.bool)
    rows = PlannedRows(positions.to(torch.int64), slots.to(torch.int64), wanted)
    _store(kv, rows, weight, eps, freqs, cache, page_size, layout, round_nope=False)


def compress_norm_rope_store_op(
    kv: torch.Tensor,
    plan: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    page_size: int,
    compress_ratio: int,
    is_decode: bool,
    layout: int,
    tokens_per_block: int,
    pdl: bool,
) -> None:
    """CPU implementation of the op ``compress_norm_rope_store``."""
    rows = resolve_plan(plan, slots, compress_ratio, is_decode)
    _store(kv, rows, weight, eps, freqs, cache, page_size, layout, round_nope=True)
