"""The plain-torch decode against definitions written out here: key by key, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference import dequantize_rows
from sgl_dsv4_kernels.split_partition import key_block, row_blocks, split_range

E4M3 = torch.tensor([(8 + c % 8) * 2.0 ** (c // 8 - 10) if c >= 8 else c * 2.0**-9 for c in range(127)]).double()
ALL_CODES = torch.cat([E4M3, torch.tensor([math.nan]).double()])
ALL_CODES = torch.cat([ALL_CODES, -ALL_CODES])
SPLITS = (1, 2, 3, 4, 8, 16, 40)


def read_row(source: reference.Source, slot: int) -> torch.Tensor:
    """One row of a cache in fp64, from its bytes."""
    layout, page_size = source.layout, source.page_size
    page = source.cache[slot // page_size]
    first = slot % page_size * layout.data_bytes
    data = page[first : first + layout.data_bytes].clone()
    if layout is CacheLayout.BF16:
        return data.view(torch.bfloat16).double()
    first = layout.scale_offset(page_size) + slot % page_size * layout.scale_bytes
    exponents = page[first : first + 7].double()
    scale = torch.where(exponents == 255, math.nan, torch.exp2(exponents - 127))
    nope = ALL_CODES[data[:448].long()].view(7, 64) * scale[:, None]
    return torch.cat([nope.flatten(), data[448:].clone().view(torch.bfloat16).double()])


def keys_of_split(problem: td.Problem, row: int, split: int, num_splits: int) -> torch.Tensor:
    """[n, 512] fp64: what one split of one row attends to."""
    sources = [problem.main, problem.extra]
    capacity = [0 if s is None else s.indices.shape[1] for s in sources]
    length = [
        c if s is None or s.length is None else int(s.length[row]) for s, c in zip(sources, capacity, strict=True)
    ]
    blocks = row_blocks(length[0], capacity[0], length[1], capacity[1])
    rows = []
    for block in range(*split_range(blocks.blocks, split, num_splits)):
        key = key_block(blocks, block)
        source = sources[key.extra]
        for slot in source.indices[row, key.begin : key.end].tolist():
            if 0 <= slot < source.cache.shape[0] * source.page_size:
                rows.append(read_row(source, slot))
    return torch.stack(rows) if rows else torch.zeros((0, 512), dtype=torch.float64)


@pytest.mark.parametrize("layout", list(CacheLayout))
@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_partials_key_by_key(num_splits, layout):
    problem = td.random_problem(3, 8, 70, 90, layout=layout, lengths=[70, 0, 5], extra_lengths=[90, 65, 0], page_size=3)
    o, lse = reference.sparse_decode_partial(
        problem.q, problem.main, problem.extra, num_splits=num_splits, dtype=torch.float64
    )
    for row in range(3):
        for split in range(num_splits):
            keys = keys_of_split(problem, row, split, num_splits)
            if len(keys) == 0:
                assert (o[split, row] == 0).all()
                assert (lse[split, row] == -math.inf).all()
                continue
            scores = problem.q[row].double() @ keys.T * 512**-0.5
            torch.testing.assert_close(o[split, row], scores.softmax(-1) @ keys, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse[split, row], scores.logsumexp(-1) / math.log(2), rtol=1e-12, atol=1e-12)


def test_every_code_and_scale():
    codes, exponents = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    cache = td.poisoned_cache(256, 256)
    for first in range(0, 448, 64):  # each group in turn
        data = cache[:, : 256 * 576].view(256, 256, 576)
        data[:, :, first : first + 64] = codes[..., None].to(torch.uint8)
        cache[:, 256 * 576 : 256 * 584].view(256, 256, 8)[:, :, first // 64] = exponents.to(torch.uint8)
    slots = torch.arange(256 * 256)
    rows = dequantize_rows(cache, slots, page_size=256, dtype=torch.bfloat16)[:, :448]
    scale = torch.where(exponents == 255, math.nan, torch.exp2(exponents.double() - 127))
    want = (ALL_CODES[codes] * scale).flatten().to(torch.bfloat16)
    assert torch.equal(rows.view(torch.int16)[:, 0], rows.view(torch.int16)[:, 447])
    got = rows[:, 0]
    assert torch.equal(got.isnan(), want.isnan())
    # -0 stays -0
    assert torch.equal(got.view(torch.int16)[~got.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("extra", [0, 192])
def test_fp32_against_fp64(extra):
    problem = td.random_problem(16, 8, 128, extra, rope=True)
    want = td.truth(problem)
    result = reference.sparse_decode(
        problem.q, problem.main, problem.extra, return_amax=True, **td.epilogue_arguments(problem.options)
    )
    assert td.relative_error(result.out, want.value) < 0.0018  # one rounding to bf16 is 2^-9
    assert td.lse_excess(result.lse, want) <= 0
    assert (result.out[want.empty] == 0).all()
    torch.testing.assert_close(result.amax.double(), want.value.abs().amax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", SPLITS)
def test_splits_agree(splits):
    problem = td.random_problem(6, 8, 129, 192, rope=True, seed=3)
    want = td.truth(problem)
    o, lse_accum = reference.sparse_decode_partial(
        problem.q, problem.main, problem.extra, num_splits=splits, dtype=torch.float64
    )
    o[(lse_accum == -math.inf)] = math.nan  # must not be read
    value, lse = reference.merge_splits(o, lse_accum)
    last = td.epilogue_arguments(problem.options)
    value = reference.rotate_back(reference.apply_sink(value, lse, last["attn_sink"]), lse, *list(last.values())[1:])
    torch.testing.assert_close(value, want.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want.lse, rtol=1e-12, atol=1e-12)


def test_sink_is_one_more_score_without_a_value():
    problem = td.random_problem(4, 8, 64, sink=False)
    sink = torch.tensor([0.5, -3.0, 200.0, -200.0, math.inf, -math.inf, math.nan, 3e38])
    plain, lse = reference.merge_splits(
        *reference.sparse_decode_partial(problem.q, problem.main, num_splits=1, dtype=torch.float64)
    )
    got = reference.apply_sink(plain, lse, sink)
    for head, value in enumerate(sink.double()):
        total = torch.logaddexp(lse[:, head], value)
        want = plain[:, head] * torch.exp(lse[:, head] - total)[:, None]
        if value == math.inf:
            want = torch.zeros_like(want)
        want[lse[:, head] == math.inf] = 0
        torch.testing.assert_close(got[:, head], want, rtol=1e-12, atol=0, equal_nan=True)


def test_inverse_rope_is_a_complex_product():
    value = torch.randn(5, 8, 512, dtype=torch.float64)
    freqs, positions = td.random_freqs(7), torch.tensor([0, 6, 3, -1, 7])
    lse = torch.zeros(5, 8)
    got = reference.rotate_back(value, lse, torch.view_as_real(freqs).flatten(1), positions)
    turned = torch.view_as_complex(value[:3, :, 448:].unflatten(-1, (32, 2)).contiguous())
    want = torch.view_as_real(turned * freqs[positions[:3]].conj().to(torch.complex128)[:, None]).flatten(-2)
    torch.testing.assert_close(got[:3, :, 448:], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[..., :448], value[..., :448])
    assert got[3:, :, 448:].isnan().all()  # outside of the table
    lse[:] = math.inf
    assert (reference.rotate_back(value, lse, torch.zeros(0, 64), positions)[..., 448:] == 0).all()


def test_every_e4m3_midpoint():
    middle = (E4M3[1:] + E4M3[:-1]) / 2
    x = torch.cat([E4M3, middle, E4M3[-1:] * 1.04, torch.tensor([1e30, math.inf, math.nan])])
    even = torch.arange(126) + (torch.arange(126) % 2)
    want = torch.cat([torch.arange(127), even, torch.tensor([126, 126, 126, 127])])
    assert torch.equal(reference.to_e4m3(x.float()).view(torch.uint8).long(), want)
    negative = torch.where(want == 127, 127, want + 128)
    assert torch.equal(reference.to_e4m3(-x.float()).view(torch.uint8).long(), negative)
    up, down = (torch.nextafter(middle.float(), torch.tensor(limit)) for limit in (1e9, 0.0))
    assert torch.equal(reference.to_e4m3(up).view(torch.uint8).long(), torch.arange(126) + 1)
    assert torch.equal(reference.to_e4m3(down).view(torch.uint8).long(), torch.arange(126))


@pytest.mark.parametrize("tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("output", reference.OUTPUTS[1:])
def test_fp8_outputs(output, tokens):
    value = torch.randn(tokens, 8, 512, generator=torch.Generator().manual_seed(0)) * 3
    if tokens:
        value[0, 0] = 0
        value[0, 1, 5] = math.inf
        value[0, 2, 5] = math.nan
    codes, scales = reference.quantise(value, output)
    expected = reference.empty_scales(tokens, 8, output, torch.device("cpu"))
    assert (scales.dtype, scales.shape, scales.stride()) == (expected.dtype, expected.shape, expected.stride())
    if tokens == 0:
        return
    group = 32 if "group32" in output else 128
    groups = value.unflatten(-1, (-1, group)).double()
    amax = groups.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).amax(-1).clamp(min=1e-10)
    if output == "fp8_group128":
        scale = scales.reshape(tokens, 8, 4).double()
        torch.testing.assert_close(scale, amax / 448, rtol=1e-6, atol=0)
    else:
        words = scales.reshape(tokens, 8, -1).long() & 0xFFFFFFFF
        exponents = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(-2)
        scale = torch.exp2(exponents.double() - 127)
        assert torch.equal(scale, torch.exp2(torch.ceil(torch.log2(amax / 448))))
    back = ALL_CODES[codes.view(torch.uint8).long()].unflatten(-1, (-1, group)) * scale[..., None]
    assert torch.equal(codes.isnan(), value.isnan())
    fine = groups.isfinite() & (amax[..., None] < 1e30)
    # half an ulp of three mantissa bits, or of the smallest code
    assert ((back - groups).abs()[fine] <= (groups.abs() / 16 + scale[..., None] * 2**-10)[fine] * (1 + 1e-6)).all()


def test_attended_nan_stays_in_its_row():
    problem = td.random_problem(3, 8, 64, 64, lengths=[64] * 3, extra_lengths=[64] * 3, invalid=0.0)
    clean = reference.sparse_decode(problem.q, problem.main, problem.extra)
    problem.extra.indices[1, 7] = 0  # slot 0 is poison
    for splits in (1, 2, 4):
        o, lse = reference.sparse_decode_partial(problem.q, problem.main, problem.extra, num_splits=splits)
        hit = reference.combine_splits(o, lse)
        assert hit.out[1].isnan().all()
        assert hit.lse[1].isnan().all()
        assert not hit.out[[0, 2]].isnan().any()
        torch.testing.assert_close(hit.lse[[0, 2]], clean.lse[[0, 2]])
        # only the split that has the key
        assert o.isnan().any(-1).any(-1).sum() == 1


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(0, 70), st.integers(0, 130))
def test_order_and_repetition_of_keys(seed, length, extra_length):
    """Any order gives the same; every index twice gives the same output, and one bit more of LSE."""
    problem = td.random_problem(1, 8, 70, 130, lengths=[length], extra_lengths=[extra_length], sink=False, seed=seed)
    main, extra = problem.main, problem.extra
    o, lse = reference.sparse_decode_partial(problem.q, main, extra, num_splits=1, dtype=torch.float64)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    shuffled = main._replace(indices=main.indices[:, :length][:, order], length=None)
    doubled = extra._replace(indices=extra.indices[:, :extra_length].repeat_interleave(2, 1), length=None)
    twice = shuffled._replace(indices=shuffled.indices.repeat(1, 2))
    for a, b, bits in ((shuffled, extra, 0.0), (twice, doubled, 1.0)):
        o2, lse2 = reference.sparse_decode_partial(problem.q, a, b, num_splits=1, dtype=torch.float64)
        torch.testing.assert_close(o2, o, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse2, lse + bits, rtol=1e-10, atol=1e-10)


def test_rows_are_computed_in_chunks(monkeypatch):
    problem = td.random_problem(7, 8, 64, 64)
    whole = reference.sparse_decode_partial(problem.q, problem.main, problem.extra, num_splits=2)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    chunked = reference.sparse_decode_partial(problem.q, problem.main, problem.extra, num_splits=2)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


def test_truncated_sums():
    """2^24 + 0.75 - 2^24, in sums of 16 channels: the fraction is cut off."""
    q, keys = torch.zeros(1, 1, 512), torch.zeros(1, 1, 512)
    q[..., 0], keys[..., 0] = 2.0**12, 2.0**12
    q[..., 16], keys[..., 16] = 1.0, 0.75
    q[..., 32], keys[..., 32] = -(2.0**12), 2.0**12
    assert td.truncated_sums(q, keys).item() == 0.0
    q[..., 16] = 4.0  # 3: its last bit is cut off
    assert td.truncated_sums(q, keys).item() == 2.0
    q[..., 0] = q[..., 32] = 0.0
    assert td.truncated_sums(q, keys).item() == 3.0


@pytest.mark.parametrize("exponents", [(117, 121), (100, 150)])
def test_lse_slack(exponents):
    """Small beside the bound of the LSE, whatever the scores; none without keys."""
    problem = td.random_problem(
        4, 16, 128, 64, lengths=[128, 3, 0, 40], extra_lengths=[64, 0, 0, 7], exponents=exponents
    )
    slack = td.lse_slack(problem)
    assert slack.shape == (4, 16)
    assert (slack[2] == 0).all()
    assert 0 < slack.max() <= td.MOST_SLACK
