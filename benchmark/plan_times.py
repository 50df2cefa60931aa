"""Times of the Hopper decode by plan, heads a block and splits, and what sm90_decode.COSTS would be by them.

    python benchmark/plan_times.py --csv plan_times.csv     measures (a GPU), then fits
    python benchmark/plan_times.py --fit plan_times.csv     fits times measured before

Which plans: of every shape those that the model predicts at most --margin times as long as the fastest one. Measured
warm, per call of a CUDA graph of 20, and cold, with L2 flushed before the call. Among the kernels of a model a decode
is between the two, and the model's time is their mean. Caches, slots and lengths as in bench_sparse_decode.py.

The model (`sm90_decode.predicted_us`) is linear in its constants, the reciprocal of the partials' rate in place of the
rate. Fitted by least squares of relative errors, without negative constants, then moved to where the plans chosen by it
lose least. Then it prints the shapes whose plan by the model was measured more than 1 % slower than another, as
sm90_decode.FASTER lists them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from bench_sparse_decode import problems, shape_options
from common import ColdTimer, comment, read_csv, require_cuda, run_facts, warm_medians, write_csv

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.sm90_decode import Cost, Plan
from sgl_dsv4_kernels.testing_decode import Problem

ROWS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
"""By default: the benchmarks' and some between them, where other plans are near."""

SM_COUNT = sm90_decode.H200_SMS
"""COSTS are an H200's times: other devices are refused."""


class Time(NamedTuple):
    """A measured decode: keys of both lists together; microseconds, the mean of warm and cold."""

    heads: int
    rows: int
    keys: int
    plan: Plan
    us: float


Constants = dict[str, float]
"""fixed_8, crowded_8, tile_8, next_row_8, ... by heads a block; small_combine, combine; partials: microseconds a
byte."""

NAMES = (
    *(f"{field}_{heads}" for heads in sm90_decode.COSTS for field in Cost._fields),
    "small_combine",
    "combine",
    "partials",
)


def predicted(constants: Mapping[str, float], times: Iterable[Time]) -> list[float]:
    """The model's times of those decodes with these constants; those that are missing are 0."""
    value = constants.get
    costs = {n: Cost(*(value(f"{field}_{n}", 0.0) for field in Cost._fields)) for n in sm90_decode.COSTS}
    with mock.patch.multiple(
        sm90_decode,
        COSTS=costs,
        SMALL_COMBINE_US=value("small_combine", 0.0),
        COMBINE_US=value("combine", 0.0),
        COMBINE_BYTES_PER_US=1 / max(value("partials", 0.0), 1e-30),
    ):
        return [sm90_decode.predicted_us(time.rows, time.heads, time.keys, SM_COUNT, time.plan) for time in times]


def columns_of(times: list[Time]) -> torch.Tensor:
    """The model's matrix: a row per time, a column per constant."""
    return torch.tensor([predicted({name: 1.0}, times) for name in NAMES], dtype=torch.float64).T


def by_shape(times: Iterable[Time]) -> list[list[Time]]:
    """The times of every shape's plans."""
    shapes: dict[tuple, list[Time]] = {}
    for time in times:
        shapes.setdefault((time.heads, time.rows, time.keys), []).append(time)
    return list(shapes.values())


# ---- fitting ----


def fit(times: list[Time]) -> Constants:
    """The constants of least relative error. Those that no time depends on, and those that would be negative, are 0."""
    shares = columns_of(times) / torch.tensor([[time.us] for time in times], dtype=torch.float64)
    columns = {name: shares[:, i] for i, name in enumerate(NAMES) if shares[:, i].max() > 1e-20}
    while True:
        matrix = torch.stack(list(columns.values()), 1)
        scales = matrix.amax(0)  # a byte's share is a millionth of a microsecond's
        ones = torch.ones(len(times), 1, dtype=torch.float64)
        found = torch.linalg.lstsq(matrix / scales, ones, driver="gelsd").solution[:, 0]
        if found.min() >= 0:
            return dict(zip(columns, (found / scales).tolist(), strict=True))
        del columns[list(columns)[int(found.argmin())]]


class Loss:
    """What constants are judged by: the mean logarithm of the chosen plan's time over the fastest one's, of all shapes,
    and, so that times not measured stay predictable, ERROR_SHARE of the mean squared relative error."""

    ERROR_SHARE = 0.3

    def __init__(self, times: list[Time]) -> None:
        shapes = by_shape(times)
        most = max(len(plans) for plans in shapes)
        ordered = [time for plans in shapes for time in plans]
        self.us = torch.tensor([time.us for time in ordered], dtype=torch.float64)
        self.columns = columns_of(ordered)
        # A shape's plans; where it has fewer than others, the first one again.
        first, self.plans = 0, torch.empty(len(shapes), most, dtype=torch.long)
        for i, plans in enumerate(shapes):
            self.plans[i] = first
            self.plans[i, : len(plans)] += torch.arange(len(plans))
            first += len(plans)
        self.fastest = self.us[self.plans].amin(1)

    def __call__(self, constants: torch.Tensor) -> float:
        us = self.columns @ constants
        chosen = self.plans.gather(1, us[self.plans].argmin(1, keepdim=True))[:, 0]
        lost = (self.us[chosen] / self.fastest).log().mean()
        return float(lost + self.ERROR_SHARE * ((us / self.us - 1) ** 2).mean())


def refine(times: list[Time], constants: Constants, steps: int = 20_000) -> Constants:
    """Constants near those given by which the chosen plans lose less: a random walk that only goes down, always the
    same for the same times. A constant that is 0 stays 0."""
    loss = Loss(times)
    random = torch.Generator().manual_seed(0)
    best = torch.tensor([constants.get(name, 0.0) for name in NAMES], dtype=torch.float64)
    least = loss(best)
    for _ in range(steps):
        moved = torch.rand(len(NAMES), generator=random) < 0.1
        factor = (0.08 * torch.randn(len(NAMES), generator=random, dtype=torch.float64)).exp()
        step = torch.where(moved, best * factor, best)
        if (now := loss(step)) < least:
            best, least = step, now
    return {name: value for name, value in zip(NAMES, best.tolist(), strict=True) if name in constants}


def wrong_choices(times: Iterable[Time], constants: Constants) -> list[tuple[Time, Time]]:
    """(chosen, fastest) of the measured plans of every shape whose chosen one takes more than 1 % longer."""
    wrong = []
    for plans in by_shape(times):
        us = predicted(constants, plans)
        chosen = plans[us.index(min(us))]
        fastest = min(plans, key=lambda time: time.us)
        if chosen.us > 1.01 * fastest.us:
            wrong.append((chosen, fastest))
    return wrong


def rounded(constants: Constants) -> Constants:
    """As they are printed, and then typed."""
    rate = 1e-6 / round(1e-6 / constants["partials"], 3) if constants.get("partials") else 0.0
    return {name: rate if name == "partials" else round(value, 3) for name, value in constants.items()}


def report(times: list[Time]) -> None:
    constants = rounded(refine(times, fit(times)))
    for heads in sm90_decode.COSTS:
        values = ", ".join(f"{constants.get(f'{field}_{heads}', 0.0):.3f}" for field in Cost._fields)
        print(f"{heads:3} heads a block: Cost({values})")
    print(f"combine {constants.get('combine', 0.0):.3f}, of few rows {constants.get('small_combine', 0.0):.3f} us")
    if constants.get("partials"):
        print(f"partials {1e-6 / constants['partials']:.3f}e6 bytes a us")
    errors = [us / time.us - 1 for us, time in zip(predicted(constants, times), times, strict=True)]
    print(f"{len(times)} times, errors {min(errors):+.1%} to {max(errors):+.1%}")
    for chosen, fastest in wrong_choices(times, constants):
        shape = (chosen.rows, chosen.heads, chosen.keys)
        print(f"({shape}, Plan{tuple(fastest.plan)}),  # {fastest.us:.2f} us, {tuple(chosen.plan)} {chosen.us:.2f}")


# ---- measuring ----


def plans_of(rows: int, heads: int, keys: int, margin: float) -> list[Plan]:
    """Those predicted to take at most ``margin`` times as long as the fastest."""
    plans = sm90_decode._plans(rows, heads, keys, None, False)
    times = {plan: sm90_decode.predicted_us(rows, heads, keys, SM_COUNT, plan) for plan in plans}
    least = min(times.values())
    return [plan for plan, us in times.items() if us <= margin * least]


def decode(problem: Problem, plan: Plan) -> object:
    """A decode by that plan, whatever the model says."""
    with mock.patch.object(sm90_decode, "cached_plan", return_value=plan):
        options = problem.arguments() | problem.options
        return dk.sparse_decode(**options, num_splits=plan.num_splits, backend="sm90")


def measure(args: argparse.Namespace) -> list[dict]:
    """Rows of the CSV: shape, block_heads, splits, warm_us, cold_us, and the facts of the run. Saves them after every
    shape."""
    facts = run_facts()
    print(comment(facts))
    cold_timer = ColdTimer()
    rows = []
    for shape, problem in problems(args):
        plans = plans_of(shape["b"], shape["heads"], shape["topk"] + shape["extra"], args.margin)
        calls = {plan: functools.partial(decode, problem, plan) for plan in plans}
        warm, cold = warm_medians(calls, args.iters), cold_timer.medians(calls, args.iters)
        for plan in plans:
            times = {"warm_us": f"{warm[plan]:.2f}", "cold_us": f"{cold[plan]:.2f}"}
            rows.append(shape | {"block_heads": plan.block_heads, "splits": plan.num_splits} | times | facts)
        if args.csv:
            write_csv(args.csv, rows)
        print("   ", *(f"{p.block_heads}x{p.num_splits} {warm[p]:.2f}/{cold[p]:.2f}" for p in plans), flush=True)
    return rows


def to_time(row: Mapping[str, str]) -> Time:
    plan = Plan(int(row["block_heads"]), int(row["splits"]))
    us = (float(row["warm_us"]) + float(row["cold_us"])) / 2
    return Time(int(row["heads"]), int(row["b"]), int(row["topk"]) + int(row["extra"]), plan, us)


def measured_rows(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], list[dict]]) -> list[dict]:
    """The rows of the CSV that --fit names, or what ``measure`` does with the arguments."""
    parser.add_argument("--fit", type=Path, metavar="CSV", help="measure nothing")
    args = parser.parse_args()
    if args.fit is not None:
        rows = read_csv(args.fit)
        if not rows:
            parser.error(f"--fit: expected times, got none in {args.fit}")
        return rows
    require_cuda()
    sm_count = sm90_decode.count_sms(torch.device("cuda"))
    if sm_count != SM_COUNT:
        parser.error(f"expected a device of {SM_COUNT} SMs, an H200, got one of {sm_count}")
    torch.manual_seed(0)
    return measure(args)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shape_options(heads=[8, 16, 32, 64], extra=[0, 512, 1024], iters=7)],
    )
    parser.set_defaults(b=ROWS)
    parser.add_argument("--margin", type=float, default=1.25, help="of the predicted time, which plans are measured")
    report([to_time(row) for row in measured_rows(parser, measure)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
