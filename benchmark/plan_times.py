"""Times of the Hopper decode by plan, heads a block and splits, and what sm90_decode.COSTS would be by them.

    python benchmark/plan_times.py --csv plan_times.csv     measures (a GPU), then fits
    python benchmark/plan_times.py --fit plan_times.csv     fits times measured before

Which plans: of every shape those that the model predicts at most --margin times as long as the fastest one. Warm, per
call of a CUDA graph of 20; caches, slots and lengths as in bench_sparse_decode.py.

The model (`sm90_decode.predicted_us`) is linear in its constants, the reciprocal of the partials' rate in place of the
rate. Fitted by least squares of relative errors, without negative constants. Behind the constants come the shapes whose
plan by the fitted model was measured more than 1 % slower than another.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from bench_sparse_decode import problems, shape_options
from common import comment, require_cuda, run_facts, warm_medians, write_csv

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.sm90_decode import Cost, Plan
from sgl_dsv4_kernels.testing_decode import Problem

SM_COUNT = 132
"""Of an H200, whose times COSTS are: other devices are refused."""


class Time(NamedTuple):
    """A measured decode: keys of both lists together; microseconds."""

    heads: int
    rows: int
    keys: int
    plan: Plan
    us: float


Constants = dict[str, float]
"""fixed_8, crowded_8, tile_8, ... by heads a block; small_combine, combine; partials: microseconds a byte."""

NAMES = (
    *(f"{field}_{heads}" for heads in sm90_decode.COSTS for field in Cost._fields),
    "small_combine",
    "combine",
    "partials",
)


def predicted_us(constants: Mapping[str, float], time: Time) -> float:
    """The model's time of that decode with these constants; those that are missing are 0."""
    value = constants.get
    costs = {n: Cost(*(value(f"{field}_{n}", 0.0) for field in Cost._fields)) for n in sm90_decode.COSTS}
    with mock.patch.multiple(
        sm90_decode,
        COSTS=costs,
        SMALL_COMBINE_US=value("small_combine", 0.0),
        COMBINE_US=value("combine", 0.0),
        COMBINE_BYTES_PER_US=1 / max(value("partials", 0.0), 1e-30),
    ):
        return sm90_decode.predicted_us(time.rows, time.heads, time.keys, SM_COUNT, time.plan)


# ---- fitting ----


def fit(times: list[Time]) -> Constants:
    """The constants of least relative error. Those that no time depends on, and those that would be negative, are 0."""
    columns = {name: [predicted_us({name: 1.0}, time) / time.us for time in times] for name in NAMES}
    names = [name for name in NAMES if max(columns[name]) > 1e-20]
    while True:
        matrix = torch.tensor([columns[name] for name in names], dtype=torch.float64).T
        scales = matrix.amax(0)  # a byte's share is a millionth of a microsecond's
        ones = torch.ones(len(times), 1, dtype=torch.float64)
        shares = torch.linalg.lstsq(matrix / scales, ones, driver="gelsd").solution[:, 0]
        if shares.min() >= 0:
            return dict(zip(names, (shares / scales).tolist(), strict=True))
        del names[int(shares.argmin())]


def wrong_choices(times: Iterable[Time], constants: Constants) -> list[tuple[Time, Time]]:
    """(chosen, fastest) of the measured plans of every shape whose chosen one takes more than 1 % longer."""
    shapes: dict[tuple, list[Time]] = {}
    for time in times:
        shapes.setdefault((time.heads, time.rows, time.keys), []).append(time)
    wrong = []
    for plans in shapes.values():
        chosen = min(plans, key=functools.partial(predicted_us, constants))
        fastest = min(plans, key=lambda t: t.us)
        if chosen.us > 1.01 * fastest.us:
            wrong.append((chosen, fastest))
    return wrong


def report(times: list[Time]) -> None:
    constants = fit(times)
    for heads in sm90_decode.COSTS:
        values = ", ".join(f"{constants.get(f'{field}_{heads}', 0.0):.2f}" for field in Cost._fields)
        print(f"{heads:3} heads a block: Cost({values})")
    print(f"combine {constants.get('combine', 0.0):.2f}, of few rows {constants.get('small_combine', 0.0):.2f} us")
    if constants.get("partials"):
        print(f"partials {1e-6 / constants['partials']:.2f}e6 bytes a us")
    errors = [predicted_us(constants, time) / time.us - 1 for time in times]
    print(f"{len(times)} times, errors {min(errors):+.1%} to {max(errors):+.1%}")
    for chosen, fastest in wrong_choices(times, constants):
        shape = f"{chosen.rows} rows of {chosen.heads} heads, {chosen.keys} keys"
        print(f"{shape}: {tuple(chosen.plan)} {chosen.us:.2f} us chosen, {tuple(fastest.plan)} {fastest.us:.2f}")


# ---- measuring ----


def plans_of(rows: int, heads: int, keys: int, margin: float) -> list[Plan]:
    """Those predicted to take at most ``margin`` times as long as the fastest."""
    plans = sm90_decode._plans(rows, heads, keys, None, False)
    predicted = {plan: sm90_decode.predicted_us(rows, heads, keys, SM_COUNT, plan) for plan in plans}
    least = min(predicted.values())
    return [plan for plan, us in predicted.items() if us <= margin * least]


def decode(problem: Problem, plan: Plan) -> object:
    """A decode by that plan, whatever the model says."""
    with mock.patch.object(sm90_decode, "cached_plan", return_value=plan):
        options = problem.arguments() | problem.options
        return dk.sparse_decode(**options, num_splits=plan.num_splits, backend="sm90")


def measure(args: argparse.Namespace) -> list[dict]:
    """Rows of the CSV: shape, block_heads, splits, us, and the facts of the run. Saves them behind every shape."""
    facts = run_facts()
    print(comment(facts))
    rows = []
    for shape, problem in problems(args):
        plans = plans_of(shape["b"], shape["heads"], shape["topk"] + shape["extra"], args.margin)
        times = warm_medians({plan: functools.partial(decode, problem, plan) for plan in plans}, args.iters)
        for plan, us in times.items():
            rows.append(shape | {"block_heads": plan.block_heads, "splits": plan.num_splits, "us": f"{us:.2f}"} | facts)
        if args.csv:
            write_csv(args.csv, rows)
        print("   ", *(f"{plan.block_heads}x{plan.num_splits} {us:.2f}" for plan, us in times.items()), flush=True)
    return rows


def to_time(row: Mapping[str, str]) -> Time:
    plan = Plan(int(row["block_heads"]), int(row["splits"]))
    return Time(int(row["heads"]), int(row["b"]), int(row["topk"]) + int(row["extra"]), plan, float(row["us"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shape_options(heads=[8, 16, 32, 64], extra=[0, 512, 1024], iters=7)],
    )
    parser.add_argument("--margin", type=float, default=1.25, help="of the predicted time, which plans are measured")
    parser.add_argument("--fit", type=Path, metavar="CSV", help="measure nothing")
    args = parser.parse_args()
    if args.fit is None:
        require_cuda()
        sm_count = sm90_decode.count_sms(torch.device("cuda"))
        if sm_count != SM_COUNT:
            parser.error(f"expected a device of {SM_COUNT} SMs, an H200, got one of {sm_count}")
        torch.manual_seed(0)
        rows = measure(args)
    else:
        with args.fit.open() as file:
            rows = list(csv.DictReader(file))
        if not rows:
            parser.error(f"--fit: expected times, got none in {args.fit}")
    report([to_time(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
