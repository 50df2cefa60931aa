"""Host side of the Hopper decode: arguments, the plan, and the address arithmetic of shared memory."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import HEAD_DIM, CacheLayout
from sgl_dsv4_kernels.ops import decode as ops
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.sm90_decode import (
    Cut,
    Plan,
    choose_cut,
    choose_plan,
    cut_us,
    possible_cut,
    predicted_us,
    usual_keys,
)
from sgl_dsv4_kernels.split_partition import MAX_PARTIAL_BYTES

CSRC = Path(__file__).resolve().parents[2] / "csrc"
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


# ---- arguments ----


def test_what_the_kernels_take():
    main = td.random_source(2, 64, page_size=64)
    assert sm90_decode.unsupported(main, None) is None
    assert sm90_decode.unsupported(main, main) is None
    odd = td.random_source(2, 64, page_size=64, offset=8)
    bf16 = td.random_source(2, 64, page_size=64, layout=CacheLayout.BF16)
    assert sm90_decode.unsupported(odd, None).startswith("cache: backend 'sm90' needs data and stride(0)")
    assert sm90_decode.unsupported(main, odd).startswith("extra_cache: ")
    pitched = td.random_source(2, 64, page_size=64, page_stride=CacheLayout.V4.page_bytes(64) + 8)
    assert sm90_decode.unsupported(pitched, None) is not None
    assert sm90_decode.unsupported(bf16, None) == "cache: backend 'sm90' takes layout v4, got bf16"


def test_tensors_without_memory(monkeypatch, recwarn):
    """Fake tensors have no address to look at, on a CUDA device neither: the default backend there is sm90."""
    monkeypatch.setattr(ops.sm90_decode, "missing", lambda device: None)
    monkeypatch.setattr(ops.sm90_decode, "count_sms", lambda device: 132)
    problem = td.random_problem(2, 64, 64, 64, rope=True)
    arguments = problem.arguments() | problem.options
    freqs, positions = arguments.pop("inverse_rope")
    with FakeTensorMode():

        def fake(value):
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

        given = {name: fake(value) for name, value in arguments.items()}
        for splits in (1, 2, None):
            result = dk.sparse_decode(**given, inverse_rope=(fake(freqs), fake(positions)), num_splits=splits)
            assert (result.out.shape, result.out.device.type) == ((2, 64, 512), "cuda")
        dk.sparse_decode_partial(**{name: x for name, x in given.items() if name != "attn_sink"}, num_splits=2)
    on_meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    assert dk.sparse_decode(**on_meta).out.shape == (2, 64, 512)
    main = td.random_source(2, 64, page_size=64)
    assert sm90_decode.unsupported(main._replace(cache=main.cache.to("meta")), None) is None
    assert not recwarn.list


def test_needs_a_hopper_gpu(monkeypatch):
    problem = td.random_problem(2, 8, 64)
    with pytest.raises(ValueError, match="backend: 'sm90' needs a CUDA device, got tensors on cpu"):
        dk.sparse_decode(**problem.arguments(), backend="sm90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ValueError, match="backend: 'sm90' needs sm_90, cuda is sm_100"):
        ops.resolve_backend("sm90", torch.device("cuda"))


def test_default_backend(monkeypatch):
    """sm90 where it runs, triton where it does not take the caches, an error where it was asked for."""
    monkeypatch.setattr(ops.sm90_decode, "missing", lambda device: None)
    monkeypatch.setattr(ops, "_check_triton", lambda device: None)
    monkeypatch.setattr(ops.settings, "sm90", True)
    cuda = torch.device("cuda")
    main, odd = (td.random_source(2, 64, page_size=64, offset=offset) for offset in (0, 8))
    assert ops.resolve_backend(None, cuda) == "sm90"
    assert ops._usable_backend(None, cuda, main, None) == "sm90"
    assert ops._usable_backend(None, cuda, odd, None) == "triton"
    assert ops._usable_backend("triton", cuda, main, None) == "triton"
    with pytest.raises(ValueError, match="cache: backend 'sm90' needs data"):
        ops._usable_backend("sm90", cuda, odd, None)
    monkeypatch.setattr(ops.settings, "sm90", False)
    assert ops.resolve_backend(None, cuda) == "triton"
    assert ops.resolve_backend("sm90", cuda) == "sm90"
    monkeypatch.setattr(ops.settings, "sm90", True)
    monkeypatch.setattr(ops.sm90_decode, "missing", lambda device: "needs a build for 90a-real")
    assert ops.resolve_backend(None, cuda) == "triton"
    with pytest.raises(ValueError, match="backend: 'sm90' needs a build for 90a-real"):
        ops.resolve_backend("sm90", cuda)


# ---- plan ----


def test_worked_examples():
    assert predicted_us(1, 64, 640, 132, Plan(16, 10)) == pytest.approx(8.54, abs=0.005)
    assert choose_plan(1, 64, 640, 132) == (8, 10)
    assert choose_plan(32, 64, 640, 132) == (32, 2)
    assert choose_plan(128, 64, 640, 132) == (64, 1)
    assert choose_plan(1, 64, 0, 132).num_splits == 1
    assert choose_plan(8, 64, 704, 132, usual=256) == (8, 2)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("keys", [192, 704, 1152, 8384])
def test_plans_for_usual_lengths(heads, keys):
    """By the model, full lengths lose at most a quarter, and usual ones gain, somewhere much."""
    most = 0.0
    for rows in (*range(1, 40), 64, 67, 80, 96, 128, 256, 512):
        usual = min(keys, 256)
        both, full = choose_plan(rows, heads, keys, 132, usual=usual), choose_plan(rows, heads, keys, 132)

        def time(plan, length, rows=rows):
            return predicted_us(rows, heads, length, 132, plan)

        assert time(both, keys) <= 1.25 * time(full, keys)
        assert time(both, usual) <= time(full, usual)
        most = max(most, time(full, usual) / time(both, usual))
    assert most > 1.15 or keys == 192 or heads < 32


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("keys", "usual"), [(704, None), (704, 256), (1152, None)])
def test_plans_can_be_traced(keys, usual, dynamic):
    """torch.compile asks for the plan of a number of rows, a symbol if shapes are dynamic. Of 1152 keys and 32 rows
    it is one of FASTER."""
    torch._dynamo.reset()  # what was compiled before counts against the limit of compilations

    def scaled(x):
        plan = choose_plan(x.shape[0], 64, keys, 132, usual=usual)
        return x * plan.num_splits + plan.block_heads

    compiled = torch.compile(scaled, fullgraph=True, backend="eager", dynamic=dynamic)
    for rows in (2, 8, 32):
        plan = choose_plan(rows, 64, keys, 132, usual=usual)
        assert compiled(torch.ones(rows))[0] == plan.num_splits + plan.block_heads


def test_small_combines():
    """Rows x heads that the model takes for small are those of the kernel."""
    text = (CSRC / "decode/combine.cu").read_text()
    (most,) = re.findall(r"kSmallGrid = (\d+);", text)
    assert int(most) == sm90_decode.SMALL_COMBINE_ROWS
    longer = predicted_us(265, 1, 640, 10_000, Plan(8, 3)) - predicted_us(264, 1, 640, 10_000, Plan(8, 3))
    assert longer == pytest.approx(sm90_decode.COMBINE_US - sm90_decode.SMALL_COMBINE_US, abs=0.02)


def test_rows_that_a_block_goes_on_to():
    """Up to as many as the kernel takes a later row costs `next_row` besides its tiles, unsplit."""
    text = (CSRC / "decode/sm90/sparse_decode.cu").read_text()
    (most,) = re.findall(r"kMostTurns = (\d+);", text)
    assert int(most) == sm90_decode.MOST_PARTS

    def turns(count: int, block_heads: int) -> float:
        return predicted_us(132 * count, block_heads, 640, 132, Plan(block_heads, 1))

    for block_heads, cost in sm90_decode.COSTS.items():
        later = cost.next_row + 10 * cost.tile
        for count in range(2, sm90_decode.MOST_PARTS + 1):
            assert turns(count, block_heads) - turns(count - 1, block_heads) == pytest.approx(later)
        most = sm90_decode.MOST_PARTS + 1
        assert turns(most, block_heads) == pytest.approx(most * turns(1, block_heads))


def test_cut():
    assert choose_cut(136, 64, 640, 132) == Cut(132, 10)
    assert choose_cut(160, 64, 640, 132) == Cut(132, 4)  # as many SMs, and no longer splits than in three
    assert choose_cut(272, 8, 640, 132) == Cut(264, 10)
    assert choose_cut(68, 128, 640, 132) == Cut(66, 10)
    assert [choose_cut(rows, 64, 640, 132) for rows in (0, 1, 16, 128, 132, 192, 256, 264, 384)] == [None] * 9
    assert choose_cut(136, 64, 128, 132) is None  # too short
    # Up to 1152 keys are listed, 256 are usual.
    assert choose_cut(192, 64, 1152, 132) == Cut(132, 2)
    assert choose_cut(192, 64, 1152, 132, usual=128) is None


def test_cut_of_a_call(monkeypatch):
    """Of calls on a device; none while torch.compile traces."""
    monkeypatch.setattr(sm90_decode, "count_sms", lambda device: 132)
    problem = td.random_problem(136, 64, 128, 512, extra_page_size=64)
    assert sm90_decode.cut_of(problem.q, problem.main, problem.extra) == Cut(132, 10)
    assert ops._choose_cut(problem.q, problem.main, problem.extra, "sm90") == Cut(132, 10)
    assert ops._choose_cut(problem.q, problem.main, problem.extra, "triton") is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert sm90_decode.cut_of(problem.q, problem.main, problem.extra) is None


@pytest.mark.parametrize("sm_count", [1, 4, 14, 78])
def test_cut_of_few_sms(sm_count):
    """Down to slices of a device that has fewer SMs than a row has blocks."""
    for heads in (8, 128):
        for rows in (0, 1, 3, sm_count, sm_count + 1, 200):
            cut = choose_cut(rows, heads, 640, sm_count)
            assert cut is None or 0 < cut.whole < rows
    assert possible_cut(200, 128, 640, 1, Plan(8, 1)) is None
    assert possible_cut(200, 128, 640, 78, Plan(64, 1)) == Cut(195, 5)  # 10 blocks of 78 SMs: 7 splits would be as long


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("keys", [1, 128, 640, 1152, 8384])
def test_cuts_fill_the_turns(heads, keys):
    """Whole rows give every SM the same number of parts, the splits of the others find an SM each, and as long ones
    could not be fewer. What is chosen is predicted to be faster."""
    for rows in range(1, 900):
        plan = choose_plan(rows, heads, keys, 132, num_splits=1)
        cut, chosen = possible_cut(rows, heads, keys, 132, plan), choose_cut(rows, heads, keys, 132)
        if chosen is not None:
            assert chosen == cut
            assert cut_us(rows, heads, keys, 132, plan, cut) < predicted_us(rows, heads, keys, 132, plan)
        if cut is None:
            continue
        blocks, tiles = heads // plan.block_heads, -(-keys // 64)
        assert 0 < cut.whole < rows
        assert cut.whole * blocks % (132 // blocks * blocks) == 0
        assert (rows - cut.whole) * blocks * cut.num_splits <= 132
        assert 2 <= cut.num_splits <= tiles
        assert -(-tiles // (cut.num_splits - 1)) > -(-tiles // cut.num_splits)
        assert cut.whole * blocks // 132 < sm90_decode.MOST_PARTS


def test_callers_plan_for_usual_lengths(monkeypatch):
    """The number of splits and the heads a block come from the same question."""
    monkeypatch.setattr(ops.sm90_decode, "count_sms", lambda device: 132)
    problem = td.random_problem(8, 64, 128, 576, extra_page_size=2)
    with FakeTensorMode():
        q = torch.empty(problem.q.shape, dtype=torch.bfloat16, device="cuda")
    splits = ops._resolve_num_splits(q, problem.main, problem.extra, None, False, "sm90")
    plan = choose_plan(8, 64, 704, 132, usual=256)
    assert splits == plan.num_splits != choose_plan(8, 64, 704, 132).num_splits
    assert sm90_decode.plan_of(q, problem.main, problem.extra, splits) == plan


def test_merges(monkeypatch):
    """Two splits, with fewer than 64 heads a block; also batch-invariant ones."""
    monkeypatch.setattr(sm90_decode, "count_sms", lambda device: 132)
    for heads in (8, 32, 64):
        problem = td.random_problem(32, heads, 128, 512, extra_page_size=64)
        assert sm90_decode.merges(problem.q, problem.main, problem.extra, 2, False)
        assert not sm90_decode.merges(problem.q, problem.main, problem.extra, 3, False)
        assert not sm90_decode.merges(problem.q, problem.main, problem.extra, 1, False)
        assert sm90_decode.merges(problem.q, problem.main, problem.extra, 2, True) == (heads < 64)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not sm90_decode.merges(problem.q, problem.main, problem.extra, 2, False)


def test_pair_has_no_combine():
    cost = sm90_decode.COSTS[32]
    blocks = cost.fixed + cost.crowded * 128 / 132 + 5 * cost.tile
    assert predicted_us(64, 32, 640, 132, Plan(32, 2)) == pytest.approx(blocks + cost.pair)
    of_64 = predicted_us(64, 64, 640, 132, Plan(64, 2))
    cost = sm90_decode.COSTS[64]
    merged = sm90_decode.combine_us(64, 64, 2)
    assert of_64 == pytest.approx(cost.fixed + cost.crowded * 128 / 132 + 5 * cost.tile + merged)


def test_usual_keys():
    """Pages of 2 tokens are those of ratio 128; all others list what they attend to."""

    def source(keys, page_size):
        indices = torch.zeros(3, keys, dtype=torch.int32)
        return Source(torch.zeros(1, 1, dtype=torch.uint8), indices, None, page_size, CacheLayout.V4)

    main = source(128, 256)
    assert usual_keys(main, None) is None
    assert usual_keys(main, source(512, 64)) is None
    assert usual_keys(main, source(8256, 2)) == 256
    assert usual_keys(main, source(64, 2)) == 192


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("keys", [0, 64, 640, 1152, 8384])
def test_plans(heads, keys):
    for rows in (1, 2, 7, 32, 100, 128, 500, 70_000):
        plan = choose_plan(rows, heads, keys, 132)
        assert plan.block_heads in (8, 16, 32, 64)
        assert plan.block_heads <= heads
        assert 1 <= plan.num_splits <= max(1, -(-keys // 64))
        assert plan.num_splits == 1 or plan.num_splits * rows * heads * HEAD_DIM * 4 <= MAX_PARTIAL_BYTES
        assert choose_plan(rows, heads, keys, 132, 37).num_splits == 37
        assert choose_plan(rows, heads, keys, 132, 3, batch_invariant=True) == (min(heads, 64), 3)


# ---- shared memory ----


def run_cpp(tmp_path: Path, body: str, text: str = "") -> list[list[int]]:
    """Compile a program around ``body``, run it on ``text``, and return the numbers of each line."""
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    headers = ("<cstddef>", "<cstdio>", "<initializer_list>", '"common/divisor.h"', '"decode/sm90/shared_memory.h"')
    includes = "".join(f"#include {header}\n" for header in headers)
    source.write_text(
        f"{includes}using namespace sgl_dsv4;\nusing namespace sgl_dsv4::sm90;\nint main() {{\n{body}\n}}\n"
    )
    subprocess.run(["c++", "-std=c++17", f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


def swizzled(linear: int) -> int:
    """wgmma's 128-byte swizzle of a byte offset: the 16-byte chunk of a 128-byte row ^= the row, modulo 8."""
    return linear ^ ((linear >> 7 & 7) << 4)


@needs_compiler
def test_tile_layout(tmp_path):
    loops = 'for (int r = 0; r < 64; ++r) for (int c = 0; c < 512; ++c) std::printf("%d\\n", tile_offset(r, c));'
    offsets = [line[0] for line in run_cpp(tmp_path, loops)]
    assert sorted(offsets) == list(range(0, 64 * 512 * 2, 2))
    for row in range(64):
        for channel in range(512):
            linear = channel // 64 * 8192 + row * 128 + channel % 64 * 2
            assert offsets[row * 512 + channel] == swizzled(linear)


@needs_compiler
@pytest.mark.parametrize("heads", [8, 64])
def test_query_layout(tmp_path, heads):
    """A lane of 8 heads reads two chunks, 8 channels apart, of the RoPE part 32: one bit of the address."""
    loops = (
        f"for (int h = 0; h < {heads}; ++h) for (int c = 0; c < 512; ++c) "
        f'std::printf("%d\\n", q_offset(h, c, {heads}));'
    )
    q = [line[0] for line in run_cpp(tmp_path, loops)]
    assert q == [swizzled(c // 64 * heads * 128 + h * 128 + c % 64 * 2) for h in range(heads) for c in range(512)]
    for head in range(heads):
        row = q[512 * head : 512 * head + 512]
        assert all(row[c + 8] == row[c] ^ 16 for c in range(0, 448, 16))
        assert all(row[c + 32] == row[c] ^ 64 for c in range(448, 480, 8))


@needs_compiler
def test_raw_rows(tmp_path):
    """Eight neighbouring rows hit all banks with the same chunk, as eight lanes with four chunks of two rows do."""
    lines = run_cpp(
        tmp_path, 'for (int r = 0; r < 64; ++r) for (int c = 0; c < 36; ++c) std::printf("%d\\n", raw_offset(r, c));'
    )
    chunks = [line[0] // 16 for line in lines]
    at = [chunks[36 * row : 36 * row + 36] for row in range(64)]
    assert sorted(chunks) == list(range(64 * 36))
    for row in range(0, 64, 8):
        for chunk in range(36):
            assert len({at[row + i][chunk] % 8 for i in range(8)}) == 8
    for row in range(0, 64, 2):
        for chunk in range(0, 36, 4):
            assert len({at[row + i][chunk + j] % 8 for i in range(2) for j in range(4)}) == 8


@needs_compiler
def test_places_of_weights(tmp_path):
    places = [
        line[0] for line in run_cpp(tmp_path, 'for (int k = 0; k < 64; ++k) std::printf("%d\\n", weight_place(k));')
    ]
    assert places == [k % 8 // 2 * 16 + k // 8 * 2 + k % 2 for k in range(64)]
    assert sorted(places) == list(range(64))


@needs_compiler
def test_descriptors(tmp_path):
    body = """
    for (unsigned long long d : {operand_descriptor(0x12400), descriptor_step(8192 + 32)})
      std::printf("%llu %llu %llu %llu\\n", d & 0x3fff, d >> 16 & 0x3fff, d >> 32 & 0x3fff, d >> 62);"""
    assert run_cpp(tmp_path, body) == [
        [0x12400 >> 4, 8192 >> 4, 1024 >> 4, 1],  # start, between channel blocks, between 8 rows, 128-byte swizzle
        [(8192 + 32) >> 4, 0, 0, 0],
    ]


@needs_compiler
def test_fits_and_is_aligned(tmp_path):
    body = """
    std::printf("%zu %zu %zu %zu\\n", sizeof(SharedMemory), offsetof(SharedMemory, keys),
                offsetof(SharedMemory, weights), offsetof(SharedMemory, barriers));"""
    ((size, keys, weights, barriers),) = run_cpp(tmp_path, body)
    assert size <= 227 * 1024
    assert keys % 1024 == weights % 1024 == 0
    assert barriers % 8 == 0


@needs_compiler
@pytest.mark.parametrize("memory", ["EightHeadsSharedMemory", "EightPartsMemory"])
def test_eight_heads_fit_and_are_aligned(tmp_path, memory):
    """Copies of 64 bytes of a row are not to cross lines of all banks; a part's query takes the rows of one tile."""
    body = f"""
    using Shared = {memory};
    std::printf("%zu %zu\\n", sizeof(Shared), alignof(Shared));
    std::printf("%zu %zu\\n", offsetof(Shared, tiles), sizeof(Shared().tiles[0]));
    std::printf("%zu %zu\\n", offsetof(Shared, q), sizeof(EightPartsMemory().q[0]));
    std::printf("%zu %zu\\n", offsetof(Shared, full), offsetof(Shared, weights_full));
    std::printf("%zu\\n", sizeof(EightPartsMemory().tiles[0].rows));"""
    (size, alignment), tiles, queries, barriers, (rows,) = run_cpp(tmp_path, body)
    assert size <= 227 * 1024
    assert alignment == 128
    assert all(place % 128 == 0 for place in (*tiles, *queries))
    assert all(place % 8 == 0 for place in barriers)
    assert queries[1] <= rows


@needs_compiler
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("memory", ["FewHeadsSharedMemory", "FewPartsMemory"])
def test_few_heads_fit_and_are_aligned(tmp_path, memory, heads):
    """Q and the weights of two tiles are operands of wgmma: multiples of 1024, the period of the swizzle. Copies of 64
    bytes of a row are not to cross lines of all banks."""
    body = f"""
    using Shared = {memory}<{heads}>;
    std::printf("%zu %zu\\n", sizeof(Shared), alignof(Shared));
    std::printf("%zu %zu %zu\\n", offsetof(Shared, q), offsetof(Shared, weights), sizeof(Shared().weights[0]));
    std::printf("%zu %zu\\n", offsetof(Shared, tiles), sizeof(Shared().tiles[0]));
    std::printf("%zu %zu %zu\\n", offsetof(Shared, scores), offsetof(Shared, full), offsetof(Shared, weights_full));"""
    (size, alignment), operands, tiles, (scores, *barriers) = run_cpp(tmp_path, body)
    assert size <= 227 * 1024
    assert alignment == 1024
    assert all(place % 1024 == 0 for place in operands)
    assert all(place % 128 == 0 for place in tiles)
    assert scores % 16 == 0
    assert all(place % 8 == 0 for place in barriers)


@needs_compiler
@pytest.mark.parametrize("heads", [16, 32])
def test_what_replaces_tiles_of_few_heads_fits(tmp_path, heads):
    """Results all tiles; a part's query the rows of one. Outputs on their way are read in vectors of 16 bytes."""
    body = f"""
    using Shared = FewHeadsSharedMemory<{heads}>;
    using Parts = FewPartsMemory<{heads}>;
    std::printf("%zu %zu\\n", sizeof(Shared().results), sizeof(Shared().tiles));
    std::printf("%zu %zu\\n", sizeof(Parts().q), sizeof(Parts().tiles[0].rows));
    std::printf("%zu %zu\\n", offsetof(Parts, outputs), sizeof(Parts().outputs[0][0]));
    std::printf("%zu\\n", offsetof(Parts, ends_full));"""
    (results, tiles), (query, rows), outputs, (ends_full,) = run_cpp(tmp_path, body)
    assert results <= tiles
    assert query <= rows
    assert all(place % 16 == 0 for place in outputs)
    assert ends_full % 8 == 0


@needs_compiler
def test_places_of_outputs(tmp_path):
    """Words of eight channel pairs of four pairs of heads hit all banks, and so do the eight chunks of a head."""
    loops = 'for (int h = 0; h < 32; ++h) for (int c = 0; c < 8; ++c) std::printf("%d\\n", output_chunk(h, c));'
    chunks = [line[0] for line in run_cpp(tmp_path, loops)]
    at = [chunks[8 * head : 8 * head + 8] for head in range(32)]
    assert all(sorted(row) == list(range(8)) for row in at)
    for first in range(0, 32, 8):
        for other in range(2):
            for half in range(4):
                rows = at[first + other : first + 8 : 2]
                assert len({row[2 * half + i] for row in rows for i in range(2)}) == 8


@needs_compiler
def test_divisor(tmp_path):
    numbers = random.Random(0)
    pairs = [(n, d) for d in (1, 2, 3, 5, 64, 127, 2**30, 2**30 + 1, 2**31 - 1) for n in (0, 1, d - 1, d, 2**31 - 1)]
    for _ in range(20_000):
        d = numbers.randrange(1, 2 ** numbers.randrange(1, 32))
        multiple = numbers.randrange(0, 2**31) // d * d
        pairs += [(n, d) for n in (multiple - 1, multiple, multiple + d - 1) if 0 <= n < 2**31]
    body = (
        'unsigned n; int d; while (std::scanf("%u %d", &n, &d) == 2) std::printf("%u\\n", divide(n, make_divisor(d)));'
    )
    quotients = run_cpp(tmp_path, body, "\n".join(f"{n} {d}" for n, d in pairs))
    assert [q[0] for q in quotients] == [n // d for n, d in pairs]
