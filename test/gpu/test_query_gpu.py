"""The query's norm and RoPE on the GPU: bit for bit SGLang's kernel, alone and fused into the decode."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode, triton_query
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.ops.decode import resolve_backend
from sgl_dsv4_kernels.plugin.targets import BY_KEY
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.triton_epilogue import load_bf16, store_bf16

DEVICE = torch.device("cuda")
EPS = 1e-6
POSITIONS = 4096


def queries(tokens: int, heads: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, and some that are not finite."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = torch.exp2(torch.randint(-20, 20, (tokens, heads, 1), generator=generator, device=DEVICE).float())
    q = torch.randn((tokens, heads, 512), generator=generator, device=DEVICE) * size
    q[:, 1] = _cancelling(q[:, 1])
    if tokens >= 4:
        q[0, 0] = 0.0
        q[1, 0, 3] = math.nan
        q[2, 0, 500] = math.inf
        q[3, 0] *= 1e-30
    return q.bfloat16()


def _cancelling(q: torch.Tensor) -> torch.Tensor:
    """[T, 512]: pairs that `rope` turns into a small difference of two products, which shows how it is rounded."""
    freqs, positions = rope(q.shape[0])
    angle = freqs[positions]
    ratio = torch.where(torch.arange(32, device=DEVICE) % 2 == 0, angle.real / angle.imag, -angle.imag / angle.real)
    real = q[:, 448::2].bfloat16().float()
    return torch.cat([q[:, :448], torch.stack([real, real * ratio], -1).flatten(-2)], -1)


def rope(tokens: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens, device=DEVICE) * 997 % POSITIONS
    return td.random_freqs(POSITIONS, DEVICE), positions.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; a NaN is a NaN."""
    bits = a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)
    return bool((bits | (a.isnan() & b.isnan())).all())


def stock():
    """SGLang's function."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    for path in BY_KEY["B5"].paths:
        module, name = path.name.rsplit(".", 1)
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    pytest.skip("this SGLang has no fused_q_norm_rope, or cannot be imported")


# ---- the kernel ----


@pytest.mark.parametrize("heads", [8, 16, 64, 128, 3])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits_are_sglangs(heads, tokens, dtype):
    q, (freqs, positions) = queries(tokens, heads), rope(tokens, dtype)
    want = torch.empty_like(q)
    stock()(q, want, EPS, freqs, positions)
    assert same(dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions)), want)


def test_bits_are_sglangs_with_its_strides():
    """A slice of a wider product as input, a slice of padded heads as output; nothing else is written."""
    tokens, heads = 33, 16
    freqs, positions = rope(tokens)
    wide = torch.full((tokens, heads * 512 + 1536), math.nan, dtype=torch.bfloat16, device=DEVICE)
    q = wide[:, 1536:].unflatten(1, (heads, 512))
    q.copy_(queries(tokens, heads))
    padded = [torch.full((tokens, 64, 512), 77.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    stock()(q, padded[0][:, :heads], EPS, freqs, positions)
    dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions), out=padded[1][:, :heads])
    assert same(*padded)


@pytest.mark.parametrize(("with_norm", "with_rope"), [(True, True), (True, False), (False, True), (False, False)])
def test_close_to_the_reference(with_norm, with_rope):
    """The reference roots correctly rounded, the GPU does not: a value on a rounding boundary may be its neighbour."""
    q, pair = queries(200, 8), rope(200)
    options = dict(norm_eps=EPS if with_norm else None, rope=pair if with_rope else None)
    got = dk.query_norm_rope(q, **options).cpu()
    options["rope"] = tuple(t.cpu() for t in pair) if with_rope else None
    want = dk.query_norm_rope(q.cpu(), **options)
    assert torch.equal(got.isnan(), want.isnan())
    differs = (got != want) & ~got.isnan()
    assert differs.double().mean() < (1e-3 if with_norm else 1e-12)
    # A neighbour, or behind the rotation the small difference of two products, of which one has a neighbour.
    size = want.double().unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    assert ((got.double() - want.double()).abs() <= 2.0**-7 * size + 1e-6)[differs].all()
    assert with_norm or not differs.any()


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_unaligned(shift):
    """Odd addresses and strides take another path to the same bits, and write nothing else."""
    tokens, heads = 9, 8
    q, pair = queries(tokens, heads), rope(tokens)
    want = dk.query_norm_rope(q, norm_eps=EPS, rope=pair)
    wide = torch.full((tokens, heads, 512 + 11), math.nan, dtype=torch.bfloat16, device=DEVICE)
    view = wide[..., shift : shift + 512]
    view.copy_(q)
    out = torch.full((tokens, heads, 512 + 13), 77.0, dtype=torch.bfloat16, device=DEVICE)
    dk.query_norm_rope(view, norm_eps=EPS, rope=pair, out=out[..., shift : shift + 512])
    assert same(out[..., shift : shift + 512], want)
    out[..., shift : shift + 512] = 77.0
    assert (out == 77).all()


def test_positions_outside_of_the_table():
    q, (freqs, _) = queries(4, 8, seed=3), rope(4)
    for dtype in (torch.int32, torch.int64):
        positions = torch.tensor([POSITIONS - 1, POSITIONS, -1, 2**31 - 1], device=DEVICE, dtype=dtype)
        got = dk.query_norm_rope(q[:, 1:], norm_eps=EPS, rope=(freqs, positions))
        assert got[1:, :, 448:].isnan().all()
        assert not got[0].isnan().any()
        assert not got[..., :448].isnan().any()
    empty = dk.query_norm_rope(q[:, 1:], rope=(freqs[:0], positions))
    assert empty[..., 448:].isnan().all()
    assert same(empty[..., :448], q[:, 1:, :448])


@pytest.mark.parametrize("pdl", [True, False])
def test_graph_replays_with_the_writer_before(monkeypatch, pdl):
    """Under programmatic dependent launch the grid starts before its writers end, and must wait for them."""
    monkeypatch.setattr(settings, "pdl", pdl)
    tokens, heads = 64, 64
    source, q = queries(tokens, heads), torch.empty((tokens, heads, 512), dtype=torch.bfloat16, device=DEVICE)
    (freqs, first), positions = rope(tokens), torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    out = torch.empty_like(q)
    dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            positions.copy_(first)
            q.copy_(source)
            dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions), out=out)
            dk.query_norm_rope(out, out=q)  # a reader of the result, and a writer of the next round's input
    for seed in range(5):
        source.copy_(queries(tokens, heads, seed))
        first.copy_((first + 17) % POSITIONS)
        graph.replay()
        assert same(q, dk.query_norm_rope(source, norm_eps=EPS, rope=(freqs, first)))


def test_first_call_inside_a_capture(tmp_path):
    code = """
import torch, sgl_dsv4_kernels as dk
q = torch.randn(3, 8, 512, device="cuda").bfloat16()
out = torch.zeros_like(q)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dk.query_norm_rope(q, norm_eps=1e-6, out=out)
graph.replay()
assert torch.equal(out, dk.query_norm_rope(q, norm_eps=1e-6)) and bool((out != 0).any())
"""
    # Elsewhere: the source folder holds no compiled extension.
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_opcheck():
    q, (freqs, positions) = queries(3, 8), rope(3)
    flat = torch.view_as_real(freqs).flatten(1)
    op = torch.ops.sgl_dsv4_kernels.query_norm_rope.default
    torch.library.opcheck(op, (q, EPS, flat, positions, True, torch.empty_like(q)))


# ---- fused ----


@triton.jit
def _query_kernel(q_ptr, out_ptr, freqs_ptr, positions_ptr, num_freqs, eps, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """What the decode kernel makes of a block of heads."""
    token = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    ok = heads < H
    at = (token * H + heads)[:, None] * 512
    norm = triton_query.norm_factor(q_ptr + at, ok, eps, BLOCK_H, False)
    position = tl.load(positions_ptr + token).to(tl.int64)
    col = tl.arange(0, 64)[None, :]
    for first in tl.static_range(0, 512, 64):
        x = load_bf16(q_ptr + at + (first + col), ok[:, None], False)
        x = triton_query.normalise(x, norm, False)
        if first == 448:
            x = triton_query.rotate(x, freqs_ptr, position, num_freqs, 64, BLOCK_H, False)
        store_bf16(out_ptr + at + (first + col), x.to(tl.float32), ok[:, None], False)


@pytest.mark.parametrize("block_h", [16, 32, 64])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("heads", [8, 64])
def test_tritons_bits_are_the_kernels(block_h, warps, heads):
    tokens = 300
    q, (freqs, positions) = queries(tokens, heads), rope(tokens)
    out = torch.empty_like(q)
    flat = torch.view_as_real(freqs).flatten(1).contiguous()
    _query_kernel[(tokens, -(-heads // block_h))](
        q, out, flat, positions, POSITIONS, EPS, heads, block_h, num_warps=warps
    )
    assert same(out, dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions)))


BACKENDS = ("triton", "sm90")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    try:
        return resolve_backend(request.param, DEVICE)
    except ValueError as lacking:
        pytest.skip(str(lacking))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 8, 150])
@pytest.mark.parametrize("splits", [1, None])
def test_decode_is_that_of_the_two_calls(backend, heads, tokens, splits):
    problem = td.random_problem(tokens, heads, 128, 512, rope=True, device=DEVICE)
    q = finite_queries(tokens, heads, seed=1)
    pair = rope(tokens)
    given = problem.arguments() | problem.options | dict(num_splits=splits, backend=backend, return_amax=True)
    want = dk.sparse_decode(**(given | dict(q=dk.query_norm_rope(q, norm_eps=EPS, rope=pair))))
    got = dk.sparse_decode(**(given | dict(q=q)), q_norm_eps=EPS, q_rope=pair)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    assert torch.equal(got.amax, want.amax)
    assert td.relative_error(got.out, td.truth(_with_query(problem, q, pair)).value) <= td.OUTPUT_BOUND


def _with_query(problem: td.Problem, q: torch.Tensor, pair) -> td.Problem:
    return td.Problem(dk.query_norm_rope(q, norm_eps=EPS, rope=pair), problem.main, problem.extra, problem.options)


def finite_queries(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return queries(tokens, heads, seed).nan_to_num(nan=1.0, posinf=1.0)


@pytest.mark.parametrize("block_heads", [8, 16, 32, 64])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize(("with_norm", "with_rope"), [(True, True), (True, False), (False, True)])
def test_every_way_into_the_hopper_kernels(monkeypatch, block_heads, heads, shift, with_norm, with_rope):
    """All heads a block, full or not; queries whose vectors of 16 bytes start anywhere. eps 0: heads that are not there
    stay zeros."""
    if reason := sm90_decode.missing(DEVICE):
        pytest.skip(reason)
    monkeypatch.setattr(sm90_decode, "cached_plan", lambda *_, **__: sm90_decode.Plan(block_heads, 1))
    problem = td.random_problem(5, heads, 128, 64, rope=True, device=DEVICE)
    q, (freqs, positions) = finite_queries(5, heads, seed=2), rope(5, torch.int32)
    q[:, 0] = 1.0  # squares that vanish have no norm without an eps
    wide = torch.full((5, heads, 528), math.nan, dtype=torch.bfloat16, device=DEVICE)[..., shift : shift + 512]
    wide.copy_(q)
    eps, pair = 0.0 if with_norm else None, (freqs, positions) if with_rope else None
    ready = dk.query_norm_rope(q, norm_eps=eps, rope=pair)
    for splits in (1, 2):
        given = problem.arguments() | problem.options | dict(num_splits=splits, backend="sm90")
        want = dk.sparse_decode(**(given | dict(q=ready)))
        got = dk.sparse_decode(**(given | dict(q=wide)), q_norm_eps=eps, q_rope=pair)
        assert not want.out.isnan().any()
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize(("with_norm", "with_rope"), [(True, False), (False, True)])
def test_one_step_alone(backend, with_norm, with_rope):
    problem = td.random_problem(6, 16, 128, 64, device=DEVICE)
    q, pair = finite_queries(6, 16, seed=2), rope(6)
    eps, pair = EPS if with_norm else None, pair if with_rope else None
    given = problem.arguments() | dict(backend=backend)
    want = dk.sparse_decode(**(given | dict(q=dk.query_norm_rope(q, norm_eps=eps, rope=pair))))
    got = dk.sparse_decode(**(given | dict(q=q)), q_norm_eps=eps, q_rope=pair)
    assert torch.equal(got.out, want.out)


def test_positions_outside_of_the_table_in_the_decode(backend):
    problem = td.random_problem(5, 64, 128, 64, lengths=[128, 128, 128, 128, 0], extra_lengths=0, device=DEVICE)
    positions = torch.tensor([POSITIONS - 1, POSITIONS, -1, 2**40, -1], device=DEVICE)
    given = problem.arguments() | dict(backend=backend, q_norm_eps=EPS)
    for freqs in (rope(5)[0], rope(5)[0][:0]):
        result = dk.sparse_decode(**given, q_rope=(freqs, positions))
        assert bool(result.out[0].isnan().any()) == (freqs.shape[0] == 0)
        assert result.out[1:4].isnan().all()
        assert (result.out[4] == 0).all()  # attends to nothing


def test_graph_of_the_fused_decode(backend):
    problem = td.random_problem(8, 64, 128, 512, rope=True, device=DEVICE)
    q, (freqs, positions) = finite_queries(8, 64, seed=4), rope(8)
    given = problem.arguments() | problem.options | dict(backend=backend, q_norm_eps=EPS, q_rope=(freqs, positions))
    given["q"] = q
    dk.sparse_decode(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = dk.sparse_decode(**given)
    q.copy_(finite_queries(8, 64, seed=5))
    positions.copy_((positions + 5) % POSITIONS)
    graph.replay()
    got = result.out.clone()
    assert torch.equal(got, dk.sparse_decode(**given).out)
