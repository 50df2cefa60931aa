"""Times of more rows than the SMs take at once, all unsplit and with the last ones split, and CUT_US by them.

    python benchmark/cut_times.py --csv cut_times.csv     measures (a GPU), then fits
    python benchmark/cut_times.py --fit cut_times.csv     fits times measured before

The last rows: those beyond as many as give every SM the same number of them (`sm90_decode.choose_cut`). Measured as
by plan_times.py, warm and cold; the model's time is their mean. The constants (`sm90_decode`) are those by which what
is chosen loses least, the geometric mean of its times over the faster ones.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from unittest import mock

from bench_sparse_decode import problems, shape_options
from common import ColdTimer, comment, run_facts, warm_medians, write_csv
from plan_times import SM_COUNT, measured_rows

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.sm90_decode import Cut, Plan
from sgl_dsv4_kernels.testing_decode import Problem

TURNS = (1, 2, 3)
BEYOND = (4, 12, 20, 28, 44, 60)
"""Rows more than full turns of them, where a row is one block."""
STEPS = [step / 4 for step in range(-16, 33)]
"""Microseconds that are tried."""


class Cell(NamedTuple):
    """A shape measured: microseconds, the mean of warm and cold, and what the model says."""

    block_heads: int
    whole: float
    cut: float
    predicted_whole: float
    predicted_cut: float


def to_cell(row: Mapping[str, str]) -> Cell:
    shape = (int(row["b"]), int(row["heads"]), int(row["topk"]) + int(row["extra"]), SM_COUNT)
    whole, cut = ((float(row[f"{name}_warm_us"]) + float(row[f"{name}_cold_us"])) / 2 for name in ("whole", "cut"))
    plan = Plan(int(row["block_heads"]), 1)
    predicted_cut = sm90_decode.cut_us(*shape, plan, Cut(int(row["whole"]), int(row["num_splits"])))
    return Cell(plan.block_heads, whole, cut, sm90_decode.predicted_us(*shape, plan), predicted_cut)


# ---- fitting ----


def chosen(cell: Cell, more: float) -> float:
    return cell.cut if cell.predicted_cut + more < cell.predicted_whole else cell.whole


def loss(cells: list[Cell], more: float) -> float:
    """The mean logarithm of the chosen time over the faster one."""
    return sum(math.log(chosen(cell, more) / min(cell.whole, cell.cut)) for cell in cells) / len(cells)


def fit(cells: list[Cell]) -> float:
    """Of the steps that lose least the middle one."""
    losses = [loss(cells, more) for more in STEPS]
    best = [more for more, lost in zip(STEPS, losses, strict=True) if lost <= min(losses) + 1e-12]
    return best[len(best) // 2]


def report(cells: list[Cell]) -> None:
    for block_heads in sm90_decode.COSTS:
        mine = [cell for cell in cells if cell.block_heads == block_heads]
        if not mine:
            continue
        more = fit(mine)
        ratios = [cell.whole / chosen(cell, more) for cell in mine]
        cut = sum(chosen(cell, more) == cell.cut for cell in mine)
        print(
            f"{block_heads:3} heads a block: {more:.2f} us, {cut} of {len(mine)} cut, {min(ratios):.3f} to "
            f"{max(ratios):.3f} times as fast, loses {math.expm1(loss(mine, more)):.2%}"
        )


# ---- measuring ----


def decode(problem: Problem, cut: Cut | None) -> object:
    """Whatever the model says."""
    with mock.patch.object(sm90_decode, "cached_cut", return_value=cut):
        return dk.sparse_decode(**problem.arguments(), **problem.options, backend="sm90")


def shapes(args: argparse.Namespace) -> Iterator[tuple[dict[str, int], Problem]]:
    """By heads, whose rows are --b or TURNS and BEYOND."""
    for heads in args.heads:
        blocks = max(heads // 64, 1)
        rows = args.b or [(turns * SM_COUNT + beyond) // blocks for turns in TURNS for beyond in BEYOND]
        yield from problems(argparse.Namespace(**vars(args) | {"heads": [heads], "b": rows}))


def measure(args: argparse.Namespace) -> list[dict]:
    """Rows of the CSV: shape, plan, cut, the times, and the facts of the run. Saves them after every shape."""
    facts = run_facts()
    print(comment(facts))
    cold_timer = ColdTimer()
    rows = []
    for shape, problem in shapes(args):
        sizes = (shape["b"], shape["heads"], shape["topk"] + shape["extra"], SM_COUNT)
        plan = sm90_decode.choose_plan(*sizes, num_splits=1)
        cut = sm90_decode.possible_cut(*sizes, plan)
        if cut is None:
            continue
        calls = {"whole": functools.partial(decode, problem, None), "cut": functools.partial(decode, problem, cut)}
        warm, cold = warm_medians(calls, args.iters), cold_timer.medians(calls, args.iters)
        times = {
            f"{name}_{kind}_us": f"{us[name]:.2f}" for name in calls for kind, us in (("warm", warm), ("cold", cold))
        }
        rows.append(shape | {"block_heads": plan.block_heads} | cut._asdict() | times | facts)
        if args.csv:
            write_csv(args.csv, rows)
        print("   ", *cut, *(f"{name} {warm[name]:.2f}/{cold[name]:.2f}" for name in calls), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shape_options(heads=[8, 16, 32, 64, 128], extra=[512, 1024], iters=9)],
    )
    parser.set_defaults(b=None)
    report([to_cell(row) for row in measured_rows(parser, measure)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
