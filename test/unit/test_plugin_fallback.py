"""What our kernels do not take goes to SGLang's, unchanged, and is said once; errors of the GPU are not hidden."""

from __future__ import annotations

import inspect
import logging
import sys
import types

import pytest
import torch
from fake_sglang import imported
from plugin_world import Plan, World

import sgl_dsv4_kernels as dk
import sgl_dsv4_plugin
from sgl_dsv4_kernels.plugin import attention, choice, install, state, store
from sgl_dsv4_kernels.plugin.fallback import MOST_REASONS, Declined, Ledger
from sgl_dsv4_kernels.plugin.options import Options
from sgl_dsv4_kernels.plugin.targets import BY_KEY, Binder, signature_problem

VERSION = "0.5.23"  # has every argument that there is


@pytest.fixture
def sglang(tmp_path):
    with imported(VERSION, tmp_path) as fake:
        yield fake


def start(fake, **options) -> World:
    install.install(Options(**options))
    fake.apply_hooks()
    return World(fake)


def reasons(plugin: state.Plugin) -> str:
    return " | ".join(f"{label}: {reason}" for label, reason in plugin.ledger.fallbacks)


# ---- store ----


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("use_fp4", True, "use_fp4 is True"),
        ("bf16_store", True, "bf16_store is True"),
        ("fp8_2buff", True, "fp8_2buff is True"),
        ("layout", "v41", "layout is 'v41'"),
        ("kvcache_scale", torch.zeros(1), "kvcache_scale is a tensor"),
        ("page_size", 3, "page_size: expected a power of two"),
        ("kv", torch.zeros(64, 512, dtype=torch.float16), "kv: expected dtype"),
    ],
)
def test_compressed_store_declines(sglang, argument, value, reason):
    world = start(sglang)
    given = dict(
        kv=torch.zeros(64, 512), plan=Plan(4, torch.zeros(64, 16, dtype=torch.uint8), True),
        norm_weight=torch.ones(512), norm_eps=1e-6, freq_cis=world.freqs, out_loc=torch.zeros(64).long(),
        kvcache=world.caches[4], page_size=64,
    ) | {argument: value}  # fmt: skip
    seen = []
    store.compress_norm_rope_store(lambda *args, **kwargs: seen.append((args, kwargs)), **given)
    (((), kwargs),) = seen
    assert kwargs.keys() == given.keys()
    assert all(kwargs[name] is given[name] for name in given)
    assert reason in reasons(state.current())
    assert not state.current().ledger.served


def test_indexer_keys_stay_with_sglang(sglang, caplog):
    world = start(sglang, strict=True)  # foreseen: no error
    caplog.set_level(logging.INFO)
    for _ in range(3):
        world.store_compressed(4, kv=torch.zeros(64, 128))
    assert sglang.stock_calls == ["A1"] * 3
    assert sum("indexer" in record.message for record in caplog.records) == 1
    assert sum(state.current().ledger.foreseen.values()) == 3


def test_query_rope_in_the_store_declines(sglang):
    world = start(sglang)
    world.store_swa(q=torch.zeros(130, 64, 512))
    assert sglang.stock_calls == ["A2"]
    assert "q is a tensor" in reasons(state.current())


def test_parameter_of_a_later_version(sglang):
    """A default is harmless, another value is not ours."""
    start(sglang)
    target = BY_KEY["A2"]

    def newer(kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache, page_size, layout="v4", q=None, fancy=0): ...

    signature = inspect.signature(newer)
    assert signature_problem(target, signature) is None
    binder = Binder(target, signature)
    assert binder.objection(binder.bind((1, 2), {"fancy": 0, "layout": "v4"})) is None
    assert binder.objection(binder.bind((1, 2), {"fancy": 1})) == "fancy is 1, expected 0"
    assert binder.objection(binder.bind((), {"other": None})) == "argument other is unknown"
    needed = inspect.signature(lambda kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache, page_size, new: None)
    assert "new parameter without a default: new" in signature_problem(target, needed)
    renamed = inspect.signature(lambda kv, weight, eps, freqs_cis, positions, out_loc, kvcache, page_size: None)
    assert "kv_weight" in signature_problem(target, renamed)


# ---- decode ----


def decode_values(world: World) -> dict:
    backend, rows = world.backend, world.rows
    return dict(
        q=torch.zeros(rows, 1, 64, 512, dtype=torch.bfloat16), k_cache=backend.cache, block_table=None,
        cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=backend.metadata, softmax_scale=512**-0.5,
        is_fp8_kvcache=True, indices=backend.indices, topk_length=backend.lengths, attn_sink=torch.zeros(64),
    )  # fmt: skip


class Other:
    """Scheduler metadata of another kind."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda v: dict(block_table=torch.zeros(1)), "block_table is a tensor"),
        (lambda v: dict(cache_seqlens=torch.zeros(1)), "cache_seqlens is a tensor"),
        (lambda v: dict(kv_format="V41"), "kv_format is 'V41'"),
        (lambda v: dict(use_legacy=False), "use_legacy is False"),
        (lambda v: dict(is_fp8_kvcache=False), "is_fp8_kvcache is False"),
        (lambda v: dict(head_dim_v=256), "head_dim_v is 256"),
        (lambda v: dict(causal=True), "causal is True"),
        (lambda v: dict(indices=None), "indices is None"),
        (lambda v: dict(indices=v["indices"].expand(-1, 2, -1)), "indices has shape [3, 2, 128]"),
        (lambda v: dict(tile_scheduler_metadata=None), "tile_scheduler_metadata is a NoneType"),
        (lambda v: dict(tile_scheduler_metadata=Other()), "tile_scheduler_metadata is a Other"),
        (lambda v: dict(q=v["q"].expand(-1, 2, -1, -1)), "q is torch.bfloat16 [T, *[2, 64, 512]]"),
        (lambda v: dict(q=v["q"].half()), "q is torch.float16"),
        (lambda v: dict(q=v["q"][..., :256]), "q is torch.bfloat16 [T, *[1, 64, 256]]"),
        (lambda v: dict(q=v["q"][:, :, :5]), "5 of 5 heads"),
        (lambda v: dict(k_cache=v["k_cache"][..., :528]), "not a V4 cache"),
        (lambda v: dict(k_cache=v["k_cache"].float()), "not a V4 cache"),
        (lambda v: dict(k_cache=v["k_cache"].contiguous()), "k_cache has pages of 149504 bytes"),
        (lambda v: dict(extra_k_cache=v["k_cache"]), "extra_indices_in_kvcache has shape None"),
        (lambda v: dict(attn_sink=torch.zeros(64).double()), "attn_sink: expected dtype"),
        (lambda v: dict(something=1), "argument something is unknown"),
    ],
)
def test_decode_declines(sglang, change, reason):
    world = start(sglang)
    values = decode_values(world)
    values |= change(values)
    heads = 5 if values["q"].shape[2] == 5 else 64
    call = attention.AttentionCall(
        types.SimpleNamespace(tp_q_head_num=heads), types.SimpleNamespace(is_decode=lambda: True)
    )
    call.mode.is_extend = lambda: False
    token = attention._attention.set(call)
    try:
        seen = []
        result = attention.flash_mla_with_kvcache(lambda **kwargs: seen.append(kwargs) or "stock", **values)
    finally:
        attention._attention.reset(token)
    assert result == "stock"
    assert seen[0].keys() == values.keys()
    assert all(seen[0][name] is values[name] for name in values)
    assert reason in reasons(state.current())


def test_without_deepseek_v4s_backend_nothing_is_counted(sglang):
    """DeepSeek-V3.2 calls the same FlashMLA function."""
    start(sglang)
    assert attention.flash_mla_with_kvcache(lambda **kwargs: "stock", q=1) == "stock"
    assert not state.current().ledger.fallbacks
    assert not state.current().ledger.foreseen


@pytest.mark.parametrize(("mode", "ours"), [("decode", 1), ("target_verify", 1), ("draft_extend_v2", 1), ("extend", 0)])
def test_modes(sglang, mode, ours):
    world = start(sglang, strict=True)
    world.attend(4, mode)
    assert sglang.stock_calls == ([] if ours else ["B2", "B3"])
    assert state.current().ledger.served["B2 flash_mla_with_kvcache"] == ours


def test_rows_beyond_the_measured_table(sglang):
    install.install(Options())
    sglang.apply_hooks()
    assert not choice.takes_decode(64, choice.MOST_ROWS[64] + 1)
    World(sglang, rows=choice.MOST_ROWS[64] + 1).attend(4)
    assert sglang.stock_calls == ["B2", "B3"]  # not rotated twice, not rotated never
    World(sglang, rows=choice.MOST_ROWS[64]).attend(4)
    assert sglang.stock_calls == ["B2", "B3"]


def test_rows_of_the_backend_that_runs(sglang, monkeypatch):
    monkeypatch.setattr(state, "resolve_backend", lambda *args: "triton")
    install.install(Options())
    sglang.apply_hooks()
    rows = choice.MOST_ROWS_TRITON[64]
    assert rows < choice.MOST_ROWS[64]
    World(sglang, rows=rows).attend(4)
    assert sglang.stock_calls == []
    World(sglang, rows=rows + 1).attend(4)
    assert sglang.stock_calls == ["B2", "B3"]


def test_most_rows_by_environment(sglang):
    install.install(Options.from_env({"SGL_DSV4_DECODE_MAX_TOKENS": "2"}))
    sglang.apply_hooks()
    World(sglang, rows=2).attend(4)
    assert sglang.stock_calls == []
    World(sglang, rows=3).attend(4)
    assert sglang.stock_calls == ["B2", "B3"]


def test_deterministic_inference(sglang, monkeypatch):
    """Batch invariant at every number of rows, by the same kernel."""
    sglang.module("sglang.srt.server_args").deterministic = True
    install.install(Options())
    sglang.apply_hooks()
    flags = []
    decode = dk.sparse_decode
    monkeypatch.setattr(dk, "sparse_decode", lambda **kw: flags.append(kw["batch_invariant"]) or decode(**kw))
    World(sglang, rows=9).attend(4)
    assert sglang.stock_calls == []
    assert flags == [True]


def test_deterministic_inference_has_no_limit():
    assert choice.takes_decode(64, 10**6, most_rows=1, batch_invariant=True)


def test_unreadable_deterministic_flag(sglang):
    sglang.module("sglang.srt.runtime_context").get_exec = None
    world = start(sglang)
    world.attend(4)
    assert state.current().batch_invariant
    assert "enable_deterministic_inference cannot be read" in reasons(state.current())


# ---- inverse RoPE ----


def test_breakable_graph_copies_the_output(sglang):
    """Target-verify there is an extend: the caller copies into a tensor of the padded size and rotates that."""
    start(sglang)
    model = sglang.module("sglang.srt.models.deepseek_v4")
    model.in_breakable_graph = True
    World(sglang, heads=16).attend(4, "target_verify")
    assert sglang.stock_calls == ["B3"]


@pytest.mark.parametrize("name", attention.ELSEWHERE)
def test_other_platforms_are_not_fused(sglang, name):
    world = start(sglang)
    setattr(sglang.module("sglang.srt.models.deepseek_v4"), name, True)
    world.attend(4)
    assert sglang.stock_calls == ["B3"]


@pytest.mark.parametrize("name", attention.OTHER_TAILS)
def test_other_tails_are_not_fused(sglang, name):
    world = start(sglang)
    setattr(world.layers[4], name, True)
    world.attend(4)
    assert sglang.stock_calls == ["B3"]


def test_an_unclaimed_rotation_is_an_error(sglang):
    """The model went on without rotating back what we had rotated back: its output is wrong."""
    world = start(sglang)
    world.layers[4].skips_inverse_rope = True
    with pytest.raises(RuntimeError, match="SGL_DSV4_KERNELS=store"):
        world.attend(4)
    assert attention._model.get() is None


def test_rotation_is_passed_over_once_and_only_for_its_output(sglang):
    world = start(sglang)
    world.attend(4)  # starts the plugin
    rotated = torch.zeros(3, 64, 512)
    call = attention.ModelCall(None, world.freqs, world.positions, rotated)
    token = attention._model.set(call)
    try:
        seen = []

        def rope(q, positions=world.positions, inverse=True):
            attention.fused_rope_inplace(
                lambda *a, **k: seen.append(a[0]), q, None, world.freqs, positions=positions, inverse=inverse
            )

        other = torch.zeros(3, 64, 64)
        rope(other)
        rope(rotated[..., 448:], inverse=False)
        assert len(seen) == 2  # not ours
        with pytest.raises(RuntimeError, match="other positions"):
            rope(rotated[..., 448:], positions=world.positions.clone())
        with pytest.raises(RuntimeError, match="another part"):
            rope(rotated[..., :64])
        rope(rotated[..., 448:])
        assert len(seen) == 2
        rope(rotated[..., 448:])
        assert len(seen) == 3  # the second time it is SGLang's
    finally:
        attention._model.reset(token)


def test_contexts_end_with_an_exception(sglang):
    world = start(sglang)
    world.backend.extras = {}
    with pytest.raises(KeyError):
        world.attend(4)
    assert attention._model.get() is None
    assert attention._attention.get() is None


# ---- errors, strictness, bindings ----


def test_runtime_errors_are_not_hidden(sglang, monkeypatch):
    world = start(sglang)

    def fails(**kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dk, "sparse_decode", fails)
    monkeypatch.setattr(dk, "compress_norm_rope_store", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.attend(4)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.store_compressed(4)
    assert sglang.stock_calls == []


def test_a_kernel_that_cannot_be_built_is_not_tried_again(sglang, monkeypatch):
    world = start(sglang)
    calls = []

    class CompilationError(Exception):
        pass

    def fails(**kwargs):
        calls.append(kwargs)
        raise CompilationError("no such instruction\nthe whole program")

    monkeypatch.setattr(dk, "sparse_decode", fails)
    for _ in range(3):
        world.attend(4)
    assert sglang.stock_calls == ["B2", "B3"] * 3
    assert len(calls) == 1
    assert "CompilationError: no such instruction" in reasons(state.current())
    assert "the whole program" not in reasons(state.current())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("a shape"), TypeError("a dtype")])
def test_errors_of_one_call_fall_back(sglang, monkeypatch, error):
    world = start(sglang)
    decode, errors = dk.sparse_decode, [error]

    def fails_once(**kwargs):
        if errors:
            raise errors.pop()
        return decode(**kwargs)

    monkeypatch.setattr(dk, "sparse_decode", fails_once)
    world.attend(4)
    assert sglang.stock_calls == ["B2", "B3"]
    assert str(error) in reasons(state.current())
    world.attend(4)
    assert sglang.stock_calls == ["B2", "B3"]  # the next call is served


def test_errors_before_a_launch_fall_back(sglang, monkeypatch):
    """Among them a view that torch refuses, a RuntimeError. One of the GPU is not hidden there either."""
    world = start(sglang)

    def refuses(*args):
        raise RuntimeError("out of bounds for storage")

    monkeypatch.setattr(attention, "_pages", refuses)
    world.attend(4)
    assert sglang.stock_calls == ["B2", "B3"]
    assert "out of bounds" in reasons(state.current())

    def dead(*args):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    monkeypatch.setattr(attention, "_pages", dead)
    with pytest.raises(torch.AcceleratorError):
        world.attend(4)


def test_strict_turns_a_fallback_into_an_error(sglang):
    world = start(sglang, strict=True)
    with pytest.raises(RuntimeError, match=r"SGL_DSV4_STRICT=1.*layout is 'v41'"):
        world.store_swa(layout="v41")
    assert sglang.stock_calls == []


def test_a_device_without_our_code(sglang, monkeypatch):
    monkeypatch.setattr(state, "store_problem", lambda device: f"{device} is sm_75")
    world = start(sglang)
    world.step()
    assert sglang.stock_calls == ["A2", "A1", "A1"]
    assert "cpu is sm_75" in reasons(state.current())


def test_reasons_do_not_fill_the_log(caplog):
    ledger = Ledger()
    for number in range(3 * MOST_REASONS):
        ledger.decline("X", Declined(f"size {number}"))
    assert len(caplog.records) == len(ledger.fallbacks) == MOST_REASONS + 1
    assert sum(ledger.fallbacks.values()) == 3 * MOST_REASONS


def test_one_line_a_process(sglang, caplog):
    caplog.set_level(logging.INFO)
    world = start(sglang)
    assert not [r for r in caplog.records if "active" in r.message]
    world.step()
    world.step()
    (line,) = [r.message for r in caplog.records if "active" in r.message]
    for word in (
        "sgl_dsv4_kernels 0.",
        "cpu",
        "A1 compress_norm_rope_store",
        "inactive nothing",
        "inverse RoPE in our decode",
    ):
        assert word in line


def test_a_missing_function_leaves_the_rest(sglang, caplog):
    module = sglang.module("sglang.kernels.ops.attention.dsv4.norm_rope")
    del module.fused_rope_inplace
    # The model imports the name, so it must be there for it: as a function of its own.
    (sglang.root / "sglang/srt/models/deepseek_v4.py").write_text(
        (sglang.root / "sglang/srt/models/deepseek_v4.py")
        .read_text()
        .replace(
            "from sglang.kernels.ops.attention.dsv4.norm_rope import fused_rope_inplace",
            "from sglang import fake_stock\ndef fused_rope_inplace(q, k, freqs_cis, positions, inverse=False):\n"
            "    fake_stock.b3(locals())",
        )
    )
    install.install(Options())
    sglang.apply_hooks()
    World(sglang).step()
    assert "B3" in state.current().problems
    assert "no hook for B3" in caplog.text
    assert sglang.stock_calls == ["B3"] * 3


def test_strict_start_ends_the_process(sglang, monkeypatch):
    del sglang.module("sglang.kernels.ops.attention.dsv4.norm_rope").fused_k_norm_rope_flashmla
    monkeypatch.setenv("SGL_DSV4_STRICT", "1")
    with pytest.raises(SystemExit, match="A2 fused_k_norm_rope_flashmla"):
        sgl_dsv4_plugin.register()
    monkeypatch.delenv("SGL_DSV4_STRICT")
    sgl_dsv4_plugin.register()  # open: the others work
    assert set(state.current().problems) == {"A2"}


def test_register_never_raises_without_strict(monkeypatch, caplog):
    monkeypatch.setenv("SGL_DSV4_KERNELS", "sometimes")
    sgl_dsv4_plugin.register()
    assert "expected one of off | store | decode | store,decode | decode,fused | all" in caplog.text
    assert not state.is_installed()


def test_a_package_that_cannot_be_imported(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sgl_dsv4_kernels.plugin", None)
    sgl_dsv4_plugin.register()
    assert "the plugin cannot start" in caplog.text
    monkeypatch.setenv("SGL_DSV4_STRICT", "1")
    with pytest.raises(SystemExit, match="the plugin cannot start"):
        sgl_dsv4_plugin.register()
    monkeypatch.setenv("SGL_DSV4_KERNELS", "off")  # imports nothing
    sgl_dsv4_plugin.register()


def test_a_stale_import_is_found(sglang):
    """Something put SGLang's own function back into the module that calls it."""
    world = start(sglang)
    consumer = sglang.module(BY_KEY["A1"].consumers[0])
    consumer.compress_norm_rope_store = state.current().hooks["A1"].original
    world.attend(4)
    assert "still calls SGLang's own" in state.current().problems["A1"]
    world.store_compressed(4)
    assert sglang.stock_calls == ["A1"]


def test_hooks_that_sglang_did_not_apply(sglang):
    install.install(Options(strict=True))  # and no apply_hooks
    plugin = state.current()
    with pytest.raises(RuntimeError, match="has not applied the hook"):
        plugin.start(torch.device("cpu"))
    assert set(plugin.problems) == set(plugin.hooks)


@pytest.mark.parametrize(
    ("kernels", "calls"), [("store", ["B2", "B3"] * 3), ("decode", ["A2", "A1", "A1"]), ("all", [])]
)
def test_switches(sglang, kernels, calls):
    start(sglang, kernels=kernels, strict=True).step()
    assert sglang.stock_calls == calls


def test_second_install_adds_nothing(sglang):
    install.install(Options())
    registry = sglang.module("sglang.srt.plugins.hook_registry").HookRegistry
    count = sum(map(len, registry._hooks.values()))
    install.install(Options())
    assert sum(map(len, registry._hooks.values())) == count


def test_tracing_sees_sglangs_own_code(sglang, monkeypatch):
    world = start(sglang)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    world.step()
    assert sglang.stock_calls == ["A2", "A1", "A1", *["B2", "B3"] * 3]


@pytest.mark.parametrize("name", ["SGL_DSV4_VERIFY", "SGL_DSV4_STRICT", "SGL_DSV4_DECODE_MAX_TOKENS"])
def test_switch_values(name):
    with pytest.raises(ValueError, match=name):
        Options.from_env({name: "yes"})
