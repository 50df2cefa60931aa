"""Time of the sparse decode, as it splits by itself and at the counts of --splits, beside FlashMLA's Hopper kernel.

    python benchmark/bench_sparse_decode.py --csv sparse_decode.csv
    python benchmark/bench_sparse_decode.py --b 1 8 --heads 8 64 --topk 128 --extra 512 1024 --splits 1 4 8

Two V4 caches (pages of 256 and 64 tokens) of random rows, random slots, full lengths, a sink, bf16 output. Peers:
sgl_dsv4_kernels/testing_peers.py; one that is missing has no column. FlashMLA's scheduler metadata is prepared outside
its time.

cold: one replay of a CUDA graph after a write larger than L2 (benchmark/common.py). warm: per call of a graph of 20.
Bytes count every key once a row, plus q, output and LSE; the roofline is the larger of bytes over the copy's bandwidth
(4.27 TB/s) and FLOP over the matrix rate (790 TFLOP/s) that an H200 was measured at.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common import (
    Call,
    ColdTimer,
    Progress,
    comment,
    plot_by_heads,
    require_cuda,
    run_facts,
    warm_medians,
    write_csv,
)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM
from sgl_dsv4_kernels.ops.decode import resolve_backend
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.split_partition import choose_num_splits
from sgl_dsv4_kernels.testing_decode import Problem
from sgl_dsv4_kernels.testing_peers import flashmla, flashmla_call, sglang_triton, sglang_triton_call

MAIN_PAGE, EXTRA_PAGE = 256, 64
COPY_BYTES_PER_US = 4.27e6
MATMUL_FLOP_PER_US = 790e6
V4 = dk.CacheLayout.V4


def random_cache(tokens: int, page_size: int) -> torch.Tensor:
    """[pages, page_bytes] uint8: random e4m3 codes and bf16 RoPE values, one scale."""
    pages = -(-tokens // page_size)
    cache = torch.empty(pages, V4.page_bytes(page_size), dtype=torch.uint8, device="cuda")
    cache[:, V4.scale_offset(page_size) :] = 127 - 7
    rows = cache[:, : V4.scale_offset(page_size)].view(pages, page_size, V4.data_bytes)
    for first in range(0, pages, 512):  # in slices: the fp32 draws are large
        part = rows[first : first + 512]
        codes = torch.randn(*part.shape[:2], NOPE_DIM, device="cuda") * 40
        part[..., :NOPE_DIM] = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        rope = torch.randn(*part.shape[:2], HEAD_DIM - NOPE_DIM, device="cuda").bfloat16()
        part[..., NOPE_DIM:] = rope.view(torch.uint8)
    return cache


def make_problem(caches: tuple[torch.Tensor, torch.Tensor], b: int, heads: int, topk: int, extra_topk: int) -> Problem:
    """Random queries and slots, full lengths, a sink."""

    def source(cache: torch.Tensor, page_size: int, keys: int) -> Source:
        slots = torch.randint(0, cache.shape[0] * page_size, (b, keys), device="cuda", dtype=torch.int32)
        length = torch.full((b,), keys, device="cuda", dtype=torch.int32)
        return Source(cache, slots, length, page_size, V4)

    main = source(caches[0], MAIN_PAGE, topk)
    extra = source(caches[1], EXTRA_PAGE, extra_topk) if extra_topk else None
    q = torch.randn(b, heads, HEAD_DIM, device="cuda").bfloat16()
    return Problem(q, main, extra, {"attn_sink": torch.randn(heads, device="cuda")})


def make_calls(problem: Problem, backends: list[str | None], splits: list[int], peers: dict) -> dict[str, Call]:
    """The contenders of one shape: auto and S=.. of the first backend, auto of the others, the peers."""

    def ours(backend: str | None, num_splits: int | None) -> Call:
        keywords = problem.arguments() | problem.options
        return lambda: dk.sparse_decode(**keywords, num_splits=num_splits, backend=backend)

    calls = {"auto": ours(backends[0], None)} | {f"S={s}": ours(backends[0], s) for s in splits}
    calls |= {backend: ours(backend, None) for backend in backends[1:]}
    return calls | {name: make(api, problem) for name, (api, make) in peers.items()}


def num_splits(backend: str, b: int, heads: int, keys: int, sm_count: int) -> int:
    """What num_splits=None means to a backend."""
    if backend == "sm90":
        return sm90_decode.choose_plan(b, heads, keys, sm_count).num_splits
    return choose_num_splits(b, heads, keys, sm_count)


def roofline_us(b: int, heads: int, keys: int) -> tuple[float, float, float]:
    """Bytes, FLOP and the time that the larger of the two needs."""
    io = b * heads * (HEAD_DIM * 4 + 4) + b * keys * 4
    total_bytes = b * keys * (V4.data_bytes + V4.scale_bytes) + io
    flop = 4.0 * b * heads * keys * HEAD_DIM
    return total_bytes, flop, max(total_bytes / COPY_BYTES_PER_US, flop / MATMUL_FLOP_PER_US)


def plot(path: Path, rows: list[dict], facts: dict[str, str]) -> None:
    """Warm time against b, auto and FlashMLA, a panel per head count, a colour per extra key count.

    Called by scripts/results.py --plots.
    """
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")

    def lines(mine: list[dict]) -> Iterator[tuple]:
        for colour, extra in zip(colours, sorted({row["extra"] for row in mine}), strict=False):
            points = [row for row in mine if row["extra"] == extra]
            for name, style in (("auto", "-o"), ("FlashMLA", "--")):
                label = f"{'ours' if name == 'auto' else name}, {points[0]['topk']} + {extra} keys"
                yield points, f"{name}_warm_us", style, colour, label

    title = "sparse decode: {gpu}, torch {torch}, commit {commit}".format(**facts)
    plot_by_heads(path, rows, sorted({row["heads"] for row in rows}), lines, "time, us (warm)", title)


def shape_options(heads: list[int], extra: list[int], iters: int) -> argparse.ArgumentParser:
    """A parent parser with the options of the decode benchmarks, and these defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    rows = [1, 2, 4, 8, 16, 32, 64, 96, 128, 144, 192, 256, 384]
    parser.add_argument("--b", type=int, nargs="+", default=rows, help="rows (b * s_q)")
    parser.add_argument("--heads", type=int, nargs="+", default=heads)
    parser.add_argument("--topk", type=int, default=128, help="keys of the first cache")
    parser.add_argument("--extra", type=int, nargs="+", default=extra, help="keys of the second cache, 0 for none")
    parser.add_argument("--tokens", type=int, default=200_000, help="of each cache")
    parser.add_argument("--iters", type=int, default=iters, help="repetitions")
    parser.add_argument("--csv", type=Path, metavar="PATH")
    return parser


def problems(args: argparse.Namespace) -> Iterator[tuple[dict[str, int], Problem]]:
    """The problems that `shape_options` asks for, with progress, and their shapes as columns."""
    caches = random_cache(args.tokens, MAIN_PAGE), random_cache(args.tokens, EXTRA_PAGE)
    shapes = list(itertools.product(args.heads, args.extra, args.b))
    progress = Progress(len(shapes))
    for heads, extra, b in shapes:
        progress.step(f"{heads} heads, {args.topk} + {extra} keys, b={b}")
        shape = {"heads": heads, "topk": args.topk, "extra": extra, "b": b}
        yield shape, make_problem(caches, b, heads, args.topk, extra)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shape_options(heads=[8, 16, 32, 64, 128], extra=[512, 1024], iters=20)],
    )
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="split counts beside auto")
    parser.add_argument(
        "--backend", nargs="+", default=[None], help="of auto and the split counts; further ones get a column each"
    )
    parser.add_argument("--sglang-triton", action="store_true", help="a column for SGLang's Triton decode")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    require_cuda()
    torch.manual_seed(0)
    facts = run_facts()
    peers = {}
    for name, (api, reason), make in (
        ("FlashMLA", flashmla(), flashmla_call),
        ("SGLang Triton", sglang_triton() if args.sglang_triton else (None, ""), sglang_triton_call),
    ):
        if api is None and reason:
            print(f"# no column {name}: {reason}")
        elif api is not None:
            peers[name] = (api, make)
    print(comment(facts))
    backend = resolve_backend(args.backend[0], torch.device("cuda"))
    print(f"# us, cold / warm; backend {backend}")
    names = ["auto", *(f"S={s}" for s in args.splits), *args.backend[1:], *peers]
    print(
        f"{'heads':>5} {'keys':>10} {'b':>4} {'S':>3}"
        + "".join(f"{name:>16}" for name in names)
        + "  FlashMLA/auto  roof"
    )
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    timer = ColdTimer()
    rows = []
    for shape, problem in problems(args):
        heads, b, extra = shape["heads"], shape["b"], shape["extra"]
        calls = make_calls(problem, args.backend, args.splits, peers)
        cold, warm = timer.medians(calls, args.iters), warm_medians(calls, max(args.iters // 3, 3))
        total_bytes, flop, roof = roofline_us(b, heads, args.topk + extra)
        chosen = num_splits(backend, b, heads, args.topk + extra, sm_count)
        cut = sm90_decode.choose_cut(b, heads, args.topk + extra, sm_count) if backend == "sm90" else None
        row = {"backend": backend, **shape, "auto_splits": chosen}
        row |= {"auto_split_rows": b - cut.whole if cut else 0, "auto_rest_splits": cut.num_splits if cut else ""}
        for name in names:
            row[f"{name}_cold_us"], row[f"{name}_warm_us"] = f"{cold[name]:.2f}", f"{warm[name]:.2f}"
        row["gb_per_s"] = f"{total_bytes / warm['auto'] / 1e3:.0f}"
        row["tflop_per_s"] = f"{flop / warm['auto'] / 1e6:.1f}"
        row["roofline_share"] = f"{roof / warm['auto']:.3f}"
        rows.append(row | facts)
        cells = "".join(f"{cold[name]:8.1f} /{warm[name]:6.1f}" for name in names)
        ratio = f"{warm['FlashMLA'] / warm['auto']:13.2f}" if "FlashMLA" in warm else f"{'-':>13}"
        print(
            f"{heads:5} {args.topk:4} +{extra:4} {b:4} {chosen:3}{cells}  {ratio}  {roof / warm['auto']:4.2f}",
            flush=True,
        )
    if args.csv:
        write_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
