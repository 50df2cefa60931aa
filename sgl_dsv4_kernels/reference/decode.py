"""Plain-torch twin of the split-KV decode: partial attention, combine, epilogues. csrc/decode/decode.h is the contract.

Independent of the kernels: it dequantises through torch's own float8 type, gathers whole rows, and takes a plain masked
softmax. ``dtype=torch.float64`` makes everything behind the bf16 inputs exact enough to be the truth of a test. Only
attended rows of a cache are read; rows that are not attended are zeros here, never 0 times what happens to lie there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM, CacheLayout
from sgl_dsv4_kernels.reference.store import E4M3_MAX, dequantize_rows
from sgl_dsv4_kernels.split_partition import SPLIT_BLOCK_KEYS

OUTPUTS = ("bf16", "fp8_group128", "fp8_group128_ue8m0", "fp8_group32_ue8m0")
"""Kinds of output; the index is the code in the torch ops."""
AMAX_FLOOR = 1e-10
CHUNK_BYTES = 256 << 20
"""Rows are gathered a chunk at a time, about this much at once."""


class Source(NamedTuple):
    """One paged cache and what each row attends to in it.

    cache: [pages, >= page bytes], one byte a value. indices: [T, K] int32 slots. length: [T] int32 or None = K.
    """

    cache: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None
    page_size: int
    layout: CacheLayout

    def rows(self, rows: slice) -> Source:
        """What some of the rows attend to."""
        length = None if self.length is None else self.length[rows]
        return self._replace(indices=self.indices[rows], length=length)

    def lengths(self) -> torch.Tensor:
        """[T] int64, clamped into [0, K]."""
        tokens, width = self.indices.shape
        if self.length is None:
            return torch.full((tokens,), width, device=self.indices.device)
        return self.length.long().clamp(0, width)

    def attended(self) -> torch.Tensor:
        """[T, K] bool: inside the length, and a slot of the cache."""
        column = torch.arange(self.indices.shape[1], device=self.indices.device)
        slots = self.cache.shape[0] * self.page_size
        return (column < self.lengths()[:, None]) & (self.indices >= 0) & (self.indices.long() < slots)


def listed_keys(main: Source, extra: Source | None) -> int:
    """K + extra K: the widths of the index lists."""
    return main.indices.shape[1] + (0 if extra is None else extra.indices.shape[1])


def op_arguments(q: torch.Tensor, main: Source, extra: Source | None) -> tuple:
    """The leading arguments of the attention ops."""
    tail = (None, None, None) if extra is None else (extra.cache, extra.indices, extra.length)
    return (q, main.cache, main.indices, main.length, *tail, main.page_size, 1 if extra is None else extra.page_size)


class DecodeOutput(NamedTuple):
    """What a decode returns.

    out: [T, h, 512] bf16, or e4m3 with ``scales``. lse: [T, h] fp32, natural log, sink not included; +inf in a row that
    attends to nothing, whose out is 0. scales: None, or as ``output`` says. amax: [T, h] fp32 or None.
    """

    out: torch.Tensor
    lse: torch.Tensor
    scales: torch.Tensor | None
    amax: torch.Tensor | None


def _gather(source: Source, attended: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, K] -> [T, K, 512]: attended rows, zeros elsewhere."""
    rows = torch.zeros((*attended.shape, HEAD_DIM), dtype=dtype, device=attended.device)
    slots = source.indices[attended].long()
    # Code x scale, rounded once to bf16, as the kernels do.
    values = dequantize_rows(
        source.cache, slots, page_size=source.page_size, layout=source.layout, dtype=torch.bfloat16
    )
    rows[attended] = values.to(dtype)
    return rows


def _split_of_key(sources: list[Source], num_splits: int) -> torch.Tensor:
    """[T, K + extra K] int64: the split of each entry; what lies past a length has any."""
    blocks, first = [], 0
    for source in sources:
        column = torch.arange(source.indices.shape[1], device=source.indices.device)
        blocks.append(first + column // SPLIT_BLOCK_KEYS)
        first = first + (source.lengths()[:, None] + SPLIT_BLOCK_KEYS - 1) // SPLIT_BLOCK_KEYS
    tokens = sources[0].indices.shape[0]
    block = torch.cat([b.expand(tokens, -1) for b in blocks], 1)
    each, longer = first // num_splits, first % num_splits
    head = longer * (each + 1)  # blocks in the splits that have one more
    return torch.where(block < head, block // (each + 1), longer + (block - head) // each.clamp(min=1))


def _partial(
    q: torch.Tensor, sources: list[Source], num_splits: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials of a chunk of rows."""
    attended = [source.attended() for source in sources]
    rows = torch.cat([_gather(s, a, dtype) for s, a in zip(sources, attended, strict=True)], 1)
    mask = torch.cat(attended, 1)
    split_of_key = _split_of_key(sources, num_splits)
    scores = torch.einsum("thd,tkd->thk", q.to(dtype), rows) * (scale * math.log2(math.e))
    o_accum = torch.zeros((num_splits, *q.shape), dtype=dtype, device=q.device)
    lse_accum = torch.full((num_splits, *q.shape[:2]), -math.inf, dtype=dtype, device=q.device)
    for split in range(num_splits):
        mine = (mask & (split_of_key == split))[:, None]
        masked = torch.where(mine, scores, -math.inf)
        live = (masked != -math.inf).any(-1)  # a key with score -inf counts as not attended
        most = torch.where(live, masked.amax(-1), 0.0)
        p = torch.where(mine, torch.exp2(masked - most[..., None]), 0.0)
        total = torch.where(live, p.sum(-1), 1.0)
        o = torch.einsum("thk,tkd->thd", p, _without(rows, mine)) / total[..., None]
        o_accum[split] = torch.where(live[..., None], o, 0.0)
        lse_accum[split] = torch.where(live, most + torch.log2(total), -math.inf)
    return o_accum, lse_accum


def _without(rows: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Rows of other splits replaced by zeros if one of them is not finite: their weight is 0, and 0 x NaN is NaN."""
    return rows if bool(rows.isfinite().all()) else torch.where(mine[:, 0, :, None], rows, 0.0)


def sparse_decode_partial(
    q: torch.Tensor,
    main: Source,
    extra: Source | None = None,
    *,
    num_splits: int,
    softmax_scale: float = HEAD_DIM**-0.5,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each split alone.

    Args:
        q: [T, h, 512]. main, extra: caches and indices. num_splits: S.
        dtype: of all arithmetic and of the result, torch.float32 or torch.float64.

    Returns:
        o_accum [S, T, h, 512], normalised by the split's own sum, 0 in an empty split; lse_accum [S, T, h] in log2,
        -inf in an empty split.
    """
    tokens, heads, _ = q.shape
    o_accum = torch.zeros((num_splits, tokens, heads, HEAD_DIM), dtype=dtype, device=q.device)
    lse_accum = torch.full((num_splits, tokens, heads), -math.inf, dtype=dtype, device=q.device)
    sources = [source for source in (main, extra) if source is not None and source.indices.shape[1] > 0]
    if not sources:
        return o_accum, lse_accum
    width = sum(source.indices.shape[1] for source in sources)
    step = max(1, CHUNK_BYTES // max(1, width * HEAD_DIM * dtype.itemsize))
    for begin in range(0, tokens, step):
        rows = slice(begin, begin + step)
        chunk = [source.rows(rows) for source in sources]
        o_accum[:, rows], lse_accum[:, rows] = _partial(q[rows], chunk, num_splits, softmax_scale, dtype)
    return o_accum, lse_accum


def merge_splits(o_accum: torch.Tensor, lse_accum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, T, h, 512] and [S, T, h] -> value [T, h, 512] and natural-log LSE [T, h]; 0 and +inf in an empty row."""
    live = lse_accum != -math.inf
    any_live = live.any(0)
    most = torch.where(any_live, lse_accum.amax(0), 0.0)
    weight = torch.where(live, torch.exp2(lse_accum - most), 0.0)
    total = torch.where(any_live, weight.sum(0), 1.0)
    value = torch.zeros(o_accum.shape[1:], dtype=o_accum.dtype, device=o_accum.device)
    for part, w, alive in zip(o_accum, weight / total, live, strict=True):
        value += torch.where(alive[..., None], w[..., None] * part, 0.0)
    return value, torch.where(any_live, most * math.log(2.0) + torch.log(total), math.inf)


def apply_sink(value: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """value / (1 + exp(sink - lse)); an empty row (lse = +inf) stays 0."""
    if attn_sink is None:
        return value
    factor = torch.sigmoid(lse - attn_sink.to(value.dtype))
    return torch.where((lse == math.inf)[..., None], value, value * factor[..., None])


def rotate_back(
    value: torch.Tensor, lse: torch.Tensor, freqs_cis: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """Inverse RoPE of the last 64 channels. freqs_cis: [P, 64] fp32 (cos, sin); a position outside [0, P) gives NaN."""
    if freqs_cis is None:
        return value
    positions = positions.long()
    inside = (positions >= 0) & (positions < freqs_cis.shape[0])
    angles = torch.full((value.shape[0], ROPE_DIM), math.nan, dtype=value.dtype, device=value.device)
    angles[inside] = freqs_cis[positions[inside]].to(value.dtype)
    cosine, sine = angles[:, None, 0::2], angles[:, None, 1::2]
    real, imaginary = value[..., NOPE_DIM::2], value[..., NOPE_DIM + 1 :: 2]
    turned = torch.stack([real * cosine + imaginary * sine, imaginary * cosine - real * sine], -1).flatten(-2)
    turned = torch.where((lse == math.inf)[..., None], 0.0, turned)
    return torch.cat([value[..., :NOPE_DIM], turned], -1)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> float8_e4m3fn, nearest even, saturating; NaN -> code 0x7f."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def quantise(value: torch.Tensor, output: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, h, 512] -> codes [T, h, 512] e4m3 and scales, as ``output`` (one of OUTPUTS[1:]) lays them out."""
    tokens, heads, _ = value.shape
    group = 32 if output == "fp8_group32_ue8m0" else 128
    groups = value.float().unflatten(-1, (-1, group))
    most = torch.finfo(torch.float32).max
    amax = groups.abs().nan_to_num(nan=0.0, posinf=most).amax(-1).clamp(min=AMAX_FLOOR)
    # By a tensor: torch on CUDA multiplies by the reciprocal of a number, which rounds otherwise.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    if output == "fp8_group128":
        return to_e4m3(groups / scale[..., None]).flatten(-2), column_major(scale.flatten(1))
    bits = scale.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    inverse = ((254 - exponents) << 23).view(torch.float32)
    codes = to_e4m3(groups * inverse[..., None]).flatten(-2)
    words = exponents.to(torch.uint8).contiguous().view(torch.int32)  # the first byte is the lowest
    if output == "fp8_group128_ue8m0":
        return codes, words.view(tokens, heads)
    return codes, column_major(words.reshape(tokens, heads * 4))


def empty_scales(tokens: int, heads: int, output: str, device: torch.device) -> torch.Tensor | None:
    """Uninitialised scales of ``output`` in its layout; None for bf16."""
    if output == "bf16":
        return None
    if output == "fp8_group128_ue8m0":
        return torch.empty((tokens, heads), dtype=torch.int32, device=device)
    dtype = torch.float32 if output == "fp8_group128" else torch.int32
    padded = (tokens + 3) // 4 * 4
    return torch.empty_strided((tokens, heads * 4), (1, padded), dtype=dtype, device=device)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """[T, G] with strides (1, align(T, 4)): a column a group, padded to 16 bytes, as a TMA descriptor takes it."""
    tokens, groups = scales.shape
    padded = (tokens + 3) // 4 * 4
    return torch.empty_strided((tokens, groups), (1, padded), dtype=scales.dtype, device=scales.device).copy_(scales)


def combine_splits(
    o_accum: torch.Tensor,
    lse_accum: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    output: str = "bf16",
    return_amax: bool = False,
) -> DecodeOutput:
    """Merge the splits and run the epilogue: sink, inverse RoPE, amax, rounding.

    Args:
        o_accum: [S, T, h, 512]; lse_accum: [S, T, h] in log2. Arithmetic is in their dtype.
        attn_sink: [h]. freqs_cis: [P, 64] fp32. positions: [T]. output: one of OUTPUTS.
    """
    value, lse = merge_splits(o_accum, lse_accum)
    value = rotate_back(apply_sink(value, lse, attn_sink), lse, freqs_cis, positions)
    amax = value.abs().amax(-1).float() if return_amax else None
    if output == "bf16":
        return DecodeOutput(value.float().to(torch.bfloat16), lse.float(), None, amax)
    codes, scales = quantise(value, output)
    return DecodeOutput(codes, lse.float(), scales, amax)


def sparse_decode(
    q: torch.Tensor,
    main: Source,
    extra: Source | None = None,
    *,
    softmax_scale: float = HEAD_DIM**-0.5,
    attn_sink: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    output: str = "bf16",
    return_amax: bool = False,
    dtype: torch.dtype = torch.float32,
) -> DecodeOutput:
    """The whole decode with one split. Arguments as of `sparse_decode_partial` and `combine_splits`."""
    partials = sparse_decode_partial(q, main, extra, num_splits=1, softmax_scale=softmax_scale, dtype=dtype)
    return combine_splits(
        *partials,
        attn_sink=attn_sink,
        freqs_cis=freqs_cis,
        positions=positions,
        output=output,
        return_amax=return_amax,
    )
