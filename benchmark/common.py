"""What the benchmarks share: timing with a cold L2, facts about the run, CSV files, progress, style of the plots.

Timing: one replay of a CUDA graph between two CUDA events, after a write of more bytes than L2 holds. The events and
the launch, 2 to 3 us, are in every figure, the device copy's too. The contenders of a measurement run once in each
repetition, in random order, so a drift of the clock meets all of them; figures are medians. Every contender has several
graphs, in turns: two graphs of one kernel of 6 us were seen to differ by 0.3 us for as long as they lived. Compare
ratios of one run, not absolute times of two.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

Call = Callable[[], object]
FLUSH_BYTES = 256 << 20
WARM_CALLS = 20
COLD_GRAPHS = 4


class ColdTimer:
    """Medians of GPU times in microseconds, L2 flushed before each run."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        # The host enqueues the events and the replay while this write runs, so no host time gets between the events.
        self._flush = torch.empty(max(FLUSH_BYTES, 4 * l2_bytes), dtype=torch.uint8, device="cuda")

    def medians(self, calls: Mapping[str, Call], repeats: int, warmups: int = 3) -> dict[str, float]:
        """Median time of each call, over ``repeats`` rounds in which every call runs once.

        A call is run outside and inside graph captures, so it must not synchronise.
        """
        graphs = {name: [capture(call) for _ in range(COLD_GRAPHS)] for name, call in calls.items()}
        order = list(graphs)
        shuffle = random.Random(0).shuffle
        times: dict[str, list[float]] = {name: [] for name in order}
        for repeat in range(-warmups, repeats):
            events = {}
            shuffle(order)  # so that no contender always follows the same one
            for name in order:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.fill_(repeat & 0x7F)
                start.record()
                graphs[name][repeat % COLD_GRAPHS].replay()
                end.record()
                events[name] = (start, end)
            torch.cuda.synchronize()
            if repeat >= 0:
                for name, (start, end) in events.items():
                    times[name].append(start.elapsed_time(end) * 1e3)
        return {name: statistics.median(values) for name, values in times.items()}


def warm_medians(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median microseconds a call in a CUDA graph of WARM_CALLS calls, contenders in turns: data that fit stay in L2."""
    graphs = {name: capture(call, WARM_CALLS) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / WARM_CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def capture(call: Call, calls_per_graph: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls_per_graph`` calls, after one call outside (which may compile or allocate)."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls_per_graph):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def device_copy(total_bytes: int) -> Call:
    """A device-to-device copy that reads and writes ``total_bytes`` in all: half in, half out."""
    source = torch.zeros(-(-total_bytes // 32) * 16, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def trace_kernels(path: Path) -> list[dict]:
    """The kernel events ("name", "ts", "dur", microseconds) of a torch.profiler trace, which may be compressed."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of the elements of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- facts about the run


def commit() -> str:
    """SGL_DSV4_COMMIT, or the short commit of the source tree ("+" if tracked files differ), or "unknown"."""
    if given := os.environ.get("SGL_DSV4_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        run = {"cwd": here, "text": True, "stderr": subprocess.DEVNULL}
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], **run).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], **run).strip()
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver_version() -> str:
    """Version of the NVIDIA driver, or "unknown"."""
    for smi in ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi"):
        try:
            command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
            return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            continue
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"


def require_cuda() -> None:
    """Exit with status 2 where no CUDA device is."""
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA device", file=sys.stderr)
        sys.exit(2)


def comment(facts: Mapping[str, object]) -> str:
    """Facts as the line that a table begins with."""
    return f"# {', '.join(f'{key} {value}' for key, value in facts.items())}"


def run_facts() -> dict[str, str]:
    """Columns that every CSV row carries: commit, date, GPU and versions."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": driver_version(),
    }


# ---- output


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows; the columns are those of the first row, a missing value is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV that `write_csv` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Progress:
    """A line on stderr a step: number, what, seconds so far."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._start = time.monotonic()

    def step(self, what: str) -> None:
        """Say what begins now."""
        self._done += 1
        seconds = time.monotonic() - self._start
        print(f"[{self._done:3}/{self._steps} {seconds:5.1f} s] {what}", file=sys.stderr, flush=True)


# ---- plots

COLOURS = {
    "auto": "#0072B2",
    "K=1": "#56B4E9",
    "K=4": "#009E73",
    "stock": "#D55E00",
    "copy": "#555555",
}
"""Colour of a contender, the same in every plot (a palette that colour-blind readers can tell apart)."""


def new_figure(**options):
    """A matplotlib Figure in the house style, without pyplot or a display. Exits where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("a plot needs matplotlib (pip install matplotlib)")
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            "lines.markersize": 4,
            "savefig.dpi": 140,
        }
    )
    return Figure(**options)


def plot_by_heads(
    path: Path,
    rows: Sequence[Mapping],
    heads: Sequence[int],
    lines: Callable[[list[Mapping]], Iterable[tuple[Sequence[Mapping], str, str, str, str]]],
    ylabel: str,
    title: str,
) -> None:
    """Time against b, a panel for each of some head counts.

    Args:
        rows: with "heads", "b" and times; a line leaves out rows without its time.
        lines: of the rows of a panel: for each line its rows, the column of its times, style, colour and label.
    """
    figure = new_figure(figsize=(3.6 * len(heads), 3.6), layout="constrained")
    axes = figure.subplots(1, len(heads), squeeze=False, sharey=True)[0]
    for axis, h in zip(axes, heads, strict=True):
        mine = [row for row in rows if row["heads"] == h]
        for points, column, style, colour, label in lines(mine):
            xy = [(row["b"], float(row[column])) for row in points if row.get(column)]
            if xy:
                axis.plot(*zip(*xy, strict=True), style, color=colour, label=label)
        axis.set_yscale("log")
        axis.set_title(f"{h} heads", loc="left")
        axis.set_xlabel("rows")
        log2_axis(axis, sorted({row["b"] for row in mine}))
    axes[0].set_ylabel(ylabel)
    axes[0].legend()
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def log2_axis(axis, values: Iterable[int]) -> None:
    """A logarithmic x axis with a tick, in plain digits, for (about eight of) the values."""
    values = sorted(set(values))
    axis.set_xscale("log", base=2)
    shown = [v for v in values if all(v == w or not v < w < v * 1.9 for w in values)]
    axis.set_xticks(shown, [f"{v // 1024}k" if v >= 1024 and v % 1024 == 0 else str(v) for v in shown])
    axis.minorticks_off()
