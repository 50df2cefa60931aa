"""The query's op: RMSNorm of each head and RoPE. The decode kernels do the same as they load a query."""

from __future__ import annotations

import math

import torch

from sgl_dsv4_kernels.checks import check_stride, check_tensor, freqs_as_float
from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.reference import query as reference
from sgl_dsv4_kernels.settings import settings

_INDEX = (torch.int32, torch.int64)
Rope = tuple[torch.Tensor, torch.Tensor]
Prologue = tuple[float | None, torch.Tensor | None, torch.Tensor | None]
"""norm_eps, freqs_cis as [P, 64] fp32, positions: how the torch ops take what is to be done to a query."""


def query_norm_rope(
    q: torch.Tensor,
    *,
    norm_eps: float | None = None,
    rope: Rope | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each head's query and rotate its last 64 values (SGLang's ``fused_q_norm_rope``).

    On CUDA the bits are those of SGLang 0.5.17. Every value is rounded to bf16 behind the norm, the rotated ones again
    behind the rotation. ``sparse_decode(q_norm_eps=..., q_rope=...)`` gives what this function and a decode behind it
    give.

    Args:
        q: [T, h, 512] bf16, any number of heads; stride(2) = 1, the others free.
        norm_eps: added to the mean square of a head's 512 values. None = no norm.
        rope: (freqs_cis, positions): [P, 32] complex64 or [P, 64] fp32 (cos, sin), contiguous, and [T] int32 or int64.
            A position outside [0, P) gives NaN in the last 64 values; SGL_DSV4_CHECK=1 makes it a ValueError.
            None = no rotation.
        out: [T, h, 512] bf16 to write to, stride(2) = 1; must not overlap q.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        TypeError: a dtype or type other than above. ValueError: a shape, stride, device or value other than above.
        RuntimeError: the build holds no code for this device, or the launch failed.
    """
    check_tensor("q", q, shape=("tokens", "heads", HEAD_DIM), dtype=torch.bfloat16)
    check_stride("q", q, 2, 1)
    prologue = check_prologue("norm_eps", norm_eps, "rope", rope, q.shape[0], q.device)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, shape=tuple(q.shape), dtype=torch.bfloat16, device=q.device)
        check_stride("out", out, 2, 1)
    if q.numel() > 0:
        torch.ops.sgl_dsv4_kernels.query_norm_rope(q, *prologue, settings.pdl, out)
    return out


def check_prologue(
    eps_name: str, eps: float | None, rope_name: str, rope: Rope | None, tokens: int, device: torch.device
) -> Prologue:
    """Check norm and rotation of ``tokens`` queries, which the caller knows by these names."""
    if eps is not None:
        if isinstance(eps, bool) or not isinstance(eps, (int, float)):
            raise TypeError(f"{eps_name}: expected a float or None, got {eps!r}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"{eps_name}: expected a finite number of at least 0, got {eps!r}")
        eps = float(eps)
    return eps, *check_rope(rope_name, rope, tokens, device)


def check_rope(
    name: str, rope: Rope | None, tokens: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check a pair (freqs_cis, positions); returns freqs_cis as [P, 64] fp32 and positions, or two None."""
    if rope is None:
        return None, None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise TypeError(f"{name}: expected a pair (freqs_cis, positions), got {type(rope).__name__}")
    freqs, positions = freqs_as_float(rope[0], device), rope[1]
    check_tensor("positions", positions, shape=(tokens,), dtype=_INDEX, device=device)
    if settings.check and bool(((positions < 0) | (positions >= freqs.shape[0])).any()):
        raise ValueError(
            f"positions: expected values in [0, {freqs.shape[0]}), the rows of freqs_cis, got "
            f"{int(positions.min())} to {int(positions.max())}"
        )
    return freqs, positions


def _query_norm_rope_op(q, norm_eps, freqs_cis, positions, pdl, out) -> None:
    out.copy_(reference.query_norm_rope(q, norm_eps, freqs_cis, positions))


def register(library: torch.library.Library) -> None:
    """Register the CPU implementation and the fake; the CUDA implementation is compiled."""
    library.impl("query_norm_rope", _query_norm_rope_op, "CPU")
    torch.library.register_fake(f"{library.ns}::query_norm_rope", lambda *args: None)
