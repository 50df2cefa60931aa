"""benchmark/plan_times.py: the fit, on times that the model itself gives, and what is reported of it."""

from __future__ import annotations

import csv
import functools
import math
import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import cut_times  # noqa: E402
import plan_times  # noqa: E402
from plan_times import Plan, Time  # noqa: E402

from sgl_dsv4_kernels import sm90_decode  # noqa: E402

OURS = {f"{field}_{n}": getattr(cost, field) for n, cost in sm90_decode.COSTS.items() for field in cost._fields} | {
    "small_combine": sm90_decode.SMALL_COMBINE_US,
    "combine": sm90_decode.COMBINE_US,
    "partials": 1 / sm90_decode.COMBINE_BYTES_PER_US,
}
NO_TIMES = "pair_64"  # its splits are not merged by pairs
OTHERS = {name: value * 1.3 + (0.0 if name == "partials" else 0.2) for name, value in OURS.items()}
OTHERS[NO_TIMES] = 0.0


def model_times(constants: dict[str, float], noise: float = 0.0) -> list[Time]:
    """Every plan of some shapes, with the times of the model."""
    rng = random.Random(0)
    times = [
        Time(heads, rows, keys, plan, 0.0)
        for heads in (8, 16, 32, 64)
        for rows in (1, 4, 16, 48, 96, 128, 256)
        for keys in (128, 640, 1152)
        for plan in sm90_decode._plans(rows, heads, keys, None, False)
    ]
    predicted = plan_times.predicted(constants, times)
    return [time._replace(us=us * (1 + rng.uniform(-noise, noise))) for time, us in zip(times, predicted, strict=True)]


def test_prediction_is_the_models():
    assert set(OURS) == set(plan_times.NAMES)
    for time in model_times(OURS)[::7]:
        model = sm90_decode.predicted_us(time.rows, time.heads, time.keys, 132, time.plan)
        assert time.us == pytest.approx(model, rel=1e-12)
    assert OURS["combine"] == sm90_decode.COMBINE_US  # put back


@pytest.mark.parametrize("constants", [OURS, OTHERS])
def test_fit_finds_the_constants(constants):
    found = plan_times.fit(model_times(constants))
    for name, value in constants.items():
        assert found.get(name, 0.0) == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_fit_has_no_negative_constants():
    """A tile of 64 heads that costs less the more of them there are: the fit takes 0 for what would be negative."""
    times = [
        Time(64, 1, 64 * tiles, Plan(64, 1), us)
        for tiles, us in ((1, 3.0), (2, 5.0), (4, 9.0), (8, 17.0))  # 1 + 2 a tile: no share for `crowded` alone
    ] + [Time(64, 132, 640, Plan(64, 1), 15.0)]  # less than 21
    found = plan_times.fit(times)
    assert min(found.values()) >= 0
    assert found.get("crowded_64", 0.0) == 0.0
    assert "tile_8" not in found
    noisy = plan_times.fit(model_times(OURS, noise=0.1))
    assert min(noisy.values()) >= 0
    assert noisy["tile_8"] == pytest.approx(OURS["tile_8"], rel=0.1)


def test_refined_constants_choose_better():
    """Times of the model, but some plans are slower than it says, so its choice loses there."""
    right = model_times(OURS)
    slow = [time.plan.block_heads == 16 and time.plan.num_splits > 3 for time in right]
    times = [time._replace(us=time.us * (1.15 if late else 1.0)) for time, late in zip(right, slow, strict=True)]
    first = plan_times.fit(times)
    refined = plan_times.refine(times, first, steps=300)
    assert refined == plan_times.refine(times, first, steps=300)
    assert set(refined) == set(first)

    def lost(constants: dict[str, float]) -> float:
        return sum(math.log(chosen.us / fastest.us) for chosen, fastest in plan_times.wrong_choices(times, constants))

    assert lost(refined) < lost(first)


def test_right_constants_stay():
    times = model_times(OURS)
    assert plan_times.refine(times, OURS, steps=100) == pytest.approx(OURS, rel=1e-12)


@pytest.fixture(scope="module")
def kept() -> list[Time]:
    with (ROOT / "benchmark/results/h200/plan_times.csv").open() as file:
        return [plan_times.to_time(row) for row in csv.DictReader(file)]


def test_plans_are_the_fastest_of_the_times_kept(kept):
    """Of the plans measured for a shape the chosen one is the fastest, or hardly slower."""
    lost = []
    shapes = plan_times.by_shape(kept)
    assert len(shapes) > 150
    for plans in shapes:
        chosen = sm90_decode.choose_plan(plans[0].rows, plans[0].heads, plans[0].keys, plan_times.SM_COUNT)
        us = {time.plan: time.us for time in plans}
        lost.append(us[chosen] / min(us.values()) - 1)
    assert max(lost) < 0.01
    assert sum(lost) / len(lost) < 0.001


def test_faster_plans_are_those_that_the_model_misses(kept):
    missed = {
        ((chosen.rows, chosen.heads, chosen.keys), fastest.plan)
        for chosen, fastest in plan_times.wrong_choices(kept, OURS)
    }
    assert set(sm90_decode.FASTER) == missed


@pytest.mark.parametrize(("shape", "plan"), sm90_decode.FASTER)
def test_faster_plans_are_for_free_choices_alone(shape, plan, monkeypatch):
    choose = functools.partial(sm90_decode.choose_plan, *shape)
    splits = plan.num_splits
    others = ((114,), (132, splits + 1), (132, None, True), (132, splits, True), (132, None, False, 256))
    # A call asks for its number of splits, and then, with that, for heads a block.
    assert choose(132) == choose(132, usual=shape[2]) == choose(132, splits) == plan
    chosen = [choose(*other) for other in others]
    rows, heads, keys = shape
    if heads == 64 and rows % 2 == 0:
        assert sm90_decode.choose_plan(rows // 2, 128, keys, 132) == plan
    monkeypatch.setattr(sm90_decode, "FASTER", ())
    assert [choose(*other) for other in others] == chosen
    assert choose(132) != plan


def test_wrong_choices():
    fast, slow = Plan(8, 10), Plan(16, 10)
    least, most = sorted((fast, slow), key=lambda plan: sm90_decode.predicted_us(1, 64, 640, 132, plan))
    right = [Time(64, 1, 640, least, 5.0), Time(64, 1, 640, most, 6.0)]
    assert plan_times.wrong_choices(right, OURS) == []
    wrong = [Time(64, 1, 640, least, 6.0), Time(64, 1, 640, most, 5.0), Time(64, 2, 640, most, 5.0)]
    assert plan_times.wrong_choices(wrong, OURS) == [(wrong[0], wrong[1])]


def test_plans_that_are_measured():
    for rows, heads, keys in ((1, 64, 640), (16, 16, 640), (128, 32, 1152)):
        plans = plan_times.plans_of(rows, heads, keys, 1.25)
        assert sm90_decode.choose_plan(rows, heads, keys, 132) in plans
        assert plan_times.plans_of(rows, heads, keys, 1.0) == [sm90_decode.choose_plan(rows, heads, keys, 132)]
        predicted = [sm90_decode.predicted_us(rows, heads, keys, 132, plan) for plan in plans]
        assert max(predicted) <= 1.25 * min(predicted)


def test_report_of_a_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "plan_times.csv"
    with path.open("w", newline="") as file:
        columns = ["heads", "topk", "extra", "b", "block_heads", "splits", "warm_us", "cold_us"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for time in model_times(OURS):
            row = (time.heads, 128, time.keys - 128, time.rows, *time.plan, repr(0.75 * time.us), repr(1.25 * time.us))
            writer.writerow(dict(zip(columns, row, strict=True)))
    monkeypatch.setattr(plan_times, "refine", functools.partial(plan_times.refine, steps=100))
    monkeypatch.setattr(sys, "argv", ["plan_times.py", "--fit", str(path)])
    assert plan_times.main() == 0
    lines = capsys.readouterr().out.splitlines()
    cost = sm90_decode.COSTS[8]
    assert lines[0].split() == [
        "8",
        "heads",
        "a",
        "block:",
        *f"Cost({', '.join(f'{us:.3f}' for us in cost)})".split(),
    ]
    assert f"{sm90_decode.COMBINE_BYTES_PER_US / 1e6:.3f}e6 bytes a us" in lines[5]
    errors = [float(error) for error in re.findall(r"[+-][\d.]+(?=%)", lines[-1])]
    assert len(errors) == 2
    assert max(map(abs, errors)) == 0.0


def test_report_of_what_the_model_misses(monkeypatch, capsys):
    """Constants are those of the model, rounded; one plan is slower than they say."""
    times = model_times(OURS)
    shape = (4, 64, 640)
    assert shape not in dict(sm90_decode.FASTER)
    chosen = sm90_decode.choose_plan(*shape, 132)
    times = [
        time._replace(us=2 * time.us) if (time.rows, time.heads, time.keys, time.plan) == (*shape, chosen) else time
        for time in times
    ]
    unrounded = {name: value * (1 + 1e-9) for name, value in OURS.items()}
    assert plan_times.rounded(unrounded) == pytest.approx(OURS, rel=1e-12)
    assert plan_times.rounded({name: value for name, value in unrounded.items() if name != "partials"})["combine"] > 0
    monkeypatch.setattr(plan_times, "refine", lambda times, constants: unrounded)
    plan_times.report(times)
    missed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("((")]
    (fastest,) = [
        next(time for time in plans if time.us == min(other.us for other in plans))
        for plans in plan_times.by_shape(times)
        if (plans[0].rows, plans[0].heads, plans[0].keys) == shape
    ]
    assert len(missed) == 1
    assert missed[0].startswith(f"({shape}, Plan{tuple(fastest.plan)}),  # {fastest.us:.2f} us, {tuple(chosen)} ")


@pytest.mark.parametrize("script", [plan_times, cut_times], ids=lambda script: script.__name__)
def test_file_without_times(script, tmp_path, monkeypatch, capsys):
    path = tmp_path / "times.csv"
    path.write_text("heads,topk,extra,b,block_heads,splits,warm_us,cold_us\n")
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--fit", str(path)])
    with pytest.raises(SystemExit):
        script.main()
    assert f"--fit: expected times, got none in {path}" in capsys.readouterr().err
