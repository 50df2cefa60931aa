"""Plain-torch twin of csrc/decode/query.cu: RMSNorm of each head's query without a weight, RoPE of its last 64 values.

Bit for bit the CUDA kernel's arithmetic, except for rsqrt, as in the store's twin.
"""

from __future__ import annotations

import math

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, ROPE_DIM
from sgl_dsv4_kernels.reference.store import fma


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """[..., 512] fp32 with the values of bf16 -> [...]. Lane l of 32 adds eight values from 8 l, then eight from
    256 + 8 l, one after the other; then a butterfly (16, 8, 4, 2, 1). A square is exact: fused or not is the same."""
    lanes = x.unflatten(-1, (2, 32, 8)).transpose(-3, -2).flatten(-2)
    total = torch.zeros_like(lanes[..., 0])
    for value in lanes.unbind(-1):
        total = total + value * value
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total.squeeze(-1)


def normalise(q: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., 512] bf16 -> bf16: times 1 / sqrt(mean square + eps)."""
    x = q.float()
    mean = fma(sum_of_squares(x), torch.tensor(1.0 / HEAD_DIM), torch.tensor(eps, dtype=torch.float32))
    return (x * mean.double().rsqrt().float()[..., None]).bfloat16()


def rotate(q: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, h, 512] bf16 -> bf16: RoPE of the last 64. freqs_cis: [P, 64] fp32; a position outside [0, P) gives NaN."""
    positions = positions.long()
    inside = (positions >= 0) & (positions < freqs_cis.shape[0])
    angles = torch.full((q.shape[0], 1, ROPE_DIM), math.nan, device=q.device)
    angles[inside, 0] = freqs_cis[positions[inside]]
    cosine, sine = angles[..., 0::2], angles[..., 1::2]
    real, imaginary = q[..., NOPE_DIM::2].float(), q[..., NOPE_DIM + 1 :: 2].float()
    turned = [fma(real, cosine, -(imaginary * sine)), fma(real, sine, imaginary * cosine)]
    return torch.cat([q[..., :NOPE_DIM], torch.stack(turned, -1).flatten(-2).bfloat16()], -1)


def query_norm_rope(
    q: torch.Tensor, norm_eps: float | None, freqs_cis: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """[T, h, 512] bf16 -> bf16, a step that is None left out. Every value is rounded to bf16 behind the norm, and the
    rotated ones again behind the rotation, which is in fp32."""
    if norm_eps is not None:
        q = normalise(q, norm_eps)
    return q if freqs_cis is None else rotate(q, freqs_cis, positions)
