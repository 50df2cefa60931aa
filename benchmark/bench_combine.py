"""Time of the combine kernel beside a device copy that moves the same bytes.

cold: L2 flushed before each call, one call between two CUDA events (their overhead, 2 to 3 us, is in it and in the
copy).
warm: 20 calls in one CUDA graph, per call. Medians. The bytes are those that have to move: the partials of all splits,
their LSEs, and the outputs.

    python benchmark/bench_combine.py --csv combine.csv
    python benchmark/bench_combine.py --splits 8 --tokens 1 256 --heads 64 --output fp8_group128 --rope --pdl
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import sgl_dsv4_kernels  # noqa: F401  (loads the ops)

DIM = 512
OUTPUTS = ("bf16", "fp8_group128", "fp8_group128_ue8m0", "fp8_group32_ue8m0")
CALLS_PER_GRAPH = 20
COLUMNS = [
    "commit",
    "gpu",
    "cache",
    "output",
    "rope",
    "pdl",
    "splits",
    "tokens",
    "heads",
    "megabytes",
    "us",
    "gb_per_s",
]
COLUMNS += ["copy_us", "copy_gb_per_s", "ratio_to_copy"]


def commit() -> str:
    """Short commit of the source tree, "+" if it has changes."""
    here = Path(__file__).parent
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=here, text=True).strip()
        return head + ("+" if subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=here) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Timer:
    """Medians of a call's GPU time in microseconds."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(max(4 * l2, 256 << 20), dtype=torch.uint8, device="cuda")

    def _between_events(self, call: Callable[[], object], flush: bool) -> float:
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush:
                self.flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def cold(self, call: Callable[[], object]) -> float:
        call()
        return self._between_events(call, flush=True)

    def warm(self, call: Callable[[], object]) -> float:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                call()
        graph.replay()
        return self._between_events(graph.replay, flush=False) / CALLS_PER_GRAPH


def make_call(splits: int, tokens: int, heads: int, output: str, rope: bool, pdl: bool) -> tuple[Callable, int]:
    """A call of the op and the bytes it has to move."""
    o = torch.randn((splits, tokens, heads, DIM), device="cuda")
    lse_accum = torch.randn((splits, tokens, heads), device="cuda")
    sink = torch.randn(heads, device="cuda")
    freqs = torch.randn((4096, 64), device="cuda") if rope else None
    positions = torch.randint(0, 4096, (tokens,), device="cuda") if rope else None
    dtype = torch.bfloat16 if output == "bf16" else torch.float8_e4m3fn
    out = torch.empty((tokens, heads, DIM), dtype=dtype, device="cuda")
    lse = torch.empty((tokens, heads), device="cuda")
    scales = None
    if output == "fp8_group128_ue8m0":
        scales = torch.empty((tokens, heads), dtype=torch.int32, device="cuda")
    elif output != "bf16":
        scale_dtype = torch.float32 if output == "fp8_group128" else torch.int32
        scales = torch.empty((heads * 4, (tokens + 3) // 4 * 4), dtype=scale_dtype, device="cuda").t()[:tokens]

    def call() -> None:
        torch.ops.sgl_dsv4_kernels.combine_splits(
            o, lse_accum, sink, freqs, positions, OUTPUTS.index(output), pdl, out, lse, scales, None
        )

    moved = [o, lse_accum, out, lse] + ([scales] if scales is not None else [])
    return call, sum(t.numel() * t.element_size() for t in moved)


def make_copy(total_bytes: int) -> Callable[[], object]:
    """A copy that reads and writes `total_bytes` in all."""
    source = torch.empty(total_bytes // 2, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--output", choices=OUTPUTS, nargs="+", default=["bf16"])
    parser.add_argument("--rope", action="store_true", help="with inverse RoPE")
    parser.add_argument("--pdl", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--csv", type=Path, help="write the rows here too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_combine.py: needs a CUDA device")

    timer = Timer(args.repeats)
    common = {"commit": commit(), "gpu": torch.cuda.get_device_name(), "rope": int(args.rope), "pdl": int(args.pdl)}
    shapes = [(output, s, t, h) for output in args.output for h in args.heads for t in args.tokens for s in args.splits]
    rows = []
    print(f"{common['gpu']}, commit {common['commit']}, rope {args.rope}, pdl {args.pdl}")
    print(
        f"{'output':>18} {'S':>3} {'T':>5} {'h':>4} {'MB':>7}   {'cache':5} {'us':>8} {'GB/s':>6} {'copy us':>8} ratio"
    )
    for output, splits, tokens, heads in shapes:
        call, total_bytes = make_call(splits, tokens, heads, output, args.rope, args.pdl)
        copy = make_copy(total_bytes)
        for cache, measure in (("cold", timer.cold), ("warm", timer.warm)):
            us, copy_us = measure(call), measure(copy)
            row = common | {
                "cache": cache, "output": output, "splits": splits, "tokens": tokens, "heads": heads,
                "megabytes": round(total_bytes / 1e6, 3), "us": round(us, 3),
                "gb_per_s": round(total_bytes / us / 1e3, 1), "copy_us": round(copy_us, 3),
                "copy_gb_per_s": round(total_bytes / copy_us / 1e3, 1), "ratio_to_copy": round(copy_us / us, 3),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{output:>18} {splits:3} {tokens:5} {heads:4} {row['megabytes']:7.2f}   {cache:5} {us:8.2f} "
                f"{row['gb_per_s']:6.0f} {copy_us:8.2f} {row['ratio_to_copy']:5.2f}",
                flush=True,
            )
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
