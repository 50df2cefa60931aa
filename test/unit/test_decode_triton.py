"""The Triton decode against the fp64 truth: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import random
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "set TRITON_INTERPRET=1: triton is imported already, and compiles"
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

import triton
import triton.language as tl

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode, triton_launch
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.triton_decode import dequantise, divide
from sgl_dsv4_kernels.triton_epilogue import encode_e4m3, store_bf16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRET = triton_launch.interpreted()
SPLITS = (1, 2, 3, 4, 8, 16, 21)
V4, BF16 = CacheLayout.V4, CacheLayout.BF16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities and NaN, in the interpreter


def decode(problem: td.Problem, **options) -> dk.DecodeOutput:
    return dk.sparse_decode(**problem.arguments(), **(problem.options | options), backend="triton")


def check(result, want: td.Truth, relative: float = td.OUTPUT_BOUND) -> None:
    assert not result.out.isnan().any()
    assert td.relative_error(result.out, want.value) <= relative
    assert td.lse_excess(result.lse, want) <= 0
    assert (result.out[want.empty] == 0).all()


@triton.jit
def _dequantise_kernel(codes_ptr, out_ptr, INTERPRET: tl.constexpr):
    exponent = tl.program_id(0) + tl.zeros([1], tl.int32)
    at = tl.arange(0, 1024)
    value = dequantise(tl.load(codes_ptr + at), exponent.to(tl.uint8), INTERPRET)
    store_bf16(out_ptr + tl.program_id(0) * 1024 + at, value.to(tl.float32), at < 1024, INTERPRET)


@triton.jit
def _divide_kernel(n_ptr, out_ptr, magic, shift):
    at = tl.arange(0, 32)
    tl.store(out_ptr + at, divide(tl.load(n_ptr + at), magic, shift))


@pytest.mark.parametrize("d", [1, 2, 3, 5, 64, 127, 2**30, 2**30 + 1, 2**31 - 1])
def test_divide(d):
    numbers = random.Random(d)
    multiples = [numbers.randrange(0, 2**31) // d * d for _ in range(9)]
    n = [0, 1, d - 1, d, 2**31 - 1, *multiples, *(m - 1 for m in multiples), *(m + d - 1 for m in multiples)]
    n = torch.tensor([min(max(x, 0), 2**31 - 1) for x in n], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(n, -1)
    _divide_kernel[(1,)](n, out, *triton_launch.divisor(d))
    assert torch.equal(out, n // d)


def test_every_code_and_scale():
    """Four codes go through the registers of a thread together: every code has every place among them."""
    codes = torch.cat([torch.arange(256).roll(place) for place in range(4)]).to(torch.uint8).to(DEVICE)
    out = torch.zeros((256, 1024), dtype=torch.bfloat16, device=DEVICE)
    _dequantise_kernel[(256,)](codes, out.view(torch.int16) if INTERPRET else out, INTERPRET)
    scale = torch.exp2(torch.arange(256, device=DEVICE).double() - 127)
    scale[255] = math.nan
    want = (codes.view(torch.float8_e4m3fn).double() * scale[:, None]).to(torch.bfloat16)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@triton.jit
def _encode_kernel(x_ptr, out_ptr, count):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out_ptr + at, encode_e4m3(tl.load(x_ptr + at, mask=at < count, other=0.0)), mask=at < count)


def test_every_e4m3_midpoint_and_its_neighbours():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    x = [codes, middle, *(torch.nextafter(middle, torch.tensor(limit)) for limit in (0.0, 1e9))]
    x = torch.cat([*x, torch.tensor([448.1, 463.9, 464.0, 480.0, 1e30, 1e-40, math.inf, math.nan])])
    x = torch.cat([x, -x]).to(DEVICE)
    out = torch.zeros(x.shape, dtype=torch.uint8, device=DEVICE)
    _encode_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel())
    assert torch.equal(out, reference.to_e4m3(x).view(torch.uint8))


CASES = [
    # h, K, extra K, page sizes, layouts, lengths, extra lengths
    (8, 64, 0, 64, 2, V4, V4, [64, 0, 1], None),
    (8, 129, 65, 2, 64, V4, V4, [129, 65, 128], [1, 65, 0]),
    (8, 192, 512, 256, 64, V4, V4, [0, 192, 200], [0, 511, 512]),
    (64, 128, 512, 256, 64, V4, V4, [128, 37, 0], [512, 1, 70]),
    (8, 1, 3, 1, 3, V4, V4, [1, 0, 1], [3, 2, 0]),
    (8, 70, 90, 3, 5, BF16, BF16, [70, 64, 1], [0, 90, 64]),
    (8, 70, 90, 16, 7, V4, BF16, [70, 64, 1], [0, 90, 64]),
    (8, 70, 90, 16, 7, BF16, V4, [70, 64, 1], [0, 90, 64]),
    (16, 70, 64, 64, 2, V4, V4, None, None),
    (32, 70, 64, 64, 2, V4, V4, None, None),
    (128, 70, 0, 64, 2, V4, V4, [70, 1, 0], None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"h{c[0]}-{c[1]}+{c[2]}-{c[5].value}-{c[6].value}")
def test_against_fp64(case):
    heads, width, extra_width, page_size, extra_page_size, layout, extra_layout, lengths, extra_lengths = case
    problem = td.random_problem(
        3, heads, width, extra_width, page_size=page_size, extra_page_size=extra_page_size, layout=layout,
        extra_layout=extra_layout, lengths=lengths, extra_lengths=extra_lengths, rope=True, device=DEVICE,
    )  # fmt: skip
    want = td.truth(problem)
    for splits in (1, 3):
        check(decode(problem, num_splits=splits), want)


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_tiles_smaller_than_the_grain(block_n):
    problem = td.random_problem(3, 8, 129, 65, lengths=[129, 65, 17], extra_lengths=[1, 65, 33], device=DEVICE)
    want = td.truth(problem)
    out = torch.full((3, 8, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((3, 8), math.nan, device=DEVICE)
    triton_launch.launch(
        problem.q, problem.main, problem.extra, 512**-0.5, out, lse,
        epilogue=triton_launch.Epilogue(0, attn_sink=problem.options["attn_sink"]),
        config=triton_launch.Config(16, block_n, 4, 1),
    )  # fmt: skip
    check(dk.DecodeOutput(out, lse, None, None), want)


@pytest.mark.parametrize("length", [*range(0, 70, 9), 63, 64, 65, 127, 128])
def test_every_length(length):
    other = (length * 37) % 131
    problem = td.random_problem(
        2, 8, 128, 130, lengths=[length, other], extra_lengths=[other, length], seed=length, device=DEVICE
    )
    check(decode(problem, num_splits=1 + length % 4), td.truth(problem))


@pytest.mark.parametrize("without", ["topk_length", "extra_topk_length"])
def test_no_lengths(without):
    problem = td.random_problem(2, 8, 70, 33, lengths=70, extra_lengths=33, device=DEVICE)
    result = decode(problem)
    arguments = problem.arguments() | {without: None}
    again = dk.sparse_decode(**arguments, **problem.options, backend="triton")
    assert torch.equal(again.out, result.out)
    check(again, td.truth(problem))


def test_nothing_to_attend():
    for problem in (
        td.random_problem(2, 8, 64, lengths=0, device=DEVICE),
        td.random_problem(2, 8, 64, 64, invalid=1.0, lengths=64, extra_lengths=64, device=DEVICE),
        td.random_problem(2, 8, 64, 64, invalid=1.0, lengths=0, extra_lengths=64, rope=True, device=DEVICE),
    ):
        for output in reference.OUTPUTS:
            result = decode(problem, num_splits=1, output=output, return_amax=True)
            assert (result.out.float() == 0).all()
            assert (result.lse == math.inf).all()
            assert (result.amax == 0).all()
        assert (decode(problem, num_splits=3).out == 0).all()


@pytest.mark.parametrize("fill_empty", [False, True])
@pytest.mark.parametrize("splits", SPLITS)
def test_partials(splits, fill_empty):
    """Every split against the reference; what must not be written keeps its sentinel."""
    problem = td.random_problem(3, 8, 130, 200, lengths=[130, 0, 64], extra_lengths=[200, 0, 1], device=DEVICE, seed=9)
    o = torch.full((splits, 3, 8, 512), 77.0, device=DEVICE)
    lse = torch.full((splits, 3, 8), math.nan, device=DEVICE)
    triton_launch.launch(problem.q, problem.main, problem.extra, 512**-0.5, o, lse, fill_empty=fill_empty)
    want, want_lse = reference.sparse_decode_partial(
        problem.q, problem.main, problem.extra, num_splits=splits, dtype=torch.float64
    )
    empty = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert td.relative_error(o[~empty], want[~empty]) <= td.OUTPUT_BOUND
    error = (lse.double() - want_lse).abs() - 2.0**-23 * want_lse.abs()
    assert error[~empty].max() <= 2e-6
    assert (o[empty] == (0.0 if fill_empty else 77.0)).all()


def test_public_partials_fill_empty_splits():
    problem = td.random_problem(2, 8, 64, lengths=[64, 0], device=DEVICE)
    o, lse = dk.sparse_decode_partial(**problem.arguments(), num_splits=3, backend="triton")
    assert (o[1:] == 0).all()
    assert (lse[1:] == -math.inf).all()
    assert (o[0, 1] == 0).all()


def test_split_counts_agree():
    problem = td.random_problem(3, 8, 128, 512, rope=True, device=DEVICE, seed=4)
    one = decode(problem, num_splits=1)
    most = one.out.abs().amax(-1, keepdim=True).double()
    for splits in SPLITS[1:]:
        other = decode(problem, num_splits=splits)
        finite = one.lse != math.inf
        error = (other.lse - one.lse).abs()[finite] - 2.0**-23 * one.lse.abs()[finite]
        assert error.max() <= 1e-6
        # On bf16's grid: codes in value order.
        a, b = (torch.where(x < 0, -32768 - x, x) for x in (r.out.view(torch.int16).int() for r in (one, other)))
        assert ((a - b).abs() <= 1).double().mean() >= 0.99
        assert ((one.out.double() - other.out.double()).abs() <= most * 2.0**-7).all()
        again = decode(problem, num_splits=splits)
        assert torch.equal(again.out, other.out)
        assert torch.equal(again.lse, other.lse)


@pytest.mark.parametrize("output", reference.OUTPUTS)
@pytest.mark.parametrize("heads", [8, 64])
def test_epilogues(heads, output):
    """The fused epilogue of the unsplit kernel against the combine of its own unsplit partial."""
    tokens = 3
    problem = td.random_problem(
        tokens, heads, 70, lengths=[70, 0, 30], rope=True, page_size=2, device=DEVICE, seed=heads
    )
    o, lse_accum = dk.sparse_decode_partial(**problem.arguments(), num_splits=1, backend="triton")
    want = reference.combine_splits(
        o, lse_accum, output=output, return_amax=True, **td.epilogue_arguments(problem.options)
    )
    got = decode(problem, num_splits=1, output=output, return_amax=True)
    torch.testing.assert_close(got.lse, want.lse, rtol=2.0**-23, atol=1e-6)
    torch.testing.assert_close(got.amax, want.amax, rtol=1e-5, atol=1e-7)
    assert got.out.dtype == want.out.dtype
    if output == "bf16":
        assert td.relative_error(got.out, want.out.double()) < 3e-4
        return
    assert (got.scales.dtype, got.scales.stride()) == (want.scales.dtype, want.scales.stride())
    if output == "fp8_group128":
        torch.testing.assert_close(got.scales, want.scales, rtol=1e-5, atol=0)
    else:
        assert (got.scales == want.scales).double().mean() > 0.99
    same = (got.out.view(torch.uint8) == want.out.view(torch.uint8)).double().mean()
    assert same > 0.99


@pytest.mark.parametrize("output", reference.OUTPUTS[1:])
def test_fp8_is_byte_exact_without_transcendental_functions(output):
    problem = td.random_problem(3, 8, 70, lengths=[70, 1, 30], sink=False, device=DEVICE)
    o, _ = dk.sparse_decode_partial(**problem.arguments(), num_splits=1, backend="triton")
    codes, scales = reference.quantise(o[0], output)
    got = decode(problem, num_splits=1, output=output)
    assert torch.equal(got.out.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(got.scales, scales)


def test_sink_of_every_kind():
    sink = torch.tensor([0.5, -3.0, 200.0, -200.0, math.inf, -math.inf, 3e38, math.nan], device=DEVICE)
    problem = td.random_problem(3, 8, 70, lengths=[70, 0, 1], device=DEVICE)
    problem.options["attn_sink"] = sink
    want = td.truth(problem)
    result = decode(problem, num_splits=1)
    assert result.out[[0, 2], 7].isnan().all()
    assert (result.out[1] == 0).all()
    assert (result.out[:, [4, 6]] == 0).all()
    fine = [0, 1, 2, 3, 4, 5, 6]
    assert td.relative_error(result.out[:, fine], want.value[:, fine]) <= td.OUTPUT_BOUND


def test_positions_outside_of_the_table():
    problem = td.random_problem(3, 8, 64, lengths=[64, 64, 0], sink=False, rope=True, device=DEVICE)
    freqs, _ = problem.options["inverse_rope"]
    positions = torch.tensor([-1, 3, 2**40], device=DEVICE)
    out = decode(problem, num_splits=1, inverse_rope=(freqs, positions)).out
    assert out[0, :, 448:].isnan().all()
    assert not out[0, :, :448].isnan().any()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize("splits", [1, 3])
def test_attended_nan_stays_in_its_row(splits):
    for kind in ("code", "scale", "rope"):
        problem = td.random_problem(3, 8, 64, 64, lengths=64, extra_lengths=64, invalid=0.0, sink=False, device=DEVICE)
        clean = decode(problem, num_splits=splits)
        slot = int(problem.extra.indices[1, 50])
        others = problem.extra.indices[[0, 2]]
        others[others == slot] = -1
        problem.extra.indices[[0, 2]] = others
        clean = decode(problem, num_splits=splits)
        page, place = divmod(slot, problem.extra.page_size)
        at = {"code": place * 576 + 391, "scale": problem.extra.page_size * 576 + place * 8 + 4}
        if kind == "rope":
            problem.extra.cache[page, place * 576 + 448 + 10 : place * 576 + 448 + 12] = 0xFF
        else:
            problem.extra.cache[page, at[kind]] = 0xFF
        result = decode(problem, num_splits=splits)
        assert result.out[1].isnan().all()
        assert result.lse[1].isnan().all()
        assert torch.equal(result.out[[0, 2]], clean.out[[0, 2]])
        assert torch.equal(result.lse[[0, 2]], clean.lse[[0, 2]])


BACKENDS = ("torch", "triton", *(["sm90"] if sm90_decode.missing(torch.device(DEVICE)) is None else []))


def infinite_scores(where: str, sign: float) -> td.Problem:
    """Two rows of 64 + 64 keys: the first one's scores are all sign * inf, by its queries or by its keys."""
    problem = td.random_problem(2, 8, 64, 64, lengths=64, extra_lengths=64, invalid=0.0, rope=True, device=DEVICE)
    problem.q[0] = 0.0
    problem.q[0, :, 500] = sign * math.inf if where == "q" else sign
    value = torch.tensor(1.0 if where == "q" else math.inf, dtype=torch.bfloat16).view(1).view(torch.uint8).to(DEVICE)
    for source in (problem.main, problem.extra):
        source.indices[1][torch.isin(source.indices[1], source.indices[0])] = -1
        page, place = source.indices[0].long() // source.page_size, source.indices[0].long() % source.page_size
        at = place[:, None] * 576 + 448 + 2 * (500 - 448) + torch.arange(2, device=DEVICE)
        source.cache[page[:, None], at] = value
    return problem


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_minus_infinity(backend, where, splits):
    """A row without another score is empty; with one, what is infinite in a key makes its channel NaN."""
    problem = infinite_scores(where, -1.0)
    given = problem.arguments() | problem.options | dict(num_splits=splits, backend=backend, return_amax=True)
    result = dk.sparse_decode(**given)
    assert (result.lse[0] == math.inf).all()
    assert (result.out[0] == 0).all()
    assert (result.amax[0] == 0).all()
    want = td.truth(problem)
    assert torch.equal(want.empty.all(1).cpu(), torch.tensor([True, False]))
    assert td.relative_error(result.out[1], want.value[1]) <= td.OUTPUT_BOUND
    o, lse = dk.sparse_decode_partial(**problem.arguments(), num_splits=splits, backend=backend)
    assert (lse[:, 0] == -math.inf).all()
    assert (o[:, 0] == 0).all()

    if where == "q":
        return
    problem.main.indices[0, 7] = problem.main.indices[1].max()  # a finite score among them
    assert problem.main.indices[0, 7] >= 0
    result, want = dk.sparse_decode(**given), td.truth(problem)
    torch.testing.assert_close(result.lse.double(), want.lse, rtol=1e-6, atol=1e-5)
    assert torch.equal(result.out.isnan(), want.value.isnan())
    assert result.out[0].isnan().any()


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_infinity(backend, where):
    problem = infinite_scores(where, 1.0)
    result = dk.sparse_decode(**problem.arguments(), **problem.options, num_splits=1, backend=backend)
    assert result.out[0].isnan().all()
    assert result.lse[0].isnan().all()
    assert not result.out[1].isnan().any()


@pytest.mark.parametrize(("page_stride", "offset"), [(40000, 64), (37441, 3), (37440 * 3, 1), (37442, 2)])
def test_packed_pools(page_stride, offset):
    problem = td.random_problem(2, 8, 70, page_size=64, lengths=[70, 33], device=DEVICE)
    want = decode(problem)
    main = problem.main
    packed = td.poisoned_cache(main.cache.shape[0], 64, page_stride=page_stride, offset=offset, device=DEVICE)
    packed.copy_(main.cache)
    result = dk.sparse_decode(**(problem.arguments() | {"cache": packed}), **problem.options, backend="triton")
    view = packed.view(torch.float8_e4m3fn)
    again = dk.sparse_decode(**(problem.arguments() | {"cache": view}), **problem.options, backend="triton")
    assert torch.equal(again.out, result.out)
    # At odd addresses the RoPE values are loaded as bytes. For mma.sync Triton orders the channels of a product by the
    # width of the load behind its operand, so the scores are summed in another order there.
    if page_stride % 2 == 0 and offset % 2 == 0:
        assert torch.equal(result.out, want.out)
    check(result, td.truth(problem))


def test_strided_arguments():
    problem = td.random_problem(3, 8, 70, 40, lengths=[70, 3, 0], extra_lengths=[9, 0, 40], rope=True, device=DEVICE)
    want = decode(problem, return_amax=True, num_splits=1)
    freqs, positions = problem.options["inverse_rope"]
    q = torch.full((3, 24, 1024), math.nan, dtype=torch.bfloat16, device=DEVICE)[:, ::3, :512]
    q.copy_(problem.q)
    wide = torch.zeros((3, 200), dtype=torch.int32, device=DEVICE)
    wide[:, 7:77] = problem.main.indices
    arguments = problem.arguments() | dict(
        q=q, indices=wide[:, 7:77], topk_length=problem.main.length.repeat_interleave(2)[::2],
        inverse_rope=(torch.view_as_real(freqs).flatten(1), positions.int().repeat_interleave(3)[::3]),
    )  # fmt: skip
    out = torch.full((3, 16, 600), 77.0, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((8, 3), 77.0, device=DEVICE).t()
    result = dk.sparse_decode(
        **arguments, attn_sink=problem.options["attn_sink"], backend="triton", num_splits=1, return_amax=True,
        out=out[:, ::2, :512], lse=lse,
    )  # fmt: skip
    assert torch.equal(result.out, want.out)
    assert torch.equal(result.lse, want.lse)
    assert torch.equal(result.amax, want.amax)
    assert (out[:, 1::2] == 77).all()
    assert (out[..., 512:] == 77).all()


def test_softmax_scale():
    problem = td.random_problem(2, 8, 64, lengths=64, device=DEVICE)
    problem.options["softmax_scale"] = 0.01
    check(decode(problem), td.truth(problem))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_head_count_has_a_configuration(capability):
    for heads in (8, 16, 32, 64, 128):
        config = triton_launch.choose_config(heads, capability, False)
        assert config.block_h >= 16
        assert 64 % config.block_n == 0
        assert triton_launch.choose_config(heads, capability, True).num_stages == 1
