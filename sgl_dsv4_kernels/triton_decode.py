"""Sparse MLA decode in Triton: every architecture from sm_80 on, and the CPU in Triton's interpreter.

A program has one row, one block of heads and one split (split_partition.py). Per step it gathers BLOCK_N keys from the
paged caches, dequantises them once into bf16 tiles, and uses each tile twice: as K in S = Q K^T and as V in O = P V,
for all heads of the block at once. Softmax is online, in log2. A program writes a partial (csrc/decode/decode.h), or
with one split runs the epilogue (triton_epilogue.py). triton_launch.py launches it.

The 512 channels are four tiles, because a Triton tile is a power of two wide and a V4 row's parts are not: channels
[0, 256), [256, 384), [384, 448), and the rope part [448, 512).
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.split_partition import SPLIT_BLOCK_KEYS
from sgl_dsv4_kernels.triton_epilogue import as_float, finish_row, load_bf16, log2_lse, round_to_bf16
from sgl_dsv4_kernels.triton_query import norm_factor, normalise, rotate

GRAIN = tl.constexpr(SPLIT_BLOCK_KEYS)
V4 = tl.constexpr(CacheLayout.V4.code)
V4_BYTES = tl.constexpr(CacheLayout.V4.data_bytes)
V4_SCALE_BYTES = tl.constexpr(CacheLayout.V4.scale_bytes)
BF16_BYTES = tl.constexpr(CacheLayout.BF16.data_bytes)
UNIT_RANGE = tl.constexpr(16.0)  # log2; keys further below the largest are rounded in a unit that depends on it

# Four codes ($2) times their scales ($3, $4: bf16 pairs) to four bf16 ($0, $1).
DEQUANTISE_ASM = tl.constexpr("""
{
.reg .b32 lo, hi, nan, lo_nan, hi_nan, one, minus_zero;
mov.b32 one, 0x7b807b80;  // 2^120
mov.b32 minus_zero, 0x80008000;
prmt.b32 lo, $2, 0, 0x9180;  // codes 0, 1, each spread to 16 bits by its sign
prmt.b32 hi, $2, 0, 0xb3a2;
shl.b32 lo, lo, 4;
shl.b32 hi, hi, 4;
and.b32 nan, $2, 0x7f7f7f7f;
add.u32 nan, nan, 0x01010101;  // bit 7 of a byte is set if that code is NaN
prmt.b32 lo_nan, nan, 0, 0x9988;  // that bit 16 times
prmt.b32 hi_nan, nan, 0, 0xbbaa;
lop3.b32 lo, lo, 0x87f087f0, lo_nan, 0xea;  // (lo & 0x87f087f0) | lo_nan
lop3.b32 hi, hi, 0x87f087f0, hi_nan, 0xea;
fma.rn.bf16x2 lo, lo, one, minus_zero;
fma.rn.bf16x2 hi, hi, one, minus_zero;
fma.rn.bf16x2 $0, lo, $3, minus_zero;
fma.rn.bf16x2 $1, hi, $4, minus_zero;
}
""")


@triton.jit
def dequantise(codes, exponents, INTERPRET: tl.constexpr):
    """e4m3 codes (uint8) times 2^(exponent - 127) (uint8, broadcastable; 255 is NaN), rounded once to bf16.

    The seven low bits of a code, put at bit 4 of a bf16, are its magnitude times 2^-120, subnormals included. One exact
    multiply by 2^120 makes that the value, another applies the scale (a single one by 2^120 x scale would stop at scale
    2^7). Codes 0x7f and 0xff are no NaN after the placement: they become 0xffff, which is one.
    """
    if INTERPRET:
        c = codes.to(tl.uint32)
        bits = tl.where((c & 0x7F) == 0x7F, 0x7FC00000, ((c & 0x80) << 24) | ((c & 0x7F) << 20))
        e = exponents.to(tl.uint32)
        scale = as_float(tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23)))
        return round_to_bf16(as_float(bits) * 1.329227995784916e36 * scale, INTERPRET)  # 2^120
    else:
        e = exponents.to(tl.uint16)
        scale = tl.where(e == 0, 0x0040, tl.where(e == 255, 0x7FC0, e << 7)).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        codes, scale = tl.broadcast(codes, scale)
        # Not pure: for mma.sync the layout passes would otherwise dequantise once per use, in registers, and spill.
        return tl.inline_asm_elementwise(
            DEQUANTISE_ASM, "=r,=r,r,r,r", [codes, scale], dtype=tl.bfloat16, is_pure=False, pack=4
        )


@triton.jit
def load_bf16_bytes(row, first, mask, COUNT: tl.constexpr, EVEN: tl.constexpr, INTERPRET: tl.constexpr):
    """COUNT bf16 values from byte `first` of each row. row: [N] pointers to uint8. EVEN: rows are 2-byte aligned."""
    col = tl.arange(0, COUNT)[None, :]
    mask2 = mask[:, None]
    if EVEN:
        at = (row + first).to(tl.pointer_type(tl.int16 if INTERPRET else tl.bfloat16))
        return load_bf16(at[:, None] + col, mask2, INTERPRET)
    else:
        at = (row + first)[:, None] + col * 2
        low = tl.load(at, mask=mask2, other=0).to(tl.uint16)
        bits = (tl.load(at + 1, mask=mask2, other=0).to(tl.uint16) << 8) | low
        if INTERPRET:
            return as_float(bits.to(tl.uint32) << 16)
        else:
            return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def load_tiles(cache, data_at, scale_at, valid, LAYOUT: tl.constexpr, EVEN: tl.constexpr, INTERPRET: tl.constexpr):
    """N rows as four bf16 tiles [N, 256 | 128 | 64 | 64], 0 where not valid.

    cache: pointer to uint8. data_at, scale_at: [N] int64, offsets of a row and of its scales. valid: [N]; nothing of
    another row is read.
    """
    N: tl.constexpr = valid.shape[0]
    row = cache + data_at
    if LAYOUT == V4:
        scale = cache + scale_at
        mask2 = valid[:, None]
        mask3 = valid[:, None, None]
        g4 = tl.arange(0, 4)[None, :]
        g2 = tl.arange(0, 2)[None, :]
        col = tl.arange(0, 64)
        # All loads, then all arithmetic.
        code0 = tl.load(row[:, None, None] + (g4[:, :, None] * 64 + col[None, None, :]), mask=mask3, other=0)
        code1 = tl.load(row[:, None, None] + (256 + g2[:, :, None] * 64 + col[None, None, :]), mask=mask3, other=0)
        code2 = tl.load(row[:, None] + (384 + col[None, :]), mask=mask2, other=0)
        exponent0 = tl.load(scale[:, None] + g4, mask=mask2, other=0)
        exponent1 = tl.load(scale[:, None] + (4 + g2), mask=mask2, other=0)
        exponent2 = tl.load(scale + 6, mask=valid, other=0)
        rope = load_bf16_bytes(row, 448, valid, 64, EVEN, INTERPRET)
        tile0 = tl.reshape(dequantise(code0, exponent0[:, :, None], INTERPRET), (N, 256))
        tile1 = tl.reshape(dequantise(code1, exponent1[:, :, None], INTERPRET), (N, 128))
        tile2 = dequantise(code2, exponent2[:, None], INTERPRET)
    else:
        tile0 = load_bf16_bytes(row, 0, valid, 256, EVEN, INTERPRET)
        tile1 = load_bf16_bytes(row, 512, valid, 128, EVEN, INTERPRET)
        tile2 = load_bf16_bytes(row, 768, valid, 64, EVEN, INTERPRET)
        rope = load_bf16_bytes(row, 896, valid, 64, EVEN, INTERPRET)
    return tile0, tile1, tile2, rope


@triton.jit
def divide(n, magic, shift):
    """n / d for 0 <= n < 2^31: d as `divisor` (triton_launch.py) gives it."""
    return ((n.to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> shift.to(tl.uint64)).to(tl.int32)


@triton.jit
def clamped_length(length_ptr, token, stride, capacity, HAS_LENGTH: tl.constexpr):
    """A row's length in [0, capacity]; capacity without lengths."""
    if HAS_LENGTH:
        return tl.minimum(tl.maximum(tl.load(length_ptr + token * stride), 0), capacity)
    else:
        return capacity


@triton.jit
def loop_bound(x, INTERPRET: tl.constexpr):
    """A scalar as an end of range(). The interpreter's scalar is an array, which numpy 2.4 does not take as an int."""
    if INTERPRET:
        return x.handle.data.item()
    else:
        return x


@triton.jit(
    do_not_specialize=[
        "topk", "extra_topk", "num_slots", "extra_num_slots", "page_size", "extra_page_size", "num_splits",
        "num_freqs", "q_num_freqs", "splits_magic", "splits_shift", "main_page_magic", "main_page_shift",
        "extra_page_magic", "extra_page_shift", "stride_q_freqs", "stride_q_positions",
        "stride_indices", "stride_extra_indices", "stride_length", "stride_extra_length",
        "stride_positions", "stride_scales_token", "stride_scales_column", "stride_amax_token", "stride_amax_head",
        "stride_lse_split", "stride_lse_token", "stride_lse_head", "stride_freqs",
    ],
    do_not_specialize_on_alignment=[
        "indices_ptr", "extra_indices_ptr", "length_ptr", "extra_length_ptr", "lse_ptr", "scales_ptr", "amax_ptr",
        "sink_ptr", "freqs_ptr", "positions_ptr", "q_freqs_ptr", "q_positions_ptr",
    ],
)  # fmt: skip
def sparse_decode_kernel(
    q_ptr, cache_ptr, indices_ptr, length_ptr, extra_cache_ptr, extra_indices_ptr, extra_length_ptr,
    out_ptr, lse_ptr, scales_ptr, amax_ptr, sink_ptr, freqs_ptr, positions_ptr,
    topk, extra_topk, num_slots, extra_num_slots, page_size, extra_page_size, num_splits, num_freqs, scale_log2,
    splits_magic, splits_shift, main_page_magic, main_page_shift, extra_page_magic, extra_page_shift,
    stride_q_token, stride_q_head, stride_page, stride_extra_page, stride_indices, stride_extra_indices,
    stride_length, stride_extra_length, stride_out_split, stride_out_token, stride_out_head,
    stride_lse_split, stride_lse_token, stride_lse_head, stride_scales_token, stride_scales_column,
    stride_amax_token, stride_amax_head, stride_freqs, stride_positions,
    q_freqs_ptr, q_positions_ptr, q_norm_eps, q_num_freqs, stride_q_freqs, stride_q_positions,
    Q_NORM: tl.constexpr, Q_ROPE: tl.constexpr,
    NUM_HEADS: tl.constexpr, LAYOUT: tl.constexpr, EXTRA_LAYOUT: tl.constexpr, EVEN: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HAS_LENGTH: tl.constexpr, HAS_EXTRA_LENGTH: tl.constexpr,
    PARTIAL: tl.constexpr, FILL_EMPTY: tl.constexpr, OUTPUT: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_AMAX: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: rows x splits x head blocks, head blocks fastest (they read the same keys), on x.

    Q_NORM, Q_ROPE: q is raw; each head is normalised, its last 64 values are rotated (triton_query.py).

    PARTIAL: out is o_accum [S, T, h, 512] fp32 and lse is lse_accum [S, T, h] in log2; FILL_EMPTY writes O = 0 for a
    split without keys, else only its LSE. Otherwise num_splits is 1 and out, lse, scales, amax are the final outputs.

    LAUNCH_DEPENDENTS: the combine may start while this kernel runs.
    """
    if LAUNCH_DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()

    # This program's row, split and heads.
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    row_split = program // HEAD_BLOCKS
    token = divide(row_split, splits_magic, splits_shift)
    split = row_split - token * num_splits
    token = token.to(tl.int64)
    heads = (program % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    head_ok = heads < NUM_HEADS

    # Its keys and Q, (BLOCK_H, 256 | 128 | 64 | 64): lengths and Q are on their way together.
    main_keys = clamped_length(length_ptr, token, stride_length, topk, HAS_LENGTH)
    if HAS_EXTRA:
        extra_keys = clamped_length(extra_length_ptr, token, stride_extra_length, extra_topk, HAS_EXTRA_LENGTH)
    q_row = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head
    q0 = load_bf16(q_row + tl.arange(0, 256)[None, :], head_ok[:, None], INTERPRET)
    q1 = load_bf16(q_row + (256 + tl.arange(0, 128)[None, :]), head_ok[:, None], INTERPRET)
    q2 = load_bf16(q_row + (384 + tl.arange(0, 64)[None, :]), head_ok[:, None], INTERPRET)
    q3 = load_bf16(q_row + (448 + tl.arange(0, 64)[None, :]), head_ok[:, None], INTERPRET)

    # Its blocks of keys: split_partition.py.
    main_blocks = (main_keys + GRAIN - 1) // GRAIN
    blocks = main_blocks
    if HAS_EXTRA:
        blocks += (extra_keys + GRAIN - 1) // GRAIN
    each = divide(blocks, splits_magic, splits_shift)
    longer = blocks - each * num_splits
    begin = split * each + tl.minimum(split, longer)
    end = begin + each + tl.where(split < longer, 1, 0)
    STEPS: tl.constexpr = GRAIN // BLOCK_N  # steps a block
    main_steps = main_blocks * STEPS

    lse_at = lse_ptr + split.to(tl.int64) * stride_lse_split + token * stride_lse_token + heads * stride_lse_head
    if PARTIAL and not FILL_EMPTY and begin >= end:
        tl.store(lse_at, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=head_ok)
        return

    if Q_NORM:
        norm = norm_factor(q_row, head_ok, q_norm_eps, BLOCK_H, INTERPRET)
        q0 = normalise(q0, norm, INTERPRET)
        q1 = normalise(q1, norm, INTERPRET)
        q2 = normalise(q2, norm, INTERPRET)
        q3 = normalise(q3, norm, INTERPRET)
    if Q_ROPE:
        q_position = tl.load(q_positions_ptr + token * stride_q_positions).to(tl.int64)
        q3 = rotate(q3, q_freqs_ptr, q_position, q_num_freqs, stride_q_freqs, BLOCK_H, INTERPRET)

    unit = tl.full([BLOCK_H], float("-inf"), tl.float32)  # O is in units of 2^unit
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # the largest score so far; total is in units of 2^top
    total = tl.zeros([BLOCK_H], tl.float32)
    o0 = tl.zeros([BLOCK_H, 256], tl.float32)
    o1 = tl.zeros([BLOCK_H, 128], tl.float32)
    o2 = tl.zeros([BLOCK_H, 64], tl.float32)
    o3 = tl.zeros([BLOCK_H, 64], tl.float32)
    main_row = indices_ptr + token * stride_indices
    if HAS_EXTRA:
        extra_row = extra_indices_ptr + token * stride_extra_indices

    for step in range(loop_bound(begin * STEPS, INTERPRET), loop_bound(end * STEPS, INTERPRET)):
        # Which keys: of the main or of the extra cache.
        is_extra = step >= main_steps
        first = step * BLOCK_N
        keys, index_row, slots, tokens_per_page = main_keys, main_row, num_slots, page_size
        cache, page_stride = cache_ptr, stride_page
        page_magic, page_shift = main_page_magic, main_page_shift
        if HAS_EXTRA:
            page_magic = tl.where(is_extra, extra_page_magic, main_page_magic)
            page_shift = tl.where(is_extra, extra_page_shift, main_page_shift)
            first = tl.where(is_extra, step - main_steps, step) * BLOCK_N
            keys = tl.where(is_extra, extra_keys, main_keys)
            index_row = tl.where(is_extra, extra_row, main_row)
            slots = tl.where(is_extra, extra_num_slots, num_slots)
            tokens_per_page = tl.where(is_extra, extra_page_size, page_size)
            cache = tl.where(is_extra, extra_cache_ptr, cache_ptr)
            page_stride = tl.where(is_extra, stride_extra_page, stride_page)
        key = first + tl.arange(0, BLOCK_N)
        slot = tl.load(index_row + key, mask=key < keys, other=-1)
        valid = (slot >= 0) & (slot < slots)
        slot = tl.where(valid, slot, 0)
        page = divide(slot, page_magic, page_shift)
        place = (slot - page * tokens_per_page).to(tl.int64)
        page_at = page.to(tl.int64) * page_stride
        scale_at = page_at + tokens_per_page.to(tl.int64) * V4_BYTES + place * V4_SCALE_BYTES
        if LAYOUT == EXTRA_LAYOUT or not HAS_EXTRA:
            ROW_BYTES: tl.constexpr = V4_BYTES if LAYOUT == V4 else BF16_BYTES
            k0, k1, k2, k3 = load_tiles(cache, page_at + place * ROW_BYTES, scale_at, valid, LAYOUT, EVEN, INTERPRET)
        else:  # no model mixes layouts: correct, not fast
            A: tl.constexpr = V4_BYTES if LAYOUT == V4 else BF16_BYTES
            B: tl.constexpr = V4_BYTES if EXTRA_LAYOUT == V4 else BF16_BYTES
            if is_extra:
                k0, k1, k2, k3 = load_tiles(cache, page_at + place * B, scale_at, valid, EXTRA_LAYOUT, EVEN, INTERPRET)
            else:
                k0, k1, k2, k3 = load_tiles(cache, page_at + place * A, scale_at, valid, LAYOUT, EVEN, INTERPRET)

        # S = Q K^T, (BLOCK_H, BLOCK_N), in log2.
        s = tl.dot(q0, tl.trans(k0))
        s = tl.dot(q1, tl.trans(k1), s)
        s = tl.dot(q2, tl.trans(k2), s)
        s = tl.dot(q3, tl.trans(k3), s)
        s = tl.where(valid[None, :], s * scale_log2, float("-inf"))

        # Online softmax. O is in units of 2^(maximum of this step), or 2^(top - UNIT_RANGE) if that is larger: with the
        # running maximum as its unit, the rounding of the weights to bf16 would hang on the keys that the split had
        # before; so it hangs on the step alone, and any number of splits gives the same result. The sum is in units of
        # 2^top, which seldom changes: the errors of a factor a step would add up in the LSE. Without a key so far both
        # units are -inf; 0 stands in, as -inf - -inf would be NaN.
        step_most = tl.max(s, 1)
        new_unit = tl.maximum(step_most, top - UNIT_RANGE)
        new_top = tl.maximum(top, step_most)
        unit_base = tl.where(new_unit == float("-inf"), 0.0, new_unit)
        top_base = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(unit - unit_base)
        p = tl.exp2(s - unit_base[:, None])
        total = total * tl.exp2(top - top_base) + tl.sum(p, 1) * tl.exp2(unit_base - top_base)
        unit = new_unit
        top = new_top

        # O = P V.
        weights = round_to_bf16(p, INTERPRET)
        o0 = tl.dot(weights, k0, o0 * decay[:, None])
        o1 = tl.dot(weights, k1, o1 * decay[:, None])
        o2 = tl.dot(weights, k2, o2 * decay[:, None])
        o3 = tl.dot(weights, k3, o3 * decay[:, None])

    empty = total == 0
    inverse = tl.where(empty, 1.0, tl.exp2(unit - top) / total)[:, None]
    o0 = o0 * inverse
    o1 = o1 * inverse
    o2 = o2 * inverse
    o3 = o3 * inverse
    if FILL_EMPTY or not PARTIAL:  # an infinite key with score -inf has left 0 * inf = NaN; else nobody reads it
        o0 = tl.where(empty[:, None], 0.0, o0)
        o1 = tl.where(empty[:, None], 0.0, o1)
        o2 = tl.where(empty[:, None], 0.0, o2)
        o3 = tl.where(empty[:, None], 0.0, o3)
    out_row = out_ptr + split.to(tl.int64) * stride_out_split + token * stride_out_token
    out_row = out_row + heads[:, None] * stride_out_head
    if PARTIAL:
        tl.store(lse_at, tl.where(empty, float("-inf"), log2_lse(top, tl.where(empty, 1.0, total))), mask=head_ok)
        store = head_ok[:, None]
        tl.store(out_row + tl.arange(0, 256)[None, :], o0, mask=store)
        tl.store(out_row + (256 + tl.arange(0, 128)[None, :]), o1, mask=store)
        tl.store(out_row + (384 + tl.arange(0, 64)[None, :]), o2, mask=store)
        tl.store(out_row + (448 + tl.arange(0, 64)[None, :]), o3, mask=store)
    else:
        position = token
        if HAS_ROPE:
            position = tl.load(positions_ptr + token * stride_positions).to(tl.int64)
        finish_row(
            o0, o1, o2, o3, top, total, sink_ptr, freqs_ptr, position, num_freqs, stride_freqs, out_row, lse_at,
            scales_ptr + token * stride_scales_token, amax_ptr + token * stride_amax_token + heads * stride_amax_head,
            heads, head_ok, stride_scales_column,
            BLOCK_H, OUTPUT, HAS_SINK, HAS_ROPE, HAS_AMAX, INTERPRET,
        )  # fmt: skip
