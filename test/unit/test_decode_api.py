"""The public decode functions on the CPU: arguments, choices, and how the ops are registered."""

from __future__ import annotations

import math

import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.ops import decode as ops
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.settings import settings


@pytest.fixture
def problem() -> td.Problem:
    return td.random_problem(3, 8, 70, 40, lengths=[70, 0, 5], extra_lengths=[40, 0, 3], rope=True)


def tensors(result: dk.DecodeOutput) -> list[torch.Tensor]:
    return [t.contiguous().view(torch.uint8) for t in result if t is not None]


@pytest.mark.parametrize("output", reference.OUTPUTS)
def test_splits_combined_are_the_decode(problem, output):
    one = dk.sparse_decode(**problem.arguments(), **problem.options, output=output, return_amax=True)
    partials = dk.sparse_decode_partial(**problem.arguments(), num_splits=1)
    again = dk.combine_splits(*partials, **problem.options, output=output, return_amax=True)
    for a, b in zip(tensors(one), tensors(again), strict=True):
        assert torch.equal(a, b)
    three = dk.sparse_decode(**problem.arguments(), **problem.options, output=output, return_amax=True, num_splits=3)
    torch.testing.assert_close(three.lse, one.lse, rtol=2.0**-23, atol=1e-6)
    torch.testing.assert_close(three.amax, one.amax, rtol=1e-5, atol=1e-6)
    assert (three.out.view(torch.uint8) == one.out.view(torch.uint8)).double().mean() > 0.99
    assert (one.scales is None) == (output == "bf16")
    assert (one.out[1].float() == 0).all()
    assert (one.lse[1] == math.inf).all()


def test_caller_outputs_are_written_and_returned(problem):
    want = dk.sparse_decode(**problem.arguments(), **problem.options)
    out = torch.full((3, 16, 600), 77.0, dtype=torch.bfloat16)
    lse = torch.full((8, 3), 77.0).t()
    for splits in (1, 2):
        view = out[:, ::2, :512]
        result = dk.sparse_decode(**problem.arguments(), **problem.options, out=view, lse=lse, num_splits=splits)
        assert result.out is view
        assert result.lse is lse
        torch.testing.assert_close(view, want.out, rtol=2.0**-7, atol=1e-3)
        assert (out[:, 1::2] == 77).all()
        assert (out[..., 512:] == 77).all()


@pytest.mark.parametrize("whole", [1, 5])
@pytest.mark.parametrize("second_cache", [False, True])
def test_last_rows_in_splits(monkeypatch, whole, second_cache):
    """What belongs to a row goes with it, and what belongs to all with both kinds of rows."""
    lengths = dict(lengths=[0, 3, 70, 130, 1, 64, 129])
    if second_cache:
        lengths["extra_lengths"] = [40, 0, 1, 33, 0, 40, 7]
    problem = td.random_problem(7, 8, 130, 40 if second_cache else None, rope=True, **lengths)
    given = problem.arguments() | problem.options | dict(q_norm_eps=1e-6, q_rope=problem.options["inverse_rope"])
    given["attn_sink"] = torch.linspace(-2, 2, 8)
    want, want_split = dk.sparse_decode(**given), dk.sparse_decode(**given, num_splits=2)
    cuts = []
    monkeypatch.setattr(ops, "_choose_cut", lambda *_: cuts.append(1) or sm90_decode.Cut(whole, 2))
    out, lse = torch.full_like(want.out, 7.0), torch.full_like(want.lse, 7.0)
    result = dk.sparse_decode(**given, out=out, lse=lse)
    assert cuts
    assert result.out is out
    assert result.lse is lse
    for got, one, two in ((out, want.out, want_split.out), (lse, want.lse, want_split.lse)):
        assert torch.equal(got[:whole], one[:whole])
        assert torch.equal(got[whole:], two[whole:])
    cuts.clear()
    for fixed in (dict(num_splits=1), dict(batch_invariant=True), dict(output="fp8_group128"), dict(return_amax=True)):
        dk.sparse_decode(**given, **fixed)
        assert not cuts, fixed


def test_forms_of_freqs_and_positions(problem):
    freqs, positions = problem.options.pop("inverse_rope")
    flat = torch.view_as_real(freqs).flatten(1)
    results = [
        dk.sparse_decode(**problem.arguments(), **problem.options, inverse_rope=(f, p)).out
        for f, p in ((freqs, positions), (flat, positions), (flat, positions.int()))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_float8_view_and_layout_names(problem):
    want = dk.sparse_decode(**problem.arguments()).out
    arguments = problem.arguments() | dict(layout="v4", extra_layout=None)
    arguments["cache"] = arguments["cache"].view(torch.float8_e4m3fn)
    assert torch.equal(dk.sparse_decode(**arguments).out, want)


@pytest.mark.parametrize("output", reference.OUTPUTS)
def test_no_rows(problem, output, monkeypatch):
    def launch(*args):
        raise AssertionError("launched")

    empty = problem.rows(slice(0, 0))
    o, lse = dk.sparse_decode_partial(**empty.arguments(), num_splits=4)
    assert o.shape == (4, 0, 8, 512)
    for name in ("sparse_decode", "sparse_decode_partial", "combine_splits"):
        monkeypatch.setattr(torch.ops.sgl_dsv4_kernels, name, launch, raising=False)
    for splits in (None, 1, 3):
        result = dk.sparse_decode(
            **empty.arguments(), **empty.options, num_splits=splits, output=output, return_amax=True
        )
        assert result.out.shape == (0, 8, 512)
        assert result.lse.shape == (0, 8)
        assert result.amax.shape == (0, 8)
    assert dk.combine_splits(o, lse, **empty.options, output=output).out.shape == (0, 8, 512)


def bad_arguments(p: td.Problem) -> list[tuple[type[Exception], str, dict]]:
    q, cache, indices = p.q, p.main.cache, p.main.indices
    freqs, positions = p.options["inverse_rope"]
    lse = torch.zeros(3, 8)
    return [
        (TypeError, "q: expected dtype torch.bfloat16, got torch.float32", dict(q=q.float())),
        (ValueError, r"q: expected shape \[tokens, heads, 512\], got \[3, 8, 256\]", dict(q=q[..., :256])),
        (ValueError, "q: expected 8, 16, 32, 64 or 128 heads, got 4", dict(q=q[:, :4])),
        (ValueError, r"q: expected stride\(2\) = 1, got 2", dict(q=q.repeat_interleave(2, 2)[..., ::2])),
        (TypeError, "q: expected a torch.Tensor, got int", dict(q=3)),
        (TypeError, "cache: expected a dtype of one byte", dict(cache=cache.short())),
        (ValueError, r"cache: expected shape \[pages, page bytes\]", dict(cache=cache[0])),
        (ValueError, "cache: expected at least 37440 bytes a page of 64 tokens, got 37439", dict(cache=cache[:, 1:])),
        (
            ValueError,
            r"cache: expected stride\(0\) >= 37440, got 100",
            dict(cache=cache.flatten().as_strided((3, 37440), (100, 1))),
        ),
        (ValueError, "page_size: expected a positive int, got 0", dict(page_size=0)),
        (TypeError, "page_size: expected a positive int, got 64.0", dict(page_size=64.0)),
        (TypeError, "indices: expected dtype torch.int32, got torch.int64", dict(indices=indices.long())),
        (ValueError, r"indices: expected shape \[3, topk\], got \[2, 70\]", dict(indices=indices[:2])),
        (ValueError, r"indices: expected stride\(1\) = 1, got 3", dict(indices=indices.t().contiguous().t())),
        (ValueError, r"topk_length: expected shape \[3\], got \[2\]", dict(topk_length=p.main.length[:2])),
        (TypeError, "topk_length: expected dtype torch.int32", dict(topk_length=p.main.length.long())),
        (ValueError, "extra_indices: expected together with extra_cache, extra_page_size", dict(extra_indices=None)),
        (ValueError, "extra_page_size: expected together with", dict(extra_page_size=None)),
        (
            ValueError,
            "extra_topk_length: expected None without extra_cache",
            dict(extra_cache=None, extra_indices=None, extra_page_size=None),
        ),
        (ValueError, "layout: expected a CacheLayout or one of 'v4', 'bf16'", dict(layout="v5")),
        (ValueError, "cache: expected at least 65536 bytes a page", dict(layout=CacheLayout.BF16)),
        (TypeError, "softmax_scale: expected a float or None", dict(softmax_scale="1")),
        (ValueError, r"attn_sink: expected shape \[8\], got \[7\]", dict(attn_sink=torch.zeros(7))),
        (TypeError, "attn_sink: expected dtype torch.float32", dict(attn_sink=torch.zeros(8).half())),
        (TypeError, r"inverse_rope: expected a pair \(freqs_cis, positions\)", dict(inverse_rope=freqs)),
        (ValueError, r"freqs_cis: expected shape \[positions, 32\]", dict(inverse_rope=(freqs[:, :16], positions))),
        (ValueError, r"positions: expected shape \[3\], got \[2\]", dict(inverse_rope=(freqs, positions[:2]))),
        (TypeError, "positions: expected dtype", dict(inverse_rope=(freqs, positions.float()))),
        (ValueError, "output: expected one of 'bf16', 'fp8_group128'", dict(output="fp8")),
        (ValueError, "out: expected None with output 'fp8_group128'", dict(output="fp8_group128", out=q)),
        (ValueError, r"out: expected shape \[3, 8, 512\]", dict(out=q[:2])),
        (TypeError, "out: expected dtype torch.bfloat16", dict(out=q.float())),
        (ValueError, r"lse: expected shape \[3, 8\]", dict(lse=lse[:2])),
        (TypeError, "lse: expected dtype torch.float32", dict(lse=lse.double())),
        (ValueError, "num_splits: expected a positive int, got 0", dict(num_splits=0)),
        (TypeError, "num_splits: expected a positive int, got True", dict(num_splits=True)),
        (ValueError, "num_splits: expected None with batch_invariant=True", dict(num_splits=2, batch_invariant=True)),
        (ValueError, "backend: expected None or one of 'sm90', 'triton', 'torch'", dict(backend="cuda")),
        (ValueError, "indices: expected device cpu, got meta", dict(indices=indices.to("meta"))),
    ]


def test_bad_arguments(problem):
    good = problem.arguments() | problem.options
    dk.sparse_decode(**good)
    for kind, message, change in bad_arguments(problem):
        with pytest.raises(kind, match=message):
            dk.sparse_decode(**(good | change))


def test_bad_arguments_of_the_other_functions(problem):
    arguments = problem.arguments()
    with pytest.raises(ValueError, match="num_splits: expected a positive int, got -1"):
        dk.sparse_decode_partial(**arguments, num_splits=-1)
    with pytest.raises(TypeError, match="q: expected dtype"):
        dk.sparse_decode_partial(**(arguments | dict(q=problem.q.half())), num_splits=1)
    o, lse = dk.sparse_decode_partial(**arguments, num_splits=2)
    for kind, message, change in [
        (TypeError, "o_accum: expected dtype torch.float32", dict(o_accum=o.double())),
        (ValueError, r"o_accum: expected shape \[splits, tokens, heads, 512\]", dict(o_accum=o[0])),
        (ValueError, "o_accum: expected at least one split", dict(o_accum=o[:0], lse_accum=lse[:0])),
        (ValueError, r"lse_accum: expected shape \[2, 3, 8\], got \[1, 3, 8\]", dict(lse_accum=lse[:1])),
        (ValueError, "attn_sink: expected shape", dict(attn_sink=torch.zeros(9))),
        (ValueError, "output: expected one of", dict(output="no")),
    ]:
        with pytest.raises(kind, match=message):
            dk.combine_splits(**(dict(o_accum=o, lse_accum=lse) | change))


def test_backends(monkeypatch):
    cpu = torch.device("cpu")
    assert ops.resolve_backend(None, cpu) == "torch"
    assert ops.resolve_backend("torch", cpu) == "torch"
    with pytest.raises(ValueError, match="'sm90' needs a CUDA device"):
        ops.resolve_backend("sm90", cpu)
    triton_launch = pytest.importorskip("sgl_dsv4_kernels.triton_launch")
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="'triton' needs a CUDA device or TRITON_INTERPRET=1, got tensors on cpu"):
        ops.resolve_backend("triton", cpu)


def test_checked_mode(problem, monkeypatch):
    freqs, positions = problem.options["inverse_rope"]
    positions = torch.tensor([0, 64, 5])
    dk.sparse_decode(**problem.arguments(), inverse_rope=(freqs, positions))
    monkeypatch.setattr(settings, "check", True)
    with pytest.raises(ValueError, match=r"positions: expected values in \[0, 64\)"):
        dk.sparse_decode(**problem.arguments(), inverse_rope=(freqs, positions))


def test_batch_invariant_rows():
    problem = td.random_problem(8, 8, 128, 512, rope=True)
    whole = dk.sparse_decode(**problem.arguments(), **problem.options, batch_invariant=True)
    for row in (0, 5):
        one = problem.rows(slice(row, row + 1))
        alone = dk.sparse_decode(**one.arguments(), **one.options, batch_invariant=True)
        torch.testing.assert_close(alone.out[0], whole.out[row], rtol=2.0**-7, atol=1e-4)


def op_arguments(problem: td.Problem) -> tuple:
    main, extra = problem.main, problem.extra
    tail = (extra.cache, extra.indices, extra.length, main.page_size, extra.page_size, 512**-0.5, 0, 0, False)
    return problem.q, main.cache, main.indices, main.length, *tail, None, None, None


def test_opcheck(problem):
    namespace = torch.ops.sgl_dsv4_kernels
    last = td.epilogue_arguments(problem.options).values()
    lse, amax = torch.empty(3, 8), torch.empty(3, 8)
    for code, output in enumerate(reference.OUTPUTS):
        out = torch.empty((3, 8, 512), dtype=torch.bfloat16 if code == 0 else torch.float8_e4m3fn)
        scales = reference.empty_scales(3, 8, output, out.device)
        arguments = (*op_arguments(problem), *last, code, "torch", out, lse, scales, amax if code else None)
        # torch cannot compare float8 tensors before and after
        tests = {} if code == 0 else dict(test_utils=("test_autograd_registration", "test_faketensor"))
        torch.library.opcheck(namespace.sparse_decode.default, arguments, **tests)
        if code == 0:
            partials = torch.empty(2, 1, 8, 512), torch.empty(2, 1, 8)
            torch.library.opcheck(namespace.sparse_decode.default, (*arguments, *partials))
    o_accum, lse_accum = torch.empty(2, 3, 8, 512), torch.empty(2, 3, 8)
    arguments = (*op_arguments(problem), True, "torch", o_accum, lse_accum)
    torch.library.opcheck(namespace.sparse_decode_partial.default, arguments)
    namespace.sparse_decode_partial(*arguments)
    out = torch.empty((3, 8, 512), dtype=torch.bfloat16)
    torch.library.opcheck(namespace.combine_splits.default, (o_accum, lse_accum, *last, 0, False, out, lse, None, amax))


@pytest.mark.parametrize("splits", [None, 3])
def test_compiles_without_graph_breaks(problem, splits):
    def run(q, out=None):
        arguments = problem.arguments() | dict(q=q * 2)
        return dk.sparse_decode(**arguments, **problem.options, num_splits=splits, return_amax=True, out=out)

    want = run(problem.q)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(problem.q), want, strict=True):
        assert a is b is None or torch.equal(a, b)
    out = torch.zeros((3, 8, 512), dtype=torch.bfloat16)
    compiled(problem.q, out)
    assert torch.equal(out, want.out)
