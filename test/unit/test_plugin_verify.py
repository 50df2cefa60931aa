"""Shadow mode: SGLang serves, ours are compared, a mismatch is logged once and its inputs can be replayed."""

from __future__ import annotations

import pytest
import torch
from fake_sglang import imported, nan_equal
from plugin_world import World

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.plugin import install, state, verify
from sgl_dsv4_kernels.plugin.options import Options


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    (tmp_path / "sglang_tree").mkdir()
    monkeypatch.setattr(verify, "_dumped", set())
    with imported("0.5.17", tmp_path / "sglang_tree") as fake:
        yield fake


def start(fake, tmp_path, **world) -> World:
    install.install(Options(verify=True, dump_dir=str(tmp_path)))
    fake.apply_hooks()
    return World(fake, **world)


@pytest.mark.parametrize("heads", [64, 16])
def test_agreement(sglang, tmp_path, heads, caplog):
    world = start(sglang, tmp_path, heads=heads)
    outputs = world.step()
    world.store_swa(out_loc=torch.zeros(130, dtype=torch.int32))  # padded rows: any of them may win
    world.store_swa(out_loc=torch.full((130,), -1))
    assert sglang.stock_calls == ["A2", "A1", "A1", *["B2", "B3"] * 3, "A2", "A2"]
    served = state.current().ledger.served
    assert served["B2 flash_mla_with_kvcache, compared"] == 3
    assert served["A1 compress_norm_rope_store, compared"] == 2
    assert served["A2 fused_k_norm_rope_flashmla, compared"] == 3
    assert not any("MISMATCHED" in label for label in served)
    assert not list(tmp_path.glob("*.pt"))
    assert outputs[4].shape == (3, heads, 512)
    assert not state.current().ledger.fallbacks
    assert "differ" not in caplog.text


@pytest.mark.parametrize("key", ["A1", "A2"])
def test_store_mismatch(sglang, tmp_path, caplog, monkeypatch, key):
    """One wrong byte of ours: said once, served by SGLang, replayed from the file."""
    world = start(sglang, tmp_path)
    name = "compress_norm_rope_store" if key == "A1" else "norm_rope_store"
    right = getattr(dk, name)

    def wrong(*rest, **arguments):
        right(*rest, **arguments)
        if "cache" in arguments:  # not the probe's call
            arguments["cache"][0, 448] ^= 1

    monkeypatch.setattr(dk, name, wrong)
    for _ in range(2):
        if key == "A1":
            world.store_compressed(4, is_decode=False)
        else:
            world.store_swa()
    assert sum("1 of " in record.message for record in caplog.records) == 1
    assert "shapes" in caplog.text
    (path,) = tmp_path.glob(f"sgl_dsv4_mismatch_{key}_*.pt")
    dump = verify.load_dump(path)
    assert int((dump["expected"] != dump["actual"]).sum()) == 1
    monkeypatch.undo()
    assert nan_equal(verify.replay(dump), dump["expected"])


@pytest.mark.parametrize("ratio", [0, 128])
def test_decode_mismatch(sglang, tmp_path, caplog, monkeypatch, ratio):
    world = start(sglang, tmp_path)
    world.store_swa()
    world.store_compressed(128, is_decode=False)
    right = dk.sparse_decode

    def wrong(**arguments):
        result = right(**arguments)
        result.out[0, 0] *= 2
        return result._replace(lse=result.lse + 0.01)

    monkeypatch.setattr(dk, "sparse_decode", wrong)
    output = world.attend(ratio)
    assert "output error" in caplog.text
    assert "LSE error 0.01" in caplog.text
    (path,) = tmp_path.glob("sgl_dsv4_mismatch_B2_*.pt")
    assert path.stat().st_size < 1 << 22
    monkeypatch.undo()
    dump = verify.load_dump(path)
    # What was served is SGLang's and has been rotated in place since; the replay is rotated too.
    again = verify.replay(dump)
    assert (again.float() - output.float()).norm() / output.float().norm() < 0.004


def test_nan_in_one_result_only_is_a_mismatch():
    value = torch.tensor([1.0, torch.nan])
    assert not verify._relative_error(value, torch.ones(2)) <= 1
    assert verify._relative_error(value, value) == 0
    assert not verify._largest_difference(value, torch.ones(2)) <= 1
    assert verify._largest_difference(torch.tensor([torch.inf, torch.nan]), torch.tensor([torch.inf, torch.nan])) == 0


def test_cuda_graphs_are_off(sglang, tmp_path, caplog):
    start(sglang, tmp_path)
    prepare = sglang.module("sglang.srt.server_args").prepare_server_args
    assert prepare(["--tp", "1"]) == ["--tp", "1", "--disable-cuda-graph"]
    assert prepare(["--disable-cuda-graph"]) == ["--disable-cuda-graph"]
    assert caplog.text.count("--disable-cuda-graph was added") == 1


def test_inside_a_capture_nothing_is_compared(sglang, tmp_path, monkeypatch):
    world = start(sglang, tmp_path)

    def refuse(device):
        raise verify.Declined("SGL_DSV4_VERIFY=1 cannot compare")

    monkeypatch.setattr(verify, "_require_eager", refuse)
    world.step()
    assert sglang.stock_calls == ["A2", "A1", "A1", *["B2", "B3"] * 3]
    assert len(state.current().ledger.fallbacks) == 4  # A1, A2, B2, B5
