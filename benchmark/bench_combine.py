"""Time of the combine kernel beside a device copy that moves the same bytes.

cold and warm medians as in benchmark/common.py. The bytes are those that have to move: the partials of all splits,
their LSEs, and the outputs.

    python benchmark/bench_combine.py --csv combine.csv
    python benchmark/bench_combine.py --splits 8 --tokens 1 256 --heads 64 --output fp8_group128 --rope --pdl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import Call, ColdTimer, comment, device_copy, nbytes, require_cuda, run_facts, warm_medians, write_csv

import sgl_dsv4_kernels  # noqa: F401  (loads the ops)
from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.reference.decode import OUTPUTS, empty_scales


def make_call(splits: int, tokens: int, heads: int, output: str, rope: bool, pdl: bool) -> tuple[Call, int]:
    """A call of the op and the bytes it has to move."""
    o_accum = torch.randn((splits, tokens, heads, HEAD_DIM), device="cuda")
    lse_accum = torch.randn((splits, tokens, heads), device="cuda")
    sink = torch.randn(heads, device="cuda")
    freqs = torch.randn((4096, 64), device="cuda") if rope else None
    positions = torch.randint(0, 4096, (tokens,), device="cuda") if rope else None
    dtype = torch.bfloat16 if output == "bf16" else torch.float8_e4m3fn
    out = torch.empty((tokens, heads, HEAD_DIM), dtype=dtype, device="cuda")
    lse = torch.empty((tokens, heads), device="cuda")
    scales = empty_scales(tokens, heads, output, torch.device("cuda"))

    def call() -> None:
        torch.ops.sgl_dsv4_kernels.combine_splits(
            o_accum, lse_accum, sink, freqs, positions, OUTPUTS.index(output), pdl, out, lse, scales, None
        )

    return call, nbytes(o_accum, lse_accum, out, lse, *([] if scales is None else [scales]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--output", choices=OUTPUTS, nargs="+", default=["bf16"])
    parser.add_argument("--rope", action="store_true", help="with inverse RoPE")
    parser.add_argument("--pdl", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--csv", type=Path, metavar="PATH")
    args = parser.parse_args()
    require_cuda()

    timer = ColdTimer()
    facts = run_facts() | {"rope": int(args.rope), "pdl": int(args.pdl)}
    print(comment(facts))
    print(f"{'output':>18} {'S':>3} {'T':>5} {'h':>4} {'MB':>7}   cache       us   GB/s  copy us  copy/ours")
    shapes = [(output, s, t, h) for output in args.output for h in args.heads for t in args.tokens for s in args.splits]
    rows = []
    for output, splits, tokens, heads in shapes:
        call, total_bytes = make_call(splits, tokens, heads, output, args.rope, args.pdl)
        calls = {"combine": call, "copy": device_copy(total_bytes)}
        for cache, times in (("cold", timer.medians(calls, args.repeats)), ("warm", warm_medians(calls, args.repeats))):
            us, copy_us = times["combine"], times["copy"]
            row = {
                "cache": cache, "output": output, "splits": splits, "tokens": tokens, "heads": heads,
                "megabytes": round(total_bytes / 1e6, 3), "us": round(us, 3),
                "gb_per_s": round(total_bytes / us / 1e3, 1), "copy_us": round(copy_us, 3),
                "copy_over_us": round(copy_us / us, 3),
            }  # fmt: skip
            rows.append(row | facts)
            print(
                f"{output:>18} {splits:3} {tokens:5} {heads:4} {row['megabytes']:7.2f}   {cache:5} {us:8.2f} "
                f"{row['gb_per_s']:6.0f} {copy_us:8.2f} {row['copy_over_us']:10.2f}",
                flush=True,
            )
    if args.csv:
        write_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
