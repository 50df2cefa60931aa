"""What limits the sparse decode: how busy it keeps the units of the GPU, by Nsight Compute (ncu).

    python benchmark/decode_limits.py --csv decode_limits.csv
    python benchmark/decode_limits.py --cells 64x1 8x128 64x32+0 --extra 1024

A cell is HEADSxROWS: a problem as in bench_sparse_decode.py, backend sm90, automatic splits, the call that
bench_decode_chain.py times for a bf16 output, with the query's norm and RoPE and the inverse RoPE. HEADSxROWS+EXTRA has
EXTRA keys of the second cache: none or few, as in layers that attend to the window alone or to few compressed tokens
besides. All cells run in one process below ncu, each WARM_CALLS times unprofiled and then once profiled; launches keep
their order.

ncu replays every kernel for its counters, with --cache-control none (what fits stays in L2) and --clock-control none
(sm_mhz is the clock that the GPU chose). A kernel runs alone, without programmatic launch: decode and combine do not
overlap, so their sum is more than the time of bench_sparse_decode.py. A metric that this ncu or GPU does not have is
n/a, in the CSV empty.

Percentages of tensor pipe, shared memory and issue slots: of the cycles in which an SM had warps, which are
sm_active_pct of all cycles of all SMs. L2, DRAM: of the whole kernel. Shared memory: the larger of the wavefronts of
loads and stores, and reads + writes of the data banks, which hold L1 too. Stalls: shares of the warps' time.

limit: the unit with the largest of these five percentages, if that is 60 or more; otherwise latency, with the unit that
is nearest. Behind it stands what leaves SMs idle: "N of M SMs" with fewer blocks than SMs, "W waves" if there is more
than one and W / ceil(W) is below 0.8.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from bench_decode_chain import POSITIONS, our_call
from bench_sparse_decode import EXTRA_PAGE, MAIN_PAGE, make_problem, random_cache
from common import Progress, comment, require_cuda, run_facts, write_csv

from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.testing_decode import random_freqs

CELLS = [f"64x{b}" for b in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)]
CELLS += [f"{heads}x{b}" for heads in (8, 16, 32, 128) for b in (1, 4, 8, 16, 32, 64, 128)]
CELLS += [f"64x{b}+{extra}" for extra in (0, 32) for b in (1, 8, 16, 32, 64)]
WARM_CALLS = 20
LIMIT_PCT = 60.0
FULL_WAVES = 0.8
CHIP = "gh100"
KERNELS = r"(raw_tiles|raw_parts|sparse_decode|many_parts|combine)_kernel"
ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
METRICS = {
    "us": ["gpu__time_duration.sum"],
    "sm_mhz": ["smsp__cycles_elapsed.avg.per_second", "sm__cycles_elapsed.avg.per_second"],
    "waves": ["launch__waves_per_multiprocessor"],
    "sm_active_pct": [f"sm__cycles_active{ELAPSED}"],
    "occupancy_pct": ["sm__warps_active.avg.pct_of_peak_sustained_active"],
    "tensor_pct": [f"sm__pipe_tensor_cycles_active{ELAPSED}", f"sm__pipe_tensor_op_hmma_cycles_active{ELAPSED}"],
    "shared_lsu_pct": [f"l1tex__data_pipe_lsu_wavefronts_mem_shared{ELAPSED}"],
    "bank_read_pct": [f"l1tex__data_bank_reads{ELAPSED}"],
    "bank_write_pct": [f"l1tex__data_bank_writes{ELAPSED}"],
    "issue_pct": [f"smsp__issue_active{ELAPSED}", f"sm__issue_active{ELAPSED}"],
    "l2_pct": [f"lts__throughput{ELAPSED}"],
    "l2_gb_per_s": ["lts__t_bytes.sum.per_second"],
    "dram_pct": [f"gpu__dram_throughput{ELAPSED}"],
    "dram_gb_per_s": ["dram__bytes.sum.per_second"],
}
"""By column; of several metrics the largest that there is counts. wgmma is in the tensor pipe's hmma."""
SCALES = {"us": 1e6, "sm_mhz": 1e-6, "l2_gb_per_s": 1e-9, "dram_gb_per_s": 1e-9}
WHILE_ACTIVE = ("tensor_pct", "shared_lsu_pct", "bank_read_pct", "bank_write_pct", "issue_pct")
UNITS = {
    "tensor_pct": "tensor",
    "shared_pct": "shared memory",
    "issue_pct": "issue slots",
    "l2_pct": "L2",
    "dram_pct": "DRAM",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Launch(NamedTuple):
    """A profiled kernel: "decode" or "combine", blocks, metrics in base units (those that were measured)."""

    kernel: str
    blocks: int
    values: dict[str, float]


# ---- ncu's output


def scale(unit: str) -> float:
    """Of a unit like "Gbyte" or "ns"."""
    prefixed = re.match(r"([numKMGT])(second|s|byte|hz|Hz|cycle)", unit)
    return PREFIXES[prefixed[1]] if prefixed else 1.0


def base_value(text: str, unit: str) -> float | None:
    """A number of ncu in seconds, bytes, hertz; None for what is none."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    upper, _, lower = unit.partition("/")
    return value * scale(upper) / scale(lower) if math.isfinite(value) else None


def parse(text: str) -> list[Launch]:
    """The launches in the output of ``ncu --csv --page raw``: a line of names, one of units, one a launch."""
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if not table or table[0][0] != "ID":
        return []
    names, units, *records = table
    launches = []
    for record in records:
        cells = dict(zip(names, record, strict=False))
        numbers = {n: base_value(cell, unit) for n, cell, unit in zip(names, record, units, strict=False) if "__" in n}
        blocks = math.prod(map(int, re.findall(r"\d+", cells["Grid Size"])))
        kernel = "combine" if "combine_kernel" in cells["Kernel Name"] else "decode"
        launches.append(Launch(kernel, blocks, {name: v for name, v in numbers.items() if v is not None}))
    return launches


def top_stalls(values: Mapping[str, float], count: int = 3) -> str:
    """The reasons that warps wait for longest and their shares of the warps' time in percent; "" if not measured."""
    times = {reason: values[STALL.format(reason)] for reason in REASONS if STALL.format(reason) in values}
    total = sum(times.values())
    times.pop("selected", None)
    ranked = sorted(times, key=lambda reason: -times[reason])[:count] if total else []
    return "; ".join(f"{reason} {100 * times[reason] / total:.0f}" for reason in ranked)


def limit(row: Mapping[str, object]) -> str:
    """What limits a launch: the rule of this file's docstring."""
    used = {name: row[column] for column, name in UNITS.items() if row[column] is not None}
    most = max(used, key=used.get) if used else None
    text = f"{most} {used[most]:.0f} %" if used else "nothing measured"
    if used and used[most] < LIMIT_PCT:
        text = f"latency (most: {text})"
    if row["blocks"] < row["sms"]:
        return f"{text}, {row['blocks']} of {row['sms']} SMs"
    waves = row["waves"]
    return text + (f", {waves:.1f} waves" if (waves or 0) > 1 and waves / math.ceil(waves) < FULL_WAVES else "")


def make_row(launch: Launch, sms: int) -> dict[str, object]:
    """The columns that are measured; None for what is missing."""
    row: dict[str, object] = {"blocks": launch.blocks, "sms": sms}
    for column, metrics in METRICS.items():
        found = [launch.values[metric] for metric in metrics if metric in launch.values]
        row[column] = max(found) * SCALES.get(column, 1.0) if found else None
    for column in WHILE_ACTIVE:
        if row[column] is not None and row["sm_active_pct"]:
            row[column] *= 100 / row["sm_active_pct"]
    lsu, *banks = (row[column] for column in ("shared_lsu_pct", "bank_read_pct", "bank_write_pct"))
    shared = [lsu, None if None in banks else sum(banks)]
    row["shared_pct"] = max((value for value in shared if value is not None), default=None)
    return row | {"stalls": top_stalls(launch.values), "limit": limit(row)}


# ---- runs


def wanted_metrics(ncu: str) -> list[str]:
    """The metrics that ncu knows for the chip; all of them where it does not say."""
    metrics = [metric for several in METRICS.values() for metric in several] + [STALL.format(r) for r in REASONS]
    query = subprocess.run([ncu, "--query-metrics", "--chips", CHIP], capture_output=True, text=True)
    known = set(re.findall(r"^\s*(\w+__\w+)", query.stdout, re.MULTILINE))
    if "gpu__time_duration" not in known:
        return metrics
    return [metric for metric in metrics if metric.startswith("launch__") or metric.split(".")[0] in known]


def profile(ncu: str, arguments: Sequence[str]) -> list[Launch]:
    """Runs this script as ncu's child. Metrics that ncu refuses by name are left out. Exits without a result."""
    metrics = wanted_metrics(ncu)
    child = [sys.executable, __file__, "--child", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        command += ["--kernel-name", f"regex:{KERNELS}"]
        for _ in range(3):
            run = subprocess.run([*command, "--metrics", ",".join(metrics), *child])
            text = log.read_text() if log.is_file() else ""
            launches = parse(text)
            if run.returncode == 0 and launches:
                return launches
            complaints = "\n".join(line for line in text.splitlines() if re.match(r"==(ERROR|WARNING)==", line))
            refused = {metric for metric in metrics if re.search(rf"\b{metric.split('.')[0]}\b", complaints)}
            if not refused:
                break
            metrics = [metric for metric in metrics if metric not in refused]
    sys.exit(f"decode_limits.py: ncu gave no figures (status {run.returncode})\n{text[-3000:]}")


def run_cells(args: argparse.Namespace) -> None:
    """The child: every cell a few times, then once between start and stop of the profiler."""
    settings.pdl = False  # a combine that finds its decode ended would prepare for nothing
    caches = random_cache(args.tokens, MAIN_PAGE), random_cache(args.tokens, EXTRA_PAGE)
    progress = Progress(len(args.cells))
    freqs = random_freqs(POSITIONS, torch.device("cuda"))
    for heads, b, extra in args.cells:
        progress.step(f"{heads} heads, {args.topk} + {extra} keys, b={b}")
        problem = make_problem(caches, b, heads, args.topk, extra)
        problem.options["backend"] = "sm90"
        call = our_call(problem, (freqs, torch.randint(0, POSITIONS, (b,), device="cuda")), "bf16")
        for _ in range(WARM_CALLS):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class Cell(NamedTuple):
    heads: int
    b: int
    extra: int | None


def cell(text: str) -> Cell:
    match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected HEADSxROWS or HEADSxROWS+EXTRA, got {text!r}")
    heads, b, extra = match.groups()
    return Cell(int(heads), int(b), None if extra is None else int(extra))


def written(value: object, missing: str) -> str:
    if value is None:
        return missing
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=cell, nargs="+", default=list(map(cell, CELLS)), metavar="HEADSxROWS[+EXTRA]")
    parser.add_argument("--topk", type=int, default=128, help="keys of the first cache")
    parser.add_argument(
        "--extra", type=int, default=512, help="keys of the second cache where a cell has none of its own, 0 for none"
    )
    parser.add_argument("--tokens", type=int, default=200_000, help="of each cache")
    parser.add_argument("--ncu", default="ncu", help="its path")
    parser.add_argument("--csv", type=Path, metavar="PATH")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cells = [c._replace(extra=args.extra if c.extra is None else c.extra) for c in args.cells]
    require_cuda()
    torch.manual_seed(0)
    if args.child:
        run_cells(args)
        return 0
    if not shutil.which(args.ncu):
        print("decode_limits.py: needs Nsight Compute (--ncu PATH)", file=sys.stderr)
        return 2
    facts, sms = run_facts(), torch.cuda.get_device_properties(0).multi_processor_count
    expected = []
    for heads, b, extra in args.cells:
        plan = sm90_decode.choose_plan(b, heads, args.topk + extra, sms)
        shape = {"heads": heads, "topk": args.topk, "extra": extra, "b": b, **plan._asdict()}
        alone = plan.num_splits == 1 or sm90_decode.in_pairs(plan)
        expected += [shape | {"kernel": kernel} for kernel in ("decode", "combine")[: 1 if alone else 2]]
    launches = profile(args.ncu, sys.argv[1:])
    if [launch.kernel for launch in launches] != [shape["kernel"] for shape in expected]:
        sys.exit(f"decode_limits.py: expected {len(expected)} kernels, got {len(launches)} or others")
    rows = [shape | make_row(launch, sms) for shape, launch in zip(expected, launches, strict=True)]
    columns = {"heads": 5, "b": 4, "extra": 6, "kernel": 8, "block_heads": 12, "num_splits": 11, "blocks": 7}
    columns |= {"us": 7, "sm_mhz": 8, "occupancy_pct": 14, "tensor_pct": 11, "shared_pct": 11, "issue_pct": 10}
    columns |= {"l2_pct": 7, "l2_gb_per_s": 12, "dram_pct": 9, "dram_gb_per_s": 14}
    print(f"{comment(facts)}\n" + "".join(f"{c:>{width}}" for c, width in columns.items()) + "  limit | stalls, %")
    for row in rows:
        cells = "".join(f"{written(row[column], 'n/a'):>{width}}" for column, width in columns.items())
        print(f"{cells}  {row['limit']} | {row['stalls'] or 'n/a'}")
    if args.csv:
        write_csv(args.csv, [{name: written(value, "") for name, value in row.items()} | facts for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
