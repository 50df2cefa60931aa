"""The partition of keys into splits, and the choice of their number."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_dsv4_kernels.split_partition import (
    MAX_AUTO_SPLITS,
    MAX_PARTIAL_BYTES,
    SPLIT_BLOCK_KEYS,
    KeyBlock,
    batch_invariant_num_splits,
    choose_num_splits,
    key_block,
    row_blocks,
    split_range,
)

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "common" / "split_partition.h"
LENGTH = st.integers(-5, 10_000)
CAPACITY = st.integers(0, 9_000)


def test_worked_example():
    row = row_blocks(128, 128, 200, 512)
    assert row == (128, 200, 2, 6)
    assert [split_range(6, s, 4) for s in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert [split_range(6, s, 8) for s in range(8)] == [(s, s + 1) for s in range(6)] + [(6, 6), (6, 6)]
    assert key_block(row, 1) == KeyBlock(False, 64, 128)
    assert key_block(row, 2) == KeyBlock(True, 0, 64)
    assert key_block(row, 5) == KeyBlock(True, 192, 200)


@given(st.integers(0, 300), st.integers(1, 400))
def test_splits_cover_the_blocks_in_order(blocks, num_splits):
    ranges = [split_range(blocks, s, num_splits) for s in range(num_splits)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == blocks
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(LENGTH, CAPACITY, LENGTH, CAPACITY, st.sampled_from([16, 32, SPLIT_BLOCK_KEYS]))
def test_blocks_cover_every_key_once(length, capacity, extra_length, extra_capacity, grain):
    row = row_blocks(length, capacity, extra_length, extra_capacity, grain)
    assert row.main_keys == min(max(length, 0), capacity)
    assert row.extra_keys == min(max(extra_length, 0), extra_capacity)
    blocks = [key_block(row, b, grain) for b in range(row.blocks)]
    assert [b.extra for b in blocks] == sorted(b.extra for b in blocks)
    for extra, keys in ((False, row.main_keys), (True, row.extra_keys)):
        mine = [b for b in blocks if b.extra is extra]
        assert [b.begin for b in mine] == list(range(0, keys, grain))
        assert [b.end for b in mine] == [min(b.begin + grain, keys) for b in mine]


@pytest.mark.skipif(not HEADER.is_file(), reason="needs the source tree")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_same_as_the_header(tmp_path):
    lengths = [-3, 0, 1, 63, 64, 65, 128, 129, 640, 9000]
    cases = [(a, k, b, e) for a in lengths for k in (0, 64, 129) for b in lengths for e in (0, 512, 8256)]
    source = tmp_path / "dump.cpp"
    source.write_text(f"""
#include "{HEADER}"
#include <cstdio>
#include <initializer_list>
using namespace sgl_dsv4;
int main() {{
  int a, k, b, e;
  while (std::scanf("%d %d %d %d", &a, &k, &b, &e) == 4) {{
    RowBlocks r = row_blocks(a, k, b, e);
    std::printf("%d %d %d %d", r.main_keys, r.extra_keys, r.main_blocks, r.blocks);
    for (int splits : {{1, 3, 8, 200}})
      for (int s = 0; s < splits; s += 1 + splits / 9) {{
        BlockRange x = split_range(r.blocks, s, splits);
        std::printf(" %d %d", x.begin, x.end);
      }}
    for (int i = 0; i < r.blocks; i += 7) {{
      KeyBlock x = key_block(r, i);
      std::printf(" %d %d %d", x.extra, x.begin, x.end);
    }}
    std::printf("\\n");
  }}
}}
""")
    program = tmp_path / "dump"
    subprocess.run(["c++", "-std=c++17", str(source), "-o", str(program)], check=True)
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    lines = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        row = row_blocks(*case)
        want = list(row)
        for splits in (1, 3, 8, 200):
            for s in range(0, splits, 1 + splits // 9):
                want += split_range(row.blocks, s, splits)
        for i in range(0, row.blocks, 7):
            want += map(int, key_block(row, i))
        assert [int(word) for word in line.split()] == want, case


def test_examples_of_the_choice():
    assert choose_num_splits(1, 64, 640, 132) == 10
    assert choose_num_splits(16, 64, 640, 132) == 5
    assert choose_num_splits(128, 64, 640, 132) == 1
    assert choose_num_splits(128, 8, 640, 132) == 2
    assert choose_num_splits(1, 64, 0, 132) == 1
    assert choose_num_splits(1, 64, 64, 132) == 1


@given(st.integers(1, 2000), st.sampled_from([8, 16, 32, 64, 128]), st.integers(0, 9000), st.integers(1, 200))
def test_choice_is_bounded(rows, heads, keys, sm_count):
    splits = choose_num_splits(rows, heads, keys, sm_count)
    assert 1 <= splits <= max(1, min(MAX_AUTO_SPLITS, -(-keys // SPLIT_BLOCK_KEYS)))
    assert splits == 1 or splits * rows * heads * 512 * 4 <= MAX_PARTIAL_BYTES
    assert splits == choose_num_splits(rows, heads, keys, sm_count)


@given(st.integers(0, 9000))
def test_batch_invariant_choice(keys):
    splits = batch_invariant_num_splits(keys)
    blocks = -(-keys // SPLIT_BLOCK_KEYS)
    assert 1 <= splits <= MAX_AUTO_SPLITS
    assert splits == MAX_AUTO_SPLITS or 4 * (splits - 1) < max(blocks, 1) <= 4 * splits
