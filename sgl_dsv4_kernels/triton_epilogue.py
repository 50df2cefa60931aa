"""Number formats and the decode epilogue in Triton. csrc/decode/decode.h is the contract, csrc/decode/epilogue.cuh the
twin of the arithmetic.

Triton's interpreter has no bf16 arithmetic (its cast truncates, its dot multiplies the bits). Under the constexpr
INTERPRET bf16 memory is seen as int16 and values are fp32 with a bf16's value; the other lines are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

OUTPUT_BF16 = tl.constexpr(0)
OUTPUT_FP8_GROUP128 = tl.constexpr(1)
OUTPUT_FP8_GROUP128_UE8M0 = tl.constexpr(2)
OUTPUT_FP8_GROUP32_UE8M0 = tl.constexpr(3)
AMAX_FLOOR = tl.constexpr(1e-10)
FLOAT_MAX = tl.constexpr(3.402823466e38)
LN_2_HIGH = tl.constexpr(0.693147182464599609375)
LN_2_LOW = tl.constexpr(-1.904654299957768e-9)


@triton.jit
def as_bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(x, INTERPRET: tl.constexpr):
    """fp32 to bf16, nearest even."""
    if INTERPRET:
        bits = as_bits(x)
        return tl.where(x != x, x, as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000))
    else:
        return x.to(tl.bfloat16)


@triton.jit
def load_bf16(ptr, mask, INTERPRET: tl.constexpr):
    """bf16 values, 0 where masked."""
    if INTERPRET:
        return as_float(tl.load(ptr, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def store_bf16(ptr, x, mask, INTERPRET: tl.constexpr):
    """fp32 values, rounded once."""
    if INTERPRET:
        rounded = as_bits(round_to_bf16(x, INTERPRET)) >> 16
        bits = tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)
        tl.store(ptr, bits.to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(ptr, x.to(tl.bfloat16), mask=mask)


@triton.jit
def encode_e4m3(x):
    """fp32 to an e4m3 code (uint8): nearest even, saturating at 448, NaN to 0x7f. One rounding, straight from fp32."""
    bits = as_bits(x)
    magnitude = bits & 0x7FFFFFFF
    # Normal codes keep 3 of 23 mantissa bits; a carry runs into the exponent, as it should.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal codes are multiples of 2^-9, the spacing of floats from 2^14 on: the addition rounds.
    subnormal = as_bits(as_float(tl.minimum(magnitude, 0x3C800000)) + 16384.0) - 0x46800000
    code = tl.where(magnitude >= 0x3C800000, normal, subnormal)
    code = tl.where(magnitude >= 0x43E00000, 0x7E, code) | ((bits >> 24) & 0x80)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def exponent_and_log2(x):
    """log2 of a positive x as a whole number and the log2 of a number in [1, 2). The GPU's logarithm has a relative
    error of 2^-22: taken of a sum of thousands it would be off by 3e-6."""
    bits = as_bits(x)
    exponent = (bits >> 23).to(tl.int32) - 127
    return exponent.to(tl.float32), tl.log2(as_float((bits & 0x7FFFFF) | 0x3F800000))


@triton.jit
def log2_lse(most, total):
    """Row maximum (log2) and sum of 2^(score - maximum) to a log2 LSE. A NaN stays one."""
    exponent, rest = exponent_and_log2(total)
    return most + tl.where(total == total, exponent + rest, total)


@triton.jit
def natural_lse(most, total):
    """Row maximum (log2) and sum of 2^(score - maximum) to a natural-log LSE; ln 2 in two parts."""
    exponent, rest = exponent_and_log2(total)
    log = tl.where(total == total, tl.fma(exponent, LN_2_HIGH, rest * LN_2_HIGH), total)
    return tl.fma(most, LN_2_HIGH, tl.fma(most, LN_2_LOW, log))


@triton.jit
def sink_factor(sink, lse):
    """1 / (1 + exp(sink - lse)) for every fp32 sink: the exponential is taken of a number <= 0."""
    difference = sink - lse
    e = tl.exp(-tl.abs(difference))
    return tl.where(difference > 0, e, 1.0) / (1.0 + e)


@triton.jit
def rotate_back(x, cosine, sine, BLOCK_H: tl.constexpr):
    """[BLOCK_H, 64] fp32: 32 (real, imaginary) pairs times cos - i sin. cosine, sine: [32]."""
    real, imaginary = tl.split(tl.reshape(x, (BLOCK_H, 32, 2)))
    c = cosine[None, :]
    s = sine[None, :]
    turned = tl.join(tl.fma(real, c, imaginary * s), tl.fma(imaginary, c, -(real * s)))
    return tl.reshape(turned, (BLOCK_H, 64))


@triton.jit
def group_amax(x, BLOCK_H: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_H, GROUPS * GROUP] -> [BLOCK_H, GROUPS]: max |x|, NaN ignored, infinity as the largest finite value."""
    magnitude = tl.minimum(tl.where(x != x, 0.0, tl.abs(x)), FLOAT_MAX)
    return tl.max(tl.reshape(magnitude, (BLOCK_H, GROUPS, GROUP)), 2)


@triton.jit
def ue8m0_exponent(amax):
    """The byte e of the scale 2^(e - 127) = 2^ceil(log2(amax / 448)), as uint32."""
    bits = as_bits(tl.div_rn(tl.maximum(amax, AMAX_FLOOR), tl.full(amax.shape, 448.0, tl.float32)))
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)


@triton.jit
def store_codes(
    ptr, x, amax, mask, BLOCK_H: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, UE8M0: tl.constexpr
):
    """Quantise [BLOCK_H, GROUPS * GROUP] with one scale a group and store the codes. amax: [BLOCK_H, GROUPS]."""
    x = tl.reshape(x, (BLOCK_H, GROUPS, GROUP))
    if UE8M0:
        x = x * as_float((254 - ue8m0_exponent(amax)) << 23)[:, :, None]
    else:
        scale = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), tl.full(amax.shape, 448.0, tl.float32))
        x, scale = tl.broadcast(x, scale[:, :, None])
        x = tl.div_rn(x, scale)
    tl.store(ptr, encode_e4m3(tl.reshape(x, (BLOCK_H, GROUPS * GROUP))), mask=mask)


@triton.jit
def packed_exponents(amax, BLOCK_H: tl.constexpr, WORDS: tl.constexpr, BYTES: tl.constexpr):
    """amax [BLOCK_H, WORDS * BYTES] -> [BLOCK_H, WORDS] int32: BYTES exponents a word, the first in the lowest byte."""
    shifts = 8 * tl.arange(0, BYTES)[None, None, :]
    words = tl.reshape(ue8m0_exponent(amax), (BLOCK_H, WORDS, BYTES)) << shifts.to(tl.uint32)
    return tl.sum(words, 2).to(tl.int32, bitcast=True)


@triton.jit
def store_fp8(
    x0, x1, x2, x3, out_row, scales_ptr, heads, mask, stride_column, BLOCK_H: tl.constexpr, OUTPUT: tl.constexpr
):
    """fp8 codes and scales of a block of heads.

    x0 .. x3: channels [0, 256), [256, 384), [384, 448), [448, 512). out_row: [BLOCK_H, 1] pointers to uint8.
    scales_ptr: of the row's column 0. heads: [BLOCK_H] int64. mask: [BLOCK_H].
    """
    mask2 = mask[:, None]
    o0 = out_row + tl.arange(0, 256)[None, :]
    o1 = out_row + (256 + tl.arange(0, 128)[None, :])
    o2 = out_row + (384 + tl.arange(0, 64)[None, :])
    o3 = out_row + (448 + tl.arange(0, 64)[None, :])
    if OUTPUT == OUTPUT_FP8_GROUP32_UE8M0:
        a0 = group_amax(x0, BLOCK_H, 8, 32)
        a1 = group_amax(x1, BLOCK_H, 4, 32)
        a2 = group_amax(x2, BLOCK_H, 2, 32)
        a3 = group_amax(x3, BLOCK_H, 2, 32)
        store_codes(o0, x0, a0, mask2, BLOCK_H, 8, 32, True)
        store_codes(o1, x1, a1, mask2, BLOCK_H, 4, 32, True)
        store_codes(o2, x2, a2, mask2, BLOCK_H, 2, 32, True)
        store_codes(o3, x3, a3, mask2, BLOCK_H, 2, 32, True)
        word = tl.arange(0, 2)[None, :]
        tl.store(
            scales_ptr + (heads[:, None] * 4 + word) * stride_column, packed_exponents(a0, BLOCK_H, 2, 4), mask=mask2
        )
        last = scales_ptr + heads[:, None] * 4 * stride_column
        tl.store(last + 2 * stride_column, packed_exponents(a1, BLOCK_H, 1, 4), mask=mask2)
        high = packed_exponents(a3, BLOCK_H, 1, 2) << 16
        tl.store(last + 3 * stride_column, packed_exponents(a2, BLOCK_H, 1, 2) | high, mask=mask2)
    else:
        UE8M0: tl.constexpr = OUTPUT == OUTPUT_FP8_GROUP128_UE8M0
        a0 = group_amax(x0, BLOCK_H, 2, 128)
        a1 = group_amax(x1, BLOCK_H, 1, 128)
        a3 = tl.maximum(group_amax(x2, BLOCK_H, 1, 64), group_amax(x3, BLOCK_H, 1, 64))
        store_codes(o0, x0, a0, mask2, BLOCK_H, 2, 128, UE8M0)
        store_codes(o1, x1, a1, mask2, BLOCK_H, 1, 128, UE8M0)
        store_codes(o2, x2, a3, mask2, BLOCK_H, 1, 64, UE8M0)
        store_codes(o3, x3, a3, mask2, BLOCK_H, 1, 64, UE8M0)
        if UE8M0:
            high = (ue8m0_exponent(a1) << 16) | (ue8m0_exponent(a3) << 24)
            word = packed_exponents(a0, BLOCK_H, 1, 2) | high.to(tl.int32, bitcast=True)
            tl.store(scales_ptr + heads[:, None] * stride_column, word, mask=mask2)
        else:
            first = scales_ptr + heads[:, None] * 4 * stride_column
            group = tl.arange(0, 2)[None, :]
            c448 = tl.full((BLOCK_H, 1), 448.0, tl.float32)
            s0 = tl.div_rn(tl.maximum(a0, AMAX_FLOOR), tl.full((BLOCK_H, 2), 448.0, tl.float32))
            tl.store(first + group * stride_column, s0, mask=mask2)
            tl.store(first + 2 * stride_column, tl.div_rn(tl.maximum(a1, AMAX_FLOOR), c448), mask=mask2)
            tl.store(first + 3 * stride_column, tl.div_rn(tl.maximum(a3, AMAX_FLOOR), c448), mask=mask2)


@triton.jit
def abs_max(x):
    """[BLOCK_H, N] -> [BLOCK_H] uint32: max |x| as bits, whose order has NaN above infinity."""
    return tl.max(as_bits(x) & 0x7FFFFFFF, 1)


@triton.jit
def finish_row(
    x0, x1, x2, x3, most, total, sink_ptr, freqs_ptr, position, num_freqs, stride_freqs, out_row, lse_at, scales_ptr,
    amax_at, heads, mask, stride_column,
    BLOCK_H: tl.constexpr, OUTPUT: tl.constexpr, HAS_SINK: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_AMAX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Everything behind the attention of one row: sink, inverse RoPE, amax, rounding, stores.

    Args:
        x0 .. x3: [BLOCK_H, 256 | 128 | 64 | 64] fp32, normalised by the sum, 0 in an empty row.
        most, total: [BLOCK_H], maximum (log2) and sum; total is 0 in an empty row.
        out_row: [BLOCK_H, 1] pointers. lse_at, amax_at: [BLOCK_H] pointers. position: int64 scalar.
    """
    empty = total == 0
    lse = tl.where(empty, float("inf"), natural_lse(most, tl.where(empty, 1.0, total)))
    tl.store(lse_at, lse, mask=mask)
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=mask, other=float("-inf"))
        factor = tl.where(empty, 1.0, sink_factor(sink, lse))[:, None]
        x0 = x0 * factor
        x1 = x1 * factor
        x2 = x2 * factor
        x3 = x3 * factor
    if HAS_ROPE:
        inside = (position >= 0) & (position < num_freqs)
        pair = tl.arange(0, 32) * 2
        row = freqs_ptr + tl.where(inside, position, 0) * stride_freqs
        cosine = tl.load(row + pair, mask=inside, other=float("nan"))
        sine = tl.load(row + pair + 1, mask=inside, other=float("nan"))
        x3 = tl.where(empty[:, None], x3, rotate_back(x3, cosine, sine, BLOCK_H))
    if HAS_AMAX:
        most_bits = tl.maximum(tl.maximum(abs_max(x0), abs_max(x1)), tl.maximum(abs_max(x2), abs_max(x3)))
        tl.store(amax_at, as_float(most_bits), mask=mask)
    if OUTPUT == OUTPUT_BF16:
        mask2 = mask[:, None]
        store_bf16(out_row + tl.arange(0, 256)[None, :], x0, mask2, INTERPRET)
        store_bf16(out_row + (256 + tl.arange(0, 128)[None, :]), x1, mask2, INTERPRET)
        store_bf16(out_row + (384 + tl.arange(0, 64)[None, :]), x2, mask2, INTERPRET)
        store_bf16(out_row + (448 + tl.arange(0, 64)[None, :]), x3, mask2, INTERPRET)
    else:
        store_fp8(x0, x1, x2, x3, out_row, scales_ptr, heads, mask, stride_column, BLOCK_H, OUTPUT)
