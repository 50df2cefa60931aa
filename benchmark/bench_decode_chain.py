"""Time of a layer's attention between the query's projection and wo_a: SGLang's kernels, and ours in one call.

    python benchmark/bench_decode_chain.py --csv decode_chain.csv
    python benchmark/bench_decode_chain.py --b 1 16 --heads 64 --output bf16

stock: SGLang's fused_q_norm_rope, FlashMLA's split and combine kernels, SGLang's fused_rope_inplace(inverse=True), and
before an FP8 wo_a its quantisation by groups of 128. Fewer than 64 heads are padded to 64, as SGLang does. FlashMLA's
scheduler metadata, three launches a step, is prepared outside.
ours: one sparse_decode with q_norm_eps, q_rope, inverse_rope and output.

Problems as in bench_sparse_decode.py. Warm: per call of a CUDA graph of 20 (benchmark/common.py). Among other kernels,
for bf16 outputs: benchmark/among.py. Where SGLang or FlashMLA is missing, stock has no column. The outputs of the two
are compared first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from among import among_medians
from bench_sparse_decode import problems, shape_options
from common import (
    COLOURS,
    Call,
    Progress,
    comment,
    plot_by_heads,
    require_cuda,
    run_facts,
    warm_medians,
    write_csv,
)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.testing_decode import Problem, random_freqs, relative_error
from sgl_dsv4_kernels.testing_peers import flashmla, sglang_chain_call, sglang_steps

EPS = 1e-6
POSITIONS = 65536
OUTPUTS = ("bf16", "fp8_group128")
MOST_DIFFERENCE = {"bf16": 0.005, "fp8_group128": 0.05}
"""Of the two outputs, relative. bf16: each is about 0.002 off fp64, and the stock chain rounds once more. FP8: each is
about 0.026 off its bf16 values."""

Rope = tuple[torch.Tensor, torch.Tensor]


def our_call(problem: Problem, rope: Rope, output: str) -> Call:
    keywords = problem.arguments() | problem.options
    return lambda: dk.sparse_decode(**keywords, q_norm_eps=EPS, q_rope=rope, inverse_rope=rope, output=output)


def make_calls(problem: Problem, rope: Rope, output: str, peers: tuple | None) -> dict[str, Call]:
    """The contenders of one shape. peers: FlashMLA's module and SGLang's kernels."""
    calls = {"ours": our_call(problem, rope, output)}
    if peers:
        calls["stock"] = sglang_chain_call(*peers, problem, EPS, rope, output != "bf16")
    return calls


def check_peers(problem: Problem, rope: Rope, output: str, peers: tuple) -> None:
    """Exits if the two chains do not compute the same; FP8 outputs are compared as the values that they stand for."""
    calls = make_calls(problem, rope, output, peers)
    ours, stock = calls["ours"](), calls["stock"]()
    if output == "bf16":
        mine, theirs = ours.out, stock.double()
    else:
        (tokens, heads), (codes, scales) = problem.q.shape[:2], stock
        mine = ours.out.double() * ours.scales.double().reshape(tokens, heads, 4).repeat_interleave(128, 2)
        theirs = (codes.double() * scales.double().repeat_interleave(128, 1)).view(tokens, heads, HEAD_DIM)
    difference = relative_error(mine, theirs)
    if not difference <= MOST_DIFFERENCE[output]:
        sys.exit(f"bench_decode_chain.py: the {output} outputs of the two chains differ by {difference:.4f}")


def plot(path: Path, rows: list[dict], facts: dict[str, str]) -> None:
    """Time against b, a panel per head count; dashed: FP8 output. Called by scripts/results.py --plots."""

    def lines(mine: list[dict]) -> Iterator[tuple]:
        for output, style in zip(OUTPUTS, ("-o", "--"), strict=True):
            points = [row for row in mine if row["output"] == output]
            for name, colour in (("ours", COLOURS["auto"]), ("stock", COLOURS["stock"])):
                yield points, f"{name}_us", style, colour, f"{name}, {output}"

    heads = list(dict.fromkeys(row["heads"] for row in rows))
    rows = [row for row in rows if row["extra"] == rows[0]["extra"]]
    title = "from projection to wo_a: {gpu}, torch {torch}, commit {commit}".format(**facts)
    plot_by_heads(path, rows, heads, lines, "time a layer, us", title)


def cells(row: dict[str, object], names: list[str], kind: str) -> str:
    """Times of a kind and their ratio, as they stand in the table; nothing without times."""
    times = {name: float(row[f"{name}_{kind}"]) for name in names if row[f"{name}_{kind}"]}
    ratio = f"{times['stock'] / times['ours']:.2f}" if "stock" in times else "-"
    return "".join(f"{times[name]:9.2f}" for name in names) + f"{ratio:>12}" if times else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shape_options(heads=[64, 32, 16, 8], extra=[512], iters=15)],
    )
    parser.add_argument("--output", nargs="+", choices=OUTPUTS, default=list(OUTPUTS))
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    require_cuda()
    torch.manual_seed(0)
    facts = run_facts()
    found = flashmla(), sglang_steps()
    missing = [reason for part, reason in found if part is None]
    peers = None if missing else tuple(part for part, _ in found)
    for reason in missing:
        print(f"# no column stock: {reason}")
    names = ["ours", *(["stock"] if peers else [])]
    print(comment(facts))
    head = "".join(f"{name:>9}" for name in names)
    print(f"# us, warm; bf16 also among other kernels\n{'heads':>5} {'keys':>10} {'b':>4} {'output':>12}", end="")
    print(f"{head}  stock/ours" * 2)
    freqs = random_freqs(POSITIONS, torch.device("cuda"))
    rows, contenders = [], []

    def save() -> None:
        if args.csv:
            write_csv(args.csv, rows)

    for shape, problem in problems(args):
        rope = freqs, torch.randint(0, POSITIONS, (shape["b"],), device="cuda")
        for output in args.output:
            if peers:
                check_peers(problem, rope, output, peers)
            contenders.append(make_calls(problem, rope, output, peers))
            warm = warm_medians(contenders[-1], args.iters)
            row = shape | {"output": output} | {f"{name}_us": f"{warm[name]:.2f}" for name in names}
            rows.append(row | {f"{name}_among_us": "" for name in names} | facts)
    save()
    # Behind all warm times: launches are dearer, by 1 to 2 us a chain, in a process that has been profiled.
    progress = Progress(len(rows))
    for row, calls in zip(rows, contenders, strict=True):
        progress.step("among other kernels, {heads} heads, b={b}, {output}".format(**row))
        if row["output"] == "bf16":
            row |= {f"{name}_among_us": f"{us:.2f}" for name, us in among_medians(calls).items()}
        print("{heads:5} {topk:4} +{extra:4} {b:4} {output:>12}".format(**row), end="")
        print(cells(row, names, "us") + cells(row, names, "among_us"), flush=True)
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
