"""Which keys a split attends to, and how many splits to make: the Python twin of csrc/common/split_partition.h.

A row attends to the first L_main entries of its main index list and the first L_extra of its extra one. Each list is
cut into blocks of ``SPLIT_BLOCK_KEYS`` keys (the last of a list may be shorter, none spans both lists), main blocks
first. The n blocks are dealt to S splits in contiguous runs: split s gets n // S blocks, one more if s < n % S.

Example: L_main = 128, L_extra = 200, S = 4. Blocks 0, 1 are main keys [0, 64) and [64, 128), blocks 2 .. 5 are extra
keys [0, 64), [64, 128), [128, 192) and [192, 200). n = 6: splits 0 .. 3 get blocks [0, 2), [2, 4), [4, 5), [5, 6).
With S = 8 splits 0 .. 5 get one block each, splits 6 and 7 are empty: [6, 6).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SPLIT_BLOCK_KEYS = 64
"""The grain of the partition, in keys."""

MAX_AUTO_SPLITS = 32
"""More splits than this are made only on request."""

MAX_PARTIAL_BYTES = 32 << 20
"""Automatic splitting stops before the partials of one call (S x T x h x 512 fp32) exceed this: they are written and
read back at once, and stay in the L2 of an H200 (50 MB) beside the keys."""

BATCH_INVARIANT_BLOCKS = 4
"""Blocks a split at full length in batch-invariant mode: 256 keys."""

HEAD_DIM = 512
HEAD_BLOCK = 64
SHARED_SM_HEADS = 16
"""Up to this many heads two programs of the Triton kernel fit an SM of Hopper."""


class KeyBlock(NamedTuple):
    """The keys behind one block: entries [begin, end) of the main or of the extra index list."""

    extra: bool
    begin: int
    end: int


class RowBlocks(NamedTuple):
    """What one row attends to: keys of both lists; blocks [0, main_blocks) are main, [main_blocks, blocks) extra."""

    main_keys: int
    extra_keys: int
    main_blocks: int
    blocks: int


def row_blocks(
    length: int, main_capacity: int, extra_length: int, extra_capacity: int, block_keys: int = SPLIT_BLOCK_KEYS
) -> RowBlocks:
    """Lengths as the caller passed them (clamped here) and K, extra K -> what the row attends to."""
    main_keys = min(max(length, 0), main_capacity)
    extra_keys = min(max(extra_length, 0), extra_capacity)
    main_blocks = -(-main_keys // block_keys)
    return RowBlocks(main_keys, extra_keys, main_blocks, main_blocks - (-extra_keys // block_keys))


def split_range(blocks: int, split: int, num_splits: int) -> tuple[int, int]:
    """Half-open range of blocks of split ``split`` (0 <= split < num_splits) of a row of ``blocks`` blocks."""
    each, longer = divmod(blocks, num_splits)
    begin = split * each + min(split, longer)
    return begin, begin + each + (split < longer)


def key_block(row: RowBlocks, block: int, block_keys: int = SPLIT_BLOCK_KEYS) -> KeyBlock:
    """Keys of block ``block`` (0 <= block < row.blocks)."""
    extra = block >= row.main_blocks
    keys = row.extra_keys if extra else row.main_keys
    begin = (block - row.main_blocks if extra else block) * block_keys
    return KeyBlock(extra, begin, min(begin + block_keys, keys))


def choose_num_splits(rows: int, heads: int, keys: int, sm_count: int) -> int:
    """Number of splits for ``num_splits=None``: a function of shapes alone, so that one graph serves all lengths.

    The cheapest S by a model, in microseconds, of the Triton kernel on an H200 (fitted to its times at commit 84b64e7):
    every wave of programs takes its longest program's blocks, and more than one split costs a combine launch and the
    partials' way out and back.

        time(S) = waves(S) * blocks_per_split(S) * block_time + (S > 1) * (4 + partial_bytes(S) / 2.5e6)
        partial_bytes(S) = S * rows * heads * 512 * 4, at most MAX_PARTIAL_BYTES for any S > 1

    With 8 or 16 heads two programs fit an SM, and each then takes 1.6 times as long.

    Example: 1 row, 64 heads, K + extra K = 128 + 512, 132 SMs: 10 blocks, block_time 7.2. S = 1: 72. S = 5: 2 blocks in
    one wave, 0.66 MB: 14.4 + 4 + 0.3 = 18.7. S = 10: 7.2 + 4 + 0.5 = 11.7, the least, and more splits than blocks never
    help: 10. 16 rows: S = 5 runs 80 programs of 2 blocks with 10.5 MB, 14.4 + 4 + 4.2 = 22.6, but S = 8 has 16.8 MB,
    25.1, and S = 10 needs two waves, 26.8: 5. 128 rows: one split fills the SMs, 72, and two double the waves: 1.
    128 rows of 8 heads: 51 unsplit; two splits are 256 programs, two an SM, 5 * 5.1 * 1.6 + 4 + 1.7 = 46.5: 2.

    Args:
        rows: T. heads: h. keys: K + extra K, the widths of the index lists. sm_count: of the device.
    """
    blocks = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    head_blocks = -(-heads // HEAD_BLOCK)
    block_time = 5.1 + 2.1 * max(min(heads, HEAD_BLOCK) - SHARED_SM_HEADS, 0) / (HEAD_BLOCK - SHARED_SM_HEADS)
    programs_per_sm = 2 if heads <= SHARED_SM_HEADS else 1
    best, best_time = 1, 0.0
    for splits in range(1, min(blocks, MAX_AUTO_SPLITS) + 1):
        partial_bytes = splits * rows * heads * HEAD_DIM * 4
        if splits > 1 and partial_bytes > MAX_PARTIAL_BYTES:
            break
        programs = rows * head_blocks * splits
        waves = -(-programs // (sm_count * programs_per_sm))
        slowdown = 1.6 if programs_per_sm == 2 and programs > sm_count else 1.0
        time = waves * -(-blocks // splits) * block_time * slowdown
        time += 0.0 if splits == 1 else 4.0 + partial_bytes / 2.5e6
        if splits == 1 or time < best_time:
            best, best_time = splits, time
    return best


def batch_invariant_num_splits(keys: int) -> int:
    """Number of splits with ``batch_invariant=True``: from K + extra K alone, so a row's bits depend on no other row.

    Splits of 256 keys at full length, at most MAX_AUTO_SPLITS. 128 + 512 keys: 10 blocks, 3 splits.
    """
    blocks = max(1, -(-keys // SPLIT_BLOCK_KEYS))
    return min(MAX_AUTO_SPLITS, -(-blocks // BATCH_INVARIANT_BLOCKS))


cached_num_splits = functools.lru_cache(maxsize=4096)(choose_num_splits)
"""``choose_num_splits`` for the eager path, where it is asked once a layer."""
