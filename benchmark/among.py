"""Time of a call among other kernels, as a layer's attention has them around it in a model.

Between two layers run products with weights of hundreds of megabytes and many small kernels. They drive a call's data
out of L2, and its instructions and parameters out of the caches of the SMs, which neither a graph of calls alone nor a
flush of L2 shows: a combine kernel that took 2 us in such a graph took 4 in a served model.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from common import Call, capture, trace_kernels

HIDDEN = 4096
WIDTHS = (4096, 6144, 1536, 12288, 8192)
"""Columns of the weights between two calls: 264 MB of bf16, L2 five times."""
STEPS = 6
MARKER = "spin_kernel"
"""Of torch.cuda._sleep, in the kernel's name."""


def other_kernels() -> Call:
    """About 20 launches of products, norms, reductions and a top-k."""
    x = torch.randn(16, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(HIDDEN, width, device="cuda", dtype=torch.bfloat16) for width in WIDTHS]

    def run() -> None:
        hidden = torch.nn.functional.layer_norm(x, (HIDDEN,))
        for weight in weights:
            y = torch.softmax((hidden @ weight).float(), -1).bfloat16()
        gated = torch.nn.functional.silu(y[:, :HIDDEN]) * hidden
        gated.topk(8, dim=-1)
        gated @ weights[0]

    return run


def spans(events: Iterable[Mapping]) -> list[float]:
    """Microseconds of each call in a trace: from the end of the marker before it to the end of its last kernel.

    Args:
        events: kernels with "name", "ts" and "dur", of one stream, in any order; a marker before and behind each call.

    Raises:
        ValueError: an odd number of markers.
    """
    found, inside, begin, end = [], False, 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        until = event["ts"] + event["dur"]
        if MARKER in event["name"]:
            if inside:
                found.append(end - begin)
            inside, begin, end = not inside, until, until
        elif inside:
            end = max(end, until)
    if inside:
        raise ValueError("the trace ends within a call")
    return found


def among_medians(calls: Mapping[str, Call], replays: int = 3) -> dict[str, float]:
    """Median microseconds of calls among other kernels, in a CUDA graph, by torch.profiler."""
    others = other_kernels()
    medians = {}
    for name, call in calls.items():

        def step(call: Call = call) -> None:
            others()
            torch.cuda._sleep(1)
            call()
            torch.cuda._sleep(1)

        graph = capture(step, STEPS)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(path))
            medians[name] = statistics.median(spans(trace_kernels(path)))
    return medians
