"""Host side of the Hopper decode kernels (csrc/decode/sm90): what they take, how the work is cut, and their launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sgl_dsv4_kernels.layout import HEAD_DIM, CacheLayout
from sgl_dsv4_kernels.ops.query import Prologue
from sgl_dsv4_kernels.reference.decode import Source, listed_keys, op_arguments
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.split_partition import MAX_AUTO_SPLITS, MAX_PARTIAL_BYTES, SPLIT_BLOCK_KEYS

ALIGNMENT = 16
"""Bytes: rows of a cache are read in vectors of this size."""


# ---- what the kernels take ----


def missing(device: torch.device) -> str | None:
    """What this device or build lacks, None if nothing."""
    if device.type != "cuda":
        return f"needs a CUDA device, got tensors on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"needs sm_90, {device} is sm_{capability[0]}{capability[1]}"
    if not hasattr(torch.ops.sgl_dsv4_kernels, "sparse_decode_sm90"):
        return "needs a build for 90a-real"
    return None


def count_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# torch.compile cannot trace these, and evaluates functions that are marked so. This is what
# torch.compiler.assume_constant_result does, which also imports torch._dynamo: seconds, at everybody's import.
missing._dynamo_marked_constant = True
count_sms._dynamo_marked_constant = True


def unsupported(main: Source, extra: Source | None) -> str | None:
    """Which argument the kernels do not take and why, None if they take all.

    Addresses are unknown while torch.compile traces, and fake tensors have none: there they count as aligned, and the
    op looks again.
    """
    for name, source in (("cache", main), ("extra_cache", extra)):
        if source is None:
            continue
        if source.layout is not CacheLayout.V4:
            return f"{name}: backend 'sm90' takes layout v4, got {source.layout.name.lower()}"
        cache = source.cache
        unknown = torch.compiler.is_compiling() or isinstance(cache, FakeTensor)
        aligned = unknown or cache.data_ptr() % ALIGNMENT == 0
        if not aligned or (cache.shape[0] > 1 and cache.stride(0) % ALIGNMENT != 0):
            return f"{name}: backend 'sm90' needs data and stride(0) that are multiples of {ALIGNMENT} bytes"
    return None


# ---- how the work is cut ----


class Cost(NamedTuple):
    """Microseconds of a block on an H200: prologue and output, more of it when all SMs run, a tile of 64 keys; prologue
    and output where it goes on to another row; the merge of two splits by a pair of blocks."""

    fixed: float
    crowded: float
    tile: float
    next_row: float
    pair: float


COSTS = {
    8: Cost(4.132, 2.018, 1.151, 2.383, 0.906),
    16: Cost(5.171, 1.857, 1.335, 1.541, 0.682),
    32: Cost(7.217, 1.778, 1.538, 2.832, 0.661),
    64: Cost(8.560, 0.881, 2.185, 4.264, 0.0),
}
PAIR = 2
MOST_PARTS = 6
COMBINE_US = 0.903
SMALL_COMBINE_US = 1.135
SMALL_COMBINE_ROWS = 264
COMBINE_BYTES_PER_US = 3.925e6
"""By heads a block; and the combine kernel: launch, and the partials' way out and back. By `benchmark/plan_times.py`
from times of plans on an H200, which are in benchmark/results/h200/plan_times.csv: 128 + 0, 512 and 1024 keys, 1 to 384
rows of 8 to 64 heads; the mean of warm and cold (L2 flushed). They choose well, and are not exact: times are predicted
17 % too short to 12 % too long. Lists of more than 1152 keys are not measured.

MOST_PARTS: parts (rows, a split) that a block takes at most; with more of them every one is a block of its own
(kMostTurns in csrc/decode/sm90/sparse_decode.cu, which names the outputs: the model knows only bf16).

SMALL_COMBINE_US: up to so many rows x heads the combine's blocks find time to prepare (kSmallGrid in
csrc/decode/combine.cu).
"""

CUT_US = {8: 0.25, 16: 0.5, 32: 0.5, 64: 7.0}
"""By heads a block: what rows of which the last ones are split are taken to cost more than the model says. By
`benchmark/cut_times.py` from times on an H200, which are in benchmark/results/h200/cut_times.csv.
"""

ALL_TOKENS_PAGE = 2
USUAL_ALL_TOKENS = 128
MOST_LOSS = 1.25
"""A list of the best compressed tokens (ratio 4) is full as soon as the context is long enough. A list of all
compressed tokens (ratio 128, whose pages of 256 tokens hold 2) has room for the longest context that a server allows,
8256 keys for a million tokens, and few contexts are that long. Its plan is the one that is fastest with 128 keys, a
context of 16384 tokens, of those that take at most MOST_LOSS times as long as the fastest with a full list. 128 + 32
keys of 128 + 576, 32 rows of 64 heads, among other kernels: 18.2 us by the plan for full lists (64 heads a block, 4
splits), 10.9 by this one (16, 1), by the kernels and costs of then.
"""


class Plan(NamedTuple):
    """Heads a block (8, 16, 32: keys are rows of the products; 64: heads are), and number of splits."""

    block_heads: int
    num_splits: int


def in_pairs(plan: Plan) -> bool:
    """Whether the splits are merged in the decode kernel, by pairs of blocks. Not where amax is wanted."""
    return plan.num_splits == PAIR and plan.block_heads < 64


class Cut(NamedTuple):
    """Of so many rows the outputs are written at once; the others are split."""

    whole: int
    num_splits: int


H200_SMS = 132
FASTER = (
    ((16, 8, 128), Plan(8, 1)),
    ((24, 8, 640), Plan(8, 4)),
    ((12, 16, 640), Plan(16, 5)),
    ((4, 16, 1152), Plan(8, 10)),
    ((12, 16, 1152), Plan(16, 10)),
    ((8, 32, 128), Plan(8, 2)),
    ((192, 32, 1152), Plan(32, 2)),
    ((4, 64, 128), Plan(8, 2)),
    ((1, 64, 1152), Plan(8, 10)),
    ((8, 64, 1152), Plan(32, 7)),
    ((16, 64, 1152), Plan(32, 4)),
    ((64, 64, 1152), Plan(32, 1)),
)
"""Of the shapes measured, (rows, heads, keys), those for which the model's plan takes more than 1 % longer than this
one; 128 heads are looked up as twice the rows of 64. `benchmark/plan_times.py` prints them.
"""


def usual_keys(main: Source, extra: Source | None) -> int | None:
    """Keys that a row usually attends to, None if as many as are listed."""
    if extra is None or extra.page_size > ALL_TOKENS_PAGE:
        return None
    return main.indices.shape[-1] + min(extra.indices.shape[-1], USUAL_ALL_TOKENS)


def predicted_us(rows: int, heads: int, keys: int, sm_count: int, plan: Plan) -> float:
    """Time of a decode by the model, the mean of warm and cold: waves of blocks, then the combine kernel, or the merge
    of a pair. Splits without keys cost nothing.

    Example: 1 row, 64 heads, 128 + 512 keys (10 tiles), 132 SMs, 16 heads a block, 10 splits: 40 blocks of one tile,
    5.17 + 0.56 + 1.34 = 7.07; partials of 1.3 MB, 1.14 + 0.33. Together 8.54.
    """
    cost = COSTS[plan.block_heads]
    all_tiles = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    splits = min(plan.num_splits, all_tiles)
    blocks = rows * -(-heads // plan.block_heads) * splits
    waves = -(-blocks // sm_count)
    first = later = cost.fixed + cost.crowded * min(1.0, blocks / sm_count)
    if plan.num_splits == 1 and waves <= MOST_PARTS:
        later = cost.next_row
    time = first + (waves - 1) * later + waves * -(-all_tiles // splits) * cost.tile
    if plan.num_splits == 1:
        return time
    if in_pairs(plan):
        return time + cost.pair
    return time + combine_us(rows, heads, splits)


def combine_us(rows: int, heads: int, splits: int) -> float:
    """Time of the combine kernel by the model."""
    launch = SMALL_COMBINE_US if rows * heads <= SMALL_COMBINE_ROWS else COMBINE_US
    return launch + splits * rows * heads * HEAD_DIM * 4 / COMBINE_BYTES_PER_US


def choose_plan(
    rows: int,
    heads: int,
    keys: int,
    sm_count: int,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    usual: int | None = None,
) -> Plan:
    """The plan with the least predicted time, or one known to be faster: a function of shapes and page sizes alone, so
    that one graph serves all lengths.

    Args:
        rows: T. heads: h. keys: K + extra K, the widths of the index lists. sm_count: of the device.
        num_splits: fixed, None = free. At most MAX_PARTIAL_BYTES of partials are made unless it is fixed.
        batch_invariant: heads a block from ``heads`` alone; ``num_splits`` is then given.
        usual: `usual_keys`; if not None, the least time for so many keys among the plans that MOST_LOSS allows.

    Example: 128 + 512 keys, 64 heads, 132 SMs: 1 row (8, 10), 32 rows (32, 2), 128 rows (64, 1). 128 + 576 keys of
    which 256 are usual: 8 rows (8, 2).
    """
    usual = keys if usual is None else usual
    if not batch_invariant and usual == keys and sm_count == H200_SMS:
        plan = _known_faster(rows, heads, keys, num_splits)
        if plan is not None:
            return plan
    plans = _plans(rows, heads, keys, num_splits, batch_invariant)
    # Plain loops, here and in what is called: torch.compile traces them.
    least = predicted_us(rows, heads, keys, sm_count, plans[0])
    for plan in plans:
        full = predicted_us(rows, heads, keys, sm_count, plan)
        if full < least:
            least = full
    best, best_time, best_full = None, 0.0, 0.0
    for plan in plans:
        full, time = (predicted_us(rows, heads, length, sm_count, plan) for length in (keys, usual))
        if full > MOST_LOSS * least:
            continue
        if best is None or time < best_time or (time == best_time and full < best_full):
            best, best_time, best_full = plan, time, full
    return best


def _known_faster(rows: int, heads: int, keys: int, num_splits: int | None) -> Plan | None:
    """What FASTER has for a shape. ``num_splits``: None, or that plan's: a call asks again, with the splits it got."""
    as_rows = heads // 64 if heads % 64 == 0 else 1  # 128 heads are cut as twice the rows of 64
    for shape, plan in FASTER:
        if num_splits is not None and num_splits != plan.num_splits:
            continue
        if shape[0] == rows * as_rows and shape[1] * as_rows == heads and shape[2] == keys:
            return plan
    return None


def _plans(rows: int, heads: int, keys: int, num_splits: int | None, batch_invariant: bool) -> list[Plan]:
    """What there is to choose from."""
    most_heads = min(heads, 64)
    tiles = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    last = min(tiles, MAX_AUTO_SPLITS) if num_splits is None else num_splits
    plans = []
    for block_heads in COSTS:
        if block_heads > most_heads or (batch_invariant and block_heads < most_heads):
            continue
        for splits in range(1 if num_splits is None else num_splits, last + 1):
            if num_splits is None and splits > 1 and splits * rows * heads * HEAD_DIM * 4 > MAX_PARTIAL_BYTES:
                break
            plans.append(Plan(block_heads, splits))
    return plans


def possible_cut(rows: int, heads: int, keys: int, sm_count: int, plan: Plan) -> Cut | None:
    """As many rows as give every SM the same number of them, unsplit, and the others, too few for one more turn, in
    splits that find an SM each. None: there are none of one kind, or too many others."""
    groups = -(-heads // plan.block_heads)
    a_turn = sm_count // groups
    if plan.num_splits > 1 or not 0 < a_turn < rows:
        return None
    rest = rows % a_turn
    if rest == 0 or rows // a_turn >= MOST_PARTS:
        return None
    tiles = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    most = min(sm_count // (rest * groups), tiles, MAX_AUTO_SPLITS)
    splits = -(-tiles // -(-tiles // most))  # the fewest whose longest has as many tiles
    return Cut(rows - rest, splits) if splits > 1 else None


def cut_us(rows: int, heads: int, keys: int, sm_count: int, plan: Plan, cut: Cut) -> float:
    """Time of such a decode by the model: whole rows, then a split a block, then the combine kernel."""
    cost = COSTS[plan.block_heads]
    tiles = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    splits = min(cut.num_splits, tiles)
    time = predicted_us(cut.whole, heads, keys, sm_count, plan)
    return time + cost.next_row + -(-tiles // splits) * cost.tile + combine_us(rows - cut.whole, heads, splits)


def choose_cut(rows: int, heads: int, keys: int, sm_count: int, usual: int | None = None) -> Cut | None:
    """Which rows to split, where the others are decoded whole in the same launch; None: all are decoded alike.

    Unsplit, a row more than the SMs take at once costs as much as a turn of them. The arguments are those of
    `choose_plan`.

    Example: 128 + 512 keys, 132 SMs: 136 rows of 64 heads, the last 4 in 10 splits; 68 rows of 128 heads, the last 2.
    """
    unsplit = choose_plan(rows, heads, keys, sm_count, num_splits=1, usual=usual)
    cut = possible_cut(rows, heads, keys, sm_count, unsplit)
    if cut is None:
        return None
    length = keys if usual is None else usual
    alike = {unsplit, choose_plan(rows, heads, keys, sm_count, usual=usual)}
    least = min(predicted_us(rows, heads, length, sm_count, plan) for plan in alike)
    time = cut_us(rows, heads, length, sm_count, unsplit, cut) + CUT_US[unsplit.block_heads]
    return cut if time < least else None


cached_plan = functools.lru_cache(maxsize=4096)(choose_plan)
"""``choose_plan`` for the eager path, where it is asked twice a layer."""


def plan_of(
    q: torch.Tensor, main: Source, extra: Source | None, num_splits: int | None = None, batch_invariant: bool = False
) -> Plan:
    """The plan of a call. Tracing goes through the plain function: a cache lookup is not traceable."""
    plan = choose_plan if torch.compiler.is_compiling() else cached_plan
    shapes = (q.shape[0], q.shape[1], listed_keys(main, extra), count_sms(q.device))
    return plan(*shapes, num_splits, batch_invariant, usual_keys(main, extra))


def merges(q: torch.Tensor, main: Source, extra: Source | None, num_splits: int, batch_invariant: bool) -> bool:
    """`in_pairs` of a call. Not while torch.compile traces, which would trace the model for every plan; the combine
    kernel gives the same bits."""
    if num_splits != PAIR or torch.compiler.is_compiling():
        return False
    return in_pairs(plan_of(q, main, extra, num_splits, batch_invariant)._replace(num_splits=num_splits))


cached_cut = functools.lru_cache(maxsize=4096)(choose_cut)


def cut_of(q: torch.Tensor, main: Source, extra: Source | None) -> Cut | None:
    """`choose_cut` of a call whose plan is free, with bf16 outputs. None while torch.compile traces: it takes long for
    every plan that is asked for with a symbol for the number of rows."""
    if torch.compiler.is_compiling():
        return None
    shapes = (q.shape[0], q.shape[1], listed_keys(main, extra), count_sms(q.device))
    return cached_cut(*shapes, usual_keys(main, extra))


# ---- launch ----


def launch(
    q: torch.Tensor,
    main: Source,
    extra: Source | None,
    softmax_scale: float,
    epilogue: tuple,
    result: tuple[torch.Tensor | None, ...],
    *,
    num_splits: int = 1,
    prologue: Prologue = (None, None, None),
    batch_invariant: bool = False,
) -> None:
    """The decode but for merging the splits of the last rows, where there are any. Shapes are checked by the caller.

    Args:
        epilogue: attn_sink, freqs_cis, positions, code of the output.
        result: out, lse, scales, amax, and o_accum, lse_accum of the last rows, where these are split.
        num_splits: 1, or 2 where `merges` says so.
        prologue: what is done to q first.
    """
    plan = plan_of(q, main, extra, num_splits, batch_invariant)
    attention = (*op_arguments(q, main, extra), softmax_scale, plan.block_heads, num_splits, *prologue)
    torch.ops.sgl_dsv4_kernels.sparse_decode_sm90(*attention, *epilogue, settings.pdl, *result)


def launch_partial(
    q: torch.Tensor,
    main: Source,
    extra: Source | None,
    softmax_scale: float,
    o_accum: torch.Tensor,
    lse_accum: torch.Tensor,
    *,
    prologue: Prologue = (None, None, None),
    fill_empty: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Partials of every split: o_accum [S, T, h, 512], lse_accum [S, T, h]. Shapes are checked by the caller."""
    plan = plan_of(q, main, extra, o_accum.shape[0], batch_invariant)
    attention = (*op_arguments(q, main, extra), softmax_scale, plan.block_heads, *prologue)
    torch.ops.sgl_dsv4_kernels.sparse_decode_partial_sm90(*attention, fill_empty, settings.pdl, o_accum, lse_accum)
