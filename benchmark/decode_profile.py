"""GPU time of decode steps by kernel group, from SGLang's /start_profile endpoint."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common import trace_kernels
from serving import Client, ServingError, in_threads

GROUPS = {
    "ours: store": r"store_(warp|block)_per_token",
    "ours: combine": r"sgl_dsv4::.*combine_kernel",
    "ours: query": r"sgl_dsv4::.*query_norm_rope",
    "ours: decode": r"^sparse_decode_kernel|sgl_dsv4::",
    "split": r"flash_fwd_splitkv_mla",
    "combine": r"flash_fwd_mla_combine",
    "metadata": r"get_mla_metadata",
    "q norm+rope": r"fused_q_norm_rope",
    "A1 (compressed store)": r"fused_norm_rope_flashmla",
    "A2 (window store)": r"fused_k_norm_rope_flashmla",
    "inverse rope": r"deepseek_rope_kernel",
}
"""Kernel groups by a pattern of the kernel's name; the first that matches counts, all else is "other"."""
PREFILL = r"prefill|sparse_attn_fwd_kernel"


def group_of(kernel: str) -> str:
    """The group of a kernel."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel)), "other")


def kernels(trace: Path) -> list[dict]:
    """The kernel events of a trace; ServingError if it has none, or some of a prefill."""
    events = trace_kernels(trace)
    if not events:
        raise ServingError(f"{trace}: no kernels in the trace")
    strange = next((event["name"] for event in events if re.search(PREFILL, event["name"])), None)
    if strange:
        raise ServingError(f"{trace}: not decode alone, it has {strange[:100]}")
    return events


def own_times(events: Sequence[dict]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel. One that was launched programmatically starts while its predecessor in the
    stream still runs, and waits for it: its time counts from the predecessor's end."""
    times, busy = [], {}
    for event in sorted(events, key=lambda event: event["ts"]):
        stream = event.get("args", {}).get("stream")
        begin, end = max(event["ts"], busy.get(stream, 0.0)), event["ts"] + event["dur"]
        times.append((event["name"], max(0.0, end - begin)))
        busy[stream] = max(end, begin)
    return times


def summarise(events: Sequence[dict], steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a step of each group, of "replaced" (all groups but "other": our kernels and those that
    they can replace, whichever of them SGL_DSV4_KERNELS leaves to SGLang), and of "GPU sum" and "wall span" (first
    start to last end).

    Kernels of side streams overlap, so the sum may exceed the span.
    """
    table = {group: [0.0, 0] for group in [*GROUPS, "other", "replaced", "GPU sum"]}
    for name, us in own_times(events):
        group = group_of(name)
        for entry in (group, "GPU sum") if group == "other" else (group, "replaced", "GPU sum"):
            table[entry][0] += us
            table[entry][1] += 1
    span = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    return {
        group: (us / steps, launches / steps) for group, (us, launches) in (table | {"wall span": (span, 0)}).items()
    }


def ranking(events: Sequence[dict], steps: int, count: int) -> list[tuple[str, float, float]]:
    """The ``count`` kernels that take most: name, microseconds and launches a step."""
    sums: dict[str, list[float]] = {}
    for name, us in own_times(events):
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += us
        entry[1] += 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])[:count]
    return [(name, us / steps, launches / steps) for name, (us, launches) in ranked]


def record(client: Client, prompts: Sequence[Sequence[int]], steps: int, folder: Path) -> Path:
    """Profile ``steps`` decode steps with all prompts decoding together; the trace file of tensor-parallel rank 0.

    The server writes the trace, so it must share ``folder`` with this process. The profile starts after the first token
    of every request and ends before any has its last.

    Raises:
        ServingError: not all requests decoded together, or no trace came within 60 s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    client.generate(prompts, 1)  # into the prefix cache, so that the prefills now are short
    first = [threading.Event() for _ in prompts]
    tokens = 64 + 40 * steps
    ended: list[float] = []

    def follow(place: int) -> None:
        try:
            for _ in client.stream(prompts[place], tokens):
                first[place].set()
            ended.append(time.monotonic())
        finally:
            first[place].set()

    def start() -> float:
        for event in first:
            event.wait(client.timeout)
        if ended:
            raise ServingError("the first request ended before the last one began: fewer prompts, or more steps")
        time.sleep(0.05)
        body = {"output_dir": str(folder.resolve()), "num_steps": steps, "activities": ["GPU"]}
        client.call("/start_profile", body)
        return time.monotonic()

    started = in_threads([start, *[lambda i=i: follow(i) for i in range(len(prompts))]], 2 * client.timeout)[0]
    if any(end < started for end in ended):
        raise ServingError("a request ended before the profile began: raise the steps")
    size = -1
    for _ in range(120):  # the trace is complete once its size stays
        files = [path for path in folder.rglob("*TP-0*.json*") if path.is_file()]
        now = sum(path.stat().st_size for path in files)
        if files and now == size:
            return max(files, key=lambda path: path.stat().st_size)
        size = now
        time.sleep(0.5)
    raise ServingError(f"no trace in {folder} after 60 s")
