"""benchmark/among.py: which part of a trace is a call's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import among

MARKER = "void at::cuda::(anonymous namespace)::spin_kernel(long)"


def kernels(*given):
    """Events in reverse order: name, start, duration."""
    return [{"name": name, "ts": ts, "dur": dur} for name, ts, dur in reversed(given)]


def test_spans_begin_and_end_with_the_markers():
    """The second kernel starts early and waits for the first; what lies outside does not count."""
    events = kernels(
        ("gemm", 0, 9), (MARKER, 10, 2), ("decode", 13, 5), ("combine", 14, 6), (MARKER, 21, 2), ("gemm", 23, 50),
        (MARKER, 80, 1), ("decode", 81, 4), (MARKER, 90, 1),
    )  # fmt: skip
    assert among.spans(events) == [8, 4]


def test_spans_refuse_half_a_call():
    with pytest.raises(ValueError, match="within a call"):
        among.spans(kernels((MARKER, 0, 1), ("decode", 2, 1)))
    assert among.spans([]) == []
