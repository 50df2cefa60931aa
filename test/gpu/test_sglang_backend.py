"""SGLang's real DeepSeek-V4 backend on its mock runner, with our hooks: rank shapes, verify, draft-extend, graphs.

Needs a GPU and SGLang 0.5.17 or newer with its attention kit, sglang.test.kits.attention_unittest (where a stripped
SGLang lacks it: SGL_DSV4_SGLANG_KIT, a folder that holds sglang/test of the same version). The cases run in a process
of their own, because a process keeps its hooks.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(400)  # less than scripts/gpu_check.sh gives all tests
RATIOS = (0, 4, 128)
# Mode, heads of the rank (of 64 padded ones), compress ratio. Draft-extend has no compressed cache.
CASES = [
    *(("decode", heads, ratio) for heads in (8, 16, 32, 64) for ratio in RATIOS),
    *(("target_verify", heads, ratio) for heads in (16, 64) for ratio in RATIOS),
    *(("draft_extend", heads, 0) for heads in (16, 64)),
    *(("graph", 16, ratio) for ratio in RATIOS),
    ("extend", 64, 0),
]
ERROR = 0.004
"""Of the output against SGLang's, relative: each is about 0.002 off fp64, and SGLang's chain rounds once more."""


def name_of(mode: str, heads: int, ratio: int) -> str:
    return f"{mode}-{heads}-{ratio}"


def run_cases() -> str:
    """What `main` prints."""
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=360)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr[-4000:]
    return lines[-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Workers of pytest-xdist share what the first of them has run."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "sglang_backend.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            file.write_text(run_cases())
    found = json.loads(file.read_text())
    if "unavailable" in found:
        pytest.skip(found["unavailable"])
    return found


@pytest.mark.parametrize(("mode", "heads", "ratio"), CASES)
def test_backend(results, mode, heads, ratio):
    result = results[name_of(mode, heads, ratio)]
    assert "failed" not in result, result["failed"]
    assert result["error"] <= ERROR
    assert result["kit_excess"] <= 0, "beyond the kit's tolerance of its own reference"
    if mode == "extend":
        assert result["served"] == 0
        return
    assert result["served"] > 0
    assert result["fallbacks"] == {}
    assert not result["flashmla_scheduled"], "FlashMLA's scheduler metadata was launched"
    assert result["inverse_rope_passed_over"]


# ---- the process of its own ----


def import_kit():
    """The kit's module, or why there is none."""
    import sglang

    folder = os.environ.get("SGL_DSV4_SGLANG_KIT")
    if folder:
        sglang.__path__.append(str(Path(folder) / "sglang"))
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention

    return dsv4_attention


class Runner:
    """One case on the real backend: caches and metadata by the kit, q padded to 64 heads with NaN."""

    def __init__(self, kit, mode: str, heads: int, ratio: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.kit, self.mode, self.heads, self.ratio = kit, mode, heads, ratio
        tokens = 3
        forward_mode, lens = {
            "decode": (ForwardMode.DECODE, ()),
            "graph": (ForwardMode.DECODE, ()),
            "target_verify": (ForwardMode.TARGET_VERIFY, (tokens, tokens)),
            "draft_extend": (ForwardMode.DRAFT_EXTEND_V2, (tokens, tokens)),
            "extend": (ForwardMode.EXTEND, (16, 16)),
        }[mode]
        case = kit.DSV4AttentionCase(
            name=f"ours_{mode}_{ratio}",
            backend="dsv4",
            forward_mode=forward_mode,
            num_heads=64,
            page_size=kit.DSV4_PAGE_SIZE,
            prefix_lens=(70, 200),
            extend_lens=lens,
            compress_ratio=ratio,
            attn_sink_value=0.5,
        )
        self.fixture = fixture = kit.build_dsv4_attention_fixture(unavailable(), case, swa_size=2048)
        width = fixture.runner.req_to_token_pool.req_to_token.shape[1]
        self.locations = kit._populate_swa_kv_cache(fixture, max_context_len=width, device="cuda")
        if ratio:
            kit._populate_extra_kv_cache(fixture, layer_id=0, num_entries=kit._DSV4_EXTRA_ENTRIES)
        batch = fixture.forward_batch
        if mode == "target_verify":
            from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify

            verify._prepare_target_verify_batch(batch, case, "cuda")
            batch.spec_info = verify._make_eagle_verify_input(case, batch, topk=1, device="cuda")
        if mode == "draft_extend":
            from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_extend_runner as extend

            batch.spec_info = extend._make_eagle_draft_extend_input(case, batch, device="cuda")
        fixture.actual_module.attn.tp_q_head_num = heads
        self.q, _ = fixture.actual_module.project(fixture.input_hidden)
        self.padded = self.q.detach().clone()
        self.padded[:, heads:] = torch.nan
        self.sink = fixture.actual_module.attn_sink.clone()
        self.sink[heads:] = 0
        angles = torch.outer(torch.arange(1024.0), 10000.0 ** (-torch.arange(32) / 32)).cuda()
        self.layer = types.SimpleNamespace(
            attn_mqa=fixture.actual_module.attn, freqs_cis=torch.polar(torch.ones_like(angles), angles)
        )

    def forward(self, layer, x, positions, forward_batch):
        """What `MQALayer.forward` does between its q and its wo_a."""
        from sglang.srt.models import deepseek_v4

        out = self.fixture.backend.forward(
            q=self.padded, k=self.padded, v=self.padded, layer=layer.attn_mqa, forward_batch=forward_batch,
            compress_ratio=self.ratio, save_kv_cache=False, attn_sink=self.sink,
        )  # fmt: skip
        self.returned_heads = out.shape[1]
        out = out[:, : self.heads]
        deepseek_v4.fused_rope_inplace(out[..., -64:], None, layer.freqs_cis, positions=positions, inverse=True)
        return out

    def context(self):
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        return forward_context(ForwardContext(attn_backend=self.fixture.backend))

    def prepare(self) -> None:
        self.fixture.backend.init_forward_metadata(self.fixture.forward_batch)
        self.kit._seed_c4_if_needed(self.fixture)

    def run(self, through) -> torch.Tensor:
        """through: the B4 hook."""
        batch = self.fixture.forward_batch
        return through(self.forward, self.layer, None, batch.positions, batch)

    def kit_reference(self) -> torch.Tensor:
        """The kit's own answer, in torch from unquantised keys, before the inverse RoPE."""
        if self.mode in ("decode", "graph", "extend") and self.ratio == 0:
            return self.kit._pure_torch_dsv4_swa_reference(self.fixture, self.q, self.locations)
        return self.kit._pure_torch_dsv4_combined_reference(self.fixture, self.q)

    def scheduled(self) -> bool:
        """Whether FlashMLA has filled its scheduler metadata."""
        metadata = self.fixture.backend.forward_metadata
        core = getattr(metadata, "core_attn_metadata", None) or metadata.core_metadata  # its name in newer versions
        return bool(core.get_flashmla_metadata(self.ratio).have_initialized)


class unavailable:
    """The kit's test case: a skip is an ImportError here."""

    def skipTest(self, reason: str) -> None:
        raise ImportError(reason)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def compare(runner: Runner) -> dict:
    """SGLang's kernels, then ours, on the same caches."""
    from sgl_dsv4_kernels.plugin import attention, state

    plugin = state.current()
    plugin.ledger.__init__(strict=False)
    plugin.problems["B2"] = "this call is for comparison"
    runner.prepare()
    stock = runner.run(attention.model_forward).clone()
    assert plugin.ledger.as_dict()["served"] == {}
    del plugin.problems["B2"]

    plugin.ledger.__init__(strict=True)
    runner.prepare()
    out = runner.run(attention.model_forward)
    if runner.mode == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = runner.run(attention.model_forward)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, out), "the replay differs from the eager call"
    scheduled = runner.mode != "extend" and runner.scheduled()
    served = plugin.ledger.served
    assert out.shape[1] == runner.heads
    if runner.mode in ("decode", "graph"):
        assert runner.returned_heads == runner.heads, "padded heads came back"
    # The kit's reference rebuilds the metadata, so it comes last; it knows no RoPE, hence the nope part.
    kit = runner.kit_reference()[:, : runner.heads, :448].float()
    excess = (out[..., :448].float() - kit).abs() - runner.kit.DSV4_ATOL - runner.kit.DSV4_RTOL * kit.abs()
    return {
        "error": relative(out, stock),
        "kit_excess": excess.max().item(),
        "served": served["B2 flash_mla_with_kvcache"],
        "inverse_rope_passed_over": served["B3 fused_rope_inplace"] == served["B2 flash_mla_with_kvcache"],
        "fallbacks": plugin.ledger.as_dict()["fallbacks"],
        "flashmla_scheduled": scheduled,
    }


def run_case(kit, mode: str, heads: int, ratio: int) -> dict:
    try:
        runner = Runner(kit, mode, heads, ratio)
        with torch.no_grad(), runner.context():
            return compare(runner)
    except Exception:
        return {"failed": traceback.format_exc()[-1500:]}


def main() -> None:
    try:
        kit = import_kit()
    except ImportError as error:
        print(json.dumps({"unavailable": f"SGLang's attention kit cannot be imported: {error}"}))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_dsv4_kernels.plugin import install, state
    from sgl_dsv4_kernels.plugin.options import Options

    install.install(Options(strict=True, decode_max_tokens=1 << 20))
    HookRegistry.apply_hooks()
    state.current().start(torch.device("cuda"))
    print(json.dumps({name_of(*case): run_case(kit, *case) for case in CASES}))


if __name__ == "__main__":
    main()
