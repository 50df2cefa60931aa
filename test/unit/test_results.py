"""scripts/results.py: tables, figures of the README, plots."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = {"gpu": "G", "torch": "2", "driver": "5", "commit": "abc", "date": "2026-01-01"}


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The module, on a folder without files."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def write(folder, name, rows):
    lines = [",".join(line) for line in (rows[0], *(row.values() for row in rows))]
    (folder / name).write_text("\n".join(lines) + "\n")


def decode_rows(extra="512"):
    times = {"auto_warm_us": "6.00", "auto_cold_us": "9.00", "FlashMLA_warm_us": "12.30", "FlashMLA_cold_us": ""}
    shape = {"backend": "sm90", "topk": "128", "extra": extra}
    return [shape | {"heads": h, "b": b} | times | RUN for h, b in (("8", "1"), ("64", "1"), ("64", "2"))]


def chain_rows():
    stock = {"64": "20.00", "8": ""}
    return [
        {"heads": h, "topk": "128", "extra": "512", "b": b, "output": output, "ours_us": "8.00", "stock_us": stock[h]}
        | RUN
        for h in stock
        for b in ("1", "16")
        for output in ("bf16", "fp8_group128")
    ]


def store_rows():
    case = {"entry": "main", "mode": "-", "input": "bf16", "layout": "v4"}
    times = {"k1_us": "4.000", "k4_us": "5.000", "auto_us": "4.000", "stock_us": "", "copy_us": "3.000"}
    return [case | {"n": n} | times | RUN for n in ("1", "64")]


def test_decode_table(results):
    assert results.decode_table(decode_rows()) == [
        "| rows | 8 heads | 64 heads |",
        "| --- | --- | --- |",
        "| 1 | 6.0 / 12.3 | 6.0 / 12.3 |",
        "| 2 |  | 6.0 / 12.3 |",
    ]
    assert results.decode_table(decode_rows(), "cold")[2] == "| 1 | 9.0 / - | 9.0 / - |"


def test_two_ranks(results, tmp_path):
    about = {"heads_per_rank": "16", "sglang": "0"} | RUN
    tpot = {"concurrency": "1", "stock_tpot_ms": "2.0", "patched_tpot_ms": "1.5", "tpot_ratio": "0.75"}
    us = {"stock_us_per_step": "8", "patched_us_per_step": "2"}
    launches = {"stock_launches_per_step": "4", "patched_launches_per_step": "3"}
    write(tmp_path, "serving_tp2_narrow.csv", [tpot | about])
    write(tmp_path, "serving_tp2_narrow_profile.csv", [{"concurrency": "1", "group": "x"} | us | launches | about])
    lines = results.results().splitlines()
    assert "## Serving, two ranks of 16 heads" in lines
    assert "## A decode step of one of two ranks, 16 heads" in lines
    assert "| 1 | 2.000 | 1.500 | 0.750 |" in lines
    assert "| 1 | x | 8.0 | 2.0 | 4.0 | 3.0 |" in lines


def test_chain_tables_among_other_kernels(results):
    rows = [
        row | {"ours_among_us": "8.04", "stock_among_us": "20.1"} for row in chain_rows() if row["output"] == "bf16"
    ]
    lines = results.chain_tables(rows)
    where = lines.index("The same among other kernels:")
    assert "8.0 / 20.1 (2.50)" in "\n".join(lines[where:])
    assert "among" not in "\n".join(results.chain_tables(chain_rows()))


def test_limits_of_other_kernels(results, tmp_path, monkeypatch):
    """Profiles of another commit than the times say so; of the same one, or without times, they do not."""
    monkeypatch.setattr(results, "limits_table", lambda rows: [])
    write(tmp_path, "decode_limits.csv", [RUN])
    assert "The kernels are those of" not in "".join(results.limits_section())
    write(tmp_path, "sparse_decode.csv", decode_rows())
    assert "The kernels are those of" not in "".join(results.limits_section())
    write(tmp_path, "sparse_decode.csv", [row | {"commit": "def"} for row in decode_rows()])
    assert "The kernels are those of abc; the decode's times above are of def." in "".join(results.limits_section())


def test_chain_tables(results):
    lines = results.chain_tables(chain_rows())
    assert "| rows | 64 heads, bf16 | 64 heads, fp8_group128 |" in lines
    assert "| 16 | 8.0 / 20.0 (2.50) | 8.0 / 20.0 (2.50) |" in lines
    assert "| 1 | 8.0 / - | 8.0 / - |" in lines


@pytest.mark.parametrize(("table", "rows"), [("decode_table", decode_rows), ("chain_table", chain_rows)])
def test_a_cell_takes_one_row(results, table, rows):
    with pytest.raises(ValueError, match="several rows of the same heads, "):
        getattr(results, table)([*rows(), rows()[0]])


def test_serving_table_has_the_low_ratio_where_it_was_measured(results):
    row = {"concurrency": "8", "rounds": "7", "stock_tpot_ms": "2", "patched_tpot_ms": "1.5", "tpot_ratio": "0.75"}
    row |= {"tpot_spread_percent": "3.21", "throughput_ratio": "1.3"}
    assert results.serving_table([row])[2] == "| 8 | 7 | 2.000 | 1.500 | 0.750 | 3.2 | 1.300 |"
    head, _, line = results.serving_table([row | {"tpot_low_ratio": "0.74"}])
    assert "| ratio | low ratio | spread, % |" in head
    assert line == "| 8 | 7 | 2.000 | 1.500 | 0.750 | 0.740 | 3.2 | 1.300 |"


def test_what_of_the_saving_arrives(results, tmp_path):
    serving = [{"concurrency": c, "stock_tpot_ms": "2.0", "patched_tpot_ms": "1.9"} for c in ("1", "8")]
    profile = [{"concurrency": "8", "group": group} for group in ("other", "replaced")]
    for row in profile:
        row |= {"stock_us_per_step": "200", "patched_us_per_step": "75"}
    assert results.saving_table(serving, profile)[2:] == ["| 8 | 200.0 | 75.0 | 0.375 | 125 | 100 | 80 | 10.0 |"]
    full = [
        row | {"rounds": "7", "tpot_ratio": "0.95", "tpot_spread_percent": "1", "throughput_ratio": "1"}
        for row in serving
    ]
    assert len(results.serving_tables(full)) == 4  # no profile, no saving
    write(tmp_path, "serving_profile.csv", [row | {"concurrency": "1"} for row in profile])
    assert results.serving_tables(full)[-1].startswith("| 1 | 200.0 |")


def limits_row(**changed):
    row = {"heads": "64", "topk": "128", "extra": "512", "b": "1", "kernel": "decode", "blocks": "40", "us": "5.04"}
    row |= {"tensor_pct": "9.6", "shared_pct": "31.2", "issue_pct": "12.0", "l2_pct": "4.4", "dram_pct": ""}
    return row | {"limit": "latency (most: L2 4 %)", "stalls": "long_scoreboard 50; wait 9"} | RUN | changed


def test_limits_are_a_section_where_they_were_measured(results, tmp_path):
    assert "What limits the decode" not in results.results()
    write(tmp_path, "decode_limits.csv", [limits_row(), limits_row(kernel="combine", stalls="")])
    text = results.results()
    assert "## What limits the decode\nG, torch 2, driver 5, commit abc, 2026-01-01.\n[decode_limits.csv](" in text
    numbers = "| 40 | 5.0 | 10 | 31 | 12 | 4 | - | latency (most: L2 4 %) |"
    assert f"| 64 | 1 | 128 + 512 | decode {numbers} long_scoreboard 50; wait 9 |" in text
    assert f"| 64 | 1 | 128 + 512 | combine {numbers} - |" in text


def test_readme_figures(results, tmp_path):
    assert results.readme_figures() == "Not measured yet.\n"
    write(tmp_path, "sparse_decode.csv", decode_rows() + decode_rows("1024"))
    text = results.readme_figures()
    assert text.startswith("**Decode** (backend `sm90`). G, torch 2, driver 5, commit abc, 2026-01-01.\n")
    assert "graph of 20, 128 + 512 keys:" in text
    assert text.count("| 1 | 6.0 / 12.3 | 6.0 / 12.3 |") == 1  # the first number of keys alone
    assert text.endswith("sparse_decode.png)\n")
    assert "**Store.**" not in text


@pytest.mark.parametrize("source", ["made up", "measured"])
def test_plots(results, tmp_path, source):
    pytest.importorskip("matplotlib")
    made_up = {"sparse_decode": decode_rows(), "decode_chain": chain_rows(), "norm_rope_store": store_rows()}
    for name, rows in made_up.items():
        if source == "made up":
            write(tmp_path, f"{name}.csv", rows)
        else:
            shutil.copy(ROOT / f"benchmark/results/h200/{name}.csv", tmp_path)
    results.draw()
    for name in made_up:
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_equal_servers(results, tmp_path):
    times = {"stock": ("2.0", "4.0"), "stock2": ("4.0", "4.0"), "all": ("1.0", "2.0")}
    rows = [{"concurrency": "8", "server": name, "tpot_ms": t} | RUN for name, values in times.items() for t in values]
    write(tmp_path, "equal_servers_tp2.csv", rows)
    text = results.results()
    assert "## Equal servers of two ranks" in text
    assert "| concurrency | all | stock | stock2 |\n| --- | --- | --- | --- |\n" in text
    assert "| 8 | 1.500 (0.375) | 3.000 (0.750) | 4.000 (1.000) |" in text


def test_triton_is_a_section_of_its_own(results, tmp_path):
    write(tmp_path, "sparse_decode_triton.csv", [row | {"backend": "triton"} for row in decode_rows()])
    text = results.results()
    assert "## Decode in Triton" in text
    assert text.count("| 1 | 6.0 / 12.3 | 6.0 / 12.3 |") == 1
    assert results.readme_figures() == "Not measured yet.\n"


def test_no_plot_without_a_file(results, tmp_path):
    results.draw()
    assert not list(tmp_path.iterdir())
