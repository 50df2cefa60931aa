"""Inputs and peers that tests, benchmarks and the demo share. Not needed to serve a model."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NUM_SCALES, QUANT_GROUP, ROPE_DIM, CacheLayout
from sgl_dsv4_kernels.reference.store import INVALID_SEQ_LEN

POISON = 0xA5
GUARD_BYTES = 256
"""Poisoned bytes behind the last page of `empty_cache`."""


def yarn_freqs_cis(
    num_positions: int,
    device: torch.device | str = "cpu",
    *,
    rope_theta: float = 160000.0,
    factor: float = 16.0,
    original_positions: int = 65536,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> torch.Tensor:
    """RoPE factors cos + i sin of 32 pairs with YaRN's frequencies: [num_positions, 32] complex64.

    The defaults are those of DeepSeek-V4's compressed layers. Its other layers have ``rope_theta=10000`` and
    ``factor=1`` (no YaRN).
    """
    pair = torch.arange(ROPE_DIM // 2, dtype=torch.float64)
    frequency = rope_theta ** (-2.0 * pair / ROPE_DIM)

    def pair_that_turns(times: float) -> float:
        """Index of the pair that makes this many turns over the original positions."""
        return ROPE_DIM * math.log(original_positions / (times * 2 * math.pi)) / (2 * math.log(rope_theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), ROPE_DIM - 1)
    interpolated = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequency = frequency * (1 - interpolated) + frequency / factor * interpolated
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return torch.complex(angle.cos().float(), angle.sin().float()).to(device)


def _plan(words: list[torch.Tensor]) -> torch.Tensor:
    """Columns of u32 values (as int64) -> [N, 4 * len(words)] uint8, little endian."""
    unsigned = torch.stack(words, -1)
    signed = torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned)
    return signed.to(torch.int32).contiguous().view(torch.uint8)


def decode_plan(seq_lens: torch.Tensor) -> torch.Tensor:
    """SGLang's DecodePlan records, [N, 16] uint8 on the device of ``seq_lens`` ([N], any integer type, u32 values).

    The fields that the store ops must not read (write_loc, read_page_0, read_page_1) hold rubbish.
    """
    seq_lens = seq_lens.to(torch.int64)
    rubbish = [torch.full_like(seq_lens, value) for value in (0x7FFFFFFF, 0x80000000, 0xDEADBEEF)]
    return _plan([seq_lens, *rubbish])


def extend_plan(seq_lens: torch.Tensor, ragged_ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """SGLang's CompressPlan records, [N, 16] uint8 on the device of ``seq_lens``.

    Args:
        seq_lens: [N], u32 values. ragged_ids: [N], u16 values. valid: [N] bool; a False record gets seq_len 0xffffffff.
    The fields that the store ops must not read (buffer_len, read_page_0, read_page_1) hold rubbish.
    """
    seq_lens = seq_lens.to(torch.int64)
    if valid is not None:
        seq_lens = torch.where(valid, seq_lens, INVALID_SEQ_LEN)
    rubbish = [torch.full_like(seq_lens, value) for value in (0x80000000, 0xDEADBEEF)]
    return _plan([seq_lens, ragged_ids.to(torch.int64) | 0xBEEF << 16, *rubbish])


def empty_cache(
    pages: int,
    page_size: int,
    layout: CacheLayout | str = CacheLayout.V4,
    device: torch.device | str = "cpu",
    poison: int = POISON,
    packed_stride: int | None = None,
    storage_offset: int = 0,
) -> torch.Tensor:
    """A cache full of ``poison`` bytes: [pages, page_bytes] uint8. `storage_bytes` shows all that it lies in.

    Args:
        packed_stride: bytes from page to page, None = page_bytes (a larger one is what packed pools have).
        storage_offset: bytes before the first page. `GUARD_BYTES` more bytes lie behind the last page.
    """
    page_bytes = CacheLayout.parse(layout).page_bytes(page_size)
    stride = page_bytes if packed_stride is None else packed_stride
    if stride < page_bytes:
        raise ValueError(f"packed_stride: expected at least {page_bytes}, got {stride}")
    storage = torch.full((storage_offset + pages * stride + GUARD_BYTES,), poison, dtype=torch.uint8, device=device)
    return storage.as_strided((pages, page_bytes), (stride, 1), storage_offset)


def storage_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage behind ``cache``, also before, between and behind its pages: [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


class SpecialRow(NamedTuple):
    """A named row: values [512]."""

    name: str
    values: torch.Tensor


def special_row_list(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[SpecialRow]:
    """Rows on which norms and quantisers go wrong; see `special_rows`."""
    index = torch.arange(HEAD_DIM)
    sign = 1.0 - 2.0 * (index % 2)
    ordinary = (index * 37 % 101 - 50) / 32  # arithmetic that rounds alike on every machine: the golden file needs it
    outlier = ordinary * 1e-3
    outlier[torch.arange(NUM_SCALES + 1) * QUANT_GROUP + 7 * torch.arange(NUM_SCALES + 1)] = 300.0

    def with_value(value: float, *where: int) -> torch.Tensor:
        row = ordinary.clone()
        row[list(where)] = value
        return row

    rows = {
        "zeros": torch.zeros(HEAD_DIM),
        "negative zeros": torch.full((HEAD_DIM,), -0.0),
        "denormals": 1e-40 * sign * (1 + index % 5),
        "constant 1e4": torch.full((HEAD_DIM,), 1e4),
        "alternating 1": sign,
        "powers of two": (1 << index % 16) / 256 * sign,
        "outlier per group": outlier,
        "one value": torch.zeros(HEAD_DIM).index_fill(0, torch.tensor([100]), 5.0),
        "wide range": (1 << index % 24) / (1 << 23) * sign,
        "NaN in the nope part": with_value(math.nan, 5),
        "NaN in the rope part": with_value(math.nan, HEAD_DIM - 3),
        "all NaN": torch.full((HEAD_DIM,), math.nan),
        "+inf": with_value(math.inf, 70),
        "-inf": with_value(-math.inf, 300),
        "+-inf in the rope part": with_value(math.inf, HEAD_DIM - 2).index_fill(0, torch.tensor([450]), -math.inf),
        "all inf": math.inf * sign,
        "squares overflow": 1e20 * ordinary,
        "sum of squares overflows": 1.2e18 * sign,
        "largest": torch.finfo(dtype).max * sign,
        "squares underflow": 1e-25 * ordinary,
    }
    return [SpecialRow(name, values.float().to(dtype).to(device)) for name, values in rows.items()]


def special_rows(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """[R, 512]: zeros, denormals, 1e4, powers of two, an outlier per group, NaN, +-inf, overflow of the sum ..."""
    return torch.stack([row.values for row in special_row_list(dtype, device)])


class _StockPlan(NamedTuple):
    """What SGLang's compress_norm_rope_store takes of its plan objects: item 1 and two attributes."""

    unused: None
    records: torch.Tensor
    is_decode: bool
    compress_ratio: int


class StockStore:
    """SGLang's two store functions with our signatures (tokens_per_block aside)."""

    def __init__(self, main, compress) -> None:
        self._main = main
        self._compress = compress

    def norm_rope_store(
        self, kv, weight, eps, freqs_cis, positions, slots, cache, *, page_size, layout=CacheLayout.V4
    ) -> None:
        """``fused_k_norm_rope_flashmla``: V4 layout only, slots int32, pages without gaps, no check of positions."""
        if CacheLayout.parse(layout) is not CacheLayout.V4:
            raise ValueError(f"layout: SGLang's main store writes v4 only, got {layout!r}")
        self._main(kv, weight, eps, freqs_cis, positions, slots, cache, page_size)

    def compress_norm_rope_store(
        self,
        kv,
        plan,
        weight,
        eps,
        freqs_cis,
        slots,
        cache,
        *,
        page_size,
        compress_ratio,
        is_decode,
        layout=CacheLayout.V4,
    ) -> None:
        """``compress_norm_rope_store``: kv contiguous, slots int64 and inside the cache, no check of positions."""
        self._compress(
            kv,
            _StockPlan(None, plan, is_decode, compress_ratio),
            norm_weight=weight,
            norm_eps=eps,
            freq_cis=freqs_cis,
            out_loc=slots,
            kvcache=cache,
            page_size=page_size,
            bf16_store=CacheLayout.parse(layout) is CacheLayout.BF16,
        )


@functools.cache
def stock_store() -> tuple[StockStore | None, str]:
    """SGLang's store functions and "", or None and the reason why they are not there."""
    try:
        from sglang.kernels.ops.attention.dsv4.compress import compress_norm_rope_store
        from sglang.kernels.ops.attention.dsv4.elementwise import fused_k_norm_rope_flashmla
    except Exception as error:  # a broken install of sglang fails in many ways, and none of them is our failure
        return None, f"SGLang's store kernels cannot be imported: {type(error).__name__}: {error}"
    return StockStore(fused_k_norm_rope_flashmla, compress_norm_rope_store), ""
