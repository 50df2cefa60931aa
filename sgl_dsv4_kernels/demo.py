"""Stores a few hundred tokens of a DeepSeek-V4 layer into paged caches, reads them back and prints what was lost; then
attends to them with several split counts.

    python -m sgl_dsv4_kernels.demo [--tokens 384] [--device cpu|cuda] [--seed 0]

Runs on the GPU if there is one and the installed binary holds code for it, else on the CPU; the first lines say which.
The exit status is 1 if an error is larger than the number format explains, or if a byte was written that should not be.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.demo_decode import decode_step
from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, NUM_SCALES, QUANT_GROUP, ROPE_DIM
from sgl_dsv4_kernels.testing import decode_plan, extend_plan, yarn_freqs_cis

EPS = 1e-6
NUM_POSITIONS = 8192
MAIN_ROW_STRIDE = 1536  # the latent is the end of a wider projection: q_lora_rank 1024 + 512
CALLS_PER_GRAPH = 20
POISONS = (0xA5, 0x5A)

# How far a stored value may be from the fp64 result. e4m3 has 3 mantissa bits, so half a unit in the last place is 2^-4
# of the value, or 2^-10 of the scale for the subnormal codes; bf16 has 7, so 2^-8. The compressed entry rounds to bf16
# before e4m3. fp32 arithmetic adds little, relative to the largest value of the group.
E4M3_RELATIVE, E4M3_SUBNORMAL = 2.0**-4, 2.0**-10
BF16_RELATIVE = 2.0**-8
FP32_SLACK = 2.0**-18


class Rows(NamedTuple):
    """One store call's input, and what should come of it."""

    entry: str
    page_size: int
    num_slots: int
    kv: torch.Tensor  # [N, 512]
    stored: torch.Tensor  # [N] bool: rows that must be written
    row_slots: torch.Tensor  # [N] slot of each row, rubbish where it is not stored
    row_positions: torch.Tensor  # [N] RoPE position of each row
    rounds_nope: bool  # to bf16 before e4m3
    call: Callable[[torch.Tensor, dk.CacheLayout], None]


class Outcome(NamedTuple):
    """Errors against the fp64 result: the worst group's relative error and its bound, the worst value as a share of its
    bound, and bytes written."""

    group_error: float
    group_bound: float
    worst_share: float
    bytes_written: int


# ---- inputs as SGLang makes them


def main_rows(tokens: int, weight: torch.Tensor, freqs: torch.Tensor, device: torch.device) -> Rows:
    """Sliding-window cache: every token is stored, some are masked (slot -1), one slot lies past the cache."""
    page_size = 256
    pages = -(-2 * tokens // page_size)
    projected = torch.randn(tokens, MAIN_ROW_STRIDE, device=device).bfloat16()
    kv = projected[:, -HEAD_DIM:]
    positions = torch.arange(tokens, device=device) + 1000
    slots = torch.randperm(pages * page_size)[:tokens].to(torch.int32).to(device)
    slots[5::16] = -1
    slots[-1] = pages * page_size
    weight = weight.bfloat16()

    def call(cache: torch.Tensor, layout: dk.CacheLayout) -> None:
        dk.norm_rope_store(kv, weight, EPS, freqs, positions, slots, cache, page_size=page_size, layout=layout)

    stored = (slots >= 0) & (slots < pages * page_size)
    return Rows("main", page_size, pages * page_size, kv, stored, slots.long(), positions, False, call)


def compress_rows(
    tokens: int, weight: torch.Tensor, freqs: torch.Tensor, device: torch.device, ratio: int, is_decode: bool
) -> Rows:
    """Compressed cache. decode: one row a request, stored when its sequence fills a group of ``ratio`` tokens. extend:
    a row a full group, named by its token's place in the batch (ragged id), the plan padded with invalid records."""
    page_size = 256 // ratio
    pages = -(-2 * tokens // page_size)
    kv = torch.randn(tokens, HEAD_DIM, device=device)
    out_loc = torch.randperm(pages * page_size)[:tokens].to(device)
    if is_decode:
        seq_lens = torch.randint(1, NUM_POSITIONS // ratio, (tokens,)) * ratio
        seq_lens += torch.arange(tokens) % 3 % 2  # a third of the rows: one token into the next group
        seq_lens = seq_lens.to(device)
        plan = decode_plan(seq_lens)
        stored = seq_lens % ratio == 0
        row_slots = out_loc
    else:
        seq_lens = (torch.arange(tokens, device=device) % (NUM_POSITIONS // ratio) + 1) * ratio
        ragged_ids = torch.randperm(tokens).to(device)
        stored = torch.arange(tokens, device=device) < tokens - tokens // 8
        plan = extend_plan(seq_lens, ragged_ids, stored)
        row_slots = out_loc[ragged_ids]

    def call(cache: torch.Tensor, layout: dk.CacheLayout) -> None:
        dk.compress_norm_rope_store(
            kv, plan, weight, EPS, freqs, out_loc, cache,
            page_size=page_size, compress_ratio=ratio, is_decode=is_decode, layout=layout,
        )  # fmt: skip

    entry = f"compress {ratio} {'decode' if is_decode else 'extend'}"
    return Rows(entry, page_size, pages * page_size, kv, stored, row_slots, seq_lens - ratio, True, call)


# ---- checks


def store_and_check(rows: Rows, layout: dk.CacheLayout, weight: torch.Tensor, freqs: torch.Tensor) -> Outcome:
    """Store into two caches of opposite filling, compare what comes back with the fp64 result."""
    pages = rows.num_slots // rows.page_size
    caches = []
    for poison in POISONS:
        cache = torch.full((pages, layout.page_bytes(rows.page_size)), poison, dtype=torch.uint8, device=rows.kv.device)
        rows.call(cache, layout)
        caches.append(cache)
    # A byte that nobody wrote still differs between the two.
    bytes_written = int((caches[0] == caches[1]).sum())

    slots, kv = rows.row_slots[rows.stored], rows.kv[rows.stored]
    factors = torch.view_as_real(freqs).flatten(-2)[rows.row_positions[rows.stored]]
    truth = dk.reference.norm_rope(kv.double(), weight.to(kv.dtype).double(), EPS, factors)
    found = dk.reference.dequantize_rows(caches[0], slots, page_size=rows.page_size, layout=layout)

    truth, found = (t.unflatten(-1, (-1, QUANT_GROUP)) for t in (truth, found))  # [rows, 8 groups, 64]
    amax = truth.abs().amax(-1, keepdim=True)
    quantised = layout is dk.CacheLayout.V4
    relative = torch.full_like(amax, BF16_RELATIVE)
    absolute = amax * FP32_SLACK
    if quantised:
        scale = torch.exp2(torch.ceil(torch.log2(amax * (1 + BF16_RELATIVE) / 448)))
        relative[:, :NUM_SCALES] = E4M3_RELATIVE + (BF16_RELATIVE * (1 + E4M3_RELATIVE) if rows.rounds_nope else 0)
        absolute[:, :NUM_SCALES] += scale[:, :NUM_SCALES] * E4M3_SUBNORMAL
    error = (found - truth).abs()
    bound = relative * truth.abs() + absolute
    group_error = error.square().sum(-1).sqrt() / truth.square().sum(-1).sqrt()
    share = error / bound
    return Outcome(
        float(group_error.max()), float(relative.max()), float(share.nan_to_num(torch.inf).max()), bytes_written
    )


def measure(rows: Rows, layout: dk.CacheLayout) -> float:
    """Seconds of one call, median: on the GPU of calls in one CUDA graph, on the CPU of calls by themselves."""
    shape = (rows.num_slots // rows.page_size, layout.page_bytes(rows.page_size))
    cache = torch.zeros(shape, dtype=torch.uint8, device=rows.kv.device)
    if rows.kv.device.type == "cpu":
        times = []
        for _ in range(5):
            start = time.perf_counter()
            rows.call(cache, layout)
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    rows.call(cache, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            rows.call(cache, layout)
    graph.replay()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / CALLS_PER_GRAPH)
    return statistics.median(times)


def bytes_per_row(layout: dk.CacheLayout) -> int:
    """Bytes that one stored row writes."""
    return NOPE_DIM + NUM_SCALES + ROPE_DIM * 2 if layout is dk.CacheLayout.V4 else HEAD_DIM * 2


def bytes_moved(rows: Rows, layout: dk.CacheLayout) -> int:
    """Bytes that a call has to read and write: index data of all rows, everything else of the stored ones."""
    index_bytes = 8 + 4 if rows.entry == "main" else 16 + 8
    row_bytes = HEAD_DIM * rows.kv.element_size() + ROPE_DIM * 4 + bytes_per_row(layout)
    return rows.kv.shape[0] * index_bytes + int(rows.stored.sum()) * row_bytes


# ---- the demo


def choose_device(asked: str | None) -> tuple[torch.device, str]:
    """The device and, in words, why."""
    if asked == "cpu":
        return torch.device("cpu"), "as asked"
    if not torch.cuda.is_available():
        reason = "torch finds no CUDA device"
    elif dk.build_info()["cuda"] == "none":
        reason = "the installed binary was built without CUDA code"
    else:
        try:
            run_one_row(torch.device("cuda"))
            return torch.device("cuda"), torch.cuda.get_device_name()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    if asked == "cuda":
        raise SystemExit(f"--device cuda: {reason}")
    return torch.device("cpu"), reason


def run_one_row(device: torch.device) -> None:
    """Raises RuntimeError if the binary cannot run on this device."""
    weight = torch.ones(HEAD_DIM, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    cache = torch.zeros(1, dk.CacheLayout.V4.page_bytes(1), dtype=torch.uint8, device=device)
    dk.norm_rope_store(
        weight[None], weight, EPS, torch.zeros(1, ROPE_DIM, device=device), index, index, cache, page_size=1
    )
    torch.cuda.synchronize(device)


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if it can be used")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.tokens < 16:
        parser.error("--tokens: at least 16")

    torch.manual_seed(args.seed)
    info = dk.build_info()
    device, why = choose_device(args.device)
    print(f"binary: CUDA {info['cuda']}, architectures {info['architectures'] or 'none'}; torch {torch.__version__}")
    print(f"device: {device.type} ({why})")
    if device.type == "cuda":
        print(f"time: {CALLS_PER_GRAPH} calls in one CUDA graph, per call, warm L2")
    else:
        print("time: the plain torch implementation, which is there to be right, not fast")
    weight = 1 + 0.1 * torch.randn(HEAD_DIM, device=device)
    freqs = yarn_freqs_cis(NUM_POSITIONS, device)
    inputs = [main_rows(args.tokens, weight, freqs, device)]
    for ratio in (4, 128):
        inputs += [compress_rows(args.tokens, weight, freqs, device, ratio, is_decode) for is_decode in (True, False)]

    print(
        "\nlayout  entry                page  tokens  stored    time us     GB/s"
        "   group error   bound   value/bound   bytes written"
    )
    failures = []
    for layout in (dk.CacheLayout.V4, dk.CacheLayout.BF16):
        for rows in inputs:
            outcome = store_and_check(rows, layout, weight, freqs)
            seconds = measure(rows, layout)
            stored = int(rows.stored.sum())
            wanted = stored * bytes_per_row(layout)
            faults = []
            if not outcome.worst_share <= 1 or not outcome.group_error <= outcome.group_bound:
                faults.append("error above its bound")
            if outcome.bytes_written != wanted:
                faults.append(f"{wanted} bytes to be written")
            print(
                f"{layout.value:6}  {rows.entry:20} {rows.page_size:4}  {rows.kv.shape[0]:6}  {stored:6}  "
                f"{seconds * 1e6:9.1f}  {bytes_moved(rows, layout) / seconds / 1e9:7.3g}  {outcome.group_error:12.5f}  "
                f"{outcome.group_bound:6.4f}  {outcome.worst_share:12.3f}  {outcome.bytes_written:14}"
                + "".join(f"  FAILED: {fault}" for fault in faults)
            )
            failures += faults
    print(
        "\ngroup error: |stored - fp64 result| / |fp64 result| of the worst group of 64 (roots of summed squares)."
        "\nbound: what rounding may cost a value: e4m3 2^-4 (compress rounds to bf16 before: + 2^-8), bf16 2^-8."
        "\nvalue/bound: the worst single value's error as a share of its bound (e4m3's subnormals: 2^-10 of the scale)."
        "\nbytes written: 583 a stored row in the v4 cache, 1024 in the bf16 cache, and none besides."
    )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        print("\ndecode: not run, it needs the package triton on a GPU")
    else:
        failures += decode_step(inputs[0], inputs[2], freqs)
    print(f"\n{'FAILED: ' + '; '.join(failures) if failures else 'ok'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
