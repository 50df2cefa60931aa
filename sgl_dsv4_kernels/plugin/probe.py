"""Whether our kernels run on a device at all, asked with one row each before SGLang's data depend on them."""

from __future__ import annotations

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM, ROPE_DIM
from sgl_dsv4_kernels.ops.decode import resolve_backend


def store_problem(device: torch.device) -> str | None:
    """Why the store kernels do not run on ``device``; None if they do."""
    row = torch.zeros((1, HEAD_DIM), dtype=torch.bfloat16, device=device)
    freqs = torch.zeros((1, ROPE_DIM), device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    cache = torch.zeros((1, dk.CacheLayout.V4.page_bytes(1)), dtype=torch.uint8, device=device)
    try:
        dk.norm_rope_store(row, row[0], 1e-6, freqs, position, position - 1, cache, page_size=1)
    except torch.OutOfMemoryError:
        raise  # says nothing about the device
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def decode_problem(device: torch.device) -> str | None:
    """Why the decode does not run on ``device``; None if it does. Compiles nothing."""
    try:
        resolve_backend(None, device)
        dk.combine_splits(torch.zeros((1, 1, 8, HEAD_DIM), device=device), torch.zeros((1, 1, 8), device=device))
    except torch.OutOfMemoryError:
        raise  # says nothing about the device
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None
