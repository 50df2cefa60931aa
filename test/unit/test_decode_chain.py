"""benchmark/bench_decode_chain.py, with the reference in the place of other people's kernels."""

from __future__ import annotations

import contextlib
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


def without_norm(q_input, q_output, *_):
    q_output.copy_(q_input)


def without_rotation(*_, **__):
    pass


def scales_of_another_group(*arguments, **keywords):
    codes, scales = quantise(*arguments, **keywords)
    return codes, scales.roll(1, 1)


@pytest.mark.parametrize(
    ("output", "wrong"),
    [
        ("bf16", {"norm_rope": without_norm}),
        ("bf16", {"rope_inplace": without_rotation}),
        ("fp8_group128", {"norm_rope": without_norm}),
        ("fp8_group128", {"rope_inplace": without_rotation}),
        ("fp8_group128", {"quantise": scales_of_another_group}),
    ],
)
def test_both_chains_compute_the_same(chain, output, wrong):
    problem, rope, (flashmla, sglang) = chain
    bench_decode_chain.check_peers(problem, rope, output, (flashmla, sglang))
    with pytest.raises(SystemExit, match=f"the {output} outputs of the two chains differ"):
        bench_decode_chain.check_peers(problem, rope, output, (flashmla, sglang._replace(**wrong)))


def test_fp8_output_of_the_stock_chain(chain):
    problem, rope, peers = chain
    codes, scales = bench_decode_chain.make_calls(problem, rope, "fp8_group128", peers)["stock"]()
    tokens, heads = problem.q.shape[:2]
    assert codes.shape == (tokens * heads // 8, 4096)
    assert scales.shape == (tokens * heads // 8, 32)


def test_without_peers(chain):
    problem, rope, _ = chain
    assert list(bench_decode_chain.make_calls(problem, rope, "bf16", None)) == ["ours"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_warm_times_are_taken_and_kept_before_any_profile(monkeypatch, tmp_path, capsys, interrupted):
    done = []

    def medians(kind, us):
        def measure(calls, *_):
            if interrupted and kind == "among":
                raise KeyboardInterrupt
            done.append(kind)
            return dict.fromkeys(calls, us)

        return measure

    shapes = [{"heads": 8, "topk": 40, "extra": 0, "b": b} for b in (1, 2)]
    given = [(shape, td.random_problem(shape["b"], 8, 40, 0)) for shape in shapes]
    facts = {"commit": "abc"}
    for name, stand_in in {
        "require_cuda": lambda: None, "run_facts": lambda: facts, "problems": lambda _: given,
        "random_freqs": lambda *_: None, "flashmla": lambda: (None, "none"),
        "sglang_steps": lambda: (None, "none"), "warm_medians": medians("warm", 8.0),
        "among_medians": medians("among", 9.5),
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_decode_chain, name, stand_in)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: None)
    path = tmp_path / "chain.csv"
    monkeypatch.setattr(sys, "argv", ["bench_decode_chain.py", "--csv", str(path)])
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        assert bench_decode_chain.main() == 0
    assert done == ["warm"] * 4 + ["among"] * (0 if interrupted else 2)
    head, *lines = path.read_text().splitlines()
    assert head == "heads,topk,extra,b,output,ours_us,ours_among_us,commit"
    among = "" if interrupted else "9.50"
    assert lines == [
        f"8,40,0,{b},{output},8.00,{us},abc" for b in (1, 2) for output, us in (("bf16", among), ("fp8_group128", ""))
    ]
    if not interrupted:
        assert [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[-2:]] == [
            ["8.00", "-", "9.50", "-"],
            ["2", "fp8_group128", "8.00", "-"],
        ]


@pytest.fixture
def sglang_modules(monkeypatch):
    """A SGLang of these modules below sglang.kernels.ops alone, each with these functions."""

    def install(**modules):
        monkeypatch.setitem(sys.modules, "sglang", None)  # so that no other module of it is found
        for name, functions in modules.items():
            module = types.SimpleNamespace(**dict.fromkeys(functions, name))
            monkeypatch.setitem(sys.modules, f"sglang.kernels.ops.{name.replace('__', '.')}", module)

    return install


QUERY, INVERSE, QUANTISE = "fused_q_norm_rope", "fused_rope_inplace", "sglang_per_token_group_quant_fp8"


@pytest.mark.parametrize("place", ["attention__dsv4__norm_rope", "attention__dsv4__elementwise"])
def test_sglang_steps_are_found_where_versions_have_them(sglang_modules, place):
    sglang_modules(**{place: [QUERY, INVERSE], "quantization__fp8_kernel": [QUANTISE]})
    assert testing_peers.sglang_steps() == ((place, place, "quantization__fp8_kernel"), "")


@pytest.mark.parametrize(
    ("missing", "modules"),
    [
        (QUERY, {}),
        (INVERSE, {"attention__dsv4__norm_rope": [QUERY], "attention__dsv4__elementwise": []}),
        (QUANTISE, {"attention__dsv4__norm_rope": [QUERY, INVERSE]}),
    ],
)
def test_missing_peers_have_a_reason(sglang_modules, missing, modules):
    sglang_modules(**modules)
    steps, reason = testing_peers.sglang_steps()
    assert steps is None
    assert reason.startswith(f"SGLang's {missing} cannot be imported: ")
