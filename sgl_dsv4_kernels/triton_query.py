"""The query's RMSNorm and RoPE in Triton, for a block of heads as it is loaded: the bits of csrc/decode/query.cuh.

The order of additions is part of those bits, so no reduction here has more than two terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_dsv4_kernels.triton_epilogue import load_bf16, round_to_bf16


@triton.jit
def fma(a, b, c, INTERPRET: tl.constexpr):
    """One rounding. The interpreter's own fma has two; in fp64 the product is exact."""
    if INTERPRET:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def rsqrt(x, INTERPRET: tl.constexpr):
    """Of a normal number: the GPU's instruction takes a subnormal one for 0 here, and not in the CUDA kernel."""
    if INTERPRET:
        return (1.0 / tl.sqrt(x.to(tl.float64))).to(tl.float32)
    else:
        return tl.rsqrt(x)


@triton.jit
def add_squares(total, x, BLOCK_H: tl.constexpr):
    """total [BLOCK_H, 32] plus the squares of x [BLOCK_H, 32, 8], one after the other. They are exact in fp32."""
    x = x.to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, 32, 4, 2)))
    x04, x26 = tl.split(tl.reshape(even, (BLOCK_H, 32, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (BLOCK_H, 32, 2, 2)))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    total = tl.fma(x0, x0, total)
    total = tl.fma(x1, x1, total)
    total = tl.fma(x2, x2, total)
    total = tl.fma(x3, x3, total)
    total = tl.fma(x4, x4, total)
    total = tl.fma(x5, x5, total)
    total = tl.fma(x6, x6, total)
    return tl.fma(x7, x7, total)


@triton.jit
def add_halves(x, BLOCK_H: tl.constexpr, HALF: tl.constexpr):
    """[BLOCK_H, 2 * HALF] -> [BLOCK_H, HALF]."""
    return tl.sum(tl.reshape(x, (BLOCK_H, 2, HALF)), 1)


@triton.jit
def norm_factor(q_row, mask, eps, BLOCK_H: tl.constexpr, INTERPRET: tl.constexpr):
    """1 / sqrt(mean square + eps) of each head, [BLOCK_H, 1]. q_row: [BLOCK_H, 1] pointers; mask: [BLOCK_H].

    The values come a second time, from cache: the tiles of the products do not hold them in this order.
    """
    lane = tl.arange(0, 32)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    mask3 = mask[:, None, None]
    first = load_bf16(q_row[:, :, None] + lane, mask3, INTERPRET)
    second = load_bf16(q_row[:, :, None] + (256 + lane), mask3, INTERPRET)
    total = add_squares(tl.zeros([BLOCK_H, 32], tl.float32), first, BLOCK_H)
    total = add_squares(total, second, BLOCK_H)
    total = add_halves(total, BLOCK_H, 16)
    total = add_halves(total, BLOCK_H, 8)
    total = add_halves(total, BLOCK_H, 4)
    total = add_halves(total, BLOCK_H, 2)
    total = add_halves(total, BLOCK_H, 1)
    return rsqrt(total * 0.001953125 + eps, INTERPRET)  # 1 / 512: exact, so fused or not is the same


@triton.jit
def normalise(x, norm, INTERPRET: tl.constexpr):
    """A tile [BLOCK_H, N] of bf16 values times norm [BLOCK_H, 1], rounded."""
    return round_to_bf16(x.to(tl.float32) * norm, INTERPRET)


@triton.jit
def rotate(x, freqs_ptr, position, num_freqs, stride_freqs, BLOCK_H: tl.constexpr, INTERPRET: tl.constexpr):
    """RoPE of [BLOCK_H, 64] bf16 values, rounded. position: int64 scalar; one outside the table gives NaN."""
    inside = (position >= 0) & (position < num_freqs)
    pair = tl.arange(0, 32) * 2
    row = freqs_ptr + tl.where(inside, position, 0) * stride_freqs
    cosine = tl.load(row + pair, mask=inside, other=float("nan"))[None, :]
    sine = tl.load(row + pair + 1, mask=inside, other=float("nan"))[None, :]
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), (BLOCK_H, 32, 2)))
    # Times -1, because Triton's minus sign is a subtraction from 0, which loses the sign of a zero.
    turned_real = fma(real, cosine, imaginary * sine * -1.0, INTERPRET)
    turned_imaginary = fma(real, sine, imaginary * cosine, INTERPRET)
    turned = round_to_bf16(tl.reshape(tl.join(turned_real, turned_imaginary), (BLOCK_H, 64)), INTERPRET)
    if INTERPRET:
        return turned
    else:
        # Not pure: for mma.sync Triton takes what a join has made for unpacked half-width values, and orders the
        # channels of the product by that. The scores would then be summed in another order than without a rotation.
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [turned], dtype=tl.bfloat16, is_pure=False, pack=2)
