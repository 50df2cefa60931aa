"""The decode on a GPU: the whole matrix of shapes, large caches, graphs, streams.

test/unit/test_decode_triton.py, which also runs on a GPU, has the masks, NaN, epilogues and strides in detail.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.testing_peers import flashmla, flashmla_call, sglang_triton, sglang_triton_call

DEVICE = torch.device("cuda")
HEADS = (8, 16, 32, 64, 128)
SPLITS = (1, 2, 3, 4, 8, 16, 37)


def decode(problem: td.Problem, **options) -> dk.DecodeOutput:
    return dk.sparse_decode(**problem.arguments(), **(problem.options | options))


def check(result: dk.DecodeOutput, want: td.Truth, what: object) -> None:
    assert not result.out.isnan().any(), what
    assert td.relative_error(result.out, want.value) <= td.OUTPUT_BOUND, what
    assert td.lse_excess(result.lse, want) <= 0, what
    assert (result.out[want.empty] == 0).all(), what


def first_heads(problem: td.Problem, heads: int) -> td.Problem:
    sink = problem.options["attn_sink"][:heads].contiguous()
    return td.Problem(problem.q[:, :heads], problem.main, problem.extra, problem.options | {"attn_sink": sink})


def same_bits(a: dk.DecodeOutput, b: dk.DecodeOutput) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None]
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("tokens", [1, 6, 16, 96])
@pytest.mark.parametrize("width", [64, 128, 192, 129])
def test_matrix(tokens, width):
    """Every head count and extra width, as chosen and unsplit; one truth of 128 heads serves all head counts."""
    for number, extra_width in enumerate((0, 64, 512, 1024, 1152, 8256)):
        sizes = dict(page_size=(256, 128, 64, 2)[number % 4], extra_page_size=(64, 2, 256, 128)[number % 4])
        lengths = dict(lengths=width, extra_lengths=extra_width) if tokens == 1 else {}
        problem = td.random_problem(tokens, 128, width, extra_width, device=DEVICE, seed=number, **sizes, **lengths)
        want = td.truth(problem)
        for heads in HEADS:
            part = first_heads(problem, heads)
            part_want = want.of_heads(heads)
            for splits in (None, 1):
                check(decode(part, num_splits=splits), part_want, (heads, extra_width, splits))


@pytest.mark.parametrize(("heads", "tokens"), [(8, 6), (64, 6), (64, 1)])
def test_split_counts_agree(heads, tokens):
    problem = td.random_problem(tokens, heads, 128, 512, rope=True, device=DEVICE, seed=4)
    one = decode(problem, num_splits=1)
    most = one.out.abs().amax(-1, keepdim=True).double()
    fp8 = {output: decode(problem, num_splits=1, output=output).out for output in reference.OUTPUTS[1:]}
    clear = one.out.abs() > 0.05 * most  # values that do not cancel
    for splits in SPLITS[1:]:
        other = decode(problem, num_splits=splits)
        finite = one.lse != math.inf
        assert ((other.lse - one.lse).abs()[finite] - 2.0**-23 * one.lse.abs()[finite] <= 1e-6).all()
        a, b = (torch.where(x < 0, -32768 - x, x) for x in (r.out.view(torch.int16).int() for r in (one, other)))
        assert ((a - b).abs() <= 1).double().mean() >= 0.99
        assert ((one.out.double() - other.out.double()).abs() <= most * 2.0**-7).all()
        for output, codes in fp8.items():
            again = decode(problem, num_splits=splits, output=output).out
            assert (again.view(torch.uint8) == codes.view(torch.uint8))[clear].double().mean() >= 0.99
        for _ in range(5):
            assert same_bits(decode(problem, num_splits=splits), other)


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(("width", "extra_width"), [(128, 0), (128, 512), (128, 1024), (64, 8256)])
def test_beside_flashmla(heads, width, extra_width):
    """On the same inputs: error at most 1.1 times FlashMLA's, the same LSE."""
    api, reason = flashmla()
    if api is None:
        pytest.skip(reason)
    sizes = dict(page_size=256, extra_page_size=64, lengths=width, extra_lengths=extra_width)
    problem = td.random_problem(6, heads, width, extra_width, device=DEVICE, invalid=0.0, seed=9, **sizes)
    want = td.truth(problem)
    out, lse = flashmla_call(api, problem)()
    theirs = td.relative_error(out, want.value)
    assert td.lse_excess(lse, want, absolute=1e-5) <= 0  # the peer was called rightly
    for splits in (None, 1, 3):
        result = decode(problem, num_splits=splits)
        assert td.relative_error(result.out, want.value) <= 1.1 * theirs, splits
        assert td.lse_excess(result.lse, want) <= 0, splits


@pytest.mark.parametrize("heads", [8, 64])
def test_beside_sglang_triton(heads):
    function, reason = sglang_triton()
    if function is None:
        pytest.skip(reason)
    sizes = dict(page_size=256, extra_page_size=64, lengths=128, extra_lengths=512)
    problem = td.random_problem(6, heads, 128, 512, device=DEVICE, invalid=0.0, seed=9, **sizes)
    problem.options["attn_sink"] = torch.randn(heads, device=DEVICE)
    want = td.truth(problem)
    theirs = td.relative_error(sglang_triton_call(function, problem)()[0], want.value)
    assert theirs < 0.02  # the peer was called rightly
    assert td.relative_error(decode(problem).out, want.value) <= theirs


@pytest.mark.parametrize("output", reference.OUTPUTS)
def test_combine_against_the_reference(output):
    problem = td.random_problem(6, 64, 128, 512, rope=True, device=DEVICE)
    o, lse_accum = dk.sparse_decode_partial(**problem.arguments(), num_splits=4)
    got = dk.combine_splits(o, lse_accum, **problem.options, output=output, return_amax=True)
    want = reference.combine_splits(
        o.double(), lse_accum.double(), output=output, return_amax=True, **td.epilogue_arguments(problem.options)
    )
    torch.testing.assert_close(got.lse, want.lse, rtol=2.0**-23, atol=1e-6)
    torch.testing.assert_close(got.amax, want.amax, rtol=1e-5, atol=1e-7)
    assert (got.out.view(torch.uint8) == want.out.view(torch.uint8)).double().mean() > 0.99
    if got.scales is not None:
        assert got.scales.stride() == want.scales.stride()
        assert ((got.scales.double() / want.scales.double() - 1).abs() < 1e-5).double().mean() > 0.99


@pytest.mark.parametrize("layout", list(CacheLayout))
@pytest.mark.parametrize("beyond", [2**31, 2**32])
def test_caches_past(beyond, layout):
    """Rows around 2^31 and 2^32 bytes, and the last slot; also with a page stride that alone passes it."""
    if torch.cuda.mem_get_info()[0] < beyond + (8 << 30):
        pytest.skip("needs more free GPU memory")
    page_size = 64
    page_bytes = layout.page_bytes(page_size)
    for stride in (page_bytes, beyond // 2 + 1024):
        pages = beyond // stride + 2
        storage = torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE)
        cache = storage.as_strided((pages, page_bytes), (stride, 1))
        far = beyond // stride * page_size
        slots = torch.tensor([0, 1, far - 1, far, far + 1, pages * page_size - 1], device=DEVICE).unique()
        td.fill_slots(cache, slots, page_size, layout)
        indices = slots.int().expand(2, -1).contiguous()
        problem = td.Problem(td.random_queries(2, 8, device=DEVICE), Source(cache, indices, None, page_size, layout))
        check(decode(problem), td.truth(problem), stride)
        del storage, cache, problem


def test_many_rows():
    """More rows than a grid's y or z takes."""
    tokens = 70_000
    problem = td.random_problem(tokens, 8, 3, device=DEVICE, lengths=3, invalid=0.3)
    out = torch.full((tokens, 8, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    for splits in (1, 2):
        result = decode(problem, out=out, num_splits=splits)
        rows = torch.tensor([0, 65534, 65535, 65536, 69_999], device=DEVICE)
        main = problem.main._replace(indices=problem.main.indices[rows], length=problem.main.length[rows])
        some = td.Problem(problem.q[rows], main, None, problem.options)
        check(dk.DecodeOutput(result.out[rows], result.lse[rows], None, None), td.truth(some), splits)
        assert not out.isnan().any()
        out.fill_(math.nan)


@pytest.mark.parametrize("heads", [8, 64])
def test_batch_invariant(heads):
    problem = td.random_problem(256, heads, 128, 512, rope=True, device=DEVICE)
    whole = decode(problem, batch_invariant=True)
    for begin, count in ((0, 1), (5, 1), (100, 3), (17, 64), (0, 255), (64, 128)):
        part = decode(problem.rows(slice(begin, begin + count)), batch_invariant=True)
        rows = slice(begin, begin + count)
        assert torch.equal(part.out, whole.out[rows])
        assert torch.equal(part.lse, whole.lse[rows])


def change(problem: td.Problem, other: td.Problem) -> None:
    """Overwrite a problem's tensors in place."""
    problem.q.copy_(other.q)
    for mine, theirs in ((problem.main, other.main), (problem.extra, other.extra)):
        mine.cache.copy_(theirs.cache)
        mine.indices.copy_(theirs.indices)
        mine.length.copy_(theirs.length)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_graph(splits, pdl, monkeypatch):
    """Captured once; replayed with other lengths, indices, keys and fewer live rows, larger eager calls between."""
    monkeypatch.setattr(settings, "pdl", pdl)
    problem = td.random_problem(16, 64, 128, 512, device=DEVICE, seed=1)
    out = torch.full((16, 64, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((16, 64), math.nan, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(problem, num_splits=splits, out=out, lse=lse)
    large = td.random_problem(64, 64, 192, 1024, device=DEVICE)
    for seed in range(2, 6):
        other = td.random_problem(16, 64, 128, 512, device=DEVICE, seed=seed)
        if seed == 4:  # padded rows
            other.main.length[5:] = 0
            other.extra.length[5:] = 0
        change(problem, other)
        other.options = problem.options
        want = decode(other, num_splits=splits)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        decode(large)
        assert torch.equal(out, want.out)
        assert torch.equal(lse, want.lse)


def test_first_call_inside_a_capture(tmp_path):
    """A process that has not decoded yet: the kernels are compiled and loaded while the stream is capturing."""
    script = """
import torch
from sgl_dsv4_kernels import sparse_decode, testing_decode as td
for splits in (1, 3):
    problem = td.random_problem(2, 64, 64, 64, lengths=64, extra_lengths=64, device="cuda")
    out = torch.zeros((2, 64, 512), dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_decode(**problem.arguments(), **problem.options, num_splits=splits, out=out)
    graph.replay()
    want = td.truth(problem).value
    assert td.relative_error(out, want) < td.OUTPUT_BOUND
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_streams():
    """Two side streams at once, each behind a slow producer."""
    problems = [td.random_problem(16, 64, 128, 512, device=DEVICE, seed=seed) for seed in (1, 2)]
    wants = [decode(problem) for problem in problems]
    lengths = [problem.main.length.clone() for problem in problems]
    for problem in problems:
        problem.main.length.zero_()
    streams = [torch.cuda.Stream() for _ in problems]
    results = []
    for problem, length, stream in zip(problems, lengths, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            problem.main.length.copy_(length)
            results.append(decode(problem))
    for result, want, stream in zip(results, wants, streams, strict=True):
        stream.synchronize()
        assert same_bits(result, want)


@pytest.mark.parametrize("splits", [1, 4])
def test_programmatic_launch_changes_nothing(splits, monkeypatch):
    problem = td.random_problem(16, 64, 128, 512, device=DEVICE)
    results = []
    for pdl in (False, True):
        monkeypatch.setattr(settings, "pdl", pdl)
        results.append(decode(problem, num_splits=splits))
    assert same_bits(*results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_current():
    want = decode(td.random_problem(3, 8, 128, 64, device="cuda:0"))
    with torch.cuda.device(0):
        got = decode(td.random_problem(3, 8, 128, 64, device="cuda:1"))
    assert torch.equal(got.out.cpu(), want.out.cpu())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backends_agree(backend):
    problem = td.random_problem(6, 16, 128, 64, rope=True, device=DEVICE)
    for splits in (1, 2):
        check(decode(problem, num_splits=splits, backend=backend), td.truth(problem), (backend, splits))


def test_no_rows():
    problem = td.random_problem(2, 8, 64, 64, rope=True, device=DEVICE).rows(slice(0, 0))
    for output in reference.OUTPUTS:
        for splits in (None, 1, 4):
            assert decode(problem, num_splits=splits, output=output, return_amax=True).out.shape == (0, 8, 512)


@pytest.mark.parametrize("backend", ["sm90", "triton"])
def test_opcheck(backend):
    if backend == "sm90" and (reason := sm90_decode.missing(DEVICE)):
        pytest.skip(reason)
    problem = td.random_problem(3, 8, 70, 40, rope=True, device=DEVICE)
    main, extra = problem.main, problem.extra
    tail = (extra.cache, extra.indices, extra.length, main.page_size, extra.page_size, 512**-0.5, 0, 0, False)
    attention = (problem.q, main.cache, main.indices, main.length, *tail, None, None, None)
    last = tuple(td.epilogue_arguments(problem.options).values())
    out = torch.empty((3, 8, 512), dtype=torch.bfloat16, device=DEVICE)
    lse, amax = torch.empty((3, 8), device=DEVICE), torch.empty((3, 8), device=DEVICE)
    o_accum, lse_accum = torch.empty((2, 3, 8, 512), device=DEVICE), torch.empty((2, 3, 8), device=DEVICE)
    ops = torch.ops.sgl_dsv4_kernels
    torch.library.opcheck(ops.sparse_decode.default, (*attention, *last, 0, backend, out, lse, None, amax))
    torch.library.opcheck(ops.sparse_decode_partial.default, (*attention, True, backend, o_accum, lse_accum))
    ops.sparse_decode_partial(*attention, True, backend, o_accum, lse_accum)
    torch.library.opcheck(ops.combine_splits.default, (o_accum, lse_accum, *last, 0, True, out, lse, None, amax))


@pytest.mark.parametrize("splits", [None, 1])
def test_compiles_without_graph_breaks(splits):
    problem = td.random_problem(3, 8, 70, 40, rope=True, device=DEVICE)

    def run(q):
        arguments = problem.arguments() | dict(q=q * 2)
        return dk.sparse_decode(**arguments, **problem.options, num_splits=splits, return_amax=True)

    want = run(problem.q)
    assert same_bits(torch.compile(run, fullgraph=True)(problem.q), want)


@pytest.mark.parametrize("options", [dict(num_splits=2), dict(batch_invariant=True)])
def test_compiled_two_splits(options):
    """Merged in the decode kernel or, where torch.compile traced, by the combine kernel: the same bits."""
    problem = td.random_problem(3, 8, 200, 200, rope=True, device=DEVICE)

    def run(q):
        arguments = problem.arguments() | dict(q=q * 2)
        return dk.sparse_decode(**arguments, **problem.options, **options)

    want = run(problem.q)
    assert same_bits(torch.compile(run, fullgraph=True)(problem.q), want)
