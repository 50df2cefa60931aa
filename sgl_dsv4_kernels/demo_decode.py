"""The demo's second step: a decode over the rows that its first step stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM, ROPE_DIM
from sgl_dsv4_kernels.testing_decode import OUTPUT_BOUND, Problem, Source, lse_excess, relative_error, truth

if TYPE_CHECKING:
    from sgl_dsv4_kernels.demo import Rows

QUERIES, HEADS, WINDOW = 4, 16, 128
SPLIT_COUNTS = (1, 2, 4, 8)


def stored_cache(rows: Rows) -> torch.Tensor:
    """A cache with the call's rows in it, zeros elsewhere."""
    pages = rows.num_slots // rows.page_size
    layout = dk.CacheLayout.V4
    cache = torch.zeros(pages, layout.page_bytes(rows.page_size), dtype=torch.uint8, device=rows.kv.device)
    rows.call(cache, layout)
    return cache


def decode_step(main: Rows, extra: Rows, freqs: torch.Tensor) -> list[str]:
    """Attend to the last window of ``main`` and to all that ``extra`` stored, for several split counts; prints errors.

    Args:
        main, extra: store calls of the demo's first step. freqs: [P, 32] complex64.

    Returns:
        What went wrong, in words; empty if all is well.
    """
    device = main.kv.device
    sources = []
    for rows, most in ((main, WINDOW), (extra, 512)):
        slots = rows.row_slots[rows.stored].int()[-most:]
        length = (slots.shape[0] - torch.arange(QUERIES, device=device) * 7).int()  # later rows see fewer keys
        indices = slots.repeat(QUERIES, 1)
        sources.append(Source(stored_cache(rows), indices, length, rows.page_size, dk.CacheLayout.V4))
    window, compressed = sources
    positions = torch.arange(QUERIES, device=device) + 2000
    options = {"attn_sink": torch.randn(HEADS, device=device), "inverse_rope": (freqs, positions)}
    q = torch.randn(QUERIES, HEADS, HEAD_DIM, device=device).bfloat16()
    problem = Problem(q, window, compressed, options)
    want = truth(problem)

    print(
        f"\ndecode: {QUERIES} queries x {HEADS} heads over {window.indices.shape[1]} + {compressed.indices.shape[1]} "
        f"stored rows, sink, inverse RoPE of the last {ROPE_DIM}"
        "\nsplits   output error   bound   LSE error beyond its bound"
    )
    failures = []
    for splits in SPLIT_COUNTS:
        result = dk.sparse_decode(**problem.arguments(), **options, num_splits=splits)
        error, excess = relative_error(result.out, want.value), lse_excess(result.lse, want)
        failed = not error <= OUTPUT_BOUND or not excess <= 0
        print(f"{splits:6}   {error:12.5f}   {OUTPUT_BOUND:.4f}   {max(excess, 0.0):.1e}{'  FAILED' if failed else ''}")
        if failed:
            failures.append(f"decode with {splits} splits: error above its bound")
    return failures
