"""Our bytes against those that SGLang's kernels wrote on a GPU (test/data/store_golden.npz).

On a GPU every byte is the same. On the CPU the reciprocal square root is correctly rounded, on the GPU it is within
2 ulp, so a row may differ, but only in the way that such a norm explains; the differences are counted.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import CacheLayout, testing

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN = DATA / "store_golden.npz"

_spec = importlib.util.spec_from_file_location("make_store_golden", DATA / "make_store_golden.py")
make_store_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_store_golden)
CASES = make_store_golden.golden_cases()

RSQRT_ULPS = 2  # CUDA's rsqrtf
# Measured: what the worst case of the file differs in. The CPU's norm is correctly rounded and the GPU's is not, yet of
# 912 rows one bf16 value differs. (Were every norm off by 1 or 2 ulp, 1 code and 4 bf16 values of a case would differ,
# and in constant rows, whose values lie on midpoints, 70 codes and 5 scale bytes.)
MAX_SCALES, MAX_CODES, MAX_CONSTANT_CODES, MAX_BF16 = 0, 0, 0, 1


class Rows(NamedTuple):
    """Bytes of the stored rows, split by meaning: codes [N, 448], scales [N, 7], bf16 bits [N, 64 or 512] int16."""

    codes: torch.Tensor
    scales: torch.Tensor
    bf16: torch.Tensor


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.is_file():
        pytest.fail(f"{GOLDEN} is missing: run test/data/make_store_golden.py on a GPU machine with sglang 0.5.17")
    with np.load(GOLDEN) as file:
        return {name: torch.from_numpy(file[name]) if name != "made_by" else str(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def freqs(golden):
    return torch.view_as_complex(golden["freqs"])


def take_rows(case, cache):
    """Rows, and the cache's other bytes with zeros in place of the rows."""
    slots = case.row_slots[case.stored]
    page, offset = slots // case.page_size, slots % case.page_size
    rest = cache.clone()

    def take(start, count):
        index = page[:, None], start[:, None] + torch.arange(count)
        rest[index] = 0
        return cache[index]

    if case.layout is CacheLayout.BF16:
        data = take(offset * 1024, 1024)
        rows = Rows(data[:, :0], data[:, :0], data.view(torch.int16))
    else:
        data = take(offset * 576, 576)
        scales = take(case.page_size * 576 + offset * 8, 7)
        rows = Rows(data[:, :448], scales, data[:, 448:].contiguous().view(torch.int16))
    return rows, rest


def same_bf16(a, b):
    """Equal bits, or two NaN (whose bits differ between machines)."""
    return (a == b) | (a.view(torch.bfloat16).isnan() & b.view(torch.bfloat16).isnan())


def in_order(bits, sign_bit):
    """Bits of a sign-magnitude number as an integer that counts representable values."""
    bits = bits.long() & (2 * sign_bit - 1)
    return torch.where(bits >= sign_bit, sign_bit - bits, bits)


def same_rows(a, b):
    """[N] bool."""
    return (a.codes == b.codes).all(-1) & (a.scales == b.scales).all(-1) & same_bf16(a.bf16, b.bf16).all(-1)


def fma(a, b, c):
    return (a.double() * b.double() + c.double()).float()


def normalised(case, freqs, ulps):
    """The stored rows in fp32 with a norm that is ``ulps`` off the correctly rounded one."""
    x = case.kv[case.stored].float()
    mean = x.square().double().sum(-1).float().double() / 512 + make_store_golden.EPS
    norm = mean.rsqrt().float()
    shifted = (norm.view(torch.int32) + ulps).view(torch.float32)
    x = x * torch.where(norm > 0, shifted, norm)[:, None] * case.weight.float()
    freq = freqs[case.row_positions[case.stored]]
    real, imag = x[:, 448::2].clone(), x[:, 449::2].clone()
    x[:, 448::2] = fma(real, freq.real, -(imag * freq.imag))
    x[:, 449::2] = fma(real, freq.imag, imag * freq.real)
    return x


def rows_with_norm_off_by(case, freqs, ulps):
    x = normalised(case, freqs, ulps)
    if case.layout is CacheLayout.BF16:
        return Rows(x[:, :0].byte(), x[:, :0].byte(), x.bfloat16().view(torch.int16))
    nope = x[:, :448] if case.entry == "main" else x[:, :448].bfloat16().float()
    codes, scales = dk.reference.store.quantize_nope(nope)
    return Rows(codes, scales, x[:, 448:].bfloat16().view(torch.int16))


def test_made_by_sglang(golden):
    assert golden["made_by"].startswith("sglang 0.5.17, NVIDIA")
    assert set(golden) == {*CASES, "freqs", "made_by"}
    assert GOLDEN.stat().st_size < 1 << 20


@pytest.mark.parametrize("name", CASES)
def test_cpu(name, golden, freqs):
    case = CASES[name]
    ours, our_rest = take_rows(case, make_store_golden.run_case(dk, case, freqs, "cpu"))
    stock, stock_rest = take_rows(case, golden[name])
    assert torch.equal(our_rest, stock_rest), "bytes outside the rows"
    assert set(our_rest.unique().tolist()) <= {0, testing.POISON}

    # Every row is one that some norm within 2 ulp of the right one (and 1 for the sum's own rounding) gives.
    explained = torch.zeros(len(ours.bf16), dtype=torch.bool)
    for ulps in range(-RSQRT_ULPS - 1, RSQRT_ULPS + 2):
        explained |= same_rows(stock, rows_with_norm_off_by(case, freqs, ulps))
    assert explained.all(), (~explained).nonzero()[:, 0]

    same_scale = ours.scales == stock.scales
    if case.layout is CacheLayout.V4:
        amax = normalised(case, freqs, 0)[:, :448].unflatten(-1, (7, 64)).abs().nan_to_num(0).amax(-1)
        mantissa = amax.view(torch.int32) & 0x7FFFFF
        from_boundary = (mantissa - 0x600000).abs()  # ulps from 1.75 * 2^k
        assert (from_boundary[~same_scale] <= RSQRT_ULPS).all()
    steps = in_order(ours.codes, 0x80) - in_order(stock.codes, 0x80)
    steps = steps * same_scale.repeat_interleave(64, -1)  # codes under different scales are not comparable
    kv = case.kv[case.stored]
    constant = (kv == kv[:, :1]).all(-1)
    differing_bf16 = ~same_bf16(ours.bf16, stock.bf16)
    bf16_steps = (in_order(ours.bf16, 0x8000) - in_order(stock.bf16, 0x8000))[differing_bf16]
    counts = {
        "scales": int((~same_scale).sum()),
        "codes": int((steps[~constant] != 0).sum()),
        "codes of constant rows": int((steps[constant] != 0).sum()),
        "bf16": int(differing_bf16.sum()),
        "rows": int((~same_rows(ours, stock)).sum()),
    }
    print(name, counts, "of", len(ours.bf16), "rows")
    assert (steps.abs() <= 1).all()
    assert (bf16_steps.abs() <= 1).all()
    assert counts["scales"] <= MAX_SCALES, counts
    assert counts["codes"] <= MAX_CODES, counts
    assert counts["codes of constant rows"] <= MAX_CONSTANT_CODES, counts
    assert counts["bf16"] <= MAX_BF16, counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens_per_block", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_gpu(name, tokens_per_block, golden, freqs):
    ours = make_store_golden.run_case(dk, CASES[name], freqs, "cuda", tokens_per_block=tokens_per_block)
    assert torch.equal(ours, golden[name])
