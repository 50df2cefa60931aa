"""Launches the Triton decode kernel: configurations by shape, arguments, and first calls inside a graph capture."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from sgl_dsv4_kernels.ops.query import Prologue
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.triton_decode import sparse_decode_kernel


class Config(NamedTuple):
    """How a program is cut: heads and keys of its tiles, warps, and stages of the load pipeline."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


class Epilogue(NamedTuple):
    """Outputs and epilogue of an unsplit decode. output: the OutputKind code; the others may be None."""

    output: int
    scales: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    freqs_cis: torch.Tensor | None = None
    positions: torch.Tensor | None = None


CONFIGS: dict[str, list[tuple[int, Config]]] = {
    # wgmma from 64 heads on. 64 keys: with 32 the score product reads Q twice as often, and is slower than the rest.
    "sm_90": [(16, Config(16, 64, 4, 2)), (32, Config(32, 64, 8, 2)), (128, Config(64, 64, 8, 2))],
    # 160 KB of shared memory and mma.sync (sm_80, sm_100): 64 heads do not fit the registers.
    "large": [(16, Config(16, 64, 4, 2)), (128, Config(32, 64, 8, 2))],
    # 99 KB of shared memory (sm_86, sm_89, sm_120).
    "small": [(16, Config(16, 32, 4, 2)), (128, Config(32, 32, 8, 2))],
}
"""Configurations by architecture, then by number of heads (the first entry that is large enough).
docs/decode_pipeline.md lists what each compiles to."""

SPREAD: dict[str, list[Config]] = {"sm_90": [Config(16, 64, 8, 1), Config(32, 64, 8, 1)]}
"""What few rows take instead: blocks of fewer heads, so that more SMs work and each has less to do. The first one of
which all programs run at once. Not in batch-invariant mode: a row's bits depend on the configuration."""


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module was imported)."""
    return not isinstance(sparse_decode_kernel, triton.runtime.JITFunction)


@functools.lru_cache(maxsize=4096)
def choose_config(
    num_heads: int, capability: tuple[int, int], mixed_layouts: bool, row_splits: int | None = None, sm_count: int = 0
) -> Config:
    """The configuration for a number of heads on a device of ``capability`` with ``sm_count`` multiprocessors.

    Args:
        row_splits: T x S; None = whatever serves every T.
    """
    large = capability in ((8, 0), (10, 0), (10, 3))
    family = "sm_90" if capability[0] == 9 else "large" if large else "small"
    config = next(config for heads, config in CONFIGS[family] if num_heads <= heads)
    if row_splits is not None:
        for spread in SPREAD.get(family, []):
            if spread.block_h <= config.block_h and row_splits * -(-num_heads // spread.block_h) <= sm_count:
                config = spread
                break
    return config._replace(num_stages=1) if mixed_layouts else config


@contextlib.contextmanager
def _loading_allowed(device: torch.device) -> Iterator[None]:
    """Inside a graph capture: let this thread load a kernel's code, which a first call does and a capture forbids."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.lru_cache(maxsize=256)
def divisor(d: int) -> tuple[int, int]:
    """magic (32 bits, as an int32) and shift: n * magic >> shift is n // d for 0 <= n < 2^31 and 1 <= d < 2^31.

    Those of csrc/common/divisor.h, which derives them.
    """
    bits = (d - 1).bit_length()
    magic = -(-(1 << 31 + bits) // d)
    return magic - (magic >> 31 << 32), 31 + bits


def launch(
    q: torch.Tensor,
    main: Source,
    extra: Source | None,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    prologue: Prologue = (None, None, None),
    epilogue: Epilogue | None = None,
    fill_empty: bool = False,
    batch_invariant: bool = False,
    config: Config | None = None,
) -> None:
    """Launch the decode kernel. Shapes are those of the ops, checked by the caller; nothing is launched for T = 0.

    Args:
        prologue: what is done to q first.
        out, lse: with ``epilogue`` the final [T, h, 512] and [T, h]; else partials [S, T, h, 512] fp32 and [S, T, h].
        fill_empty: partials only: write O = 0 for an empty split.
        batch_invariant: choose the configuration from the number of heads alone.
        config: instead of the table's, for benchmarks.
    """
    partial = epilogue is None
    done = epilogue or Epilogue(0)
    tokens, heads, _ = q.shape
    num_splits = out.shape[0] if partial else 1
    if tokens == 0:
        return
    interpret = interpreted()
    capability = (9, 0) if interpret else torch.cuda.get_device_capability(q.device)
    other = extra or main
    if config is None:
        sm_count = 0 if interpret else torch.cuda.get_device_properties(q.device).multi_processor_count
        row_splits = None if batch_invariant else tokens * num_splits
        config = choose_config(heads, capability, main.layout is not other.layout, row_splits, sm_count)
    programs = tokens * num_splits * -(-heads // config.block_h)
    if programs >= 2**31:
        raise ValueError(f"q and num_splits: expected T * num_splits * head blocks below 2^31, got {programs}")
    caches = [source.cache.view(torch.uint8) for source in (main, other)]
    even = all(cache.data_ptr() % 2 == 0 and cache.stride(0) % 2 == 0 for cache in caches)
    out_strides = out.stride()[:3] if partial else (0, *out.stride()[:2])
    lse_strides = lse.stride() if partial else (0, *lse.stride())
    q_eps, q_freqs, q_positions = prologue
    scales, amax = done.scales, done.amax
    freqs, positions = done.freqs_cis, done.positions
    if out.dtype is torch.float8_e4m3fn:
        out = out.view(torch.uint8)
    elif interpret and out.dtype is torch.bfloat16:
        out = out.view(torch.int16)
    on_device = torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext()
    with on_device, _loading_allowed(q.device):
        sparse_decode_kernel[(programs,)](
            # An absent tensor's place is taken by one of the same type; nothing is read or written there.
            q.view(torch.int16) if interpret else q,
            caches[0],
            main.indices,
            main.indices if main.length is None else main.length,
            caches[1],
            other.indices,
            other.indices if other.length is None else other.length,
            out,
            lse,
            lse if scales is None else scales,
            lse if amax is None else amax,
            lse if done.attn_sink is None else done.attn_sink,
            lse if freqs is None else freqs,
            main.indices if positions is None else positions,
            main.indices.shape[1],
            other.indices.shape[1],
            main.cache.shape[0] * main.page_size,
            other.cache.shape[0] * other.page_size,
            main.page_size,
            other.page_size,
            num_splits,
            0 if freqs is None else freqs.shape[0],
            softmax_scale * math.log2(math.e),
            *divisor(num_splits),
            *divisor(main.page_size),
            *divisor(other.page_size),
            q.stride(0),
            q.stride(1),
            main.cache.stride(0),
            other.cache.stride(0),
            main.indices.stride(0),
            other.indices.stride(0),
            0 if main.length is None else main.length.stride(0),
            0 if other.length is None else other.length.stride(0),
            *out_strides,
            *lse_strides,
            *((0, 0) if scales is None else scales.stride()),
            *((0, 0) if amax is None else amax.stride()),
            0 if freqs is None else freqs.stride(0),
            0 if positions is None else positions.stride(0),
            lse if q_freqs is None else q_freqs,
            main.indices if q_positions is None else q_positions,
            q_eps or 0.0,
            0 if q_freqs is None else q_freqs.shape[0],
            0 if q_freqs is None else q_freqs.stride(0),
            0 if q_positions is None else q_positions.stride(0),
            Q_NORM=q_eps is not None,
            Q_ROPE=q_freqs is not None,
            NUM_HEADS=heads,
            LAYOUT=main.layout.code,
            EXTRA_LAYOUT=other.layout.code,
            EVEN=even,
            HAS_EXTRA=extra is not None,
            HAS_LENGTH=main.length is not None,
            HAS_EXTRA_LENGTH=other.length is not None,
            PARTIAL=partial,
            FILL_EMPTY=fill_empty,
            OUTPUT=done.output,
            HAS_SINK=done.attn_sink is not None,
            HAS_ROPE=freqs is not None,
            HAS_AMAX=amax is not None,
            LAUNCH_DEPENDENTS=partial and settings.pdl and capability[0] >= 9 and not interpret,
            INTERPRET=interpret,
            BLOCK_H=config.block_h,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
