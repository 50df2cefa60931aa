"""Argument checks. Every text names the argument, what was expected and what came."""

from __future__ import annotations

import torch


def check_tensor(
    name: str,
    value: torch.Tensor,
    *,
    shape: tuple[int | str | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Check one tensor argument.

    Args:
        name: the argument's name.
        value: what came.
        shape: one entry a dimension: a number, or None or a name for a free dimension.
        dtype: the dtype, or those allowed.
        device: where the tensor must lie.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if dtype is not None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if value.dtype not in allowed:
            raise TypeError(f"{name}: expected dtype {' or '.join(map(str, allowed))}, got {value.dtype}")
    if shape is not None and (
        value.dim() != len(shape)
        or any(isinstance(want, int) and got != want for got, want in zip(value.shape, shape, strict=True))
    ):
        text = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{text}], got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")


def check_stride(name: str, value: torch.Tensor, dim: int, expected: int) -> None:
    """Check one stride, in elements. Raises ValueError; a dimension of at most one entry has any stride."""
    if value.shape[dim] > 1 and value.stride(dim) != expected:
        raise ValueError(f"{name}: expected stride({dim}) = {expected}, got {value.stride(dim)}")


def freqs_as_float(freqs_cis: torch.Tensor, device: torch.device) -> torch.Tensor:
    """RoPE factors [P, 32] complex64 or [P, 64] fp32 (cos, sin interleaved) as [P, 64] fp32, without a copy."""
    check_tensor("freqs_cis", freqs_cis, dtype=(torch.complex64, torch.float32), device=device)
    if freqs_cis.dtype == torch.complex64:
        check_tensor("freqs_cis", freqs_cis, shape=("positions", 32))
    else:
        check_tensor("freqs_cis", freqs_cis, shape=("positions", 64))
    check_stride("freqs_cis", freqs_cis, 1, 1)
    check_stride("freqs_cis", freqs_cis, 0, freqs_cis.shape[1])
    return torch.view_as_real(freqs_cis).flatten(-2) if freqs_cis.is_complex() else freqs_cis
