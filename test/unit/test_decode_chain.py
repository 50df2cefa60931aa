"""benchmark/bench_decode_chain.py and its table, with the reference in the place of other people's kernels."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels import testing_peers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import bench_decode_chain  # noqa: E402

EPS = bench_decode_chain.EPS


class FlashMLA(types.SimpleNamespace):
    """Answers for the padded query, from the problem's caches."""

    FlashMLASchedMeta = object

    def flash_mla_with_kvcache(self, q, attn_sink, **keywords):
        assert q.shape[2] in (64, 128)
        assert attn_sink.shape == (q.shape[2],)
        problem = self.problem
        result = dk.sparse_decode(**(problem.arguments() | dict(q=q[:, 0], attn_sink=attn_sink)))
        return result.out[:, None], result.lse


def norm_rope(q_input, q_output, eps, freqs_cis, positions):
    dk.query_norm_rope(q_input, norm_eps=eps, rope=(freqs_cis, positions), out=q_output)


def rope_inplace(q, k, freqs_cis, positions, inverse):
    assert k is None
    assert inverse
    turned = torch.view_as_complex(q.float().unflatten(-1, (-1, 2))) * freqs_cis[positions].conj()[:, None]
    q.copy_(torch.view_as_real(turned).flatten(-2))


def quantise(x, group_size, scale_ue8m0):
    assert x.is_contiguous()
    assert not scale_ue8m0
    scales = x.float().unflatten(-1, (-1, group_size)).abs().amax(-1).clamp(min=1e-10) / 448
    return (x.float() / scales.repeat_interleave(group_size, 1)).to(torch.float8_e4m3fn), scales


@pytest.fixture(params=[8, 64])
def chain(request):
    """A problem, its rotation, and the peers."""
    problem = td.random_problem(3, request.param, 70, 40, lengths=[70, 9, 64], extra_lengths=[40, 3, 0])
    rope = td.random_freqs(64), torch.tensor([3, 60, 7])
    return problem, rope, (FlashMLA(problem=problem), testing_peers.SglangSteps(norm_rope, rope_inplace, quantise))


def test_both_chains_compute_the_same(chain):
    bench_decode_chain.check_peers(*chain)
    problem, rope, peers = chain
    wrong = peers[1]._replace(norm_rope=lambda q_input, q_output, *_: q_output.copy_(q_input))
    with pytest.raises(SystemExit, match="differ"):
        bench_decode_chain.check_peers(problem, rope, (peers[0], wrong))


def test_fp8_output(chain):
    problem, rope, peers = chain
    calls = bench_decode_chain.make_calls(problem, rope, "fp8_group128", peers)
    ours, (codes, scales) = calls["ours"](), calls["stock"]()
    tokens, heads = problem.q.shape[:2]
    assert codes.shape == (tokens * heads // 8, 4096)
    assert scales.shape == (tokens * heads // 8, 32)
    stock = codes.double() * scales.double().repeat_interleave(128, 1)
    mine = ours.out.double() * ours.scales.double().reshape(tokens, heads, 4).repeat_interleave(128, 2)
    assert td.relative_error(stock.view(tokens, heads, 512), mine) < 0.05


def test_without_peers(chain):
    problem, rope, _ = chain
    assert list(bench_decode_chain.make_calls(problem, rope, "bf16", None)) == ["ours"]


def test_missing_peers_have_a_reason():
    steps, reason = testing_peers.sglang_steps()
    assert (steps is None) == bool(reason)


def test_tables():
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    rows = [
        {"heads": h, "topk": "128", "extra": "512", "b": b, "output": output, "ours_us": "8.00"} | stock
        for h, stock in (("64", {"stock_us": "20.00"}), ("8", {}))
        for b in ("1", "16")
        for output in bench_decode_chain.OUTPUTS
    ]
    lines = results.chain_tables(rows)
    assert "| rows | 64 heads, bf16 | 64 heads, fp8_group128 |" in lines
    assert "| 16 | 8.0 / 20.0 (2.50) | 8.0 / 20.0 (2.50) |" in lines
    assert "| 1 | 8.0 / - | 8.0 / - |" in lines
