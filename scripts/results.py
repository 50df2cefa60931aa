"""Writes the figures of README.md and docs/results.md from the CSV files under benchmark/results/h200.

python scripts/results.py            rewrites docs/results.md, and README.md between the two "figures" comments
python scripts/results.py --check    exits 1 if that would change anything
python scripts/results.py --plots    draws the PNG of the kernels' benchmarks as well; needs torch and matplotlib
"""

from __future__ import annotations

import csv
import importlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results/h200"
BEGIN = "<!-- figures:begin (written by scripts/results.py) -->\n"
END = "<!-- figures:end -->"
SHOWN_N = ("1", "64", "1024", "8192", "16384", "65536")
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """Rows of a CSV, none if it is not there."""
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def machine(row: Row) -> str:
    """Where and when a CSV was measured."""
    sglang = f", sglang {row['sglang']}" if "sglang" in row else ""
    return f"{row['gpu']}, torch {row['torch']}{sglang}, driver {row['driver']}, commit {row['commit']}, {row['date']}."


# ---- tables: lists of Markdown lines


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table; lines of empty cells are left out."""
    rows = [["| " + " | ".join(cells) + " |"] for cells in lines if any(cells[1:])]
    return ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1), *(row for (row,) in rows)]


def keyed(rows: list[Row], *columns: str) -> dict[tuple[str, ...], Row]:
    """Rows by the columns that say which cell of a table they belong to."""
    found = {tuple(row[column] for column in columns): row for row in rows}
    if len(found) != len(rows):
        raise ValueError(f"several rows of the same {', '.join(columns)}: a table has one cell for them")
    return found


def number(text: str, digits: int = 1) -> str:
    return f"{float(text):.{digits}f}" if text else "-"


def store_table(rows: list[Row], layout: str, shown: Sequence[str] | None = SHOWN_N) -> list[str]:
    """A line for each N, a cell "ours / SGLang / copy" for each kind of call."""
    rows = [row for row in rows if row["layout"] == layout]
    cases = list(dict.fromkeys((row["entry"], row["mode"], row["input"]) for row in rows))
    by_key = keyed(rows, "entry", "mode", "input", "n")

    def cell(case: tuple[str, str, str], n: str) -> str:
        row = by_key.get((*case, n))
        return "" if row is None else " / ".join(number(row[c]) for c in ("auto_us", "stock_us", "copy_us"))

    names = [" ".join(filter(None, (entry, mode.strip("-")))) + f", {kind} in" for entry, mode, kind in cases]
    counts = shown or list(dict.fromkeys(row["n"] for row in rows))
    return table(["rows", *names], ([n, *(cell(case, n) for case in cases)] for n in counts))


def decode_table(rows: list[Row], kind: str = "warm") -> list[str]:
    """A line for each number of rows, a cell "ours / FlashMLA" for each head count."""
    heads = list(dict.fromkeys(row["heads"] for row in rows))
    by_key = keyed(rows, "heads", "b")

    def cell(h: str, b: str) -> str:
        row = by_key.get((h, b))
        return "" if row is None else f"{number(row[f'auto_{kind}_us'])} / {number(row[f'FlashMLA_{kind}_us'])}"

    return table(
        ["rows", *(f"{h} heads" for h in heads)],
        ([b, *(cell(h, b) for h in heads)] for b in dict.fromkeys(row["b"] for row in rows)),
    )


def chain_table(rows: list[Row], kind: str = "us") -> list[str]:
    """A line for each number of rows, a cell "ours / stock (ratio)" for each head count and output."""
    cases = list(dict.fromkeys((row["heads"], row["output"]) for row in rows))
    by_key = keyed(rows, "heads", "output", "b")

    def cell(case: tuple[str, str], b: str) -> str:
        row = by_key.get((*case, b))
        if row is None:
            return ""
        ours, stock = row[f"ours_{kind}"], row.get(f"stock_{kind}", "")
        return f"{number(ours)} / {number(stock)}" + (f" ({float(stock) / float(ours):.2f})" if stock else "")

    return table(
        ["rows", *(f"{heads} heads, {output}" for heads, output in cases)],
        ([b, *(cell(case, b) for case in cases)] for b in dict.fromkeys(row["b"] for row in rows)),
    )


def combine_table(rows: list[Row]) -> list[str]:
    columns = ("splits", "tokens", "heads", "output", "cache")
    lines = ([*(r[c] for c in columns), number(r["us"], 2), r["gb_per_s"], number(r["copy_us"], 2)] for r in rows)
    return table([*columns, "us", "GB/s", "copy of the same bytes, us"], lines)


def serving_table(rows: list[Row]) -> list[str]:
    columns = {  # heading and digits
        "concurrency": ("concurrency", 0), "rounds": ("rounds", 0), "stock_tpot_ms": ("stock, ms a token", 3),
        "patched_tpot_ms": ("patched", 3), "tpot_ratio": ("ratio", 3), "tpot_low_ratio": ("low ratio", 3),
        "tpot_spread_percent": ("spread, %", 1), "throughput_ratio": ("ratio of throughputs", 3),
    }  # fmt: skip
    columns = {column: about for column, about in columns.items() if column in rows[0]}
    if any(row.get("ttft_ratio") for row in rows):
        columns |= {"stock_ttft_ms": ("stock, ms to the first token", 1), "patched_ttft_ms": ("patched", 1)}
    lines = ([number(row[column], digits) for column, (_, digits) in columns.items()] for row in rows)
    return table([heading for heading, _ in columns.values()], lines)


def saving_table(serving: list[Row], profile: list[Row]) -> list[str]:
    """What the kernels save of a decode step's GPU time, and how much of it a user's time per token falls by."""
    replaced = {row["concurrency"]: row for row in profile if row["group"] == "replaced"}
    lines = []
    for row in serving:
        if row["concurrency"] not in replaced:
            continue
        before, after = (float(replaced[row["concurrency"]][f"{side}_us_per_step"]) for side in ("stock", "patched"))
        token, patched_token = (float(row[f"{side}_tpot_ms"]) * 1e3 for side in ("stock", "patched"))
        saved, arrives = before - after, token - patched_token
        line = [row["concurrency"], f"{before:.1f}", f"{after:.1f}", f"{after / before:.3f}", f"{saved:.0f}"]
        lines.append([*line, f"{arrives:.0f}", f"{100 * arrives / saved:.0f}", f"{100 * before / token:.1f}"])
    headings = [
        "concurrency", "replaced kernels, stock, us", "patched", "ratio", "saved, us", "a token is shorter by, us",
        "share, %", "replaced of stock's token, %",
    ]  # fmt: skip
    return table(headings, lines)


def serving_tables(rows: list[Row]) -> list[str]:
    profile = read("serving_profile.csv")
    saving = ["", SAVING_TEXT, "", *saving_table(rows, profile)] if profile else []
    return [*serving_table(rows), *saving]


def metadata_times() -> str:
    """Microseconds of FlashMLA's metadata kernel in the profiles, "" without one."""
    rows = [row for row in read("serving_profile.csv") if row["group"] == "metadata"]
    times = sorted(float(row["stock_us_per_step"]) / float(row["stock_launches_per_step"]) for row in rows)
    return f", {times[0]:.0f} to {times[-1]:.0f} us each," if times else ""


def profile_table(rows: list[Row]) -> list[str]:
    return table(
        ["concurrency", "kernels", "stock, us a step", "patched", "launches a step", "patched"],
        (
            [
                row["concurrency"], row["group"], number(row["stock_us_per_step"]), number(row["patched_us_per_step"]),
                number(row["stock_launches_per_step"]), number(row["patched_launches_per_step"]),
            ]
            for row in rows
        ),
    )  # fmt: skip


def limits_table(rows: list[Row]) -> list[str]:
    """A line for each kernel; percentages are whole."""
    percent = ("tensor_pct", "shared_pct", "issue_pct", "l2_pct", "dram_pct")
    return table(
        [
            "heads", "rows", "keys", "kernel", "blocks", "us", "tensor", "shared", "issue", "L2", "DRAM", "limit",
            "stalls",
        ],
        (
            [
                row["heads"], row["b"], f"{row['topk']} + {row['extra']}", row["kernel"], row["blocks"],
                number(row["us"]),
                *(number(row[column], 0) for column in percent), row["limit"], row["stalls"] or "-",
            ]
            for row in rows
        ),
    )  # fmt: skip


# ---- the two documents


def decode_intro(rows: list[Row]) -> list[str]:
    keys = f"{rows[0]['topk']} + {rows[0]['extra']}"
    return [
        f"**Decode** (backend `{rows[0]['backend']}`). {machine(rows[0])}",
        f"Median us a call in a graph of 20, {keys} keys: **ours / FlashMLA's Hopper kernel** (fewer",
        "than 64 heads padded to 64, as SGLang does).",
    ]


def readme_figures() -> str:
    """What belongs between the two comments of README.md."""
    store, decode = read("norm_rope_store.csv"), read("sparse_decode.csv")
    decode = [row for row in decode if row["extra"] == decode[0]["extra"]]
    lines = []
    if store:
        lines += [
            f"**Store.** {machine(store[0])}",
            "Median us, L2 flushed before each run: **ours / SGLang's kernel / a device copy of the same bytes**, into",
            "a `v4` cache. Each figure includes launch and events, 2 to 5 us by machine.",
            "",
            *store_table(store, "v4"),
            "",
            "![time against rows](benchmark/results/h200/norm_rope_store.png)",
            "",
        ]
    if decode:
        lines += [*decode_intro(decode), "", *decode_table(decode), ""]
        lines += ["![time against rows](benchmark/results/h200/sparse_decode.png)", ""]
    chain = [row for row in read("decode_chain.csv") if row["output"] == "bf16"]
    if chain := [row for row in chain if row["extra"] == chain[0]["extra"]]:
        lines += [
            f"**A layer, from the query's projection to `wo_a`.** {machine(chain[0])}",
            "Median us: **one call of ours / SGLang's chain** of query kernel, FlashMLA's two and inverse RoPE",
            "(stock / ours), by heads of a rank; fewer than 64 are padded to 64 there. FlashMLA's metadata, 3 launches",
            f"a step{metadata_times()} come on top.",
            "",
            *chain_table(chain),
            "",
        ]
    if serving := read("serving.csv"):
        lines += [
            f"**Served**, a 6-layer model of DeepSeek-V4-Flash's layer shapes. {machine(serving[0])}",
            "Dummy weights, one GPU. Time per output token without and with the plugin, ratio: patched / stock.",
            "One that is nearer to 1 than the spread says nothing. The first token is prefill, where the plugin only",
            "stores.",
            "",
            *serving_table(serving),
            "",
        ]
    return "\n".join(lines or ["Not measured yet."]).rstrip("\n") + "\n"


def section(name: str, title: str, command: str, text: str, tables: Callable[[list[Row]], list[str]]) -> list[str]:
    """A section of docs/results.md; none if its CSV is not there."""
    rows = read(name)
    if not rows:
        return []
    source = f"[{name}](../benchmark/results/h200/{name}), `{command}`."
    return [f"## {title}", f"{machine(rows[0])}", source, text, "", *tables(rows), ""]


def commits(name: str) -> str:
    return ", ".join(sorted({row["commit"] for row in read(name)}))


def limits_section() -> list[str]:
    """With a remark where the profiles are not of the commit that the decode's times are of."""
    name, text = "decode_limits.csv", LIMITS_TEXT
    then, now = commits(name), commits("sparse_decode.csv")
    if now and then != now:
        text += f"\nThe kernels are those of {then}; the decode's times above are of {now}."
    return section(name, "What limits the decode", "decode_limits.py", text, limits_table)


def equal_table(rows: list[Row]) -> list[str]:
    """A line for each concurrency, for each server the median of its times and that over all stock servers'."""
    times: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        times.setdefault((row["concurrency"], row["server"]), []).append(float(row["tpot_ms"]))
    servers = sorted({server for _, server in times}, key=lambda name: (name.rstrip("0123456789"), name))

    def cell(concurrency: str, server: str) -> str:
        stock = [t for name in servers if name.startswith("stock") for t in times[concurrency, name]]
        middle = statistics.median(times[concurrency, server])
        return f"{middle:.3f} ({middle / statistics.median(stock):.3f})"

    return table(
        ["concurrency", *servers],
        ([c, *(cell(c, server) for server in servers)] for c in dict.fromkeys(row["concurrency"] for row in rows)),
    )


def two_rank_sections() -> list[str]:
    """Sections of the models that were served by two tensor-parallel ranks, and of equal servers of them."""
    lines = []
    for path in sorted(RESULTS.glob("serving_tp2_*.csv")):
        heads = read(path.name)[0]["heads_per_rank"]
        title, text, tables = f"Serving, two ranks of {heads} heads", TWO_RANKS_TEXT, serving_table
        if path.stem.endswith("_profile"):
            title, text, tables = f"A decode step of one of two ranks, {heads} heads", PROFILE_TEXT, profile_table
        lines += section(path.name, title, "gpu_check.sh tp2", text, tables)
    title = "Equal servers of two ranks"
    return lines + section("equal_servers_tp2.csv", title, EQUAL_COMMAND, EQUAL_TEXT, equal_table)


def store_tables(rows: list[Row]) -> list[str]:
    lines = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        lines += [f"Cache `{layout}`:", "", *store_table(rows, layout, None), ""]
    return [*lines, "![time against rows](../benchmark/results/h200/norm_rope_store.png)"]


def decode_tables(rows: list[Row]) -> list[str]:
    plot = "![time against rows](../benchmark/results/h200/sparse_decode.png)"
    return [*backend_tables(rows), plot]


def backend_tables(rows: list[Row]) -> list[str]:
    """Of one backend: for each number of keys a table with a warm and one with a cold L2."""
    lines = []
    for extra in dict.fromkeys(row["extra"] for row in rows):
        part = [row for row in rows if row["extra"] == extra]
        for kind in ("warm", "cold"):
            lines += [f"{part[0]['topk']} + {extra} keys, {kind}:", "", *decode_table(part, kind), ""]
    return lines


def chain_tables(rows: list[Row]) -> list[str]:
    """A table for each number of keys and each head count that FlashMLA takes as it is, or only padded."""
    lines = []
    for extra in dict.fromkeys(row["extra"] for row in rows):
        for padded in (False, True):
            part = [row for row in rows if row["extra"] == extra and (int(row["heads"]) < 64) == padded]
            if part:
                text = ", padded to 64 for FlashMLA" if padded else ""
                lines += [f"{part[0]['topk']} + {extra} keys{text}:", "", *chain_table(part), ""]
            if part := [row for row in part if row.get("ours_among_us")]:
                lines += ["The same among other kernels:", "", *chain_table(part, "among_us"), ""]
    return [*lines, "![time against rows](../benchmark/results/h200/decode_chain.png)"]


STORE_TEXT = """Median us, L2 flushed before each run, **ours / SGLang's kernel / a device copy of the same bytes**;
launch and events, 2 to 5 us by machine, are in every figure."""
DECODE_TEXT = """Median us, **ours / FlashMLA's Hopper kernel** (fewer than 64 heads padded to 64, as SGLang does).
Warm: per call of a graph of 20. Cold: one call, L2 flushed before."""
LIMITS_TEXT = """The kernels of a layer's chain, each alone under Nsight Compute, L2 warm, clocks not fixed: percent of
what a unit can do (tensor, shared memory, issue slots: while an SM has warps), and the three largest stalls' shares of
the warps' time. Limit: the unit that is used most, if that is 60 % or more, otherwise latency."""
CHAIN_TEXT = """A layer between the query's projection and wo_a: **ours**, one `sparse_decode` with the query's norm and
RoPE, inverse RoPE and output, **/ stock** (ratio), SGLang's query kernel, FlashMLA's two, SGLang's inverse RoPE and,
for an FP8 wo_a, its quantisation. Median us of a chain in a graph of 20, without FlashMLA's scheduler metadata. Among
other kernels, where it is given: the chain between products with 264 MB of weights and small kernels, which drive its
data, instructions and parameters out of the caches, as the rest of a model does."""
SERVING_TEXT = """A 6-layer model of DeepSeek-V4-Flash's layer shapes with dummy weights: time per output token as the
client sees it, from the first token of all requests on, medians over rounds in the order stock, patched, patched,
stock. Spread: the larger interquartile range of the two; a ratio that is nearer to 1 than that says nothing. Low
ratio: of the least disturbed requests."""
SAVING_TEXT = """The kernels that the plugin replaces, by the profile below, and what a user gets of their saving: the
share by which a token becomes shorter (above 100 %: launches and gaps go too). For another model: the part of a token
that these kernels take there (last column, here), times 1 - ratio, times the share."""
TWO_RANKS_TEXT = """A small model with dummy weights, time per output token as above, no other server beside these two.
The host limits them: a token takes 1.3 to 3.2 times its GPU time, and patched as long as stock, or up to 12 % longer.
Five servers side by side (last table of this page) do not show that: two stock ones are up to 6 % apart there, and
patched ones take 0.97 to 1.02 of stock's time. What the kernels save is the line "replaced" of the profile below;
"other" has waits for the other rank in it."""
EQUAL_COMMAND = "equal_servers.py --model DIR"
EQUAL_TEXT = """Five servers side by side, stock (no plugin), patched (all) and plugin switched off (off), some of them
alike, one driven at a time in random order: median ms a token (over that of the stock servers together). 64 heads, 32 a
rank; prompts of 1024 tokens. What differs between stock and stock2, or between all and all2, is the host's doing."""
TRITON_COMMAND = "bench_sparse_decode.py --backend triton --heads 8 16 64 --extra 512"
TRITON_TEXT = """The portable backend, which Hopper takes only where its own kernels do not serve: median us, **ours /
FlashMLA's Hopper kernel** (fewer than 64 heads padded to 64)."""
PROFILE_TEXT = """GPU time of the kernels of a decode step. A kernel that starts early by programmatic launch counts
from its predecessor's end in the stream."""


def results() -> str:
    """docs/results.md."""
    lines = [
        "# Results", "", "Written by scripts/results.py from the CSV files under benchmark/results/h200.", "",
        *section("norm_rope_store.csv", "Store", "bench_norm_rope_store.py --layout all", STORE_TEXT, store_tables),
        *section("sparse_decode.csv", "Decode", "bench_sparse_decode.py", DECODE_TEXT, decode_tables),
        *section("sparse_decode_triton.csv", "Decode in Triton", TRITON_COMMAND, TRITON_TEXT, backend_tables),
        *limits_section(),
        *section("decode_chain.csv", "A layer's chain", "bench_decode_chain.py", CHAIN_TEXT, chain_tables),
        *section("combine.csv", "Combine kernel", "bench_combine.py", "Median us.", combine_table),
        *section("serving.csv", "Serving", "bench_serving.py", SERVING_TEXT, serving_tables),
        *section("serving_profile.csv", "A decode step", "bench_serving.py", PROFILE_TEXT, profile_table),
        *two_rank_sections(),
    ]  # fmt: skip
    return "\n".join(lines).rstrip("\n") + "\n"


def draw() -> None:
    """The plots of the kernels' benchmarks, from their CSV files."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    if rows := read("norm_rope_store.csv"):
        importlib.import_module("bench_norm_rope_store").plot(RESULTS / "norm_rope_store.png", rows, rows[0])
    for name in ("sparse_decode", "decode_chain"):
        if rows := read(f"{name}.csv"):
            typed = [row | {key: int(row[key]) for key in ("heads", "topk", "extra", "b")} for row in rows]
            importlib.import_module(f"bench_{name}").plot(RESULTS / f"{name}.png", typed, rows[0])


def main() -> int:
    if "--plots" in sys.argv[1:]:
        draw()
    readme = (ROOT / "README.md").read_text()
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    wanted = {"README.md": before + BEGIN + readme_figures() + END + after, "docs/results.md": results()}
    drifted = False
    for name, text in wanted.items():
        path = ROOT / name
        if path.is_file() and path.read_text() == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{name}: its figures are not those of benchmark/results/h200: run scripts/results.py")
            drifted = True
        else:
            path.write_text(text)
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
