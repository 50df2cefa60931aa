"""benchmark/apart_times.py: what it fits, and that the constants are those of the CSV that is kept."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import apart_times  # noqa: E402
from apart_times import Cell  # noqa: E402
from common import read_csv  # noqa: E402

from sgl_dsv4_kernels import sm90_decode  # noqa: E402

MEASURED = ROOT / "benchmark/results/h200/apart_times.csv"


def test_constants_are_those_of_the_measured_times():
    cells: dict[int, list[Cell]] = {}
    for row in read_csv(MEASURED):
        cell = apart_times.to_cell(row)
        cells.setdefault(cell.block_heads, []).append(cell)
    assert {block_heads: apart_times.fit(mine) for block_heads, mine in cells.items()} == sm90_decode.SECOND_DECODE_US
    for block_heads, mine in cells.items():
        second = sm90_decode.SECOND_DECODE_US[block_heads]
        assert min(cell.one / apart_times.chosen(cell, second) for cell in mine) > 0.999  # none is slower for it


def test_full_turns_choose_as_the_fit_does():
    for row in read_csv(MEASURED):
        heads, rows, apart = int(row["heads"]), int(row["b"]), int(row["apart"])
        cell = apart_times.to_cell(row)
        two = cell.predicted_two + sm90_decode.SECOND_DECODE_US[cell.block_heads] < cell.predicted_one
        assert sm90_decode.full_turns(rows, heads, int(row["topk"]) + int(row["extra"]), 132) == (apart if two else 0)


@pytest.mark.parametrize("second", [-1.0, 0.0, 2.5, 6.0])
def test_fit_finds_what_separates(second):
    """Two decodes that cost `second` more than the model says: the constant is within a step of it."""
    cells = [Cell(64, 50.0, 40.0 + gap + second, 50.0, 40.0 + gap) for gap in (x / 8 for x in range(0, 160))]
    found = apart_times.fit(cells)
    assert abs(found - second) <= 0.25
    assert apart_times.loss(cells, found) < apart_times.loss(cells, second + 1.0)


def test_report_of_a_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "apart_times.csv"
    with path.open("w", newline="") as file:
        columns = ["heads", "topk", "extra", "b", "apart"]
        columns += [f"{name}_{kind}_us" for name in ("one", "two") for kind in ("warm", "cold")]
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerow([64, 128, 512, 136, 132, 50.0, 60.0, 40.0, 50.0])
        writer.writerow([64, 128, 512, 216, 132, 50.0, 60.0, 55.0, 65.0])
    monkeypatch.setattr(sys, "argv", ["apart_times.py", "--fit", str(path)])
    assert apart_times.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(" 64 heads a block: ")
    assert "1 of 2 in two, 1.000 to 1.222 times as fast, loses 0.00%" in line
