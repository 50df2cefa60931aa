"""The combine kernel on the GPU against an independent fp64 computation: csrc/decode/decode.h is the contract."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

import sgl_dsv4_kernels  # noqa: F401  (loads the ops)

DEVICE = "cuda"
DIM, ROPE = 512, 64
OUTPUTS = ("bf16", "fp8_group128", "fp8_group128_ue8m0", "fp8_group32_ue8m0")
AMAX_FLOOR = torch.tensor(1e-10).item()  # as fp32
FLOAT_MAX = torch.finfo(torch.float32).max
SENTINEL = 0x55555555


class Result(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    scales: torch.Tensor | None
    amax: torch.Tensor | None


def align4(n: int) -> int:
    return (n + 3) // 4 * 4


def new_scales(tokens: int, heads: int, output: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of an output kind, in storage full of sentinels, and the padding that must stay as it is."""
    if output == "bf16":
        return None, None
    if output == "fp8_group128_ue8m0":
        return torch.full((tokens, heads), SENTINEL, dtype=torch.int32, device=DEVICE), None
    storage = torch.full((heads * 4, align4(tokens)), SENTINEL, dtype=torch.int32, device=DEVICE)
    view = storage.view(torch.float32) if output == "fp8_group128" else storage
    return view.t()[:tokens], storage[:, tokens:]


def combine(o, lse_accum, sink=None, rope=None, output="bf16", pdl=False, want_amax=False, out=None) -> Result:
    """Call the op with outputs that hold rubbish."""
    _, tokens, heads, _ = o.shape
    if out is None:
        if output == "bf16":
            out = torch.full((tokens, heads, DIM), math.nan, dtype=torch.bfloat16, device=DEVICE)
        else:
            out = torch.full((tokens, heads, DIM), 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    lse = torch.full((tokens, heads), math.nan, device=DEVICE)
    scales, padding = new_scales(tokens, heads, output)
    amax = torch.full((tokens, heads), math.nan, device=DEVICE) if want_amax else None
    freqs, positions = rope if rope is not None else (None, None)
    torch.ops.sgl_dsv4_kernels.combine_splits(
        o, lse_accum, sink, freqs, positions, OUTPUTS.index(output), pdl, out, lse, scales, amax
    )
    if padding is not None:
        assert (padding == SENTINEL).all(), "the padding of the scales was written"
    return Result(out, lse, scales, amax)


class Exact(NamedTuple):
    value: torch.Tensor  # [T, h, 512] fp64, after sink and rotation
    lse: torch.Tensor  # [T, h] fp64
    slack: torch.Tensor  # [T, h, 1] what fp32 arithmetic may be off by


def exact(o, lse_accum, sink=None, rope=None) -> Exact:
    """The contract in fp64; one split at a time, dead ones replaced before they are touched."""
    live = lse_accum != -math.inf
    any_live = live.any(0)
    l2 = lse_accum.double()
    most = torch.where(any_live, l2.amax(0), 0.0)
    weights = torch.where(live, torch.exp2(l2 - most), 0.0)
    total = torch.where(any_live, weights.sum(0), 1.0)
    value = torch.zeros(o.shape[1:], dtype=torch.float64, device=o.device)
    slack = torch.zeros((*o.shape[1:3], 1), dtype=torch.float64, device=o.device)
    for s in range(o.shape[0]):
        part = torch.where(live[s, ..., None], o[s], 0.0).double()
        value += (weights[s] / total)[..., None] * part
        slack = torch.maximum(slack, part.abs().amax(-1, keepdim=True))
    lse = torch.where(any_live, (most + torch.log2(total)) * math.log(2.0), math.inf)
    if sink is not None:
        factor = torch.where(any_live, torch.sigmoid(lse - sink.double()), 1.0)
        value = torch.where(any_live[..., None], value * factor[..., None], 0.0)
    if rope is not None:
        freqs, positions = rope
        table = freqs.double().view(-1, ROPE // 2, 2)
        cos, sin = (table[positions.long()][:, None, :, i] for i in (0, 1))
        real, imag = value[..., -ROPE::2].clone(), value[..., -ROPE + 1 :: 2].clone()
        value[..., -ROPE::2] = real * cos + imag * sin
        value[..., -ROPE + 1 :: 2] = imag * cos - real * sin
    return Exact(value, lse, slack * 4e-6)


E4M3 = torch.tensor([(8 + c % 8) * 2.0 ** (c // 8 - 10) if c >= 8 else c * 2.0**-9 for c in range(127)]).double()
MIDPOINTS = (E4M3[1:] + E4M3[:-1]) / 2


def e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 code (ties to even, saturating, NaN 0x7f), from the definition."""
    a, midpoints = x.double().abs(), MIDPOINTS.to(x.device)
    below = torch.searchsorted(midpoints, a)  # how many midpoints are smaller
    tie = midpoints[below.clamp(max=125)] == a
    code = below + (tie & (below % 2 == 1))
    code = torch.where(x.isnan(), 0x7F, code + torch.where(torch.signbit(x), 0x80, 0))
    return code.to(torch.uint8)


def e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """fp64 values of uint8 codes."""
    table = torch.cat([E4M3, torch.tensor([math.nan]), -E4M3, torch.tensor([math.nan])]).to(codes.device)
    return table[codes.long()]


def unpacked_scales(result: Result, output: str) -> torch.Tensor:
    """fp64 scale of every channel, [T, h, 512]."""
    tokens, heads = result.lse.shape
    scales = result.scales.contiguous()
    if output == "fp8_group128":
        scale = scales.double()
    else:
        shifts = torch.arange(0, 32, 8, device=scales.device)
        exponents = scales[..., None] >> shifts & 0xFF
        scale = (exponents.int() << 23).view(torch.float32).double()  # 2^(exponent - 127)
    return scale.reshape(tokens, heads, -1, 1).expand(-1, -1, -1, 32 if "group32" in output else 128).flatten(2)


def check(result: Result, want: Exact, output: str) -> None:
    """Errors of a result without NaN: one rounding of the output format, and fp32's slack."""
    empty = want.lse == math.inf
    assert torch.equal(result.lse == math.inf, empty)
    error = (result.lse.double() - want.lse).abs()[~empty]
    assert (error <= 1e-6 + 2.0**-23 * want.lse.abs()[~empty]).all(), f"lse off by {error.max()}"
    magnitude = want.value.abs()
    if output == "bf16":
        value, rounding = result.out.double(), magnitude * 2.0**-8
    else:
        scale = unpacked_scales(result, output)
        group = 32 if "group32" in output else 128
        amax = magnitude.unflatten(-1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, -1, group).flatten(2)
        low, high = ((amax + sign * want.slack).clamp(min=AMAX_FLOOR) / 448 for sign in (-1, 1))
        if output != "fp8_group128":
            low, high = (torch.exp2(torch.ceil(torch.log2(x))) for x in (low, high))
        assert ((scale >= low * (1 - 1e-6)) & (scale <= high * (1 + 1e-6))).all(), "scales"
        value = e4m3_values(result.out.view(torch.uint8)) * scale
        rounding = torch.maximum(magnitude * 2.0**-4, scale * 2.0**-10)
    error = (value - want.value).abs()
    assert (error <= rounding * (1 + 1e-6) + want.slack).all(), f"output off by {error.max()}"
    assert (value[empty] == 0).all()
    if result.amax is not None:
        error = (result.amax.double() - magnitude.amax(-1)).abs()
        assert (error <= want.slack[..., 0]).all(), f"amax off by {error.max()}"
        assert (result.amax[empty] == 0).all()


def poison(o: torch.Tensor, lse_accum: torch.Tensor) -> torch.Tensor:
    """O of the empty splits becomes NaN, in place: nobody may read it."""
    return o.masked_fill_((lse_accum == -math.inf)[..., None], math.nan)


def make(splits, tokens, heads, seed=0, empty=0.3):
    """Partials with poisoned empty splits; the last row of several attends to nothing."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    o = torch.randn((splits, tokens, heads, DIM), device=DEVICE, generator=generator)
    lse_accum = 6 * torch.randn((splits, tokens, heads), device=DEVICE, generator=generator)
    dead = torch.rand((splits, tokens, heads), device=DEVICE, generator=generator) < empty
    lse_accum.masked_fill_(dead, -math.inf)
    if tokens > 1:
        lse_accum[:, -1] = -math.inf
    return poison(o, lse_accum), lse_accum


def make_sink(heads, seed=1):
    return 3 * torch.randn(heads, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def make_rope(tokens, dtype=torch.int64, table=4096, seed=2):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    angle = torch.arange(table, device=DEVICE)[:, None] * 10000.0 ** (-torch.arange(32, device=DEVICE) / 32)
    freqs = torch.stack([angle.cos(), angle.sin()], -1).flatten(1).contiguous()
    return freqs, torch.randint(0, table, (tokens,), device=DEVICE, generator=generator, dtype=dtype)


SHAPES = [(1, 1), (1, 8), (5, 16), (5, 32), (1, 64), (5, 128), (256, 8), (256, 64), (70000, 1)]
CASES = [(s, t, h) for s in (1, 2, 3, 4, 8, 16, 37) for t, h in SHAPES if s * t * h <= 37 * 256 * 64]


@pytest.mark.parametrize(("splits", "tokens", "heads"), CASES)
def test_against_fp64(splits, tokens, heads):
    o, lse_accum = make(splits, tokens, heads, seed=splits)
    sink, rope = make_sink(heads), make_rope(tokens, torch.int32 if splits % 2 else torch.int64)
    for use_rope in (False, True):
        results = {
            (output, want_amax): combine(
                o, lse_accum, sink, rope if use_rope else None, output, pdl=want_amax, want_amax=want_amax
            )
            for output in OUTPUTS
            for want_amax in (False, True)
        }
        want = exact(o, lse_accum, sink, rope if use_rope else None)
        for (output, _), result in results.items():
            check(result, want, output)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
def test_every_pattern_of_empty_splits(splits):
    o, lse_accum = make(splits, 2**splits, 2, empty=0.0)
    lse_accum = lse_accum.nan_to_num(neginf=0.5)
    o = o.nan_to_num()
    pattern = torch.arange(2**splits, device=DEVICE)
    for s in range(splits):
        lse_accum[s, (pattern >> s & 1) == 0] = -math.inf
    poison(o, lse_accum)
    for output in OUTPUTS:
        check(combine(o, lse_accum, output=output, want_amax=True), exact(o, lse_accum), output)


@pytest.mark.parametrize("splits", [1, 4, 8, 16, 17, 32, 33, 64, 300])
def test_one_live_split_is_exact(splits):
    """Whichever split is the live one, the output is its O."""
    o = torch.full((splits, splits, 3, DIM), math.nan, device=DEVICE)
    lse_accum = torch.full((splits, splits, 3), -math.inf, device=DEVICE)
    each = torch.arange(splits, device=DEVICE)
    o[each, each] = torch.randn(splits, 3, DIM, device=DEVICE)
    lse_accum[each, each] = 30 * torch.randn(splits, 3, device=DEVICE)
    result = combine(o, lse_accum)
    assert torch.equal(result.out, o[each, each].bfloat16())
    assert torch.allclose(result.lse.double(), lse_accum[each, each].double() * math.log(2), rtol=2.0**-23, atol=1e-6)


def test_split_counts_agree():
    """The same partials among more and more empty splits."""
    o, lse_accum = make(1, 6, 16, empty=0.0)
    first = combine(o, lse_accum)
    for splits in (2, 3, 4, 8, 16, 37, 200):
        wide = torch.full((splits, 6, 16, DIM), math.nan, device=DEVICE)
        wide_lse = torch.full((splits, 6, 16), -math.inf, device=DEVICE)
        wide[splits // 2], wide_lse[splits // 2] = o[0], lse_accum[0]
        result = combine(wide, wide_lse)
        assert torch.equal(result.out, first.out), splits
        assert torch.equal(result.lse, first.lse), splits


@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0, 1e30])
def test_far_apart_lse(spread):
    o, lse_accum = make(8, 6, 16, empty=0.2)
    lse_accum = lse_accum * spread
    lse_accum = torch.where(lse_accum.isnan(), -math.inf, lse_accum)  # 0 * -inf
    poison(o, lse_accum)
    for output in OUTPUTS:
        check(combine(o, lse_accum, output=output), exact(o, lse_accum), output)


@pytest.mark.parametrize("splits", [1, 8, 37])
def test_sinks(splits):
    special = [-math.inf, math.inf, math.nan, 1e30, -1e30, FLOAT_MAX, -FLOAT_MAX, 0.0, 1e-45, 88.0, -88.0, 200.0]
    sink = torch.tensor(special, device=DEVICE)
    o, lse_accum = make(splits, 7, len(special), empty=0.2)
    result, want = combine(o, lse_accum, sink), exact(o, lse_accum, sink)
    bare = combine(o, lse_accum)
    empty = want.lse == math.inf
    assert torch.equal(result.lse, bare.lse), "the sink must not touch the LSE"
    assert (result.out[empty] == 0).all(), "an empty row is 0 for every sink"
    assert result.out[:, 2][~empty[:, 2]].isnan().all()
    finite = [i for i, s in enumerate(special) if not math.isnan(s)]
    check(
        Result(result.out[:, finite], result.lse[:, finite], None, None),
        Exact(want.value[:, finite], want.lse[:, finite], want.slack[:, finite]),
        "bf16",
    )
    for head in (0, 4, 6):  # no sink
        assert torch.equal(result.out[:, head], bare.out[:, head])
    for head in (1, 3, 5):
        assert (result.out[:, head] == 0).all()


@pytest.mark.parametrize("splits", [1, 4, 37])
def test_nan_stays_in_its_row_and_head(splits):
    o, lse_accum = make(splits, 6, 8, empty=0.0)
    clean = {output: combine(o, lse_accum, output=output, want_amax=True) for output in OUTPUTS}
    o[splits - 1, 1, 2, 100] = math.nan
    lse_accum[0, 3, 4] = math.nan
    lse_accum[0, 2, 5] = math.inf
    hit = torch.zeros(6, 8, dtype=torch.bool, device=DEVICE)
    hit[1, 2] = hit[3, 4] = hit[2, 5] = True
    for output in OUTPUTS:
        result = combine(o, lse_accum, output=output, want_amax=True)
        nan = result.out.float().isnan()
        assert nan[1, 2].sum() == 1
        assert nan[1, 2, 100]
        assert nan[3, 4].all()
        assert nan[2, 5].all()
        assert torch.equal(result.out.view(torch.uint8)[~hit], clean[output].out.view(torch.uint8)[~hit])
        assert torch.equal(result.lse[~hit], clean[output].lse[~hit])
        assert torch.equal(result.amax.isnan(), hit)
        if output != "bf16":
            scale = unpacked_scales(result, output)
            assert scale.isfinite().all()
            assert (scale > 0).all()
            assert (result.out.view(torch.uint8)[nan] == 0x7F).all()
    assert result.lse[3, 4].isnan()
    assert result.lse[2, 5].isnan()


@pytest.mark.parametrize("output", OUTPUTS)
def test_positions_outside_the_table(output):
    o, lse_accum = make(4, 6, 8)
    freqs, positions = make_rope(6)
    inside = combine(o, lse_accum, None, (freqs, positions), output, want_amax=True)
    bad = torch.tensor([0, 2, 3, 5], device=DEVICE)
    positions = positions.clone()
    positions[bad] = torch.tensor([-1, 4096, 2**62, -(2**62)], device=DEVICE)
    result = combine(o, lse_accum, None, (freqs, positions), output, want_amax=True)
    nan = result.out.float().isnan()
    live = result.lse != math.inf
    expected = torch.zeros_like(nan)
    expected[bad, :, -ROPE:] = True
    expected &= live[..., None]
    assert torch.equal(nan, expected)
    if output in ("bf16", "fp8_group32_ue8m0"):  # a group of 128 has channels of both kinds, and another scale then
        assert torch.equal(result.out.float()[~nan], inside.out.float()[~nan])
    good = torch.tensor([1, 4], device=DEVICE)
    assert torch.equal(result.out.view(torch.uint8)[good], inside.out.view(torch.uint8)[good])
    empty_table = (freqs[:0], positions)
    assert combine(o, lse_accum, None, empty_table).out[..., -ROPE:][live].isnan().all()


@pytest.mark.parametrize(("offset", "head_stride"), [(0, 512), (0, 520), (1, 513), (4, 516), (2, 512)])
def test_strided_out(offset, head_stride):
    o, lse_accum = make(4, 5, 8)
    token_stride = 8 * head_stride + 3
    storage = torch.full((offset + 5 * token_stride,), 77.0, dtype=torch.bfloat16, device=DEVICE)
    out = storage.as_strided((5, 8, DIM), (token_stride, head_stride, 1), offset)
    want = combine(o, lse_accum).out
    combine(o, lse_accum, out=out)
    assert torch.equal(out, want)
    out.fill_(77.0)
    assert (storage == 77.0).all(), "written outside of out"


def test_strided_inputs():
    o, lse_accum = make(5, 6, 8)
    freqs, positions = make_rope(6)
    want = combine(o, lse_accum, None, (freqs, positions))
    other_o = o.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    other_lse = lse_accum.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = torch.full((freqs.shape[0], ROPE + 2), math.nan, device=DEVICE)
    wide[:, 2:] = freqs
    other_positions = positions.repeat_interleave(3)[::3]
    got = combine(other_o, other_lse, None, (wide[:, 2:], other_positions))
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_offsets_past_two_to_the_31():
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    far = 2**31 + 64
    buffer = torch.empty(far + 4096, device=DEVICE)
    o = buffer.as_strided((2, 1, 2, DIM), (far, 1024, DIM, 1))
    near, lse_accum = make(2, 1, 2, empty=0.0)
    o.copy_(near)
    out = torch.empty(far + 4096, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 2, DIM), (1, far, 1))
    combine(o, lse_accum, out=out)
    assert torch.equal(out, combine(near, lse_accum).out)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("splits", [1, 8, 37])
def test_reruns_are_bit_identical(splits, output):
    o, lse_accum = make(splits, 64, 16)
    sink, rope = make_sink(16), make_rope(64)
    first = combine(o, lse_accum, sink, rope, output, want_amax=True)
    for _ in range(10):
        again = combine(o, lse_accum, sink, rope, output, pdl=True, want_amax=True)
        for a, b in zip(first, again, strict=True):
            assert (a is None and b is None) or torch.equal(
                a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
            )


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_row_does_not_depend_on_its_batch(output):
    o, lse_accum = make(8, 256, 8)
    whole = combine(o, lse_accum, output=output)
    alone = combine(o[:, 17:18].contiguous(), lse_accum[:, 17:18].contiguous(), output=output)
    assert torch.equal(alone.out.view(torch.uint8), whole.out[17:18].view(torch.uint8))


def every_midpoint() -> torch.Tensor:
    """Rows of 128 fp32 values with amax 448: every code, every midpoint and its neighbours, both signs."""
    codes, middle = E4M3.float(), MIDPOINTS.float()
    zero, inf = torch.zeros(1), torch.full((1,), math.inf)
    x = torch.cat([codes, middle, torch.nextafter(middle, zero), torch.nextafter(middle, inf)])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 127)).view(-1, 127)
    return torch.cat([torch.full((len(x), 1), 448.0), x], 1)


@pytest.mark.parametrize(("output", "group"), [("fp8_group128_ue8m0", 128), ("fp8_group32_ue8m0", 32)])
def test_every_e4m3_midpoint_at_every_scale(output, group):
    rows = every_midpoint() if group == 128 else every_midpoint()[:, 1:].flatten()
    if group == 32:
        rows = torch.nn.functional.pad(rows, (0, -rows.numel() % 31)).view(-1, 31)
        rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], 1)
    exponents = torch.arange(-42, 120)  # 448 * 2^-42 is just above the floor, 448 * 2^119 the largest in fp32
    x = (rows[None].double() * torch.exp2(exponents.double())[:, None, None]).float()
    assert torch.equal(x.double() / torch.exp2(exponents.double())[:, None, None], rows[None].double().expand_as(x))
    per_head = DIM // group
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % per_head))
    x[:, :, 0] = 448 * torch.exp2(exponents.double())[:, None].float()
    o = x.reshape(1, len(exponents), -1, DIM).to(DEVICE)
    result = combine(o, torch.zeros(o.shape[:3], device=DEVICE), output=output)
    scale = torch.exp2(exponents.double()).to(DEVICE)[:, None, None]
    assert torch.equal(unpacked_scales(result, output), scale.expand_as(o[0]))
    # + 0.0: the sum over splits begins with +0, so -0 comes out as +0
    assert torch.equal(result.out.view(torch.uint8), e4m3_codes(o[0].double() / scale + 0.0))


def test_fp8_group128_is_byte_exact():
    """One split, so that the fp32 value is known: amax / 448, then x / scale, in IEEE fp32."""
    o, lse_accum = make(1, 256, 16, empty=0.0)
    o = o * torch.exp2(torch.randint(-20, 20, (1, 256, 16, 1), device=DEVICE))
    result = combine(o, lse_accum, output="fp8_group128", want_amax=True)
    value = torch.where(lse_accum[0, ..., None] == -math.inf, 0.0, o[0])
    groups = value.unflatten(-1, (4, 128))
    # fp64 quotients of fp32 numbers, rounded once: the IEEE division
    scale = (groups.abs().amax(-1).clamp(min=AMAX_FLOOR).double() / 448).float()
    assert torch.equal(result.scales.contiguous().view(256, 16, 4), scale)
    quotient = (groups.double() / scale.double()[..., None]).float()
    assert torch.equal(result.out.view(torch.uint8), e4m3_codes(quotient).flatten(2))
    assert torch.equal(result.amax, value.abs().amax(-1))


@pytest.mark.parametrize("output", OUTPUTS[1:])
def test_extreme_groups(output):
    """All zero, below the floor, infinite: scales stay finite, codes saturate."""
    o = torch.zeros((1, 1, 4, DIM), device=DEVICE)
    o[0, 0, 1] = 1e-20
    o[0, 0, 2, ::2] = -math.inf
    o[0, 0, 3] = FLOAT_MAX
    result = combine(o, torch.zeros((1, 1, 4), device=DEVICE), output=output, want_amax=True)
    codes, scale = result.out.view(torch.uint8)[0], unpacked_scales(result, output)[0]
    ue8m0 = output != "fp8_group128"
    floor = 2.0**-42 if ue8m0 else torch.tensor(AMAX_FLOOR / 448).float().double().item()
    assert (scale[:2] == floor).all()
    assert (codes[:2] == 0).all()
    assert (codes[2, ::2] == 0xFE).all()
    assert (codes[2, 1::2] == 0).all()
    assert torch.allclose(e4m3_values(codes[3]) * scale[3], o[0, 0, 3].double(), rtol=2.0**-4)
    assert torch.equal(result.amax[0].cpu(), torch.tensor([0, 1e-20, math.inf, FLOAT_MAX]))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 8, 16, 37])
def test_graph_with_a_slow_producer(splits, pdl):
    """A replay takes what the producer inside the graph has just written; partials change between replays."""
    source_o, source_lse = make(splits, 6, 64)
    o, lse_accum = torch.full_like(source_o, math.nan), torch.full_like(source_lse, math.nan)
    sink, rope = make_sink(64), make_rope(6)
    out = torch.empty((6, 64, DIM), dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty((6, 64), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(200_000)
        o.copy_(source_o)
        lse_accum.copy_(source_lse)
        torch.ops.sgl_dsv4_kernels.combine_splits(o, lse_accum, sink, *rope, 0, pdl, out, lse, None, None)
        consumed = out + 0
    for seed in range(3):
        new_o, new_lse = make(splits, 6, 64, seed=seed)
        source_o.copy_(new_o)
        source_lse.copy_(new_lse)
        o.fill_(math.nan)
        out.fill_(math.nan)
        graph.replay()
        want = combine(new_o, new_lse, sink, rope)
        assert torch.equal(out, want.out)
        assert torch.equal(lse, want.lse)
        assert torch.equal(consumed, want.out)


@triton.jit
def slow_producer(flag_ptr):
    """Lets the next kernel start, and ends when the flag is set, or after a second or two."""
    tl.extra.cuda.gdc_launch_dependents()
    seen = tl.atomic_add(flag_ptr, 0)
    turns = 0
    while (seen == 0) & (turns < 2_000_000):
        seen = tl.atomic_add(flag_ptr, 0)
        turns += 1


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90")
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("splits", "tokens"), [(1, 2), (3, 2), (8, 2), (16, 2), (37, 2), (3, 6)])
def test_nothing_is_written_before_the_producer_ends(splits, tokens, output):
    """Blocks start while the producer runs, and prepare: 128 in all, or some of 384. They take what it leaves."""
    o, lse_accum = make(splits, tokens, 64)
    sink, (freqs, positions) = make_sink(64), make_rope(tokens)
    want = combine(o, lse_accum, sink, (freqs, positions), output, want_amax=True)
    got = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE) for x in want if x is not None]
    kept = [torch.empty_like(x) for x in got]
    for x in got:
        (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x).fill_(85)
    rubbish = [x.clone() for x in got]
    late_o, late_lse = torch.full_like(o, math.nan), torch.full_like(lse_accum, math.nan)
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    slow_producer[(1,)](flag)  # compiled here
    flag.zero_()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    slow_producer[(1,)](flag)
    out, lse, *more = got
    scales, amax = more if output != "bf16" else (None, *more)
    torch.ops.sgl_dsv4_kernels.combine_splits(
        late_o, late_lse, sink, freqs, positions, OUTPUTS.index(output), True, out, lse, scales, amax
    )
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000)
        for x, y in zip(kept, got, strict=True):
            x.copy_(y)
        late_o.copy_(o)
        late_lse.copy_(lse_accum)
        flag.fill_(1)
    torch.cuda.synchronize()

    def same(these, those):
        return all(torch.equal(bits(x), bits(y)) for x, y in zip(these, those, strict=True))

    assert same(kept, rubbish)
    assert same(got, [x for x in want if x is not None])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_first_call_inside_a_capture(tmp_path):
    """In a process that has not run the op yet: kernels are loaded while the stream is capturing."""
    script = """
import torch, sgl_dsv4_kernels
for splits in (1, 2, 4, 8, 16, 17):
    o, lse_accum = torch.ones((splits, 1, 8, 512), device="cuda"), torch.zeros((splits, 1, 8), device="cuda")
    out, lse = torch.empty((1, 8, 512), dtype=torch.bfloat16, device="cuda"), torch.empty((1, 8), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.sgl_dsv4_kernels.combine_splits(
            o, lse_accum, None, None, None, 0, splits % 2 == 0, out, lse, None, None
        )
    graph.replay()
    assert (out.float() - 1).abs().max() < 0.01
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pdl", [False, True])
def test_side_stream(pdl):
    source_o, source_lse = make(8, 16, 64)
    want = combine(source_o, source_lse)
    o, lse_accum = torch.full_like(source_o, math.nan), torch.full_like(source_lse, math.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        o.copy_(source_o)
        lse_accum.copy_(source_lse)
        result = combine(o, lse_accum, pdl=pdl)
    stream.synchronize()
    assert torch.equal(result.out, want.out)
    assert torch.equal(result.lse, want.lse)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_current():
    o, lse_accum = make(4, 5, 8)
    want = combine(o, lse_accum).out
    out, lse = torch.empty_like(want, device="cuda:1"), torch.empty((5, 8), device="cuda:1")
    with torch.cuda.device(0):
        torch.ops.sgl_dsv4_kernels.combine_splits(
            o.to("cuda:1"), lse_accum.to("cuda:1"), None, None, None, 0, False, out, lse, None, None
        )
    assert torch.equal(out.to(want.device), want)


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_tokens(output):
    o, lse_accum = make(4, 0, 8)
    result = combine(o, lse_accum, make_sink(8), make_rope(0), output, want_amax=True)
    assert result.out.shape == (0, 8, DIM)


def test_arguments_are_checked():
    o, lse_accum = make(2, 3, 8)
    out = torch.empty((3, 8, DIM), dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty((3, 8), device=DEVICE)
    freqs, positions = make_rope(3)
    good = dict(
        o_accum=o, lse_accum=lse_accum, attn_sink=None, freqs_cis=None, positions=None, output=0, pdl=False, out=out,
        lse=lse, scales=None, amax=None,
    )  # fmt: skip
    torch.ops.sgl_dsv4_kernels.combine_splits(**good)
    fp8 = torch.empty((3, 8, DIM), dtype=torch.float8_e4m3fn, device=DEVICE)
    bad = [
        ("o_accum: expected dtype", dict(o_accum=o.half())),
        ("o_accum: expected shape", dict(o_accum=o[..., :448])),
        ("o_accum: expected 1 to", dict(o_accum=o[:0], lse_accum=lse_accum[:0])),
        ("o_accum: expected data", dict(o_accum=torch.empty(o.numel() + 1, device=DEVICE)[1:].view_as(o))),
        ("lse_accum: expected shape", dict(lse_accum=lse_accum[:1])),
        ("lse_accum: expected dtype", dict(lse_accum=lse_accum.double())),
        ("attn_sink: expected shape", dict(attn_sink=make_sink(7))),
        ("attn_sink: expected dtype", dict(attn_sink=make_sink(8).bfloat16())),
        ("expected both or neither", dict(freqs_cis=freqs)),
        ("expected both or neither", dict(positions=positions)),
        ("freqs_cis: expected shape", dict(freqs_cis=freqs[:, :32], positions=positions)),
        ("positions: expected shape", dict(freqs_cis=freqs, positions=positions[:2])),
        ("positions: expected dtype", dict(freqs_cis=freqs, positions=positions.float())),
        ("output: expected", dict(output=4)),
        ("out: expected dtype", dict(output=1)),
        ("out: expected dtype", dict(out=fp8)),
        ("out: expected shape", dict(out=out[:2])),
        ("lse: expected shape", dict(lse=lse[:2])),
        ("scales: expected a tensor", dict(output=1, out=fp8)),
        ("scales: expected None", dict(scales=new_scales(3, 8, "fp8_group128")[0])),
        ("scales: expected dtype", dict(output=1, out=fp8, scales=new_scales(3, 8, "fp8_group32_ue8m0")[0])),
        ("scales: expected stride", dict(output=3, out=fp8, scales=torch.zeros_like(fp8[..., :4].flatten(1).int()))),
        ("scales: expected shape", dict(output=2, out=fp8, scales=new_scales(3, 8, "fp8_group32_ue8m0")[0])),
        ("amax: expected shape", dict(amax=lse[:2])),
    ]
    for message, change in bad:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.sgl_dsv4_kernels.combine_splits(**(good | change))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ops.sgl_dsv4_kernels.combine_splits(**(good | dict(lse=lse.cpu())))
