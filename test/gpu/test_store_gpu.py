"""The store kernels on the GPU: byte identity with SGLang's kernels, with each other and under every way of calling."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import CacheLayout, testing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EPS = 1e-6
POSITIONS = 4096
ENTRIES = ("main", "decode", "extend")
LAYOUTS = (CacheLayout.V4, CacheLayout.BF16)
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 8, 64, 255, 256, 1024, 2048, 4096, 8192, 16384)
WIDTHS = (1, 4, None)


# ---- inputs


def random_rows(n, dtype, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    size = torch.exp2(torch.randint(-10, 11, (n, 1), generator=g, device="cuda").float())
    return (torch.randn(n, 512, generator=g, device="cuda") * size).to(dtype)


def mixed_rows(n, dtype, seed):
    """Random rows, up to half of them replaced by special ones."""
    rows = random_rows(n, dtype, seed)
    g = torch.Generator("cuda").manual_seed(seed)
    special = testing.special_rows(dtype, "cuda")
    special = special[torch.randperm(len(special), generator=g, device="cuda")[: n // 2]]
    rows[torch.randperm(n, generator=g, device="cuda")[: len(special)]] = special
    return rows


class Case(NamedTuple):
    """Arguments of either entry; ``row_slots[i]`` is where row i goes if ``stored[i]``."""

    entry: str
    arguments: dict
    row_slots: torch.Tensor
    stored: torch.Tensor

    def store(self, cache, implementation=dk, **changed):
        name = "norm_rope_store" if self.entry == "main" else "compress_norm_rope_store"
        getattr(implementation, name)(**(self.arguments | {"cache": cache} | changed))

    def new_cache(self, **options):
        page_size = self.arguments["page_size"]
        pages = -(-self.capacity // page_size)
        return testing.empty_cache(pages, page_size, self.arguments["layout"], "cuda", **options)

    def stored_bytes(self, implementation=dk, **changed):
        """All bytes around a fresh cache after the call."""
        cache = self.new_cache()
        self.store(cache, implementation, **changed)
        return testing.storage_bytes(cache)

    @property
    def capacity(self):
        return len(self.row_slots) * 5 // 4 + 2


def make_case(
    entry,
    n,
    dtype,
    *,
    layout=CacheLayout.V4,
    page_size=64,
    ratio=4,
    ordered=False,
    position_dtype=torch.int64,
    slot_dtype=None,
    stride=512,
    rows=mixed_rows,
    seed=0,
) -> Case:
    """About one row in eight is skipped, invalid, or has a negative slot (main). All positions and slots are inside."""
    g = torch.Generator("cuda").manual_seed(seed + n)

    def randint(high, size):
        return torch.randint(0, high, (size,), generator=g, device="cuda")

    capacity = n * 5 // 4 + 2
    row_slots = torch.arange(n, device="cuda") if ordered else torch.randperm(capacity, generator=g, device="cuda")[:n]
    positions = randint(POSITIONS // ratio, n) * ratio
    left_out = randint(8, n) == 0
    left_out[0] = n == 1 and ordered
    kv = torch.full((n, stride), torch.nan, dtype=dtype, device="cuda")
    kv[:, stride - 512 :] = rows(n, dtype, seed + n)
    weight = 1 + 0.2 * torch.randn(512, generator=g, device="cuda")
    weight[64:128] = 1.75  # a constant row's amax is on the boundary of two scales
    arguments = {
        "kv": kv[:, stride - 512 :],
        "weight": weight.to(dtype),
        "eps": EPS,
        "freqs_cis": testing.yarn_freqs_cis(POSITIONS, "cuda"),
        "page_size": page_size,
        "layout": layout,
    }
    if entry == "main":
        row_slots = torch.where(left_out, -1, row_slots)
        arguments |= {"positions": positions.to(position_dtype), "slots": row_slots.to(slot_dtype or torch.int32)}
        return Case(entry, arguments, row_slots, ~left_out)
    seq_lens = positions + ratio
    if entry == "decode":
        plan = testing.decode_plan(torch.where(left_out, seq_lens + 1 + randint(ratio - 1, n), seq_lens))
        slots = torch.where(left_out, 0, row_slots)  # as SGLang leaves it
    else:
        ragged = torch.arange(n, device="cuda") if ordered else torch.randperm(2 * n, generator=g, device="cuda")[:n]
        slots = torch.zeros(2 * n, dtype=torch.int64, device="cuda")
        slots[ragged] = row_slots
        plan = testing.extend_plan(seq_lens, ragged, ~left_out)
    arguments |= {"plan": plan, "slots": slots.to(slot_dtype or torch.int64)}
    arguments |= {"compress_ratio": ratio, "is_decode": entry == "decode"}
    return Case(entry, arguments, row_slots, ~left_out)


def row_addresses(slots, page_size, layout, stride, offset=0):
    """Byte addresses of everything a row owns: [N, 583 or 1024]."""
    page, row = offset + slots // page_size * stride, slots % page_size
    if layout is CacheLayout.BF16:
        return (page + row * 1024)[:, None] + torch.arange(1024, device=slots.device)
    data = (page + row * 576)[:, None] + torch.arange(576, device=slots.device)
    scales = (page + page_size * 576 + row * 8)[:, None] + torch.arange(7, device=slots.device)
    return torch.cat([data, scales], 1)


# ---- byte identity with SGLang


@pytest.fixture(scope="module")
def stock():
    implementation, reason = testing.stock_store()
    if implementation is None:
        pytest.skip(reason)
    return implementation


def assert_equals_stock(case, stock):
    torch.cuda.synchronize()  # SGLang's kernels read plans and slots before they wait for the previous kernel
    expected = case.stored_bytes(stock)
    for tokens_per_block in WIDTHS:
        got = case.stored_bytes(tokens_per_block=tokens_per_block)
        assert torch.equal(got, expected), (tokens_per_block, (got != expected).nonzero()[:8].tolist())


# One compiled module of SGLang for each: every input type with every layout; pages of C4, of C128 and of plain rows.
COMPRESSED = [
    (torch.float32, CacheLayout.V4, 64, 4),
    (torch.float32, CacheLayout.V4, 2, 128),
    (torch.bfloat16, CacheLayout.V4, 64, 4),
    (torch.float32, CacheLayout.BF16, 1, 4),
    (torch.bfloat16, CacheLayout.BF16, 64, 128),
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "permuted"])
@pytest.mark.parametrize("entry", ["decode", "extend"])
@pytest.mark.parametrize(("dtype", "layout", "page_size", "ratio"), COMPRESSED)
def test_compressed_equals_sglang(stock, dtype, layout, page_size, ratio, entry, ordered, n):
    case = make_case(entry, n, dtype, layout=layout, page_size=page_size, ratio=ratio, ordered=ordered)
    assert_equals_stock(case, stock)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "permuted"])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [128, 256])
def test_main_equals_sglang(stock, page_size, position_dtype, ordered, n):
    case = make_case(
        "main", n, torch.bfloat16, page_size=page_size, ordered=ordered, position_dtype=position_dtype, stride=1536
    )
    assert_equals_stock(case, stock)


@pytest.mark.parametrize(
    ("entry", "dtype", "page_size"), [("main", torch.bfloat16, 256), ("decode", torch.float32, 64)]
)
def test_infinite_amax_equals_sglang(stock, entry, dtype, page_size):
    """Weights so large that normalised values overflow: scale byte 255 and whatever SGLang makes of it."""
    case = make_case(entry, 64, dtype, page_size=page_size)
    case.arguments["weight"][::3] = 3e38
    assert_equals_stock(case, stock)


@pytest.mark.parametrize("entry", ["main", "decode"])
def test_zero_eps_equals_sglang(stock, entry):
    """rsqrt(0) is inf and 0 * inf is NaN."""
    dtype, page_size = (torch.bfloat16, 256) if entry == "main" else (torch.float32, 64)
    case = make_case(entry, 64, dtype, page_size=page_size)
    case.arguments["eps"] = 0.0
    assert_equals_stock(case, stock)


# ---- without SGLang: K = 1, K = 4, the CPU path, addresses


@pytest.mark.parametrize("n", [1, 3, 5, 1022, 4099])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_tokens_per_block_does_not_change_bytes(entry, dtype, layout, n):
    case = make_case(entry, n, dtype, layout=layout, stride=520)
    first = case.stored_bytes(tokens_per_block=1)
    assert torch.equal(case.stored_bytes(tokens_per_block=4), first)
    assert torch.equal(case.stored_bytes(), first)
    first[row_addresses(case.row_slots[case.stored], 64, layout, layout.page_bytes(64))] = testing.POISON
    assert (first == testing.POISON).all(), "bytes outside the rows"


@pytest.mark.parametrize("tokens_per_block", [1, 4])
def test_more_rows_than_a_grid_s_y_dimension(tokens_per_block):
    """A small set of distinct rows, so that the bytes are known from a small call."""
    n, period = 70001, 512
    kv = random_rows(period, torch.bfloat16, 3)
    weight = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    freqs = testing.yarn_freqs_cis(64, "cuda")
    index = torch.arange(n, device="cuda") % period
    small, large = (testing.empty_cache(-(-rows // 64), 64, device="cuda") for rows in (period, n))
    slots = torch.arange(n, device="cuda")
    dk.norm_rope_store(kv, weight, EPS, freqs, index[:period] % 64, slots[:period], small, page_size=64)
    dk.norm_rope_store(
        kv[index], weight, EPS, freqs, index % 64, slots, large, page_size=64, tokens_per_block=tokens_per_block
    )
    page = CacheLayout.V4.page_bytes(64)
    expected = testing.storage_bytes(small)[row_addresses(index, 64, CacheLayout.V4, page)]
    assert torch.equal(testing.storage_bytes(large)[row_addresses(slots, 64, CacheLayout.V4, page)], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_cpu_path(entry, dtype, layout):
    """Scales, codes and bf16 values differ only where the approximate rsqrt moves a value across a boundary."""
    n = 512
    case = make_case(entry, n, dtype, layout=layout, rows=random_rows)
    case.arguments["weight"][64:128] = case.arguments["weight"][128:192]  # no amax on a boundary on purpose
    gpu = case.stored_bytes().cpu()
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}
    cache = testing.empty_cache(-(-case.capacity // 64), 64, layout)
    case._replace(arguments=on_cpu).store(cache)
    cpu = testing.storage_bytes(cache)

    address = row_addresses(case.row_slots[case.stored].cpu(), 64, layout, layout.page_bytes(64))
    gpu_rows, cpu_rows = gpu[address], cpu[address]
    gpu[address] = cpu[address] = 0
    assert torch.equal(gpu, cpu), "bytes outside the rows"

    def steps(a, b):
        """How many representable values lie between (sign-magnitude bits)."""
        sign = 1 << (8 * a.element_size() - 1)
        a, b = (torch.where(x.long() < 0, x.long() + 2 * sign, x.long()) for x in (a, b))
        a, b = (torch.where(x >= sign, sign - x, x) for x in (a, b))
        return (a - b).abs()

    # rsqrtf is within 2 ulp, the CPU's within 1/2: a value moves by at most 3 * 2^-23. Neighbouring bf16 values are at
    # least 2^-8 apart, codes 2^-4: at most one value in 2^13.4 or 2^17.4 can be expected to change. Twice that and 8
    # more is beyond what chance does.
    bf16_start = 448 if layout is CacheLayout.V4 else 0
    bf16_end = 576 if layout is CacheLayout.V4 else 1024
    gpu_bf16, cpu_bf16 = (x[:, bf16_start:bf16_end].contiguous().view(torch.int16) for x in (gpu_rows, cpu_rows))
    bf16_steps = steps(gpu_bf16, cpu_bf16)
    # The rotation may cancel, and then the same error is more than one step.
    assert (bf16_steps > 0).sum() <= bf16_steps.numel() * 2.0**-13.4 * 2 + 8
    counts = {"bf16": int((bf16_steps > 0).sum())}
    if layout is CacheLayout.V4:
        same_scale = gpu_rows[:, 576:] == cpu_rows[:, 576:]
        code_steps = steps(gpu_rows[:, :448], cpu_rows[:, :448]) * same_scale.repeat_interleave(64, -1)
        counts |= {"codes": int((code_steps > 0).sum()), "scales": int((~same_scale).sum())}
        assert code_steps.max() <= 1
        assert (code_steps > 0).sum() <= code_steps.numel() * 2.0**-17.4 * 2 + 8
        assert counts["scales"] <= 1
    print(entry, dtype, layout, counts, "of", len(gpu_rows), "rows")


def shifted(x, elements=1):
    """The same values at an address that is ``elements`` further than an aligned one."""
    flat = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    view = flat[elements:].view(x.shape)
    view.copy_(x)
    return view


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_unaligned_addresses(entry, dtype, layout):
    """Every tensor in turn at an odd address, or with rows that are no multiple of 16 bytes."""
    n = 259
    case = make_case(entry, n, dtype, layout=layout)
    case.arguments["freqs_cis"] = torch.view_as_real(case.arguments["freqs_cis"]).flatten(-2)
    expected = case.stored_bytes()
    for name in ("kv", "weight", "freqs_cis"):
        assert torch.equal(case.stored_bytes(**{name: shifted(case.arguments[name])}), expected), name
    for width in (513, 515, 520):
        wide = torch.full((n, width), torch.nan, device="cuda", dtype=dtype)
        wide[:, :512] = case.arguments["kv"]
        assert torch.equal(case.stored_bytes(kv=wide[:, :512]), expected), f"kv rows of {width}"
    for name in ("positions", "slots"):
        if name in case.arguments:
            assert torch.equal(case.stored_bytes(**{name: shifted(case.arguments[name])}), expected), name

    page = layout.page_bytes(64)
    address = row_addresses(case.row_slots[case.stored], 64, layout, page)
    for stride, offset in ((page, 1), (page, 8), (page + 1, 0), (page + 4, 3), (page + 576, 16)):
        for tokens_per_block in WIDTHS:
            cache = case.new_cache(packed_stride=stride, storage_offset=offset)
            case.store(cache, tokens_per_block=tokens_per_block)
            storage = testing.storage_bytes(cache)
            moved = row_addresses(case.row_slots[case.stored], 64, layout, stride, offset)
            assert torch.equal(storage[moved], expected[address]), (stride, offset)
            storage[moved] = testing.POISON
            assert (storage == testing.POISON).all(), "bytes outside the rows"


@pytest.mark.parametrize("page_size", [1, 2, 64, 128, 256, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_page_sizes_and_rows_that_go_nowhere(entry, layout, page_size):
    """Slots and positions outside change nothing; the other rows are those of a cache with another page size."""
    n = 300
    case = make_case(entry, n, torch.float32, layout=layout)
    arguments, stored = case.arguments, case.stored.clone()
    capacity = len(case.new_cache()) * 64
    outside = torch.tensor([-1, -(2**31), capacity, capacity + 1, 2**31 - 1, 2**31, 2**40, -(2**40)], device="cuda")
    if entry == "main":
        arguments["slots"], arguments["positions"] = arguments["slots"].long(), arguments["positions"].clone()
    where = torch.arange(5, 5 + len(outside), device="cuda")
    slot_index = where
    if entry == "extend":
        slot_index = arguments["plan"].view(torch.int32)[where, 1].long() & 0xFFFF
    arguments["slots"][slot_index] = outside
    stored[where] = False
    bad_positions = torch.tensor([-4, POSITIONS, POSITIONS + 4, 2**31 - 4], device="cuda")
    where = torch.arange(50, 54, device="cuda")
    if entry == "main":
        arguments["positions"][where] = bad_positions
    else:  # seq_len 0, beyond the table, and 2^31
        words = arguments["plan"].view(torch.int32)
        words[where, 0] = torch.where(bad_positions < 2**31 - 4, bad_positions + 4, -(2**31)).int()
        if entry == "extend":
            words[54, 1] = 2 * n  # past the end of slots; the upper half (buffer_len) is 0
            stored[54] = False
    stored[where] = False

    slots = case.row_slots[stored]
    expected = case.stored_bytes()
    address = row_addresses(slots, 64, layout, layout.page_bytes(64))
    rows = expected[address]
    expected[address] = testing.POISON
    assert (expected == testing.POISON).all()
    pages = capacity // page_size if page_size <= 64 else -(-capacity // page_size)
    inside = slots < pages * page_size
    for tokens_per_block in WIDTHS:
        cache = testing.empty_cache(pages, page_size, layout, "cuda")
        in_range = dict(arguments)
        if page_size > 64:  # the last page is larger: slots that were outside would be inside
            in_range["slots"] = torch.where(arguments["slots"] >= capacity, -1, arguments["slots"])
        case._replace(arguments=in_range).store(cache, page_size=page_size, tokens_per_block=tokens_per_block)
        storage = testing.storage_bytes(cache)
        moved = row_addresses(slots[inside], page_size, layout, layout.page_bytes(page_size))
        assert torch.equal(storage[moved], rows[inside])
        storage[moved] = testing.POISON
        assert (storage == testing.POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_index_types_and_cache_types(entry, dtype):
    case = make_case(entry, 200, dtype)
    expected = case.stored_bytes()
    for index_dtype in (torch.int32, torch.int64):
        changed = {"slots": case.arguments["slots"].to(index_dtype)}
        if entry == "main":
            changed["positions"] = case.arguments["positions"].to(index_dtype)
        assert torch.equal(case.stored_bytes(**changed), expected)
    cache = case.new_cache()
    case.store(cache.view(torch.float8_e4m3fn))
    assert torch.equal(testing.storage_bytes(cache), expected)


def test_rows_that_share_a_slot_disturb_no_other():
    """Graph padding sends several rows to slot 0."""
    case = make_case("main", 1000, torch.bfloat16)
    case.arguments["slots"][case.row_slots == 0] = -1
    expected = case.stored_bytes()
    case.arguments["slots"][::7] = 0
    got = case.stored_bytes()
    slots = case.row_slots[(case.arguments["slots"] > 0) & case.stored]
    address = row_addresses(slots, 64, CacheLayout.V4, CacheLayout.V4.page_bytes(64))
    assert torch.equal(got[address], expected[address])
    got[address] = testing.POISON
    got[row_addresses(slots[:1] * 0, 64, CacheLayout.V4, 37440)] = testing.POISON
    assert (got == testing.POISON).all()


# ---- large caches

GIB4 = 1 << 32


@pytest.fixture(scope="module")
def big_storage():
    free, _ = torch.cuda.mem_get_info()
    if free < 7 << 30:
        pytest.skip(f"needs 7 GiB of free GPU memory, {free >> 20} MiB are free")
    storage = torch.full((GIB4 + (1 << 20),), testing.POISON, dtype=torch.uint8, device="cuda")
    yield storage
    del storage
    torch.cuda.empty_cache()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("form", ["v4", "bf16", "few far pages", "unaligned"])
def test_addresses_past_32_bits(big_storage, form, entry, slot_dtype):
    """The first rows past 2^31 and 2^32 bytes, those before, the last slot, and slots past the end."""
    layout, page_size = (CacheLayout.BF16, 1) if form == "bf16" else (CacheLayout.V4, 256)
    page_bytes = layout.page_bytes(page_size)
    offset = 3 if form == "unaligned" else 0
    stride = (1 << 31) - 4096 + offset if form == "few far pages" else page_bytes
    pages = (len(big_storage) - offset - page_bytes) // stride + 1
    cache = big_storage.as_strided((pages, page_bytes), (stride, 1), offset)
    assert (pages - 1) * stride + page_bytes > GIB4 - (1 << 20)
    capacity = pages * page_size
    near = [limit // stride * page_size for limit in (1 << 31, GIB4)]
    wanted = {0, capacity - 1} | {slot + d for slot in near for d in (-page_size, -1, 0, 1, 8, page_size)}
    inside = sorted(slot for slot in wanted if 0 <= slot < capacity)
    outside = [capacity, capacity + 1, capacity + page_size, 2**31 - 1, -1, -capacity]
    outside += [2**31, 2**32, 2**40] if slot_dtype is torch.int64 else []
    slots = torch.tensor(inside + outside, device="cuda")
    n = len(slots)

    case = make_case(entry, n, torch.float32, layout=layout, rows=random_rows)
    if entry == "main":
        case.arguments["slots"] = torch.arange(n, device="cuda")
    else:
        seq_lens = 4 + 4 * torch.arange(n, device="cuda")
        order = torch.arange(n, device="cuda").flip(0)
        decode = entry == "decode"
        case.arguments["plan"] = testing.decode_plan(seq_lens) if decode else testing.extend_plan(seq_lens, order)
        case.arguments["slots"] = torch.arange(n, device="cuda") if decode else order
    near_cache = testing.empty_cache(1, 64, layout, "cuda")
    case.store(near_cache, page_size=64)
    rows = testing.storage_bytes(near_cache)[
        row_addresses(torch.arange(n, device="cuda"), 64, layout, layout.page_bytes(64))
    ]
    far = (slots if entry != "extend" else slots.flip(0)).to(slot_dtype)
    moved = row_addresses(slots[: len(inside)], page_size, layout, stride, offset)
    assert moved.max() >= 1 << 31
    for tokens_per_block in (1, 4):
        case.store(cache, page_size=page_size, slots=far, tokens_per_block=tokens_per_block)
        assert torch.equal(big_storage[moved], rows[: len(inside)])
        big_storage[moved] = testing.POISON
    for chunk in big_storage.split(1 << 30):
        assert (chunk == testing.POISON).all()


# ---- empty calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_tokens(entry, dtype, layout):
    case = make_case(entry, 8, dtype, layout=layout)
    empty = {name: case.arguments[name][:0] for name in ("kv", "positions", "plan", "slots") if name in case.arguments}
    for tokens_per_block in WIDTHS:
        assert (case.stored_bytes(tokens_per_block=tokens_per_block, **empty) == testing.POISON).all()
    case.store(torch.empty(0, 262144, dtype=torch.uint8, device="cuda"))  # a cache without pages
    torch.cuda.synchronize()


# ---- streams, graphs, programmatic dependent launch


@pytest.fixture(params=[True, False], ids=["pdl", "no pdl"])
def pdl(request, monkeypatch):
    monkeypatch.setattr(dk.settings, "pdl", request.param)
    return request.param


def copy_inputs(to, source):
    for name, value in source.arguments.items():
        if isinstance(value, torch.Tensor):
            to.arguments[name].copy_(value)


@pytest.mark.usefixtures("pdl")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [3, 2048])
@pytest.mark.parametrize("entry", ENTRIES)
def test_graph_replay_with_changed_inputs(entry, n, layout):
    """kv, plans (or positions) and slots change between replays; also to fewer live rows than were captured."""
    static = make_case(entry, n, torch.float32, layout=layout, seed=1)
    cache = static.new_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.store(cache)
        static.store(cache)  # a second one behind it, which may start early
    assert (testing.storage_bytes(cache) == testing.POISON).all(), "capture must not run the kernel"
    for seed in (1, 2, 3):
        case = make_case(entry, n, torch.float32, layout=layout, seed=seed)
        if seed == 3:
            case.arguments["slots"][:] = -1
        copy_inputs(static, case)
        cache.fill_(testing.POISON)
        graph.replay()
        assert torch.equal(testing.storage_bytes(cache), case.stored_bytes())


@pytest.mark.usefixtures("pdl")
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
def test_waits_for_a_late_producer(entry, in_graph):
    """The kernels before write kv, plan, positions and slots, long after the store was enqueued."""
    case, stale = (make_case(entry, 600, torch.bfloat16, seed=seed) for seed in (5, 6))
    expected = case.stored_bytes()
    cache = case.new_cache()

    def run():
        torch.cuda._sleep(20_000_000)  # about 10 ms
        copy_inputs(stale, case)
        stale.store(cache)

    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
    else:
        run()
    assert torch.equal(testing.storage_bytes(cache), expected)


def int_rows(values):
    """Bytes [N, 1024] of integers as [N, 512] bf16 rows. Each half word is a bf16 so small that its square is lost in
    eps = 1: with weight 1 and position 0 the store copies such rows unchanged."""
    rows = values.contiguous().view(torch.uint8).view(-1, 1024).view(torch.bfloat16)
    assert (rows.view(torch.int16) >= 0).all()
    assert (rows.view(torch.int16) < 0x3000).all()
    return rows


@pytest.mark.usefixtures("pdl")
@pytest.mark.parametrize("entry", ENTRIES)
def test_waits_for_a_producer_that_lets_it_start_early(entry):
    """The previous kernel is a store too (which releases its dependents at once), and what it stores is the next one's
    positions, plan and slots."""
    n = 1024
    ones = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    freqs = testing.yarn_freqs_cis(POSITIONS, "cuda")
    case = make_case(entry, n, torch.bfloat16, seed=7)
    slots = torch.where(case.stored, case.row_slots, 12000).to(torch.int32)  # 12000 is past the capacity
    position = torch.arange(n, device="cuda", dtype=torch.int32) * 4
    if entry == "main":
        source = position
    else:  # a plan without the rubbish that is no small number
        source = torch.zeros(n, 4, dtype=torch.int32, device="cuda")
        source[:, 0] = position + 4
        source[:, 1] = torch.arange(n, device="cuda")
    parts = [int_rows(x) for x in (source, slots)]
    # Rows in front, so that the last ones are stored late.
    rows = torch.cat([torch.zeros(4096, 512, dtype=torch.bfloat16, device="cuda"), *parts])
    produced = testing.empty_cache(len(rows), 1, CacheLayout.BF16, "cuda")
    zero, order = (torch.zeros(len(rows), dtype=torch.int64, device="cuda"), torch.arange(len(rows), device="cuda"))
    split = [4096, len(parts[0]), len(parts[1])]
    _, produced_source, produced_slots = (part.reshape(-1) for part in produced.split(split))
    cache = case.new_cache()

    def arguments(source, slots):
        if entry == "main":
            return {"positions": source.view(torch.int32), "slots": slots.view(torch.int32)}
        return {"plan": source.view(torch.uint8).view(n, 16), "slots": slots.view(torch.int32)}

    case.arguments["freqs_cis"] = freqs
    expected = case.stored_bytes(**arguments(source, slots))
    assert (expected != testing.POISON).any()
    for attempt in range(20):
        produced.fill_(testing.POISON)
        cache.fill_(testing.POISON)
        dk.norm_rope_store(rows, ones, 1.0, freqs, zero, order, produced, page_size=1, layout="bf16")
        case.store(cache, **arguments(produced_source, produced_slots))
        assert torch.equal(produced_slots.view(torch.int32), slots), "the copy by store"
        assert torch.equal(testing.storage_bytes(cache), expected), attempt


FIRST_CALL = """
    import torch
    import sgl_dsv4_kernels as dk
    from sgl_dsv4_kernels import testing
    dk.settings.pdl = {pdl}
    n = 64
    kv = torch.randn(n, 512, device="cuda")
    weight = torch.ones(512, device="cuda")
    freqs = testing.yarn_freqs_cis(n, "cuda")
    index = torch.arange(n, device="cuda")
    captured, eager = (testing.empty_cache(1, 64, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dk.norm_rope_store(kv, weight, 1e-6, freqs, index, index, captured, page_size=64)
    graph.replay()
    dk.norm_rope_store(kv, weight, 1e-6, freqs, index, index, eager, page_size=64)
    assert torch.equal(captured, eager) and (eager != testing.POISON).any()
    print("same bytes")
"""


def test_first_call_of_a_process_inside_a_capture(tmp_path):
    """With and without programmatic dependent launch, in two processes at once."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    scripts = [textwrap.dedent(FIRST_CALL).format(pdl=pdl) for pdl in (True, False)]
    processes = [subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, **pipes) for script in scripts]
    results = [process.communicate(timeout=120) for process in processes]
    for process, (output, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
        assert "same bytes" in output


@pytest.mark.usefixtures("pdl")
@pytest.mark.parametrize("entry", ENTRIES)
def test_side_stream(entry):
    """The kernel runs on the current stream: behind what is slow there, and not behind the default stream."""
    case, stale = (make_case(entry, 300, torch.float32, seed=seed) for seed in (8, 9))
    expected = case.stored_bytes()
    cache = case.new_cache()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        copy_inputs(stale, case)
        stale.store(cache)
    stream.synchronize()
    assert torch.equal(testing.storage_bytes(cache), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("entry", ENTRIES)
def test_device_that_is_not_current(entry):
    case = make_case(entry, 300, torch.float32)
    expected = case.stored_bytes().cpu()
    moved = {name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}
    cache = case.new_cache().to("cuda:1")
    page_bytes = CacheLayout.V4.page_bytes(64)
    case._replace(arguments=moved).store(cache)
    assert torch.cuda.current_device() == 0
    assert torch.equal(cache.cpu().flatten(), expected[: len(cache) * page_bytes])


# ---- errors


def on_cpu(x):
    return x.cpu()


ERRORS = [
    ("kv", on_cpu, ValueError, "weight: expected device cpu, got cuda:0"),
    ("weight", on_cpu, ValueError, "weight: expected device cuda:0, got cpu"),
    ("freqs_cis", on_cpu, ValueError, "freqs_cis: expected device cuda:0, got cpu"),
    ("positions", on_cpu, ValueError, "positions: expected device cuda:0, got cpu"),
    ("plan", on_cpu, ValueError, "plan: expected device cuda:0, got cpu"),
    ("slots", on_cpu, ValueError, "slots: expected device cuda:0, got cpu"),
    ("cache", on_cpu, ValueError, "cache: expected device cuda:0, got cpu"),
    ("kv", lambda x: x.half(), TypeError, "kv: expected dtype torch.bfloat16 or torch.float32, got torch.float16"),
    ("weight", lambda x: x.double(), TypeError, "weight: expected dtype torch.float32, got torch.float64"),
    ("kv", lambda x: x[:, ::2], ValueError, r"kv: expected shape \[tokens, 512\], got \[8, 256\]"),
    ("cache", lambda x: x[:, 1:], ValueError, "cache: expected at least 37440 bytes a page of 64 tokens, got 37439"),
]


@pytest.mark.parametrize(("name", "spoil", "error", "text"), ERRORS)
@pytest.mark.parametrize("entry", ["main", "decode"])
def test_wrong_argument(entry, name, spoil, error, text):
    case = make_case(entry, 8, torch.float32)
    cache = case.new_cache()
    arguments = case.arguments | {"cache": cache}
    if name not in arguments:
        pytest.skip(f"this entry has no {name}")
    with pytest.raises(error, match=f"^{text}"):
        case.store(**(arguments | {name: spoil(arguments[name])}))
    assert (testing.storage_bytes(cache) == testing.POISON).all()


def test_plan_at_an_odd_address():
    case = make_case("decode", 8, torch.float32)
    shifted_plan = shifted(case.arguments["plan"], 8)
    with pytest.raises(ValueError, match="plan: expected a storage offset that is a multiple of 16, got"):
        case.stored_bytes(plan=shifted_plan)
    op, arguments = op_arguments("decode")
    arguments[1] = shifted_plan
    with pytest.raises(RuntimeError, match="plan: expected data that starts at a multiple of 16 bytes"):
        op(*arguments)


@pytest.mark.parametrize("entry", ENTRIES)
def test_checked_mode(entry, monkeypatch):
    monkeypatch.setattr(dk.settings, "check", True)
    case = make_case(entry, 8, torch.float32)
    case.stored_bytes()
    few = case.arguments["freqs_cis"][:4]
    with pytest.raises(ValueError, match=r"expected values in \[0, 4\), the rows of freqs_cis, got \d+ in row \d"):
        case.stored_bytes(freqs_cis=few)


def op_arguments(entry):
    """The op and its positional arguments, as the public function passes them."""
    case = make_case(entry, 8, torch.float32)
    a = case.arguments
    freqs = torch.view_as_real(a["freqs_cis"]).flatten(-2)
    ops = torch.ops.sgl_dsv4_kernels
    if entry == "main":
        first = [a["kv"], a["weight"], EPS, freqs, a["positions"], a["slots"], case.new_cache()]
        return ops.norm_rope_store.default, [*first, 64, 0, 0, True]
    first = [a["kv"], a["plan"], a["weight"], EPS, freqs, a["slots"], case.new_cache()]
    return ops.compress_norm_rope_store.default, [*first, 64, 4, entry == "decode", 0, 0, True]


# What the public functions catch first, at the op itself: it must not touch memory on a wrong call either.
OP_ERRORS = [
    ("kv", lambda x: x.half(), "kv: expected dtype BFloat16 or Float, got Half"),
    ("kv", lambda x: x[:, :500], r"kv: expected shape \[\*, 512\], got \[8, 500\]"),
    ("kv", lambda x: x.t().contiguous().t(), r"kv: expected stride\(1\) = 1, got 8"),
    ("weight", lambda x: x.bfloat16(), "weight: expected dtype Float, got BFloat16"),
    ("weight", lambda x: x.repeat(2)[::2], r"weight: expected stride\(0\) = 1, got 2"),
    ("weight", on_cpu, "weight: expected a CUDA tensor"),
    ("freqs_cis", lambda x: x.double(), "freqs_cis: expected dtype Float, got Double"),
    ("freqs_cis", lambda x: x[:, :32], r"freqs_cis: expected shape \[\*, 64\], got \[4096, 32\]"),
    ("freqs_cis", lambda x: x.repeat(1, 2)[:, :64], r"freqs_cis: expected stride\(0\) = 64, got 128"),
    ("positions", lambda x: x.short(), "positions: expected dtype Int or Long, got Short"),
    ("positions", lambda x: x[:7], r"positions: expected shape \[8\], got \[7\]"),
    ("plan", lambda x: x[:, :8], r"plan: expected shape \[8, 16\], got \[8, 8\]"),
    ("plan", lambda x: x.view(torch.int8), "plan: expected dtype Byte, got Char"),
    ("plan", lambda x: x.repeat(1, 2)[:, :16], r"plan: expected stride\(0\) = 16, got 32"),
    ("slots", lambda x: x.short(), "slots: expected dtype Int or Long, got Short"),
    ("slots", lambda x: x[:7], r"slots: expected shape \[8\], got \[7\]"),
    ("cache", lambda x: x.short(), "cache: expected a dtype of one byte, got Short"),
    ("cache", lambda x: x[:, 1:], "cache: expected at least 37440 bytes a page for page_size 64, got 37439"),
    ("cache", lambda x: x[:1].expand(2, -1), r"cache: expected stride\(0\) >= 37440, got 0"),
    ("page_size", lambda x: 48, "page_size: expected a power of two, got 48"),
    ("layout", lambda x: 7, r"layout: expected 0 \(v4\) or 1 \(bf16\), got 7"),
    ("tokens_per_block", lambda x: 3, r"tokens_per_block: expected 0 \(choose\), 1 or 4, got 3"),
    ("compress_ratio", lambda x: 0, "compress_ratio: expected a positive number, got 0"),
]


@pytest.mark.parametrize(("name", "spoil", "text"), OP_ERRORS)
@pytest.mark.parametrize("entry", ["main", "decode"])
def test_wrong_argument_at_the_op(entry, name, spoil, text):
    op, arguments = op_arguments(entry)
    names = [argument.name for argument in op._schema.arguments]
    if name not in names:
        pytest.skip(f"this entry has no {name}")
    arguments[names.index(name)] = spoil(arguments[names.index(name)])
    with pytest.raises(RuntimeError, match=text):
        op(*arguments)


def test_a_failed_call_leaves_no_error_behind():
    op, arguments = op_arguments("main")
    with pytest.raises(RuntimeError):
        op(*arguments[:-2], 3, True)
    case = make_case("main", 8, torch.float32)
    assert (case.stored_bytes() != testing.POISON).any()
    torch.cuda.synchronize()


# ---- torch's own checks


@pytest.mark.parametrize("entry", ENTRIES)
def test_opcheck(entry):
    op, arguments = op_arguments(entry)
    assert set(torch.library.opcheck(op, tuple(arguments)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_compile_without_graph_break(entry):
    case = make_case(entry, 64, torch.float32)
    cache = case.new_cache()
    torch._dynamo.reset()
    torch.compile(lambda c: case.store(c), fullgraph=True)(cache)
    assert torch.equal(testing.storage_bytes(cache), case.stored_bytes())
