"""The store ops' CPU path against an fp64 computation that this file does on its own, down to the bytes.

How close the bytes must be follows from the arithmetic: the normalised fp32 value lies within `RELATIVE_ERROR` of the
true one, so its code lies between the codes of the two ends of that interval.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._subclasses import FakeTensorMode

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import CacheLayout, testing

EPS = 1e-6
RATIO = 4
POSITIONS = 512
ENTRIES = ("main", "decode", "extend")
LAYOUTS = (CacheLayout.V4, CacheLayout.BF16)
DTYPES = (torch.float32, torch.bfloat16)

U = 2.0**-24  # half an fp32 ulp, relative
# Sum of 512 squares: 2 roundings a pair, 8 levels of the tree (all terms positive, so relative errors do not grow);
# times 1/512 + eps: 1. The square root halves them; rsqrt itself, times x, times weight: 1 each. 0.5: second order.
RELATIVE_ERROR = (11 / 2 + 3 + 0.5) * U
# The rotation: the product, the fused multiply-add, and the errors of its two inputs.
ROTATION_ERROR = RELATIVE_ERROR + 2 * U


# ---- an independent truth


def fp64_rows(kv, weight, eps, freqs, positions):
    """[N, 512] fp64 after norm and RoPE, and the size of the rotation's terms [N, 64]."""
    x = kv.double()
    x = x / (x.pow(2).sum(-1, keepdim=True) / 512 + eps).sqrt() * weight.double()
    freq = freqs[positions].to(torch.complex128)
    pair = torch.complex(x[:, 448::2], x[:, 449::2])
    turned = pair * freq
    real_terms = (pair.real * freq.real).abs() + (pair.imag * freq.imag).abs()
    imag_terms = (pair.real * freq.imag).abs() + (pair.imag * freq.real).abs()
    x[:, 448::2], x[:, 449::2] = turned.real, turned.imag
    return x, torch.stack([real_terms, imag_terms], -1).flatten(-2)


def to_bf16(x):
    """fp64 to the nearest bf16 (ties to even), as fp64, in one rounding."""
    _, exponent = torch.frexp(x)
    quantum = torch.exp2(exponent.clamp(min=-125).double() - 8)
    return (x / quantum).round() * quantum


def _e4m3_values():
    """Values of the codes 0 .. 0x7e, from the format's definition."""
    code = torch.arange(0x7F)
    exponent, mantissa = code >> 3, (code & 7).double()
    normal = torch.exp2(exponent.double() - 7) * (1 + mantissa / 8)
    return torch.where(exponent == 0, mantissa * 2.0**-9, normal)


E4M3 = _e4m3_values()
E4M3_MIDPOINTS = (E4M3[1:] + E4M3[:-1]) / 2


def to_e4m3(x):
    """fp64 to the nearest e4m3 code (ties to even, beyond 448 to 448), as fp64 value."""
    magnitude = x.abs().contiguous()
    below = torch.searchsorted(E4M3_MIDPOINTS, magnitude, right=False)
    above = torch.searchsorted(E4M3_MIDPOINTS, magnitude, right=True)
    code = torch.where(below % 2 == 0, below, above)  # both agree except on a midpoint, where one is even
    return torch.copysign(E4M3[code], x)


def scale_exponent(amax):
    """Biased exponent of the smallest power of two >= max(amax, 1e-4) / 448."""
    mantissa, exponent = torch.frexp(amax.clamp(min=1e-4) / 448)
    return exponent - (mantissa == 0.5).int() + 127


class Case(NamedTuple):
    """Inputs of either entry, and what the call must write: rows ``stored`` at ``row_slots`` with ``row_positions``."""

    entry: str
    kv: torch.Tensor
    weight: torch.Tensor
    freqs: torch.Tensor
    source: torch.Tensor  # positions (main) or plan
    slots: torch.Tensor
    stored: torch.Tensor
    row_slots: torch.Tensor
    row_positions: torch.Tensor


def make_case(entry, kv, capacity, *, seed=0, index_dtype=torch.int64, all_stored=False, weight=None) -> Case:
    """Rows at distinct permuted slots; unless ``all_stored``, with rows of every kind that must not be written."""
    n = kv.shape[0]
    g = torch.Generator().manual_seed(seed)
    if weight is None:
        weight = (1 + 0.2 * torch.randn(512, generator=g)).to(kv.dtype)
    freqs = testing.yarn_freqs_cis(POSITIONS)
    row_slots = torch.randperm(capacity, generator=g)[:n]
    row_positions = torch.randint(0, POSITIONS // RATIO, (n,), generator=g) * RATIO
    stored = torch.ones(n, dtype=torch.bool)
    seq_lens = row_positions + RATIO
    valid = torch.ones(n, dtype=torch.bool)
    if not all_stored:
        for kind, slot in ((0, -1), (1, capacity), (2, capacity + 12345), (3, -(2**31))):
            row_slots[kind::11] = slot
            stored[kind::11] = False
        row_positions[4::11], seq_lens[4::11] = POSITIONS, POSITIONS + RATIO
        row_positions[5::11], seq_lens[5::11] = -RATIO, 0
        stored[4::11] = stored[5::11] = False
        if entry == "decode":
            seq_lens[6::11] += 1  # not a multiple of the ratio
        if entry != "main":
            valid[7::11] = False
            stored[6::11] = stored[6::11] & (entry != "decode")
            stored[7::11] = False
    if entry == "main":
        source, slots = row_positions.to(index_dtype), row_slots
    elif entry == "decode":
        source, slots = testing.decode_plan(torch.where(valid, seq_lens, testing.INVALID_SEQ_LEN)), row_slots
    else:
        ragged = torch.randperm(2 * n, generator=g)[:n]
        slots = torch.full((2 * n,), -1)
        slots[ragged] = row_slots
        if not all_stored:
            ragged[8::11] = 2 * n  # past the end of slots
            stored[8::11] = False
        source = testing.extend_plan(seq_lens, ragged, valid)
    return Case(entry, kv, weight, freqs, source, slots.to(index_dtype), stored, row_slots, row_positions)


def store(case: Case, cache, page_size, layout, **changed):
    arguments = {"kv": case.kv, "weight": case.weight, "eps": EPS, "freqs_cis": case.freqs, "slots": case.slots}
    arguments |= {"cache": cache, "page_size": page_size, "layout": layout}
    if case.entry == "main":
        dk.norm_rope_store(**(arguments | {"positions": case.source} | changed))
    else:
        plan = {"plan": case.source, "compress_ratio": RATIO, "is_decode": case.entry == "decode"}
        dk.compress_norm_rope_store(**(arguments | plan | changed))


# ---- reading bytes, with the numbers of the format written out


def row_addresses(cache, slots, page_size, layout):
    """Addresses in `testing.storage_bytes` of each row's data [N, 576 or 1024] and scales [N, 7 or 0]."""
    page = cache.storage_offset() + slots // page_size * cache.stride(0)
    offset = slots % page_size
    if layout is CacheLayout.BF16:
        return page[:, None] + offset[:, None] * 1024 + torch.arange(1024), torch.zeros(
            len(slots), 0, dtype=torch.int64
        )
    data = page[:, None] + offset[:, None] * 576 + torch.arange(576)
    return data, page[:, None] + page_size * 576 + offset[:, None] * 8 + torch.arange(7)


def read_rows(cache, slots, page_size, layout):
    """Bytes of each row: data [N, 576 or 1024], scales [N, 7 or 0]."""
    return tuple(testing.storage_bytes(cache)[address] for address in row_addresses(cache, slots, page_size, layout))


def assert_rest_untouched(cache, slots, page_size, layout):
    storage = testing.storage_bytes(cache).clone()
    for address in row_addresses(cache, slots, page_size, layout):
        storage[address] = testing.POISON
    assert torch.equal(storage, torch.full_like(storage, testing.POISON)), (storage != testing.POISON).nonzero()[:10]


def bf16_values(data):
    return data.contiguous().view(torch.bfloat16).double()


def code_values(codes):
    sign = 1 - 2.0 * (codes >> 7)
    return torch.copysign(E4M3[(codes & 0x7F).long()], sign)


def assert_between(got, low, high):
    wrong = ~((got >= torch.minimum(low, high)) & (got <= torch.maximum(low, high)))
    assert not wrong.any(), [(i.tolist(), got[tuple(i)], low[tuple(i)], high[tuple(i)]) for i in wrong.nonzero()[:5]]


def check_rows(case: Case, cache, page_size, layout):
    """Every stored row lies within the derived error of the fp64 truth. Returns how many codes are not the truth's."""
    slots = case.row_slots[case.stored]
    data, scales = read_rows(cache, slots, page_size, layout)
    truth, terms = fp64_rows(case.kv[case.stored], case.weight, EPS, case.freqs, case.row_positions[case.stored])
    # The smallest fp32 numbers have an absolute error, 2^-149 a rounding.
    rope_error = terms * ROTATION_ERROR + 2.0**-147
    rope = bf16_values(data[:, -128:])
    assert_between(rope, to_bf16(truth[:, 448:] - rope_error), to_bf16(truth[:, 448:] + rope_error))

    low, high = (truth[:, :448] * (1 + sign * RELATIVE_ERROR) for sign in (-1, 1))
    if layout is CacheLayout.BF16:
        assert_between(bf16_values(data[:, :896]), to_bf16(low), to_bf16(high))
        return int((rope != to_bf16(truth[:, 448:])).sum())
    nope = truth[:, :448]
    if case.entry != "main":
        low, high, nope = to_bf16(low), to_bf16(high), to_bf16(nope)
    groups = [x.unflatten(-1, (7, 64)) for x in (low, high, nope)]
    exponent_low, exponent_high = (scale_exponent(x.abs().amax(-1)) for x in groups[:2])
    assert_between(scales.int(), exponent_low, exponent_high)
    scale = torch.exp2(scales.double() - 127)[..., None]
    got = code_values(data[:, :448]).unflatten(-1, (7, 64))
    assert_between(got, to_e4m3(groups[0] / scale), to_e4m3(groups[1] / scale))
    assert torch.equal(torch.signbit(got), torch.signbit(groups[2]))
    return int((got != to_e4m3(groups[2] / scale)).sum())


def random_rows(n, dtype, seed=0):
    """Rows whose sizes span six decades, with outliers, as latents have them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 512, generator=g) * torch.exp2(torch.randint(-10, 11, (n, 1), generator=g).float())
    x[torch.arange(n), torch.randint(0, 512, (n,), generator=g)] *= 50
    return x.to(dtype)


# ---- bytes


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_bytes_against_fp64(entry, dtype, layout, page_size):
    n = 120
    pages = -(-2 * n // page_size)
    case = make_case(entry, random_rows(n, dtype), pages * page_size)
    assert 0 < case.stored.sum() < n
    cache = testing.empty_cache(
        pages, page_size, layout, packed_stride=layout.page_bytes(page_size) + 31, storage_offset=5
    )
    store(case, cache, page_size, layout)
    differing = check_rows(case, cache, page_size, layout)
    # 448 (or 64) values a row, a code's boundary hit within 9 * 2^-24 about once in 10^5 values: 0 or 1 seen.
    assert differing <= 3
    assert_rest_untouched(cache, case.row_slots[case.stored], page_size, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_special_rows(entry, dtype, layout):
    """Rows that are finite throughout obey the same bounds; the others have bytes of their own."""
    named = testing.special_row_list(dtype)
    case = make_case(entry, torch.stack([row.values for row in named]), 64, all_stored=True)
    cache = testing.empty_cache(1, 64, layout)
    store(case, cache, 64, layout)
    assert_rest_untouched(cache, case.row_slots, 64, layout)

    sum_of_squares = case.kv.float().pow(2).sum(-1)
    ordinary = sum_of_squares.isfinite()
    assert ordinary.sum() >= 10
    check_rows(case._replace(stored=ordinary), cache, 64, layout)

    seen = set()
    for i in (~ordinary).nonzero()[:, 0].tolist():
        data, scales = (x[0] for x in read_rows(cache, case.row_slots[i : i + 1], 64, layout))
        row, rope = case.kv[i].float(), bf16_values(data[-128:])
        # The norm is 0 if the sum overflows and NaN if there is a NaN; 0 * inf is NaN.
        nan = torch.full_like(row, row.isnan().any().item(), dtype=torch.bool) | row.isinf()
        rope_nan = nan[448:].unflatten(-1, (32, 2)).any(-1).repeat_interleave(2)
        assert torch.equal(rope.isnan(), rope_nan), named[i].name
        assert (rope[~rope_nan] == 0).all(), named[i].name
        if layout is CacheLayout.V4:
            assert torch.equal(data[:448] == 0x7E, nan[:448]), named[i].name
            assert (data[:448][~nan[:448]] & 0x7F == 0).all(), named[i].name
            assert (scales == 127 - 22).all(), named[i].name  # 2^-22 >= 1e-4 / 448 > 2^-23
        else:
            nope = bf16_values(data[:896])
            assert torch.equal(nope.isnan(), nan[:448]), named[i].name
            assert (nope[~nan[:448]] == 0).all(), named[i].name
        seen.add(named[i].name)
    assert {"all NaN", "+inf", "-inf", "all inf", "squares overflow", "largest"} <= seen


def store_exact_values(values, entry):
    """Store [448] values that the norm leaves as they are (a row of ones, eps 0, the values as weight)."""
    weight = torch.cat([values, torch.zeros(64)])
    case = make_case(entry, torch.ones(1, 512), 2, all_stored=True, weight=weight)
    cache = testing.empty_cache(1, 2)
    store(case, cache, 2, CacheLayout.V4, eps=0.0)
    data, scales = read_rows(cache, case.row_slots, 2, CacheLayout.V4)
    return data[0, :448], scales[0]


def test_every_code_and_every_midpoint():
    """Scale 1: all codes, all midpoints between neighbours and the fp32 numbers beside them, both signs."""
    middle = E4M3_MIDPOINTS.float()
    beside = [torch.nextafter(middle, torch.tensor(to)) for to in (0.0, math.inf)]
    values = torch.cat([E4M3.float(), middle, *beside])
    values = torch.cat([values, -values])
    values = torch.cat([values, torch.zeros(-len(values) % 441)])
    for chunk in values.split(441):
        row = torch.cat([chunk.unflatten(0, (7, 63)), torch.full((7, 1), 448.0)], 1).flatten()  # 448 fixes the scale
        codes, scales = store_exact_values(row, "main")
        assert (scales == 127).all()
        assert torch.equal(code_values(codes), to_e4m3(row.double()))
        assert torch.equal(codes >> 7, torch.signbit(row).to(torch.uint8))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_scale(entry):
    """amax = 448 * 2^k and its neighbours in fp32 (main) or bf16 (compressed), from below the floor 1e-4 to the top."""
    bounds = 448.0 * torch.exp2(torch.arange(-30.0, 119.0))
    for toward in (0.0, None, math.inf):
        amax = bounds
        if toward is not None:
            amax = torch.nextafter(bounds, torch.tensor(toward))
            if entry != "main":
                amax = torch.nextafter(bounds.bfloat16(), torch.tensor(toward, dtype=torch.bfloat16)).float()
        for chunk in torch.cat([amax, amax[: -len(amax) % 7]]).split(7):
            codes, scales = store_exact_values(torch.cat([chunk[:, None], torch.zeros(7, 63)], 1).flatten(), entry)
            assert torch.equal(scales.int(), scale_exponent(chunk.double()))
            assert torch.equal(code_values(codes[::64]), to_e4m3(chunk.double() / torch.exp2(scales.double() - 127)))


@pytest.mark.parametrize("entry", ENTRIES)
def test_only_compressed_rows_are_rounded_to_bf16_first(entry):
    """448 * (1 + 2^-10) is 448 in bf16; 17 + 1/32 is 17, a midpoint of the codes 16 and 18."""
    values = torch.zeros(448)
    values[0], values[64], values[65] = 448 * (1 + 2.0**-10), 448, 17 + 1 / 32
    codes, scales = store_exact_values(values, entry)
    assert scales[:2].tolist() == ([128, 127] if entry == "main" else [127, 127])
    assert code_values(codes[65:66]).item() == (18 if entry == "main" else 16)


@pytest.mark.parametrize("entry", ENTRIES)
def test_infinite_amax_gives_scale_255(entry):
    """As in SGLang's kernel: scale byte 255, and codes of x * -inf; such a group reads back as NaN."""
    values = torch.zeros(448)
    values[:4] = torch.tensor([math.inf, -math.inf, 1.0, -1.0])
    codes, scales = store_exact_values(values, entry)
    assert scales.tolist() == [255] + [105] * 6
    assert codes[:5].tolist() == [0xFE, 0x7E, 0xFE, 0x7E, 0x7E]  # 0 * -inf is NaN, and a NaN has code 0x7e


def test_nan_beside_numbers_does_not_change_their_scale():
    values = torch.zeros(448)
    values[:3] = torch.tensor([math.nan, 448.0, 3.0])
    codes, scales = store_exact_values(values, "main")
    assert scales[0] == 127
    assert codes[0] == 0x7E
    assert code_values(codes[1:3]).tolist() == [448, 3]


@pytest.mark.parametrize("entry", ENTRIES)
def test_rotation_uses_the_row_s_position(entry):
    """A unit vector turns into (cos, sin) of its position's angle, pair by pair."""
    kv = torch.zeros(5, 512)
    kv[:, 448::2] = 1.0
    case = make_case(entry, kv, 8, all_stored=True, weight=torch.ones(512))
    cache = testing.empty_cache(1, 8)
    store(case, cache, 8, CacheLayout.V4, eps=0.0)
    data, _ = read_rows(cache, case.row_slots, 8, CacheLayout.V4)
    factor = math.sqrt(512 / 32)
    expected = torch.view_as_real(case.freqs[case.row_positions]).flatten(-2).double() * factor
    assert_between(bf16_values(data[:, 448:]), to_bf16(expected * (1 - 4 * U)), to_bf16(expected * (1 + 4 * U)))


def test_ratio_128():
    """C128: one row in 128 tokens, positions seq_len - 128."""
    seq_lens = torch.tensor([127, 128, 129, 255, 256, 384, 0, 4])
    kv = random_rows(8, torch.float32)
    freqs = testing.yarn_freqs_cis(512)
    weight = torch.ones(512)
    cache, expected = (testing.empty_cache(4, 2) for _ in range(2))
    dk.compress_norm_rope_store(
        kv, testing.decode_plan(seq_lens), weight, EPS, freqs, torch.arange(8), cache,
        page_size=2, compress_ratio=128, is_decode=True,
    )  # fmt: skip
    rows = torch.tensor([1, 4, 5])
    plan = testing.extend_plan(torch.tensor([128, 256, 384]), torch.arange(3))
    dk.compress_norm_rope_store(
        kv[rows], plan, weight, EPS, freqs, rows, expected,
        page_size=2, compress_ratio=128, is_decode=False,
    )  # fmt: skip
    assert torch.equal(cache, expected)
    assert_rest_untouched(cache, rows, 2, CacheLayout.V4)


@pytest.mark.parametrize("seq_len", [0x80000004, 0xFFFFFFFC, 0xFFFFFFFF])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("is_decode", [True, False])
def test_huge_seq_len_is_no_negative_position(seq_len, ratio, is_decode):
    plan = (testing.decode_plan if is_decode else lambda s: testing.extend_plan(s, torch.arange(1)))(
        torch.tensor([seq_len])
    )
    cache = testing.empty_cache(1, 2)
    dk.compress_norm_rope_store(
        torch.ones(1, 512), plan, torch.ones(512), EPS, testing.yarn_freqs_cis(8), torch.arange(1), cache,
        page_size=2, compress_ratio=ratio, is_decode=is_decode,
    )  # fmt: skip
    assert (testing.storage_bytes(cache) == testing.POISON).all()


# ---- the same bytes however the arguments come


def stored_bytes(case, page_size=64, layout=CacheLayout.V4, **changed):
    cache = testing.empty_cache(4, page_size, layout)
    store(case, cache, page_size, layout, **changed)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_forms_of_the_arguments(entry, dtype):
    kv = random_rows(60, dtype)
    case = make_case(entry, kv, 256)
    expected = stored_bytes(case)

    wide = torch.full((60, 1536), math.nan, dtype=dtype)
    wide[:, 1024:] = kv
    assert torch.equal(stored_bytes(case, kv=wide[:, 1024:]), expected), "strided kv"
    assert torch.equal(stored_bytes(make_case(entry, kv, 256, index_dtype=torch.int32)), expected), "int32 indices"
    assert torch.equal(stored_bytes(case, freqs_cis=torch.view_as_real(case.freqs).flatten(-2)), expected), "fp32 freqs"
    assert torch.equal(stored_bytes(case, layout="v4"), expected), "layout by name"
    for tokens_per_block in (1, 4, None):
        assert torch.equal(stored_bytes(case, tokens_per_block=tokens_per_block), expected), "tokens_per_block"

    for byte_type in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        cache = testing.empty_cache(4, 64)
        store(case, cache.view(byte_type), 64, CacheLayout.V4)
        assert torch.equal(cache, expected), byte_type
    for stride, offset in ((37440 + 576, 0), (37440 + 1, 3)):
        cache = testing.empty_cache(4, 64, packed_stride=stride, storage_offset=offset)
        store(case, cache, 64, CacheLayout.V4)
        assert torch.equal(cache, expected), "packed pool"
        assert_rest_untouched(cache, case.row_slots[case.stored], 64, CacheLayout.V4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_wider_pages_than_needed(entry):
    """A cache may have more bytes a page than the layout takes."""
    case = make_case(entry, random_rows(60, torch.bfloat16), 256)
    wide = torch.full((4, 37440 + 40), testing.POISON, dtype=torch.uint8)
    store(case, wide, 64, CacheLayout.V4)
    assert torch.equal(wide[:, :37440], stored_bytes(case))
    assert (wide[:, 37440:] == testing.POISON).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_tokens(entry, layout):
    case = make_case(entry, torch.empty(0, 512), 256, all_stored=True)
    assert (stored_bytes(case, layout=layout) == testing.POISON).all()
    if entry == "extend":
        empty = stored_bytes(case, slots=torch.arange(7), layout=layout)
        assert (empty == testing.POISON).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_cache_without_pages(entry):
    case = make_case(entry, random_rows(3, torch.float32), 8, all_stored=True)
    store(case, torch.empty(0, 37440, dtype=torch.uint8), 64, CacheLayout.V4)  # no slot is inside: nothing to write


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    data=st.data(),
    entry=st.sampled_from(ENTRIES),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    page_bits=st.integers(0, 9),
    pages=st.integers(1, 5),
    poison=st.integers(0, 255),
    slack=st.integers(0, 700),
    offset=st.integers(0, 40),
)
def test_addresses(data, entry, dtype, layout, page_bits, pages, poison, slack, offset):
    """A row's bytes do not depend on where it goes, and nothing else changes."""
    page_size = 1 << page_bits
    capacity = pages * page_size
    slots = torch.tensor(
        data.draw(
            st.lists(st.integers(-3, capacity + 3) | st.integers(-(2**40), 2**40), min_size=1, max_size=8, unique=True)
        )
    )
    n = len(slots)
    case = make_case(entry, random_rows(n, dtype, seed=n), n, seed=poison, all_stored=True)
    flat = testing.empty_cache(n, 1, layout)
    store(case, flat, 1, layout)
    flat_data, flat_scales = read_rows(flat, case.row_slots, 1, layout)

    moved = (
        slots
        if entry != "extend"
        else torch.where(case.slots < 0, -1, slots[torch.argsort(case.row_slots)][case.slots])
    )
    row_slots = slots if entry != "extend" else slots[torch.argsort(case.row_slots)][case.row_slots]
    cache = testing.empty_cache(
        pages,
        page_size,
        layout,
        poison=poison,
        packed_stride=layout.page_bytes(page_size) + slack,
        storage_offset=offset,
    )
    store(case, cache, page_size, layout, slots=moved)
    inside = (row_slots >= 0) & (row_slots < capacity)
    got_data, got_scales = read_rows(cache, row_slots[inside], page_size, layout)
    assert torch.equal(got_data, flat_data[inside])
    assert torch.equal(got_scales, flat_scales[inside])
    storage = testing.storage_bytes(cache)
    for address in row_addresses(cache, row_slots[inside], page_size, layout):
        storage[address] = poison
    assert (storage == poison).all()


# ---- reading back


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantize_rows(layout):
    case = make_case("main", random_rows(60, torch.float32), 256, all_stored=True)
    cache = stored_bytes(case, layout=layout)
    rows = dk.reference.dequantize_rows(cache, case.row_slots, page_size=64, layout=layout)
    data, scales = read_rows(cache, case.row_slots, 64, layout)
    assert rows.dtype == torch.float64
    assert torch.equal(rows[:, 448:], bf16_values(data[:, -128:]))
    if layout is CacheLayout.V4:
        scale = torch.exp2(scales.double() - 127).repeat_interleave(64, -1)
        assert torch.equal(rows[:, :448], code_values(data[:, :448]) * scale)
    else:
        assert torch.equal(rows[:, :448], bf16_values(data[:, :896]))
    folded = dk.reference.dequantize_rows(
        cache, case.row_slots.view(3, 20), page_size=64, layout=layout, dtype=torch.float32
    )
    assert torch.equal(folded.view(60, 512), rows.float())


def test_dequantize_rows_shows_nan():
    """Codes 0x7f and 0xff, scale byte 255 and bf16 NaN read as NaN, and as nothing else."""
    cache = torch.zeros(1, CacheLayout.V4.page_bytes(2), dtype=torch.uint8)
    cache[0, 0], cache[0, 65] = 0x7F, 0xFF
    cache[0, 576 + 448 : 576 + 450] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    cache[0, 1152 + 3] = 255
    nan = dk.reference.dequantize_rows(cache, torch.arange(2), page_size=2).isnan()
    expected = torch.zeros(2, 512, dtype=torch.bool)
    expected[0, [0, 65]] = expected[1, 448] = True
    expected[0, 192:256] = True
    assert torch.equal(nan, expected)


# ---- errors


def good(entry):
    """Arguments that are right, as a dict."""
    case = make_case(entry, random_rows(6, torch.bfloat16), 128, all_stored=True)
    arguments = {"kv": case.kv, "weight": case.weight, "eps": EPS, "freqs_cis": case.freqs, "slots": case.slots}
    arguments |= {"cache": testing.empty_cache(2, 64), "page_size": 64}
    if entry == "main":
        return dk.norm_rope_store, arguments | {"positions": case.source}
    plan = {"plan": case.source, "compress_ratio": RATIO, "is_decode": entry == "decode"}
    return dk.compress_norm_rope_store, arguments | plan


def on_meta(x):
    return x.to("meta")


COMMON_ERRORS = [
    ("kv", lambda x: [1.0], TypeError, "expected a torch.Tensor, got list"),
    ("kv", lambda x: x.half(), TypeError, "expected dtype torch.bfloat16 or torch.float32, got torch.float16"),
    ("kv", lambda x: x[:, :511], ValueError, r"expected shape \[tokens, 512\], got \[6, 511\]"),
    ("kv", lambda x: x[0], ValueError, r"expected shape \[tokens, 512\], got \[512\]"),
    ("kv", lambda x: x.t().contiguous().t(), ValueError, r"expected stride\(1\) = 1, got 6"),
    ("weight", lambda x: x.float(), TypeError, "expected dtype torch.bfloat16, got torch.float32"),
    ("weight", lambda x: x[:511], ValueError, r"expected shape \[512\], got \[511\]"),
    ("weight", lambda x: x[None], ValueError, r"expected shape \[512\], got \[1, 512\]"),
    ("weight", lambda x: x.repeat(2)[::2], ValueError, r"expected stride\(0\) = 1, got 2"),
    ("weight", on_meta, ValueError, "expected device cpu, got meta"),
    ("freqs_cis", lambda x: x.to(torch.complex128), TypeError, "expected dtype torch.complex64 or torch.float32, got"),
    ("freqs_cis", lambda x: x[:, :31], ValueError, r"expected shape \[positions, 32\], got \[512, 31\]"),
    ("freqs_cis", lambda x: x.repeat(1, 2)[:, :32], ValueError, r"expected stride\(0\) = 32, got 64"),
    ("freqs_cis", on_meta, ValueError, "expected device cpu, got meta"),
    ("slots", lambda x: x.to(torch.int16), TypeError, "expected dtype torch.int32 or torch.int64, got torch.int16"),
    ("slots", lambda x: x.float(), TypeError, "expected dtype torch.int32 or torch.int64, got torch.float32"),
    ("slots", lambda x: x[None], ValueError, r"expected shape \[slots\], got \[1, \d+\]"),
    ("slots", lambda x: x.repeat_interleave(2)[::2], ValueError, r"expected stride\(0\) = 1, got 2"),
    ("slots", on_meta, ValueError, "expected device cpu, got meta"),
    ("cache", lambda x: x.to(torch.int32), TypeError, "expected a dtype of one byte .*, got torch.int32"),
    ("cache", lambda x: x[0], ValueError, r"expected shape \[pages, page bytes\], got \[37440\]"),
    ("cache", lambda x: x[:, :-1], ValueError, "expected at least 37440 bytes a page of 64 tokens, got 37439"),
    ("cache", lambda x: x.t().contiguous().t(), ValueError, r"expected stride\(1\) = 1, got 2"),
    ("cache", lambda x: x[:1].expand(2, -1), ValueError, r"expected stride\(0\) >= 37440, got 0"),
    ("cache", on_meta, ValueError, "expected device cpu, got meta"),
    ("page_size", lambda x: 48, ValueError, "expected a power of two, got 48"),
    ("page_size", lambda x: 0, ValueError, "expected a power of two, got 0"),
    ("page_size", lambda x: -2, ValueError, "expected a power of two, got -2"),
    ("page_size", lambda x: 64.0, ValueError, "expected a power of two, got 64.0"),
    ("page_size", lambda x: True, ValueError, "expected a power of two, got True"),
    ("layout", lambda x: "fp4", ValueError, "expected a CacheLayout or one of 'v4', 'bf16', got 'fp4'"),
    ("tokens_per_block", lambda x: 2, ValueError, "expected None, 1 or 4, got 2"),
    ("tokens_per_block", lambda x: 0, ValueError, "expected None, 1 or 4, got 0"),
]
MAIN_ERRORS = [
    ("positions", lambda x: x.to(torch.int16), TypeError, "expected dtype torch.int32 or torch.int64, got torch.int16"),
    ("positions", lambda x: x[:5], ValueError, r"expected shape \[6\], got \[5\]"),
    ("positions", lambda x: x.repeat_interleave(2)[::2], ValueError, r"expected stride\(0\) = 1, got 2"),
    ("positions", on_meta, ValueError, "expected device cpu, got meta"),
    ("slots", lambda x: x[:5], ValueError, r"expected shape \[6\], got \[5\]"),
]
COMPRESS_ERRORS = [
    ("plan", lambda x: x.view(torch.int32), TypeError, "expected dtype torch.uint8, got torch.int32"),
    ("plan", lambda x: x[:, :8], ValueError, r"expected shape \[6, 16\], got \[6, 8\]"),
    ("plan", lambda x: x[:5], ValueError, r"expected shape \[6, 16\], got \[5, 16\]"),
    ("plan", lambda x: x.repeat(1, 2)[:, :16], ValueError, r"expected stride\(0\) = 16, got 32"),
    ("plan", lambda x: x.t().contiguous().t(), ValueError, r"expected stride\(1\) = 1, got 6"),
    ("plan", on_meta, ValueError, "expected device cpu, got meta"),
    ("compress_ratio", lambda x: 0, ValueError, "expected a positive int, got 0"),
    ("compress_ratio", lambda x: 4.0, ValueError, "expected a positive int, got 4.0"),
]
DECODE_ERRORS = [("slots", lambda x: x[:5], ValueError, r"expected shape \[6\], got \[5\]")]
ERRORS = [
    (entry, *error)
    for entry, errors in (
        ("main", COMMON_ERRORS + MAIN_ERRORS),
        ("decode", COMMON_ERRORS + COMPRESS_ERRORS + DECODE_ERRORS),
        ("extend", COMMON_ERRORS + COMPRESS_ERRORS),
    )
    for error in errors
]


@pytest.mark.parametrize(("entry", "name", "spoil", "error", "text"), ERRORS)
def test_wrong_argument(entry, name, spoil, error, text):
    """Every argument, wrong in every way, is named in the error, and nothing has been written."""
    function, arguments = good(entry)
    cache = arguments["cache"]
    with pytest.raises(error, match=f"^{name}: {text}"):
        function(**(arguments | {name: spoil(arguments.get(name))}))
    assert (testing.storage_bytes(cache) == testing.POISON).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_arguments_of_the_error_tests_are_right(entry):
    function, arguments = good(entry)
    function(**arguments)
    assert (arguments["cache"] != testing.POISON).any()


# ---- checked mode


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(dk.settings, "check", True)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("entry", ENTRIES)
def test_checked_mode_accepts_what_is_right(entry):
    """Also rows that are skipped on purpose, and those whose slot is outside."""
    function, arguments = good(entry)
    arguments["slots"][arguments["slots"].argmax()] = -1
    if entry == "main":
        arguments["positions"][arguments["slots"] < 0] = 10**9
    function(**arguments)
    assert (arguments["cache"] != testing.POISON).any()


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("entry", ["decode", "extend"])
def test_checked_mode_accepts_seq_len_zero(entry):
    """A plan's position below 0 is no error: such a row is defined to write nothing."""
    function, arguments = good(entry)
    arguments["plan"].view(torch.int32)[:, 0] = 0
    function(**arguments)
    assert (arguments["cache"] == testing.POISON).all()


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("entry", "bad"), [*((entry, POSITIONS) for entry in ENTRIES), ("main", -4)])
def test_checked_mode_names_the_row(entry, bad):
    function, arguments = good(entry)
    name = "positions" if entry == "main" else "plan's seq_len - compress_ratio"
    if entry == "main":
        arguments["positions"][3] = bad
    else:
        arguments["plan"].view(torch.int32)[3, 0] = bad + RATIO
    text = f"{name}: expected values in \\[0, 512\\), the rows of freqs_cis, got {bad} in row 3 \\(1 rows in all\\)"
    with pytest.raises(ValueError, match=text):
        function(**arguments)
    assert (arguments["cache"] == testing.POISON).all()


# ---- torch's own checks


def op_call(entry):
    """The op and its positional arguments, as the public function passes them."""
    _, a = good(entry)
    freqs = torch.view_as_real(a["freqs_cis"]).flatten(-2)
    if entry == "main":
        arguments = (a["kv"], a["weight"], EPS, freqs, a["positions"], a["slots"], a["cache"], 64, 0, 0, False)
        return torch.ops.sgl_dsv4_kernels.norm_rope_store.default, arguments
    arguments = (a["kv"], a["plan"], a["weight"], EPS, freqs, a["slots"], a["cache"])
    return torch.ops.sgl_dsv4_kernels.compress_norm_rope_store.default, (
        *arguments, 64, RATIO, entry == "decode", 0, 0, False,
    )  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_opcheck(entry):
    op, arguments = op_call(entry)
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_fake_tensors(entry):
    """Shapes pass through without data."""
    with FakeTensorMode():
        function, arguments = good_fake(entry)
        assert function(**arguments) is None


def good_fake(entry):
    n = 6
    arguments = {
        "kv": torch.empty(n, 512, dtype=torch.bfloat16),
        "weight": torch.empty(512, dtype=torch.bfloat16),
        "eps": EPS,
        "freqs_cis": torch.empty(100, 32, dtype=torch.complex64),
        "slots": torch.empty(n, dtype=torch.int64),
        "cache": torch.empty(2, 37440, dtype=torch.uint8),
        "page_size": 64,
    }
    if entry == "main":
        return dk.norm_rope_store, arguments | {"positions": torch.empty(n, dtype=torch.int32)}
    plan = {"plan": torch.empty(n, 16, dtype=torch.uint8), "compress_ratio": RATIO, "is_decode": entry == "decode"}
    return dk.compress_norm_rope_store, arguments | plan


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_compile_without_graph_break(entry, backend):
    function, arguments = good(entry)
    expected = arguments["cache"].clone()
    function(**(arguments | {"cache": expected}))
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: function(**kwargs), fullgraph=True, backend=backend)
    compiled(arguments)
    assert torch.equal(arguments["cache"], expected)


def test_mutation_is_declared():
    """Only the cache is written, and torch knows."""
    for op in (torch.ops.sgl_dsv4_kernels.norm_rope_store, torch.ops.sgl_dsv4_kernels.compress_norm_rope_store):
        written = [a.name for a in op.default._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == ["cache"]
