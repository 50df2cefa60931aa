"""benchmark/common.py: several graphs a contender."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import common


def test_graphs_of_a_contender_take_turns(monkeypatch):
    replays = []

    def capture(call):
        graph = types.SimpleNamespace(replay=lambda: replays.append((call, id(graph))))
        return graph

    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.006)
    monkeypatch.setattr(common, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = common.ColdTimer.__new__(common.ColdTimer)
    timer._flush = torch.empty(4, dtype=torch.uint8)
    assert timer.medians({"a": "call a", "b": "call b"}, 2 * common.COLD_GRAPHS, warmups=common.COLD_GRAPHS) == {
        "a": 6.0,
        "b": 6.0,
    }
    counts = Counter(replays)
    assert sorted(call for call, _ in counts) == ["call a"] * common.COLD_GRAPHS + ["call b"] * common.COLD_GRAPHS
    assert set(counts.values()) == {3}
    assert common.COLD_GRAPHS > 1
