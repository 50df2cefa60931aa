"""benchmark/cut_times.py: what it fits, and that the constants are those of the CSV that is kept."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import cut_times  # noqa: E402
from common import read_csv  # noqa: E402
from cut_times import Cell  # noqa: E402

from sgl_dsv4_kernels import sm90_decode  # noqa: E402
from sgl_dsv4_kernels.sm90_decode import Cut, choose_cut  # noqa: E402

MEASURED = ROOT / "benchmark/results/h200/cut_times.csv"


def test_constants_are_those_of_the_measured_times():
    cells: dict[int, list[Cell]] = {}
    for row in read_csv(MEASURED):
        cell = cut_times.to_cell(row)
        cells.setdefault(cell.block_heads, []).append(cell)
    assert {block_heads: cut_times.fit(mine) for block_heads, mine in cells.items()} == sm90_decode.CUT_US
    for block_heads, mine in cells.items():
        more = sm90_decode.CUT_US[block_heads]
        assert min(cell.whole / cut_times.chosen(cell, more) for cell in mine) > 0.999  # none is slower for it


def test_choice_is_that_of_the_fit():
    for row in read_csv(MEASURED):
        cell = cut_times.to_cell(row)
        faster = cell.predicted_cut + sm90_decode.CUT_US[cell.block_heads] < cell.predicted_whole
        cut = choose_cut(int(row["b"]), int(row["heads"]), int(row["topk"]) + int(row["extra"]), 132)
        assert cut == (Cut(int(row["whole"]), int(row["num_splits"])) if faster else None)


@pytest.mark.parametrize("more", [-1.0, 0.0, 2.5, 6.0])
def test_fit_finds_what_separates(more):
    """Splits that cost `more` than the model says: the constant is within a step of it."""
    cells = [Cell(64, 50.0, 40.0 + gap + more, 50.0, 40.0 + gap) for gap in (x / 8 for x in range(0, 160))]
    found = cut_times.fit(cells)
    assert abs(found - more) <= 0.25
    assert cut_times.loss(cells, found) < cut_times.loss(cells, more + 1.0)


def test_report_of_a_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "cut_times.csv"
    with path.open("w", newline="") as file:
        columns = ["heads", "topk", "extra", "b", "block_heads", "whole", "num_splits"]
        columns += [f"{name}_{kind}_us" for name in ("whole", "cut") for kind in ("warm", "cold")]
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerow([64, 128, 512, 136, 64, 132, 10, 50.0, 60.0, 40.0, 50.0])
        writer.writerow([64, 128, 512, 192, 64, 132, 2, 50.0, 60.0, 55.0, 65.0])
    monkeypatch.setattr(sys, "argv", ["cut_times.py", "--fit", str(path)])
    assert cut_times.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(" 64 heads a block: ")
    assert "1 of 2 cut, 1.000 to 1.222 times as fast, loses 0.00%" in line
