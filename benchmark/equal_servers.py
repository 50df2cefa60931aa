"""How far equal SGLang servers are apart: what a difference between two servers of bench_serving.py can be by chance.

    python benchmark/equal_servers.py --model DIR --server-args "--tp-size 2 --load-format dummy" --csv equal.csv

Starts several servers side by side, some of them alike: without the plugin (stock), with all of it switched off (off),
patched (all). Drives one at a time, in random order, as bench_serving.py does, and prints for each concurrency the
median time per output token of every server, its ratio to that of all stock servers, and the least. A server that is
held up by its host differs from its equal for as long as both live; more rounds do not help.

The CSV has a row for every request. Every server must allow max(concurrency) requests of CTX + GEN tokens at once, and
they share the GPUs' memory.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_serving import check_rounds, facts, print_table, request_seconds, rounds, serving_options, warm_up
from common import Progress, write_csv
from serving import (
    VARIANTS,
    Server,
    ServingError,
    exit_on_sigterm,
    print_ended,
    random_prompt,
    start_all,
    stop_all,
    vocab_size,
)


def named(kinds: Sequence[str]) -> dict[str, str]:
    """Servers by name: all, then all2 if there is another one of that kind."""
    found: dict[str, str] = {}
    for kind in kinds:
        count = sum(other == kind for other in found.values()) + 1
        found[kind if count == 1 else f"{kind}{count}"] = kind
    return found


def measure(servers: dict[str, Server], concurrency: int, args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for every request: the round, the server, its time per output token and that of the whole request."""
    prompts = [random_prompt(args.ctx, args.vocab, place) for place in range(concurrency)]
    warm_up([server.client for server in servers.values()], prompts, args.gen)
    draw, rows = random.Random(concurrency), []
    for done in rounds(args):
        for name in draw.sample(list(servers), len(servers)):
            whole, decode = request_seconds(servers[name].client, prompts, args.gen)
            row = {"concurrency": concurrency, "round": done, "server": name}
            rows.append(row | {"tpot_ms": round(decode / (args.gen - 1) * 1e3, 5), "whole_s": round(whole, 4)})
    return rows


def summary(rows: Sequence[dict], kinds: dict[str, str]) -> list[dict[str, object]]:
    """A line for each concurrency and server: median TPOT, its ratio to the median of all stock servers, the least."""
    lines = []
    for concurrency in dict.fromkeys(row["concurrency"] for row in rows):
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for row in rows:
            if row["concurrency"] == concurrency:
                times[row["server"]].append(float(row["tpot_ms"]))
        stock = statistics.median(value for name, kind in kinds.items() if kind == "stock" for value in times[name])
        for name, values in times.items():
            middle = statistics.median(values)
            line = {"concurrency": concurrency, "server": name, "rounds": len(values), "tpot_ms": f"{middle:.3f}"}
            lines.append(line | {"ratio": f"{middle / stock:.3f}", "least_ms": f"{min(values):.3f}"})
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[serving_options(30500, [1, 8, 32], ctx=1024, runs=14, case_seconds=45)],
    )
    parser.add_argument("--model", required=True, help="model path")
    parser.add_argument("--servers", nargs="+", choices=VARIANTS, default=["stock", "all", "off", "all", "stock"])
    args = parser.parse_args(argv)
    check_rounds(parser, args)
    if "stock" not in args.servers:
        parser.error(f"expected stock among --servers, got {args.servers}")
    args.vocab = vocab_size(args.model)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, measure, end them."""
    args = parse(argv)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="equal_servers_"))
    command = [*shlex.split(args.launch), "--model-path", args.model, *shlex.split(args.server_args)]
    kinds = named(args.servers)
    servers = {
        name: Server(name, command, args.port + place, logs / f"server_{name}.log", VARIANTS[kind])
        for place, (name, kind) in enumerate(kinds.items())
    }
    exit_on_sigterm()
    rows: list[dict[str, object]] = []
    progress = Progress(1 + len(args.concurrency))
    try:
        progress.step(f"starting {', '.join(servers)}; logs in {logs}")
        start_all(list(servers.values()), args.start_seconds)
        about = facts(next(iter(servers.values())).client, args)
        for concurrency in args.concurrency:
            progress.step(f"concurrency {concurrency}")
            rows += measure(servers, concurrency, args)
            if args.csv:
                write_csv(args.csv, [row | about for row in rows])
    except ServingError as error:
        print(f"error: {error}", file=sys.stderr)
        print_ended(list(servers.values()), sys.stderr)
        return 1
    finally:
        stop_all(list(servers.values()))
    heads = ("concurrency", "server", "rounds", "tpot_ms", "ratio", "least_ms")
    print_table(summary(rows, kinds), dict(zip(heads, heads, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
