"""Time of the two store ops beside SGLang's kernels and a device copy that moves the same bytes.

    python benchmark/bench_norm_rope_store.py --csv store.csv
    python benchmark/bench_norm_rope_store.py --entry compress --input fp32 --bf16-store --n 1 64 16384

Inputs are shaped as SGLang's DeepSeek-V4 layer makes them. main: bf16 rows that are a slice of a 1536 wide product,
int64 positions, int32 slots, page 256. compress: contiguous fp32 rows (bf16 with --input), plans in which every row is
stored, int64 slots, page 64, ratio 4. Slots and positions are as a prefill makes them: tokens fill pages in order, the
pages come in random order, positions are consecutive; --random scatters both.

Timing (L2-cold medians, contenders in random order): see benchmark/common.py. The bytes of the copy are those
that the op has to move: kv row, plan or position, slot, RoPE factors and stored bytes of every row, the weight once;
half of them are read, half written. Without sglang the stock column stays empty. SGLang's main store knows no bf16
cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from common import (
    COLOURS,
    Call,
    ColdTimer,
    Progress,
    comment,
    device_copy,
    log2_axis,
    new_figure,
    require_cuda,
    run_facts,
    write_csv,
)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, NUM_SCALES, ROPE_DIM
from sgl_dsv4_kernels.testing import decode_plan, empty_cache, extend_plan, stock_store, yarn_freqs_cis

DEFAULT_N = [1, 8, 64, 256, 1024, 2048, 4096, 8192, 16384, 65536]
NUM_POSITIONS = 1 << 18
EPS = 1e-6
RATIO = 4
MAIN_ROW_STRIDE = 1536  # q_lora_rank 1024 + 512: kv is a slice of the fused projection
MAIN_PAGE = 256
COMPRESS_PAGE = 64
MAX_RAGGED_ROWS = 65535  # a CompressPlan's ragged_id has 16 bits
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED_BYTES = {
    dk.CacheLayout.V4: NOPE_DIM + ROPE_DIM * 2 + NUM_SCALES,
    dk.CacheLayout.BF16: HEAD_DIM * 2,
}


class Case(NamedTuple):
    """One curve of the plot."""

    entry: str  # main, compress
    mode: str  # main: "-"; compress: decode, extend
    input: str  # fp32, bf16
    layout: dk.CacheLayout

    def __str__(self) -> str:
        mode = "" if self.mode == "-" else f" {self.mode}"
        return f"{self.entry}{mode}, {self.input} in, {self.layout.value} cache"


@dataclass(frozen=True)
class Target:
    """A speed line of the store kernel on an H200: auto / contender is at most `limit` for n in a range."""

    against: str
    lowest_n: int
    highest_n: int
    limit: float


TARGETS = [
    Target("stock", 1, 64, 0.95),
    Target("stock", 1, 1 << 30, 1.03),
    Target("copy", 8192, 65535, 1.25),
    Target("copy", 65536, 1 << 30, 1.15),
]


# ---- inputs


def make_slots(n: int, page_size: int, random: bool, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """n distinct slots of a pool of twice that size (at least 64 pages), and the pool's pages."""
    pages = max(64, -(-2 * n // page_size))
    if random:
        slots = torch.randperm(pages * page_size, device="cuda")[:n]
    else:
        index = torch.arange(n, device="cuda")
        slots = torch.randperm(pages, device="cuda")[index // page_size] * page_size + index % page_size
    return slots.to(dtype), pages


def make_positions(n: int, random: bool, step: int) -> torch.Tensor:
    """n multiples of step inside the RoPE table, distinct until the table is used up: [n] int64."""
    choices = NUM_POSITIONS // step
    order = torch.randperm(choices, device="cuda") if random else torch.arange(choices, device="cuda")
    return order[torch.arange(n, device="cuda") % choices] * step


def make_calls(case: Case, n: int, random: bool, freqs: torch.Tensor, stock) -> tuple[dict[str, Call], int]:
    """The contenders (K=1, K=4, auto, stock if it can, copy) and the bytes that the op has to move."""
    dtype = DTYPES[case.input]
    weight = (1 + 0.1 * torch.randn(HEAD_DIM, device="cuda")).to(dtype)
    positions = make_positions(n, random, 1 if case.entry == "main" else RATIO)
    if case.entry == "main":
        page_size = MAIN_PAGE
        kv = torch.randn(n, MAIN_ROW_STRIDE, device="cuda").to(dtype)[:, -HEAD_DIM:]
        slots, pages = make_slots(n, page_size, random, torch.int32)
        index_bytes = 8
        arguments = (kv, weight, EPS, freqs, positions, slots)
        keywords = {}
        ours, theirs = dk.norm_rope_store, stock and stock.norm_rope_store
        if case.layout is not dk.CacheLayout.V4:
            theirs = None
    else:
        page_size = COMPRESS_PAGE
        kv = torch.randn(n, HEAD_DIM, device="cuda").to(dtype)
        slots, pages = make_slots(n, page_size, random, torch.int64)
        index_bytes = 16
        decode = case.mode == "decode"
        seq_lens = positions + RATIO  # RoPE position = seq_len - ratio
        plan = decode_plan(seq_lens) if decode else extend_plan(seq_lens, torch.arange(n, device="cuda"))
        arguments = (kv, plan, weight, EPS, freqs, slots)
        keywords = {"compress_ratio": RATIO, "is_decode": decode}
        ours, theirs = dk.compress_norm_rope_store, stock and stock.compress_norm_rope_store
    cache = empty_cache(pages, page_size, case.layout, "cuda")
    keywords |= {"page_size": page_size, "layout": case.layout}

    def with_k(tokens_per_block: int | None) -> Call:
        return lambda: ours(*arguments, cache, **keywords, tokens_per_block=tokens_per_block)

    row_bytes = HEAD_DIM * kv.element_size() + index_bytes + slots.element_size() + ROPE_DIM * 4
    total_bytes = n * (row_bytes + STORED_BYTES[case.layout]) + weight.numel() * weight.element_size()
    calls = {"K=1": with_k(1), "K=4": with_k(4), "auto": with_k(None)}
    if theirs:
        calls["stock"] = lambda: theirs(*arguments, cache, **keywords)
    calls["copy"] = device_copy(total_bytes)
    return calls, total_bytes


# ---- measurement and output

CONTENDERS = ["K=1", "K=4", "auto", "stock", "copy"]


def column(contender: str) -> str:
    """Its name in the CSV file."""
    return f"{contender.replace('=', '').lower()}_us"


def header() -> str:
    return f"{'N':>6}  {'mode':36}" + "".join(f"{name:>9}" for name in CONTENDERS) + "  auto/stock  auto/copy    GB/s"


def ratio(times: dict[str, float], against: str) -> float | None:
    return times["auto"] / times[against] if against in times else None


def line(case: Case, n: int, times: dict[str, float], total_bytes: int) -> str:
    cells = "".join(f"{times[name]:9.2f}" if name in times else f"{'-':>9}" for name in CONTENDERS)
    ratios = [ratio(times, against) for against in ("stock", "copy")]
    texts = [f"{r:.2f}" if r else "-" for r in ratios]
    return f"{n:6}  {case!s:36}{cells}  {texts[0]:>10}  {texts[1]:>9}  {total_bytes / times['auto'] / 1e3:6.0f}"


def record(case: Case, n: int, times: dict[str, float], total_bytes: int, order: str, repeats: int) -> dict:
    """A CSV row."""
    row = {
        "entry": case.entry, "mode": case.mode, "input": case.input, "layout": case.layout.value, "order": order,
        "n": n, "bytes": total_bytes, "repeats": repeats,
    }  # fmt: skip
    for name in CONTENDERS:
        row[column(name)] = f"{times[name]:.3f}" if name in times else ""
    for against in ("stock", "copy"):
        r = ratio(times, against)
        row[f"auto_over_{against}"] = f"{r:.4f}" if r else ""
    return row


def check_targets(case: Case, n: int, times: dict[str, float]) -> tuple[int, list[str]]:
    """How many speed lines a measurement can be held against, and those that it misses, in words."""
    checked, missed = 0, []
    for target in TARGETS:
        r = ratio(times, target.against)
        if r is not None and target.lowest_n <= n <= target.highest_n:
            checked += 1
            if r > target.limit:
                missed.append(f"N={n}, {case}: auto / {target.against} = {r:.3f}, at most {target.limit} wanted")
    return checked, missed


def drop_failing_stock(case: Case, calls: dict[str, Call]) -> None:
    """SGLang's kernels are compiled at their first call; where that fails, the benchmark goes on without them."""
    if "stock" not in calls:
        return
    try:
        calls["stock"]()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"# {case}: no stock column: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
        del calls["stock"]


Y_TICKS = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]  # us
Results = dict[Case, dict[int, dict[str, float]]]


def from_csv(rows: Iterable[Mapping[str, str]]) -> Results:
    """The times of the rows of a CSV file."""
    results: Results = {}
    for row in rows:
        case = Case(row["entry"], row["mode"], row["input"], dk.CacheLayout(row["layout"]))
        times = {name: row[column(name)] for name in CONTENDERS}
        results.setdefault(case, {})[int(row["n"])] = {name: float(us) for name, us in times.items() if us}
    return results


def plot(path: Path, rows: Sequence[Mapping[str, str]], facts: Mapping[str, str]) -> None:
    """Per case: time against N (log-log) above the ratios auto / stock and auto / copy. Called by scripts/results.py
    --plots."""
    results = from_csv(rows)
    columns = min(len(results), 3)
    bands = -(-len(results) // columns)
    figure = new_figure(figsize=(3.9 * columns, 5.2 * bands), layout="constrained")
    axes = figure.subplots(
        2 * bands, columns, squeeze=False, sharex="col", sharey="row", height_ratios=[2.2, 1] * bands
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for index, (case, by_n) in enumerate(results.items()):
        top, bottom = (axes[2 * (index // columns) + half][index % columns] for half in (0, 1))
        ns = sorted(by_n)
        top.set_visible(True)
        bottom.set_visible(True)
        for name in CONTENDERS:
            points = [(n, by_n[n][name]) for n in ns if name in by_n[n]]
            if points:
                thin = name.startswith("K=")
                style = {"lw": 1.0, "ls": ":"} if thin else {"ls": "--"} if name == "copy" else {"marker": "o"}
                top.plot(*zip(*points, strict=True), color=COLOURS[name], label=name, **style)
        for against in ("stock", "copy"):
            points = [(n, ratio(by_n[n], against)) for n in ns if against in by_n[n]]
            if points:
                style = "--" if against == "copy" else "-"
                colour = COLOURS[against]
                bottom.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=f"auto / {against}")
        top.set_yscale("log")
        top.set_title(str(case), loc="left")
        log2_axis(top, ns)
        log2_axis(bottom, ns)
        for label in bottom.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")
        top.set_yticks([t for t in Y_TICKS if top.get_ylim()[0] <= t <= top.get_ylim()[1]])
        top.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        top.minorticks_off()
        bottom.tick_params(labelbottom=True)
        top.tick_params(labelbottom=False)
        bottom.axhline(1, color="black", lw=0.8)
        bottom.set_ylim(0, max(2.0, bottom.get_ylim()[1]))
        bottom.set_xlabel("rows N")
        if index % columns == 0:
            top.set_ylabel("time, us (cold L2)")
            bottom.set_ylabel("ratio (< 1: faster)")
        if index == 0:
            top.legend()
            bottom.legend(loc="upper center", ncols=2)
    figure.suptitle(
        "norm + RoPE + store: {gpu}, torch {torch}, driver {driver}, commit {commit}".format(**facts), fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def make_cases(args: argparse.Namespace) -> list[Case]:
    layouts = {
        "v4": [dk.CacheLayout.V4],
        "bf16": [dk.CacheLayout.BF16],
        "all": [dk.CacheLayout.V4, dk.CacheLayout.BF16],
    }["bf16" if args.bf16_store else args.layout]
    inputs = ["fp32", "bf16"] if args.input == "all" else [args.input]
    modes = ["decode", "extend"] if args.extend else ["decode"]
    cases = []
    for layout in layouts:
        if args.entry in ("main", "all"):
            cases.append(Case("main", "-", "bf16", layout))
        if args.entry in ("compress", "all"):
            cases += [Case("compress", mode, kind, layout) for mode in modes for kind in inputs]
    return cases


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", choices=["main", "compress", "all"], default="all")
    parser.add_argument("--input", choices=["fp32", "bf16", "all"], default="all", help="of compress; main is bf16")
    parser.add_argument("--layout", choices=["v4", "bf16", "all"], default="v4", help="of the cache")
    parser.add_argument("--bf16-store", action="store_true", help="the same as --layout bf16")
    parser.add_argument("--extend", action="store_true", help="compress: extend plans too")
    parser.add_argument("--random", action="store_true", help="slots and positions in random order")
    parser.add_argument("--n", type=int, nargs="+", default=DEFAULT_N, metavar="N", help="rows")
    parser.add_argument("--iters", type=int, default=300, help="repetitions (a fifth of them for N > 8192)")
    parser.add_argument("--csv", type=Path, metavar="PATH")
    parser.add_argument("--check", action="store_true", help="exit 1 if a speed line of the H200 is missed")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    require_cuda()
    torch.manual_seed(0)
    cases = make_cases(args)
    facts = run_facts()
    stock, reason = stock_store()
    print(comment(facts))
    print(f"# us, {'random' if args.random else 'paged'} slots{'' if stock else f'; no stock column: {reason}'}")
    print(header(), flush=True)

    timer = ColdTimer()
    progress = Progress(len(cases) * len(args.n))
    freqs = yarn_freqs_cis(NUM_POSITIONS, "cuda")
    rows, missed, checked, with_stock = [], [], 0, False
    for case in cases:
        for n in args.n:
            progress.step(f"{case}, N={n}")
            if case.mode == "extend" and n > MAX_RAGGED_ROWS:
                continue
            calls, total_bytes = make_calls(case, n, args.random, freqs, stock)
            drop_failing_stock(case, calls)
            with_stock |= "stock" in calls
            repeats = args.iters if n <= 8192 else max(args.iters // 5, 1)
            times = timer.medians(calls, repeats)
            order = "random" if args.random else "paged"
            rows.append(record(case, n, times, total_bytes, order, repeats) | facts)
            case_checked, case_missed = check_targets(case, n, times)
            checked += case_checked
            missed += case_missed
            print(line(case, n, times, total_bytes), flush=True)

    if args.csv and rows:
        write_csv(args.csv, rows)
    if args.check or facts["gpu"].startswith("NVIDIA H200"):
        print("".join(f"# missed: {text}\n" for text in missed), end="")
        print(f"# speed lines missed: {len(missed)} of {checked}{'' if with_stock else ' (none against SGLang)'}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
