"""benchmark/decode_limits.py: what it makes of ncu's output, and with an ncu that only pretends."""

from __future__ import annotations

import argparse
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import decode_limits  # noqa: E402

SOURCES = "".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*.cu*")))

OUTPUT = """==PROF== Connected to process 812 (/usr/bin/python3.12)
==PROF== Profiling "raw_tiles_kernel" - 0: 0%....50%....100% - 14 passes
==PROF== Profiling "combine_kernel" - 1: 0%....50%....100% - 14 passes
==PROF== Disconnected from process 812
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes.sum.per_second","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed","l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",\
"launch__waves_per_multiprocessor","sm__cycles_active.avg.pct_of_peak_sustained_elapsed",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__cycles_elapsed.avg.per_second"
"","","","","","","","","","","","byte/s","%","ns","%","%","","%","inst","inst","inst","inst","Ghz"
"0","812","python3.12","127.0.0.1",\
"void sgl_dsv4::sm90::<unnamed>::raw_tiles_kernel<sgl_dsv4::sm90::FewHeads<(int)16>>(sgl_dsv4::DecodeParams)","1","7",\
"(768, 1, 1)","(40, 1, 1)","0","9.0","141,500,000,000.25","3.1","5,056","10","5","0.30","25","4","2","1","3","1.98"
"1","812","python3.12","127.0.0.1","void sgl_dsv4::<unnamed>::combine_kernel<16>(sgl_dsv4::CombineParams)","1",\
"7","(128, 1, 1)","(4, 33, 1)","0","9.0","n/a","61","2528","nan","1","1.50","50","0","0","0","0","1.98"
"""


def test_kernels_by_name():
    """Of the kernels in csrc, those of the decode and no other."""
    kernels = re.findall(r"^\s*__global__[^;{]*?\b(\w+)\(const ", SOURCES, re.MULTILINE)
    found = {name for name in kernels if re.search(decode_limits.KERNELS, name)}
    ours = {"raw_tiles_kernel", "raw_parts_kernel", "sparse_decode_kernel", "many_parts_kernel", "combine_kernel"}
    assert found == ours < set(kernels)


def test_parse():
    decode, combine = decode_limits.parse(OUTPUT)
    assert (decode.kernel, decode.blocks, combine.kernel, combine.blocks) == ("decode", 40, "combine", 132)
    assert decode.values["gpu__time_duration.sum"] == pytest.approx(5.056e-6)
    assert decode.values["smsp__cycles_elapsed.avg.per_second"] == pytest.approx(1.98e9)
    assert "dram__bytes.sum.per_second" not in combine.values
    assert decode_limits.parse("==ERROR== permission denied\n") == []


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("1,250.5", "usecond", 1.2505e-3), ("1.5", "cycle/ns", 1.5e9), ("3", "Tbyte/s", 3e12), ("7", "%", 7.0)],
)
def test_base_value(text, unit, value):
    assert decode_limits.base_value(text, unit) == pytest.approx(value)


def test_rows():
    decode, combine = (decode_limits.make_row(launch, 132) for launch in decode_limits.parse(OUTPUT))
    measured = {"us": 5.056, "sm_mhz": 1980, "dram_gb_per_s": 141.5, "bank_read_pct": 40, "shared_pct": 60}
    assert {name: decode[name] for name in measured} == pytest.approx(measured)
    assert decode["limit"] == "shared memory 60 %, 40 of 132 SMs"
    assert decode["stalls"] == "barrier 40; wait 30; long_scoreboard 20"
    assert [decode[name] for name in ("tensor_pct", "l2_pct", "occupancy_pct")] == [None] * 3
    assert combine["limit"] == "DRAM 61 %, 1.5 waves"
    assert [combine[name] for name in ("shared_pct", "dram_gb_per_s", "stalls")] == [None, None, ""]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "nothing measured"),
        ({"tensor_pct": 59.0, "l2_pct": 20.0}, "latency (most: tensor 59 %)"),
        ({"tensor_pct": 61.0, "l2_pct": 70.0}, "L2 70 %"),
        ({"issue_pct": 60.0, "blocks": 131}, "issue slots 60 %, 131 of 132 SMs"),
        ({"dram_pct": 5.0, "waves": 1.94}, "latency (most: DRAM 5 %)"),
        ({"dram_pct": 5.0, "waves": 0.4}, "latency (most: DRAM 5 %)"),
        ({"dram_pct": 5.0, "waves": 2.1}, "latency (most: DRAM 5 %), 2.1 waves"),
    ],
)
def test_limit(changes, text):
    row = dict.fromkeys(decode_limits.UNITS) | {"blocks": 256, "sms": 132, "waves": None}
    assert decode_limits.limit(row | changes) == text


@pytest.mark.parametrize(
    ("text", "cell"), [("64x32", (64, 32, None)), ("8x1+0", (8, 1, 0)), ("64x256+1024", (64, 256, 1024))]
)
def test_cell(text, cell):
    assert decode_limits.cell(text) == cell


@pytest.mark.parametrize("text", ["64", "64x", "64x1+", "x1", "64x1+32+1", "64x-1"])
def test_a_cell_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected HEADSxROWS or HEADSxROWS"):
        decode_limits.cell(text)


def test_cells_by_default():
    cells = [decode_limits.cell(text) for text in decode_limits.CELLS]
    assert len(set(cells)) == len(cells)
    assert all(heads in (8, 16, 32, 64, 128) for heads, _, _ in cells)


@pytest.fixture
def ncu(monkeypatch):
    """An ncu that names no stalls, and refuses the L2 metrics at first. The commands that it got."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if "--query-metrics" in command:
            known = [metric.split(".")[0] for metrics in decode_limits.METRICS.values() for metric in metrics]
            return types.SimpleNamespace(stdout="".join(f"{name}   Counter   %   text\n" for name in known))
        refuses = "lts__" in command[command.index("--metrics") + 1]
        log = Path(command[command.index("--log-file") + 1])
        log.write_text("==ERROR== no metric lts__throughput, lts__t_bytes\n" if refuses else OUTPUT)
        return types.SimpleNamespace(returncode=int(refuses))

    monkeypatch.setattr(decode_limits.subprocess, "run", run)
    return commands


def test_metrics_that_ncu_lacks_are_left_out(ncu):
    assert len(decode_limits.profile("ncu", ["--cells", "16x1"])) == 2
    _, first, second = ncu
    assert second[-3:] == ["--child", "--cells", "16x1"]
    asked, again = (command[command.index("--metrics") + 1].split(",") for command in (first, second))
    assert not [metric for metric in asked if "stalled" in metric]  # the query did not name them
    assert set(asked) - set(again) == {
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_bytes.sum.per_second",
    }


def test_a_profile_without_figures_ends_the_run(monkeypatch):
    answer = types.SimpleNamespace(stdout="", returncode=1)
    monkeypatch.setattr(decode_limits.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(SystemExit, match=r"ncu gave no figures \(status 1\)"):
        decode_limits.profile("ncu", [])
