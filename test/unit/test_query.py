"""RMSNorm and RoPE of the query: the reference, the public functions on the CPU, and Triton's fused form."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "set TRITON_INTERPRET=1: triton is imported already, and compiles"
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

import triton
import triton.language as tl

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels import triton_query
from sgl_dsv4_kernels.reference import query as reference
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.triton_epilogue import load_bf16, store_bf16

EPS = 1e-6
POSITIONS = 64
BACKENDS = ("torch", "triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def queries(tokens: int = 5, heads: int = 8, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-12, 12, (tokens, heads, 1), generator=generator).float())
    return (torch.randn((tokens, heads, 512), generator=generator) * size).bfloat16()


def rope(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return td.random_freqs(POSITIONS), torch.arange(tokens) * 7 % POSITIONS


# ---- the reference ----


def cancelling(tokens: int, heads: int, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries whose rotation is a small difference of two products: any other order or form of its operations shows."""
    q, (freqs, positions) = queries(tokens, heads, seed=1), pair
    angle = freqs[positions][:, None]
    ratio = torch.where(torch.arange(32) % 2 == 0, angle.real / angle.imag, -angle.imag / angle.real)
    q[..., 449::2] = (q[..., 448::2].float() * ratio).bfloat16()
    return q


def bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).bfloat16().item()


def sum_by_hand(row: list[float]) -> np.float32:
    """One head, one number at a time, as the CUDA kernel's lanes do it."""
    sums = []
    for lane in range(32):
        total = np.float32(0)
        for first in (8 * lane, 256 + 8 * lane):
            for i in range(8):
                x = np.float32(row[first + i])
                total = np.float32(total + x * x)
        sums.append(total)
    for bit in (16, 8, 4, 2, 1):
        sums = [np.float32(sums[lane] + sums[lane ^ bit]) for lane in range(32)]
    assert len(set(sums)) == 1
    return sums[0]


def by_hand(row: list[float], eps: float | None, factors: list[float] | None) -> list[float]:
    """As `query_norm_rope`, of one head."""
    row = list(row)
    if eps is not None:
        mean = np.float32(sum_by_hand(row) / np.float32(512) + np.float32(eps))
        norm = np.float32(1.0 / math.sqrt(mean))
        row = [bf16(float(np.float32(np.float32(x) * norm))) for x in row]
    if factors is not None:
        for i in range(32):
            x, y, c, s = row[448 + 2 * i], row[449 + 2 * i], factors[2 * i], factors[2 * i + 1]
            real = np.float32(x * c - float(np.float32(np.float32(y) * np.float32(s))))
            imaginary = np.float32(x * s + float(np.float32(np.float32(y) * np.float32(c))))
            row[448 + 2 * i], row[449 + 2 * i] = bf16(float(real)), bf16(float(imaginary))
    return row


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_reference_is_the_kernels_order(with_norm, with_rope):
    freqs, positions = rope(3)
    q = cancelling(3, 2, (freqs, positions))
    got = dk.query_norm_rope(q, norm_eps=EPS if with_norm else None, rope=(freqs, positions) if with_rope else None)
    flat = torch.view_as_real(freqs).flatten(1)
    for token in range(3):
        for head in range(2):
            factors = flat[positions[token]].tolist() if with_rope else None
            want = by_hand(q[token, head].tolist(), EPS if with_norm else None, factors)
            assert got[token, head].tolist() == want


def test_error_against_fp64():
    q, (freqs, positions) = queries(40), rope(40)
    x = q.double()
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    turned = torch.view_as_complex(x[..., 448:].unflatten(-1, (-1, 2))) * freqs[positions].to(torch.complex128)[:, None]
    want = torch.cat([x[..., :448], torch.view_as_real(turned).flatten(-2)], -1)
    got = dk.query_norm_rope(q, norm_eps=EPS, rope=(freqs, positions))
    assert (got.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    assert td.relative_error(got, want) < 0.0025


def test_sums_are_added_in_the_kernels_order():
    """In fp32: bf16 results seldom show it. Another order gives other sums."""
    x = queries(20, 2).float()
    got = reference.sum_of_squares(x)
    assert got.flatten().tolist() == [float(sum_by_hand(row.tolist())) for row in x.flatten(0, 1)]
    assert (got != x.square().sum(-1)).any()


def test_values_that_are_not_finite():
    q = queries(4)
    q[0, 0, 3] = math.nan
    q[1, 0, 500] = math.inf
    q[2, 0] = 0.0
    got = dk.query_norm_rope(q, norm_eps=EPS, rope=rope(4))
    assert got[0, 0].isnan().all()
    assert got[1, 0, 500:502].isnan().all()  # infinity times 0
    assert (got[2, 0] == 0).all()
    assert not got[3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(dtype):
    q, (freqs, _) = queries(4), rope(4)
    positions = torch.tensor([3, -1, POSITIONS, POSITIONS - 1], dtype=dtype)
    got = dk.query_norm_rope(q, rope=(freqs, positions))
    assert torch.equal(got[..., :448], q[..., :448])
    assert got[1:3, :, 448:].isnan().all()
    assert not got[[0, 3]].isnan().any()


# ---- the public function ----


def test_strides_and_out():
    q, pair = queries(), rope()
    want = dk.query_norm_rope(q, norm_eps=EPS, rope=pair)
    wide = torch.full((5, 16, 600), math.nan, dtype=torch.bfloat16)
    wide[:, ::2, 3:515] = q
    out = torch.full((5, 24, 600), 77.0, dtype=torch.bfloat16)
    view = out[:, ::3, 5:517]
    spread = pair[1].repeat_interleave(2)[::2]
    assert dk.query_norm_rope(wide[:, ::2, 3:515], norm_eps=EPS, rope=(pair[0], spread), out=view) is view
    assert torch.equal(view, want)
    out[:, ::3, 5:517] = 77.0
    assert (out == 77).all()


def test_nothing_to_do():
    q = queries()
    assert torch.equal(dk.query_norm_rope(q), q)
    assert dk.query_norm_rope(q[:0], norm_eps=EPS, rope=rope(0)).shape == (0, 8, 512)
    assert dk.query_norm_rope(q[:, :0], norm_eps=EPS).shape == (5, 0, 512)


def bad_arguments(q: torch.Tensor) -> list[tuple[type[Exception], str, dict]]:
    freqs, positions = rope()
    return [
        (TypeError, "q: expected dtype torch.bfloat16", dict(q=q.float())),
        (ValueError, r"q: expected shape \[tokens, heads, 512\]", dict(q=q[0])),
        (ValueError, r"q: expected stride\(2\) = 1", dict(q=q.repeat_interleave(2, 2)[..., ::2])),
        (TypeError, "norm_eps: expected a float or None, got '1'", dict(norm_eps="1")),
        (TypeError, "norm_eps: expected a float or None, got True", dict(norm_eps=True)),
        (ValueError, "norm_eps: expected a finite number of at least 0, got -1.0", dict(norm_eps=-1.0)),
        (ValueError, "norm_eps: expected a finite number of at least 0, got nan", dict(norm_eps=math.nan)),
        (TypeError, r"rope: expected a pair \(freqs_cis, positions\), got Tensor", dict(rope=freqs)),
        (ValueError, r"freqs_cis: expected shape \[positions, 32\]", dict(rope=(freqs[:, :16], positions))),
        (ValueError, r"positions: expected shape \[5\], got \[4\]", dict(rope=(freqs, positions[:4]))),
        (TypeError, "positions: expected dtype", dict(rope=(freqs, positions.float()))),
        (ValueError, r"out: expected shape \[5, 8, 512\]", dict(out=q[:2])),
        (TypeError, "out: expected dtype torch.bfloat16", dict(out=q.float())),
        (ValueError, r"out: expected stride\(2\) = 1", dict(out=q.repeat_interleave(2, 2)[..., ::2])),
    ]


def test_bad_arguments():
    q = queries()
    for kind, message, change in bad_arguments(q):
        with pytest.raises(kind, match=message):
            dk.query_norm_rope(**({"q": q} | change))


def test_bad_arguments_of_the_decode():
    problem = td.random_problem(3, 8, 64)
    freqs, positions = rope(3)
    for call in (dk.sparse_decode, lambda **given: dk.sparse_decode_partial(**given, num_splits=2)):
        for kind, message, change in [
            (TypeError, "q_norm_eps: expected a float or None", dict(q_norm_eps="x")),
            (ValueError, "q_norm_eps: expected a finite number", dict(q_norm_eps=-1)),
            (TypeError, "q_rope: expected a pair", dict(q_rope=3)),
            (ValueError, r"positions: expected shape \[3\], got \[2\]", dict(q_rope=(freqs, positions[:2]))),
        ]:
            with pytest.raises(kind, match=message):
                call(**problem.arguments(), **change)


def test_checked_mode(monkeypatch):
    q, (freqs, positions) = queries(), rope()
    positions[2] = POSITIONS
    dk.query_norm_rope(q, rope=(freqs, positions))
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=r"positions: expected values in \[0, 64\)"):
        dk.query_norm_rope(q, rope=(freqs, positions))


def test_opcheck():
    q, (freqs, positions) = queries(), rope()
    op = torch.ops.sgl_dsv4_kernels.query_norm_rope.default
    flat = torch.view_as_real(freqs).flatten(1)
    torch.library.opcheck(op, (q, EPS, flat, positions, False, torch.empty_like(q)))
    torch.library.opcheck(op, (q, None, None, None, True, torch.empty_like(q)))


# ---- Triton's parts, beside the reference ----


@triton.jit
def _norm_kernel(q_ptr, out_ptr, eps, H: tl.constexpr, BLOCK_H: tl.constexpr, INTERPRET: tl.constexpr):
    heads = tl.arange(0, BLOCK_H)
    at = tl.program_id(0) * H + heads
    norm = triton_query.norm_factor(q_ptr + at[:, None] * 512, heads < H, eps, BLOCK_H, INTERPRET)
    tl.store(out_ptr + at[:, None], norm, mask=(heads < H)[:, None])


@triton.jit
def _rotate_kernel(
    q_ptr, out_ptr, freqs_ptr, positions_ptr, num_freqs, H: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    heads = tl.arange(0, H)[:, None]
    at = (tl.program_id(0) * H + heads) * 512 + 448 + tl.arange(0, 64)[None, :]
    position = tl.load(positions_ptr + tl.program_id(0)).to(tl.int64)
    x = load_bf16(q_ptr + at, heads < H, INTERPRET)
    x = triton_query.rotate(x, freqs_ptr, position, num_freqs, 64, H, INTERPRET)
    store_bf16(out_ptr + at, x.to(tl.float32), heads < H, INTERPRET)


INTERPRETED = not isinstance(_norm_kernel, triton.runtime.JITFunction)
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="on a GPU: test/gpu/test_query_gpu.py")


@needs_interpreter
def test_tritons_norm_is_the_references():
    """In fp32, as it is before the rounding hides the last bits."""
    q = queries(50, 24)
    out = torch.empty(50, 24)
    _norm_kernel[(50,)](q.view(torch.int16), out, EPS, 24, 32, True)
    mean = reference.sum_of_squares(q.float()) / 512 + torch.tensor(EPS)
    assert torch.equal(out, mean.double().rsqrt().float())


@needs_interpreter
def test_tritons_rotation_is_the_references():
    freqs, positions = rope(50)
    q = cancelling(50, 16, (freqs, positions))
    out = q.clone()
    flat = torch.view_as_real(freqs).flatten(1).contiguous()
    _rotate_kernel[(50,)](q.view(torch.int16), out.view(torch.int16), flat, positions, POSITIONS, 16, True)
    assert torch.equal(out, dk.query_norm_rope(q, rope=(freqs, positions)))


# ---- fused into the decode ----


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize(("with_norm", "with_rope"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_is_that_of_the_two_calls(backend, heads, with_norm, with_rope, splits):
    problem = td.random_problem(4, heads, 70, 40, lengths=[70, 0, 5, 64], extra_lengths=[40, 0, 3, 0], rope=True)
    raw, pair = queries(4, heads), rope(4)
    eps, pair = EPS if with_norm else None, pair if with_rope else None
    given = problem.arguments() | problem.options | dict(num_splits=splits, backend=backend, return_amax=True)
    want = dk.sparse_decode(**(given | dict(q=dk.query_norm_rope(raw, norm_eps=eps, rope=pair))))
    got = dk.sparse_decode(**(given | dict(q=raw)), q_norm_eps=eps, q_rope=pair)
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.equal(a, b)
    if with_norm:  # the raw query has another result
        assert not torch.equal(dk.sparse_decode(**(given | dict(q=raw))).lse, want.lse)


def test_partials_are_those_of_the_two_calls(backend):
    problem = td.random_problem(3, 16, 70, 40, lengths=[70, 0, 5], extra_lengths=[40, 0, 3])
    raw, pair = queries(3, 16), rope(3)
    arguments = problem.arguments() | dict(num_splits=2, backend=backend)
    want = dk.sparse_decode_partial(**(arguments | dict(q=dk.query_norm_rope(raw, norm_eps=EPS, rope=pair))))
    got = dk.sparse_decode_partial(**(arguments | dict(q=raw)), q_norm_eps=EPS, q_rope=pair)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_strided_query_in_the_decode(backend):
    problem = td.random_problem(3, 8, 64)
    raw, (freqs, positions) = queries(3), rope(3)
    given = problem.arguments() | dict(backend=backend, q_norm_eps=EPS)
    want = dk.sparse_decode(**(given | dict(q=raw)), q_rope=(freqs, positions))
    wide = torch.full((3, 24, 1024), math.nan, dtype=torch.bfloat16)[:, ::3, :512]
    wide.copy_(raw)
    spread = positions.int().repeat_interleave(3)[::3]
    got = dk.sparse_decode(**(given | dict(q=wide)), q_rope=(torch.view_as_real(freqs).flatten(1), spread))
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_position_outside_of_the_table_in_the_decode(backend):
    problem = td.random_problem(3, 8, 64, lengths=[64, 64, 0])
    positions = torch.tensor([3, POSITIONS, -1])
    result = dk.sparse_decode(**problem.arguments(), q_rope=(rope()[0], positions), backend=backend)
    assert not result.out[0].isnan().any()
    assert result.out[1].isnan().all()
    assert (result.out[2] == 0).all()  # attends to nothing


def test_the_hopper_kernels_get_the_raw_query_and_what_to_do_to_it(monkeypatch):
    """Without a Hopper."""
    from sgl_dsv4_kernels import sm90_decode
    from sgl_dsv4_kernels.ops import decode as ops

    problem = td.random_problem(3, 8, 64)
    raw, pair = queries(3), rope(3)
    seen = []

    def launch(q, *args, prologue, **kw):
        seen.append((q, *prologue))

    monkeypatch.setattr(ops, "_usable_backend", lambda *args: "sm90")
    monkeypatch.setattr(sm90_decode, "unsupported", lambda *args: None)
    monkeypatch.setattr(sm90_decode, "launch", launch)
    monkeypatch.setattr(sm90_decode, "launch_partial", launch)
    dk.sparse_decode(**(problem.arguments() | dict(q=raw)), q_norm_eps=EPS, q_rope=pair, num_splits=1)
    dk.sparse_decode_partial(**(problem.arguments() | dict(q=raw)), q_norm_eps=EPS, q_rope=pair, num_splits=2)
    dk.sparse_decode(**(problem.arguments() | dict(q=raw)), num_splits=1)
    assert len(seen) == 3
    assert all(torch.equal(q, raw) for q, *_ in seen)
    for _, eps, freqs, positions in seen[:2]:
        assert eps == EPS
        assert torch.equal(freqs, torch.view_as_real(pair[0]).flatten(1))
        assert torch.equal(positions, pair[1])
    assert seen[2][1:] == (None, None, None)


@pytest.mark.parametrize("splits", [None, 2])
def test_compiles_without_graph_breaks(splits):
    problem = td.random_problem(3, 8, 64, 64)
    pair = rope(3)

    def run(q):
        given = problem.arguments() | dict(q=q * 2)
        return dk.sparse_decode(**given, num_splits=splits, q_norm_eps=EPS, q_rope=pair).out

    raw = queries(3)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(raw), run(raw))
