"""Time per output token, throughput and time to first token of SGLang with and without this package, side by side.

    python benchmark/bench_serving.py --model DIR --server-args "--mem-fraction-static 0.4 --load-format dummy" \\
        --csv serving.csv --plot serving.png
    python benchmark/bench_serving.py --stock-url http://a:30000 --patched-url http://b:30000

Starts two servers on the same GPU, stock (SGL_DSV4_KERNELS=off) and patched, and drives one at a time in the order
ABBA, so a drift of the clock meets both. For each concurrency, over up to --runs rounds, as one batch request of random
prompts that lie in the prefix cache:

- TPOT: from the moment when every prompt has its first token to the last token of all, over GEN - 1, as the client sees
  it; the server sends nothing between (sampling parameter stream_interval). The ratio is the median over the rounds of
  patched / stock; the spread is the larger interquartile range of the two servers, in percent of the median. A host
  that is busy elsewhere only ever adds time: "low" is the lowest tenth of the TPOT (up to 10 rounds: the least);
- throughput: output tokens a second of the whole request;
- TTFT (--ttft): time to the first streamed token of prompts that are new to the cache, median over requests.

Then a profile of decode steps by kernel group (--profile), in NAME_profile.csv beside the CSV; it needs servers on this
machine. "replaced" there is the sum of this package's kernels and all those that it can replace, whichever of them
SGL_DSV4_KERNELS leaves to SGLang; with tensor parallelism all is rank 0's.

Both servers must allow max(concurrency) requests of CTX + GEN + 600 tokens at once (--max-running-requests,
--cuda-graph-max-bs-decode, --max-total-tokens), and a server profiles its memory while the other one fills the GPU: set
--mem-fraction-static so that it holds both.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import decode_profile
import torch
from common import Progress, log2_axis, new_figure, run_facts, write_csv
from serving import (
    LAUNCH,
    Client,
    Server,
    ServingError,
    exit_on_sigterm,
    in_threads,
    model_config,
    print_ended,
    random_prompt,
    start_all,
    stop_all,
    vocab_size,
)

SIDES = ("stock", "patched")
LEAST_RUNS = 3
TTFT_COLUMNS = ("stock_ttft_ms", "patched_ttft_ms", "ttft_ratio")
COLOURS = {"stock": "#D55E00", "patched": "#0072B2"}
BAR_COLOURS = (
    *("#0072B2", "#56B4E9", "#004466", "#009E73"),  # ours: blue and green
    *("#D55E00", "#E69F00", "#F0E442", "#CC79A7", "#7F3C8D", "#A6761D", "#999999"),
)
"""Of decode_profile.GROUPS."""


def request_seconds(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Wall time of one batch request, and that part of it after every prompt has its first token.

    Raises:
        ServingError: a prompt got fewer tokens, or all of them before another one had its first.
    """
    start = time.perf_counter()
    first: dict[int, float] = {}
    last: dict[int, tuple[float, dict]] = {}
    for event in client.stream(prompts, tokens, interval=tokens):
        now = time.perf_counter()
        if "index" not in event:
            raise ServingError(f"{client.url}: {json.dumps(event)[:300]}")
        first.setdefault(event["index"], now)
        last[event["index"]] = now, event.get("meta_info", {})
    for place in range(len(prompts)):
        _, about = last.get(place, (0.0, {}))
        if about.get("completion_tokens") != tokens:
            raise ServingError(f"{client.url}: prompt {place} was not answered: {json.dumps(about)[:300]}")
    begin, end = max(first.values()), max(now for now, _ in last.values())
    if min(now for now, _ in last.values()) <= begin:
        raise ServingError(f"{client.url}: {len(prompts)} prompts did not decode together")
    return end - start, end - begin


def first_token_seconds(client: Client, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Time to the first token of each of some streamed requests that are sent together."""

    def one(prompt: Sequence[int]) -> float:
        start = time.perf_counter()
        seconds = [time.perf_counter() - start for _ in client.stream(prompt, 1)]
        if not seconds:
            raise ServingError(f"{client.url}: a stream without a token")
        return seconds[0]

    return in_threads([lambda p=prompt: one(p) for prompt in prompts], 2 * client.timeout)


def spread_percent(values: Sequence[float]) -> float:
    """Interquartile range in percent of the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return 100 * (high - low) / middle


def low_decile(values: Sequence[float]) -> float:
    """The largest of the lowest tenth of some values, the least of up to 10."""
    return sorted(values)[(len(values) - 1) // 10]


def warm_up(clients: Iterable[Client], prompts: Sequence[Sequence[int]], gen: int) -> None:
    """Prompts into the prefix cache; what is compiled for shapes met for the first time is compiled."""
    for client in clients:
        client.generate(prompts, 1)
        request_seconds(client, prompts, gen)


def rounds(args: argparse.Namespace, first: int = 0) -> Iterator[int]:
    """Numbers of a measurement's rounds: --runs of them, fewer at the time limit, but LEAST_RUNS."""
    begin = time.monotonic()
    for done in range(first, args.runs):
        if done >= LEAST_RUNS and time.monotonic() - begin > args.case_seconds:
            return
        yield done


def measure(
    clients: dict[str, Client], prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, object]:
    """One row of the table: all figures of one concurrency, without TTFT."""
    gen, concurrency = args.gen, len(prompts)
    tpot: dict[str, list[float]] = {side: [] for side in SIDES}
    rate: dict[str, list[float]] = {side: [] for side in SIDES}
    warm_up(clients.values(), prompts, gen)
    for done in rounds(args):
        for side in SIDES if done % 2 == 0 else reversed(SIDES):
            whole, decode = request_seconds(clients[side], prompts, gen)
            tpot[side].append(decode / (gen - 1) * 1e3)
            rate[side].append(concurrency * gen / whole)
    row: dict[str, object] = {"concurrency": concurrency, "rounds": len(tpot["stock"])}
    for side in SIDES:
        row[f"{side}_tpot_ms"] = round(statistics.median(tpot[side]), 5)
    row["tpot_ratio"] = round(statistics.median(p / s for s, p in zip(*(tpot[side] for side in SIDES), strict=True)), 4)
    for side in SIDES:
        row[f"{side}_tpot_low_ms"] = round(low_decile(tpot[side]), 5)
    row["tpot_low_ratio"] = round(row["patched_tpot_low_ms"] / row["stock_tpot_low_ms"], 4)
    row["tpot_spread_percent"] = round(max(spread_percent(tpot[side]) for side in SIDES), 2)
    for side in SIDES:
        row[f"{side}_tokens_per_s"] = round(statistics.median(rate[side]), 1)
    row["throughput_ratio"] = round(
        statistics.median(p / s for s, p in zip(*(rate[side] for side in SIDES), strict=True)), 4
    )
    return row


def measure_ttft(clients: dict[str, Client], concurrency: int, args: argparse.Namespace) -> dict[str, object]:
    """Median time to first token of new prompts, in ms, and the ratio of the medians."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for run in rounds(args, first=-1):  # which warms up
        prompts = [random_prompt(args.ctx, args.vocab, hash((concurrency, run, i))) for i in range(concurrency)]
        for side in SIDES:
            seconds = first_token_seconds(clients[side], prompts)
            times[side] += seconds if run >= 0 else []
    stock, patched = (statistics.median(times[side]) * 1e3 for side in SIDES)
    return dict(zip(TTFT_COLUMNS, (round(stock, 3), round(patched, 3), round(patched / stock, 4)), strict=True))


def profile(clients: dict[str, Client], prompts, args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Rows of the profile of one concurrency: kernel group, time and launches a step of both servers."""
    tables = {}
    for side in SIDES:
        events = decode_profile.kernels(
            decode_profile.record(clients[side], prompts, args.profile_steps, folder / f"{side}_{len(prompts)}")
        )
        tables[side] = decode_profile.summarise(events, args.profile_steps)
        print(f"{side}, concurrency {len(prompts)}: us a step, launches a step, kernel", file=sys.stderr)
        for name, us, launches in decode_profile.ranking(events, args.profile_steps, args.profile_top):
            print(f"  {us:8.1f} {launches:6.1f}  {name[:110]}", file=sys.stderr)
    rows = []
    for group, (stock_us, _) in tables["stock"].items():
        row: dict[str, object] = {"concurrency": len(prompts), "group": group}
        row |= {f"{side}_us_per_step": round(tables[side][group][0], 2) for side in SIDES}
        row["us_ratio"] = round(tables["patched"][group][0] / stock_us, 4) if stock_us else ""
        row |= {f"{side}_launches_per_step": round(tables[side][group][1], 2) for side in SIDES}
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, object]], columns: dict[str, str]) -> None:
    """Columns (key -> heading) of rows, aligned."""
    cells = [list(columns.values()), *[[str(row.get(key, "")) for key in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def plot(path: Path, rows: Sequence[dict], profile_rows: Sequence[dict], title: str) -> None:
    """TPOT against concurrency, its ratio, and the attention kernels of a decode step."""
    figure = new_figure(figsize=(11, 3.6), layout="constrained")
    lines, ratios, bars = figure.subplots(1, 3)
    concurrency = [row["concurrency"] for row in rows]
    for side in SIDES:
        lines.plot(concurrency, [row[f"{side}_tpot_ms"] for row in rows], "o-", color=COLOURS[side], label=side)
    ratios.plot(concurrency, [row["tpot_ratio"] for row in rows], "o-", color=COLOURS["patched"])
    ratios.axhline(1, color="#555555", linewidth=0.8)
    for axis, label in ((lines, "ms per output token"), (ratios, "patched / stock")):
        log2_axis(axis, concurrency)
        axis.set(xlabel="concurrency", title=label)
    lines.set_ylim(bottom=0)
    lines.legend()
    cases = [
        (concurrency, side) for concurrency in sorted({row["concurrency"] for row in profile_rows}) for side in SIDES
    ]
    left = [0.0] * len(cases)
    for colour, group in zip(BAR_COLOURS, decode_profile.GROUPS, strict=True):
        us = {
            (r["concurrency"], side): r[f"{side}_us_per_step"]
            for r in profile_rows
            for side in SIDES
            if r["group"] == group
        }
        widths = [us[case] for case in cases]
        if any(widths):
            bars.barh(range(len(cases)), widths, left=left, color=colour, label=group)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.set_yticks(range(len(cases)), [f"{side}, {concurrency}" for concurrency, side in cases])
    bars.invert_yaxis()
    bars.set(title="attention kernels, theirs and ours", xlabel="us per decode step")
    if cases:
        figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def facts(client: Client, args: argparse.Namespace) -> dict[str, object]:
    """Columns that every CSV row carries."""
    try:
        info = json.loads(client.call("/server_info"))
    except (ServingError, ValueError):
        info = {}
    found = run_facts() if torch.cuda.is_available() else {}
    path = str(args.model or info.get("model_path", "unknown"))
    tp, heads = info.get("tp_size", 1), model_config(path).get("num_attention_heads")
    sizes = {"ctx": args.ctx, "gen": args.gen, "tp": tp, "heads_per_rank": heads // tp if heads else ""}
    return {"model": Path(path).name, **sizes, "sglang": info.get("version", "unknown"), **found}


def servers_of(args: argparse.Namespace, logs: Path) -> list[Server]:
    """The servers to start: those without a URL."""
    command = [*shlex.split(args.launch), "--model-path", str(args.model), *shlex.split(args.server_args)]
    kernels = {"stock": "off", "patched": args.kernels}
    return [
        Server(side, command, args.port + place, logs / f"server_{side}.log", {"SGL_DSV4_KERNELS": kernels[side]})
        for place, side in enumerate(SIDES)
        if not getattr(args, f"{side}_url")
    ]


def run(clients: dict[str, Client], args: argparse.Namespace, logs: Path) -> int:
    """Measure, print and write everything; the exit status. The CSV files are written anew after each step."""
    about = facts(clients["patched"], args)
    progress = Progress(len(args.concurrency) + len(args.ttft) + len(args.profile))
    all_prompts = [random_prompt(args.ctx, args.vocab, i) for i in range(max([*args.concurrency, *args.profile]))]
    rows, profile_rows, status = [], [], 0

    def save(path: Path | None, table: list[dict[str, object]]) -> None:
        if path and table:
            write_csv(path, [row | about for row in table])

    for concurrency in args.concurrency:
        progress.step(f"concurrency {concurrency}")
        rows.append(measure(clients, all_prompts[:concurrency], args) | dict.fromkeys(TTFT_COLUMNS, ""))
        save(args.csv, rows)
        print("  TPOT {stock_tpot_ms} and {patched_tpot_ms} ms, ratio {tpot_ratio}".format(**rows[-1]), file=sys.stderr)
    for row in rows:
        if row["concurrency"] in args.ttft:
            progress.step(f"time to first token, concurrency {row['concurrency']}")
            row |= measure_ttft(clients, row["concurrency"], args)
            save(args.csv, rows)
    for concurrency in args.profile:
        progress.step(f"profile, concurrency {concurrency}")
        try:
            profile_rows += profile(clients, all_prompts[:concurrency], args, logs / "profile")
        except ServingError as error:
            print(f"profile of concurrency {concurrency} failed: {error}", file=sys.stderr)
            status = 1
        save(args.csv and args.csv.with_name(f"{args.csv.stem}_profile.csv"), profile_rows)
    title = f"{about['model']}, context {args.ctx}, sglang {about['sglang']}, {about.get('gpu', 'no GPU')}"
    if about["tp"] != 1:
        title += f", {about['tp']} ranks of {about['heads_per_rank']} heads"
    print(f"\n{title}: medians; ratios are patched / stock")
    columns = {
        "concurrency": "C",
        "rounds": "rounds",
        "stock_tpot_ms": "stock TPOT ms",
        "patched_tpot_ms": "patched",
        "tpot_ratio": "ratio",
    }
    columns |= {
        "tpot_low_ratio": "low ratio",
        "tpot_spread_percent": "spread %",
        "stock_tokens_per_s": "stock tok/s",
        "patched_tokens_per_s": "patched",
    }
    columns |= {"throughput_ratio": "ratio", "stock_ttft_ms": "stock TTFT ms", "patched_ttft_ms": "patched"}
    print_table(rows, columns | {"ttft_ratio": "ratio"})
    if profile_rows:
        print("\nGPU time of a decode step")
        shown = [row for row in profile_rows if row["stock_us_per_step"] or row["patched_us_per_step"]]
        columns = {
            "concurrency": "C",
            "group": "kernels",
            "stock_us_per_step": "stock us",
            "patched_us_per_step": "patched us",
            "us_ratio": "ratio",
        }
        print_table(shown, columns | {"stock_launches_per_step": "launches", "patched_launches_per_step": "patched"})
    if args.most_replaced is not None:
        for row in profile_rows:
            if row["group"] == "replaced":
                print("replaced kernels, concurrency {concurrency}: {us_ratio} of stock's time".format(**row), end=", ")
                print(f"at most {args.most_replaced}")
                status |= not row["us_ratio"] or row["us_ratio"] > args.most_replaced
    if args.plot:
        plot(args.plot, rows, profile_rows, title)
    return int(status)


def serving_options(
    port: int, concurrency: list[int], ctx: int, runs: int, case_seconds: float
) -> argparse.ArgumentParser:
    """A parent parser with what starts and drives servers, and these defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--server-args", default="", help="further flags of every server, as one string")
    parser.add_argument("--launch", default=LAUNCH, help="command that starts a server (default: sglang.launch_server)")
    parser.add_argument("--port", type=int, default=port, help="the first server's; the others' follow")
    parser.add_argument("--start-seconds", type=float, default=600, help="time that the servers have to start")
    parser.add_argument("--concurrency", type=int, nargs="+", default=concurrency)
    parser.add_argument("--ctx", type=int, default=ctx, help="tokens of a prompt")
    parser.add_argument("--gen", type=int, default=129, help="tokens generated for each prompt")
    parser.add_argument("--runs", type=int, default=runs, help="rounds of each measurement, fewer at its time limit")
    parser.add_argument("--case-seconds", type=float, default=case_seconds, help="that limit, for 3 rounds or more")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for server logs and traces (default: a temporary one)")
    return parser


def check_rounds(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits if nothing could be measured."""
    if args.gen < 2 or args.runs < 1:
        parser.error(f"expected --gen >= 2 and --runs >= 1, got {args.gen} and {args.runs}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[serving_options(30100, [1, 4, 8, 16, 32, 64], ctx=4096, runs=7, case_seconds=30)],
    )
    parser.add_argument("--model", help="model path, for the servers that are started here")
    parser.add_argument("--kernels", default="all", help="SGL_DSV4_KERNELS of the patched server (default: all)")
    parser.add_argument("--stock-url", help="use this server, which runs already, as stock")
    parser.add_argument("--patched-url", help="use this server, which runs already, as patched")
    parser.add_argument("--timeout", type=float, default=300, help="seconds without a byte after which a request fails")
    parser.add_argument("--ttft", type=int, nargs="*", help="concurrencies of the TTFT measurement (default: 1 8)")
    parser.add_argument("--profile", type=int, nargs="*", default=[1, 32], help="concurrencies of the profile")
    parser.add_argument("--profile-steps", type=int, default=10)
    parser.add_argument("--profile-top", type=int, default=12, help="kernels listed on stderr for each profile")
    parser.add_argument(
        "--most-replaced", type=float, help="fail if a profile's replaced kernels take a larger part of stock's time"
    )
    parser.add_argument(
        "--vocab", type=int, help="token ids are drawn below this (default: the model's config.json, or 100000)"
    )
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    if not args.model and not (args.stock_url and args.patched_url):
        parser.error("--model is needed, unless both --stock-url and --patched-url are given")
    check_rounds(parser, args)
    if args.ttft is None:
        args.ttft = [concurrency for concurrency in (1, 8) if concurrency in args.concurrency]
    if not set(args.ttft) <= set(args.concurrency):
        parser.error(f"expected --ttft among --concurrency {args.concurrency}, got {args.ttft}")
    args.vocab = args.vocab or vocab_size(args.model)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start what is to be started, measure, end it."""
    args = parse(argv)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="bench_serving_"))
    servers = servers_of(args, logs)
    clients = {side: Client(getattr(args, f"{side}_url") or "", args.timeout) for side in SIDES}
    exit_on_sigterm()
    try:
        if servers:
            print(f"starting {', '.join(s.name for s in servers)}; logs in {logs}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            start_all(servers, args.start_seconds)
            print(f"ready after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        clients |= {server.name: Client(server.client.url, args.timeout) for server in servers}
        return run(clients, args, logs)
    except ServingError as error:
        print(f"error: {error}", file=sys.stderr)
        print_ended(servers, sys.stderr)
        return 1
    finally:
        stop_all(servers)


if __name__ == "__main__":
    sys.exit(main())
