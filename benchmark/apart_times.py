"""Times of more rows than the SMs take at once, in one decode and in two, and what SECOND_DECODE_US would be by them.

    python benchmark/apart_times.py --csv apart_times.csv     measures (a GPU), then fits
    python benchmark/apart_times.py --fit apart_times.csv     fits times measured before

Two decodes: of the rows that give every SM the same number of them, and of the rest (`sm90_decode.full_turns`).
Measured as by plan_times.py, warm and cold; the model's time is their mean. The constants (`sm90_decode`) are those by
which what is chosen loses least, the geometric mean of its times over the faster ones.
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
from sgl_dsv4_kernels.testing_decode import Problem

TURNS = (1, 2, 3)
BEYOND = (4, 12, 20, 28, 44, 60, 84)
"""Rows more than full turns of them, where a row is one block."""
STEPS = [step / 4 for step in range(-16, 33)]
"""Microseconds that are tried."""


class Cell(NamedTuple):
    """A shape measured: microseconds, the mean of warm and cold, and what the model says."""

    block_heads: int
    one: float
    two: float
    predicted_one: float
    predicted_two: float


def to_cell(row: Mapping[str, str]) -> Cell:
    heads, rows, apart = int(row["heads"]), int(row["b"]), int(row["apart"])
    keys = int(row["topk"]) + int(row["extra"])
    one, two = ((float(row[f"{name}_warm_us"]) + float(row[f"{name}_cold_us"])) / 2 for name in ("one", "two"))
    block_heads = sm90_decode.choose_plan(rows, heads, keys, SM_COUNT).block_heads
    whole, *parts = (sm90_decode.planned_us(n, heads, keys, SM_COUNT) for n in (rows, apart, rows - apart))
    return Cell(block_heads, one, two, whole, sum(parts))


# ---- fitting ----


def chosen(cell: Cell, second: float) -> float:
    return cell.two if cell.predicted_two + second < cell.predicted_one else cell.one


def loss(cells: list[Cell], second: float) -> float:
    """The mean logarithm of the chosen time over the faster one."""
    return sum(math.log(chosen(cell, second) / min(cell.one, cell.two)) for cell in cells) / len(cells)


def fit(cells: list[Cell]) -> float:
    """Of the steps that lose least the middle one."""
    losses = [loss(cells, second) for second in STEPS]
    best = [second for second, lost in zip(STEPS, losses, strict=True) if lost <= min(losses) + 1e-12]
    return best[len(best) // 2]


def report(cells: list[Cell]) -> None:
    for block_heads in sm90_decode.COSTS:
        mine = [cell for cell in cells if cell.block_heads == block_heads]
        if not mine:
            continue
        second = fit(mine)
        ratios = [cell.one / chosen(cell, second) for cell in mine]
        cut = sum(chosen(cell, second) == cell.two for cell in mine)
        print(
            f"{block_heads:3} heads a block: {second:.2f} us, {cut} of {len(mine)} in two, {min(ratios):.3f} to "
            f"{max(ratios):.3f} times as fast, loses {math.expm1(loss(mine, second)):.2%}"
        )


# ---- measuring ----


def decode(problem: Problem, apart: int) -> object:
    """In two decodes, whatever the model says; 0: in one."""
    with mock.patch.object(sm90_decode, "cached_full_turns", return_value=apart):
        return dk.sparse_decode(**problem.arguments(), **problem.options, backend="sm90")


def shapes(args: argparse.Namespace) -> Iterator[tuple[dict[str, int], Problem]]:
    """By heads, whose rows are --b or TURNS and BEYOND."""
    for heads in args.heads:
        blocks = max(heads // 64, 1)
        rows = args.b or [(turns * SM_COUNT + beyond) // blocks for turns in TURNS for beyond in BEYOND]
        yield from problems(argparse.Namespace(**vars(args) | {"heads": [heads], "b": rows}))


def measure(args: argparse.Namespace) -> list[dict]:
    """Rows of the CSV: shape, apart, the times, and the facts of the run. Saves them after every shape."""
    facts = run_facts()
    print(comment(facts))
    cold_timer = ColdTimer()
    rows = []
    for shape, problem in shapes(args):
        cut = (shape["b"], shape["heads"])
        plan = sm90_decode.choose_plan(*cut, shape["topk"] + shape["extra"], SM_COUNT)
        apart = sm90_decode.rows_of_full_turns(*cut, SM_COUNT, plan)
        if apart == 0:
            continue
        calls = {"one": functools.partial(decode, problem, 0), "two": functools.partial(decode, problem, apart)}
        warm, cold = warm_medians(calls, args.iters), cold_timer.medians(calls, args.iters)
        times = {
            f"{name}_{kind}_us": f"{us[name]:.2f}" for name in calls for kind, us in (("warm", warm), ("cold", cold))
        }
        rows.append(shape | {"apart": apart} | times | facts)
        if args.csv:
            write_csv(args.csv, rows)
        print("   ", apart, *(f"{name} {warm[name]:.2f}/{cold[name]:.2f}" for name in calls), flush=True)
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
