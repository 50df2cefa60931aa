"""B5, SGLang's norm and RoPE of the query left to our decode: in every supported SGLang, and all ways out of it."""

from __future__ import annotations

import logging

import pytest
import torch
from fake_sglang import VERSIONS, FakeSGLang, Mode, imported, nan_equal
from plugin_world import World

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.plugin import attention, choice, install, query, state, verify
from sgl_dsv4_kernels.plugin.options import Options

B5 = "B5 fused_q_norm_rope"
VERSION = "0.5.23"
RATIOS = (0, 4, 128)


@pytest.fixture
def sglang(tmp_path):
    with imported(VERSION, tmp_path) as fake:
        yield fake


def start(fake: FakeSGLang, *, warm: bool = True, world: dict | None = None, **options) -> World:
    """The plugin with "fused"; ``warm``: a decode of ours has been served."""
    install.install(Options(**({"kernels": "all"} | options)))
    fake.apply_hooks()
    here = World(fake, **(world or {}))
    if warm:
        here.attend(0)
        fake.stock_calls.clear()
        fake.stock_queries.clear()
        state.current().ledger.foreseen.clear()
    return here


def expected(tmp_path, version: str = VERSION, prepare=lambda world: None, mode: str = "decode", **world) -> dict:
    """Outputs of that SGLang alone."""
    (tmp_path / "alone").mkdir()
    with imported(version, tmp_path / "alone") as fake:
        here = World(fake, **world)
        prepare(here)
        return {ratio: here.attend(ratio, mode) for ratio in RATIOS}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= 0.004 * b.float().norm())


def reasons() -> str:
    ledger = state.current().ledger
    return " | ".join(reason for _, reason in [*ledger.fallbacks, *ledger.foreseen])


# ---- every version ----


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [64, 16])
@pytest.mark.parametrize("mode", ["decode", "target_verify", "draft_extend_v2"])
def test_deferred(version, heads, mode, tmp_path):
    ranks = dict(heads=heads, rank=0 if heads == 64 else 2)
    want = expected(tmp_path, version, mode=mode, **ranks)
    (tmp_path / "with").mkdir()
    with imported(version, tmp_path / "with") as fake:
        world = start(fake, world=ranks, strict=version != "0.5.12")
        got = {ratio: world.attend(ratio, mode) for ratio in RATIOS}
        assert fake.stock_calls == []
        leads = version in ("0.5.12", "0.5.13") and heads < 64  # heads of lower ranks come first: not deferred
        assert fake.stock_queries == (["B5"] * 3 if leads else [])
        assert state.current().ledger.served[B5] == (0 if leads else 3)
        assert not state.current().ledger.fallbacks
        assert all(close(got[ratio], want[ratio]) for ratio in RATIOS)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bits_are_those_without_fused(version, tmp_path):
    """The query is the same bit for bit, and so is all that follows."""
    outputs = []
    for kernels in ("store,decode", "all"):
        folder = tmp_path / kernels.replace(",", "_")
        folder.mkdir()
        with imported(version, folder) as fake:
            install.install(Options(kernels=kernels))
            fake.apply_hooks()
            world = World(fake, heads=64)
            world.attend(0)
            outputs.append([world.attend(ratio) for ratio in RATIOS])
            assert len(fake.stock_queries) == (1 if kernels == "all" else 4)
    assert all(nan_equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("kernels", ["off", "store", "decode", "store,decode"])
def test_other_kernels_leave_the_query_to_sglang(sglang, kernels):
    install.install(Options(kernels=kernels))
    sglang.apply_hooks()
    World(sglang).step()
    assert sglang.stock_queries == ["B5"] * 3
    assert kernels == "off" or "B5" not in state.current().hooks


def test_without_the_stores(sglang):
    world = start(sglang, kernels="decode,fused", strict=True)
    world.step()
    assert sglang.stock_calls == ["A2", "A1", "A1"]
    assert sglang.stock_queries == []


def test_options():
    assert Options(kernels="all").wants("store")
    assert not Options(kernels="decode,fused").wants("store")
    assert Options(kernels="all").wants("fused")
    assert not Options(kernels="store,decode").wants("fused")
    for kernels in ("fused", "store,fused", "off,fused", "all, fused"):
        with pytest.raises(ValueError, match="SGL_DSV4_KERNELS"):
            Options(kernels=kernels)


def test_the_line_says_so(sglang, caplog):
    caplog.set_level(logging.INFO)
    start(sglang)
    (line,) = [r.message for r in caplog.records if "active" in r.message]
    assert "B5 fused_q_norm_rope" in line
    assert "the query's norm and RoPE in our decode" in line


# ---- what is not deferred ----


def test_first_decode_is_not(sglang):
    """Only when B2 has served: a backend that never comes to it is then never given a raw query."""
    world = start(sglang, warm=False, strict=True)
    world.attend(4)
    assert sglang.stock_queries == ["B5"]
    world.attend(4)
    assert sglang.stock_queries == ["B5"]


def test_prefill_is_not(sglang):
    world = start(sglang, strict=True)
    world.attend(4, "extend")
    assert sglang.stock_queries == ["B5"]
    assert sglang.stock_calls == ["B2", "B3"]


def test_many_rows_are_not(sglang):
    start(sglang, strict=True)
    World(sglang, rows=choice.MOST_ROWS[64] + 1).attend(4)
    assert sglang.stock_queries == ["B5"]


def test_breakable_graphs_are_not(sglang):
    world = start(sglang)
    sglang.module("sglang.srt.models.deepseek_v4").in_breakable_graph = True
    world.attend(4, "target_verify")
    assert sglang.stock_queries == ["B5"]


@pytest.mark.parametrize("name", attention.ELSEWHERE)
def test_other_platforms_are_not(sglang, name):
    world = start(sglang)
    setattr(sglang.module("sglang.srt.models.deepseek_v4"), name, True)
    world.attend(4)
    assert sglang.stock_queries == ["B5"]


def test_tracing_is_not(sglang, monkeypatch):
    world = start(sglang)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    world.attend(4)
    assert sglang.stock_queries == ["B5"]


def test_a_layer_of_its_own_is_not(sglang):
    """DSpark's attention calls the function outside of MQALayer.forward."""
    world = start(sglang, strict=True)
    q = world.queries
    out = torch.full_like(q, torch.nan)
    query_kernel = sglang.module("sglang.srt.models.deepseek_v4").fused_q_norm_rope
    query_kernel(q, out, 1e-6, world.freqs, world.positions)
    assert sglang.stock_queries == ["B5"]
    assert not out.isnan().any()


def given(world: World) -> dict:
    q = world.queries
    return dict(q_input=q, q_output=torch.empty_like(q), eps=1e-6, freqs_cis=world.freqs, positions=world.positions)


@pytest.mark.parametrize(
    ("change", "reason", "foreseen"),
    [
        (lambda v: dict(eps=None), "a query without a norm", True),
        (lambda v: dict(q_output=v["q_output"].to(torch.float8_e4m3fn)), "as torch.float8_e4m3fn", True),
        (lambda v: dict(q_input=v["q_input"].half()), "a query of torch.float16", False),
        (lambda v: dict(q_output=v["q_output"][:, :8]), "q_output [3, 8, 512]", False),
        (lambda v: dict(q_output=v["q_input"]), "q_input and q_output overlap", False),
        (lambda v: dict(positions=v["positions"].clone()), "positions are not the layer's", False),
        (lambda v: dict(freqs_cis=v["freqs_cis"].clone()), "freqs_cis is not the layer's", False),
        (lambda v: dict(q_input=v["q_input"][:, :5], q_output=v["q_output"][:, :5]), "5 heads", False),
        (lambda v: dict(fancy=True), "argument fancy is unknown", False),
    ],
)
def test_declines(sglang, change, reason, foreseen):
    world = start(sglang)
    call = attention.ModelCall(None, world.freqs, world.positions, mode=Mode("decode"))
    values = given(world)
    values |= change(values)
    token = attention._model.set(call)
    seen = []
    try:
        query.fused_q_norm_rope(lambda **kwargs: seen.append(kwargs), **values)
    finally:
        attention._model.reset(token)
    assert seen[0].keys() == values.keys()
    assert all(seen[0][name] is values[name] for name in values)
    assert call.query is None
    ledger = state.current().ledger
    assert any(reason in why for _, why in (ledger.foreseen if foreseen else ledger.fallbacks)), reasons()


# ---- what was deferred and is asked for after all ----


def test_decode_that_falls_back_gets_its_query(sglang, tmp_path):
    """Every reason of B2's: here scheduler metadata that it does not know."""
    want = expected(tmp_path)
    world = start(sglang)
    world.backend.metadata = object()
    got = world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert sglang.stock_calls == ["B2", "B3"]
    assert nan_equal(got, want[4])


def test_decode_that_fails_gets_its_query(sglang, tmp_path, monkeypatch):
    want = expected(tmp_path)
    world = start(sglang)

    def fails(**kwargs):
        assert kwargs["q_norm_eps"] == 1e-6
        raise KeyError("compiler")

    monkeypatch.setattr(dk, "sparse_decode", fails)
    got = world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert nan_equal(got, want[4])


def test_decode_of_other_heads_gets_its_query(sglang):
    """The backend's number of heads is not the query's: ours runs, on what SGLang's kernel has made."""
    world = start(sglang)
    world.layers[4].attn_mqa.tp_q_head_num = 32
    got = world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert sglang.stock_calls == []
    assert got.shape[1] == 32
    assert not got.isnan().any()
    assert state.current().is_active("B5")


def test_backend_with_another_kernel(sglang, tmp_path, caplog):
    """sm_120's, TRT-LLM's: B2 is not called. The backend runs again with the query, and none is deferred any more."""

    def other(here):
        here.backend.other_kernel = lambda q: q * 2

    want = expected(tmp_path, prepare=other)
    world = start(sglang)
    other(world)
    assert nan_equal(world.attend(4), want[4])
    assert sglang.stock_queries == ["B5"]
    assert nan_equal(world.attend(128), want[128])
    assert sglang.stock_queries == ["B5"] * 2
    assert "reads the query elsewhere" in state.current().problems["B5"]
    assert sum("reads the query elsewhere" in r.message for r in caplog.records) == 1
    world.backend.other_kernel = None
    world.attend(4)  # B2 still serves
    assert sglang.stock_calls.count("B2") == 0


def test_backend_that_copies_the_query(sglang, tmp_path):
    want = expected(tmp_path)
    world = start(sglang)
    world.backend.copies_query = True
    got = world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert close(got, want[4])
    assert not state.current().fuses_query


def test_strict_makes_that_an_error(sglang):
    world = start(sglang, strict=True)
    world.backend.other_kernel = lambda q: q * 2
    with pytest.raises(RuntimeError, match="reads the query elsewhere"):
        world.attend(4)
    assert attention._model.get() is None


def test_layer_without_a_backend_call_is_an_error(sglang):
    world = start(sglang)
    world.layers[4].backend = type("Other", (), {"forward": lambda self, **kw: kw["q"]})()
    with pytest.raises(RuntimeError, match="SGL_DSV4_KERNELS=store,decode"):
        world.attend(4)
    assert attention._model.get() is None


def test_a_second_decode_in_the_layer_gets_the_query(sglang):
    """Ours took the raw one; what then reads ``q_output`` must not find rubbish."""
    world = start(sglang)
    seen = []
    forward = type(world.backend).forward

    def twice(self, **given):
        first = forward(self, **given)
        self.metadata = object()
        seen.append((first, forward(self, **given)))
        return first

    world.layers[4].backend = type("Twice", (), {"forward": lambda self, **given: twice(world.backend, **given)})()
    world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert not seen[0][1].isnan().any()


@pytest.mark.parametrize("missing", ["B1", "B2", "B3", "B4"])
def test_needs_the_other_hooks(sglang, missing):
    world = start(sglang, warm=False)
    state.current().started = True
    state.current().problems[missing] = "not here"
    world.attend(4)
    world.attend(4)
    assert sglang.stock_queries == ["B5"] * 2


def test_a_missing_function_leaves_the_rest(sglang, caplog):
    module = sglang.module("sglang.kernels.ops.attention.dsv4.norm_rope")
    stock = module.fused_q_norm_rope
    module.fused_q_norm_rope = lambda q_input, q_output, eps, table, positions: stock(
        q_input, q_output, eps, table, positions
    )
    install.install(Options(kernels="all"))
    sglang.apply_hooks()
    world = World(sglang)
    for _ in range(2):
        world.attend(4)
    assert "has no parameter freqs_cis" in state.current().problems["B5"]
    assert sglang.stock_queries == ["B5"] * 2
    assert sglang.stock_calls == []


# ---- shadow mode ----


def test_shadow_mode_compares_bits_and_serves_sglangs(sglang, tmp_path):
    world = start(sglang, warm=False, verify=True, strict=True, dump_dir=str(tmp_path))
    seen = []
    decode = dk.sparse_decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dk, "sparse_decode", lambda **given: seen.append(given) or decode(**given))
        world.attend(4)
    assert sglang.stock_queries == ["B5"]
    assert sglang.stock_calls == ["B2", "B3"]
    served = state.current().ledger.served
    assert served[f"{B5}, compared"] == 1
    assert not [name for name in served if "MISMATCHED" in name]
    assert seen[0]["q_norm_eps"] == 1e-6  # ours was the fused one
    assert seen[0]["q"].data_ptr() != world.queries.data_ptr()
    assert torch.equal(seen[0]["q"], world.queries)


def test_shadow_mode_finds_one_wrong_value(sglang, tmp_path, monkeypatch):
    world = start(sglang, warm=False, verify=True, dump_dir=str(tmp_path))
    kernel = dk.query_norm_rope

    def wrong(q, **given):
        out = kernel(q, **given)
        out.view(torch.int16)[1, 2, 3] ^= 1
        return out

    verify._dumped.discard("B5")
    with monkeypatch.context() as patch:
        patch.setattr(dk, "query_norm_rope", wrong)
        world.attend(4)
    assert state.current().ledger.served[f"{B5}, MISMATCHED"] == 1
    (path,) = tmp_path.glob("sgl_dsv4_mismatch_B5_*.pt")
    dump = verify.load_dump(path)
    assert "1 of 98304 values differ" in dump["text"]
    assert torch.equal(verify.replay(dump), dump["expected"])
    assert int((dump["expected"] != dump["actual"]).sum()) == 1
