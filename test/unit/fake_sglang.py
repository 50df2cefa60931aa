"""Small SGLangs to test the plugin in: one for each version, made from the facts of test/data/sglang_contract.json.

Names, signatures, imports, keywords and the shape of `MQALayer.forward` are the version's; the bodies are ours, on
torch's CPU. The hook registry is the real one if the version's wheel is at hand (SGL_DSV4_WHEELS), and a stand-in else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from sglang_contract import SNAPSHOT, default_wheels, find_wheel  # noqa: E402
from sglang_contract_check import locate  # noqa: E402

from sgl_dsv4_kernels.plugin import state  # noqa: E402
from sgl_dsv4_kernels.plugin.targets import BY_KEY  # noqa: E402

CONTRACT: dict[str, dict[str, Any]] = json.loads(SNAPSHOT.read_text())
VERSIONS = list(CONTRACT)
PACKAGES = ("sglang", "sgl_kernel", "flash_mla")
REGISTRY_FILE = "sglang/srt/plugins/hook_registry.py"

STAND_IN_REGISTRY = '''
"""Does what the plugin needs of SGLang's hook registry."""
import enum, functools, pkgutil, sys

class HookType(enum.Enum):
    AROUND = "around"

class HookRegistry:
    _hooks, _patched = {}, set()

    @classmethod
    def register(cls, target, hook, hook_type, *, source=None):
        cls._hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            original = wrapped = getattr(owner, name)
            for hook in hooks:
                wrapped = cls._around(wrapped, hook)
            setattr(owner, name, wrapped)
            for module in list(sys.modules.values()):
                for key, value in list(getattr(module, "__dict__", {}).items()):
                    if value is original:
                        setattr(module, key, wrapped)
            cls._patched.add(target)

    @staticmethod
    def _around(function, hook):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return hook(function, *args, **kwargs)
        return wrapper
'''

STOCK = '''
"""The kernels of this SGLang: our reference, and a list of who was called."""
import torch
from sgl_dsv4_kernels.checks import freqs_as_float
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.reference import decode, query, store

calls = []
queries = []  # B5, which few tests look at

def a1(p):
    calls.append("A1")
    if p["kv"].shape[-1] != 512:
        return
    weight = p["norm_weight"].to(p["kv"].dtype)
    freqs = freqs_as_float(p["freq_cis"], p["kv"].device)
    store.compress_norm_rope_store_op(p["kv"], p["plan"][1], weight, p["norm_eps"], freqs, p["out_loc"], p["kvcache"],
        p["page_size"], p["plan"].compress_ratio, p["plan"].is_decode, CacheLayout.V4.code, 0, False)

def a2(p):
    calls.append("A2")
    freqs = freqs_as_float(p["freqs_cis"], p["kv"].device)
    store.norm_rope_store_op(p["kv"], p["kv_weight"], p["eps"], freqs, p["positions"], p["out_loc"], p["kvcache"],
        p["page_size"], CacheLayout.V4.code, 0, False)

def source(cache, indices, length):
    pages, size = cache.shape[:2]
    flat = cache.as_strided((pages, CacheLayout.V4.page_bytes(size)), (cache.stride(0), 1))
    return decode.Source(flat.view(torch.uint8), indices[:, 0], length, size, CacheLayout.V4)

def b2(p):
    calls.append("B2")
    main = source(p["k_cache"], p["indices"], p["topk_length"])
    extra = p["extra_k_cache"]
    if extra is not None:
        extra = source(extra, p["extra_indices_in_kvcache"], p["extra_topk_length"])
    result = decode.sparse_decode(p["q"][:, 0], main, extra, softmax_scale=p["softmax_scale"], attn_sink=p["attn_sink"])
    return result.out[:, None], result.lse[..., None]

def b3(p):
    calls.append("B3")
    sign = -1 if p["inverse"] else 1
    factor = p["freqs_cis"][p["positions"]][:, None]
    turned = torch.view_as_complex(p["q"].float().unflatten(-1, (-1, 2)).contiguous())
    turned = turned * (factor.conj() if p["inverse"] else factor)
    p["q"].copy_(torch.view_as_real(turned).flatten(-2))

def b5(p):
    queries.append("B5")
    freqs = freqs_as_float(p["freqs_cis"], p["q_input"].device)
    p["q_output"].copy_(query.query_norm_rope(p["q_input"], p["eps"], freqs, p["positions"]))
'''

LAYOUT = """import enum

class KVLayout(str, enum.Enum):
    V4 = "v4"
    V41 = "v41"
"""

MODEL = '''
_is_npu = False
_is_hip = False
_wo_a_fp8_mxscale_fused_invrope = None
in_breakable_graph = False

def is_in_breakable_cuda_graph():
    return in_breakable_graph

class MQALayer:
    """heads of n_heads heads, of this rank."""
    qk_rope_head_dim = 64
    eps = 1e-6
    skips_inverse_rope = False

    def __init__(self, backend, attention, freqs_cis, sink, n_heads, heads, rank, make_q):
        self.backend, self.attn_mqa, self.freqs_cis, self.attn_sink = backend, attention, freqs_cis, sink
        self.n_heads, self.n_local_heads, self.tp_rank, self.make_q = n_heads, heads, rank, make_q

    def _compute_q_b(self, x, positions, q_out):
        q = self.make_q(x)
        if q_out is None:
            q_out = torch.full_like(q, float("nan"))
        fused_q_norm_rope(q, q_out, self.eps, self.freqs_cis, positions)
        return q_out

    def forward({parameters}):
        tp_slice, padded, q_out = slice(None), None, None
        if self.n_local_heads < self.n_heads:
            rank = self.tp_rank
            tp_slice = {head_slice}
            padded = torch.full((x.shape[0], {padded_heads}, 512), float("nan"), dtype=x.dtype)
            q_out = padded[:, tp_slice, :]
        q = self._compute_q_b(x, positions, q_out)
        q = q if padded is None else padded
        attn_sink = {sink}
        o = self.backend.forward(q=q, k=q, v=q, layer=self.attn_mqa, forward_batch=forward_batch,
            compress_ratio=self.attn_mqa.ratio, attn_sink=attn_sink, save_kv_cache=False)
        if in_breakable_graph and forward_batch.forward_mode.is_extend():
            into = torch.empty(q.shape, dtype=q.dtype)
            assert into.numel() == o.numel()
            o = into.copy_(o)
        o = o[:, tp_slice, :]
        if not self.skips_inverse_rope:
            {inverse_rope}
        return o
'''


def parameter_text(rows: list[list[str | None]]) -> str:
    """Source of a parameter list."""
    words, starred = [], False
    for name, kind, default in rows:
        if kind == "keyword" and not starred:
            words.append("*")
        starred = starred or kind in ("args", "keyword")
        words.append({"args": "*", "kwargs": "**"}.get(kind, "") + name + ("" if default is None else f"={default}"))
    return ", ".join(words)


class FakeSGLang:
    """A version's modules, written below ``root``."""

    def __init__(self, version: str, root: Path, registry: str) -> None:
        self.facts, self.root = CONTRACT[version], root
        self.paths = {key: locate(target, self.facts)[0] for key, target in BY_KEY.items()}
        if version == "0.5.12":  # the hook stays away from it, but it is there
            self.paths["A1"] = "sglang.jit_kernel.dsv4.compress.compress_norm_rope_store"
        self._write("sglang.srt.plugins.hook_registry", registry)
        self._write("sglang.fake_stock", STOCK)
        self._kernels()
        self._callers()
        self._attention()
        self._settings()

    def _write(self, module: str, text: str) -> None:
        folder = self.root
        for part in module.split(".")[:-1]:
            folder = folder / part
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        file = folder / f"{module.split('.')[-1]}.py"
        file.write_text((file.read_text() if file.exists() else "") + text)

    def _parameters(self, key: str) -> str:
        rows = self.facts["functions"].get(self.paths[key])
        if rows is None:  # sgl_kernel's or flash_mla's: 0.5.23's interface without its two additions
            rows = CONTRACT["0.5.23"]["functions"][BY_KEY["B2"].paths[0].name][:-2]
        return parameter_text(rows)

    def _kernels(self) -> None:
        for key in ("A1", "A2", "B2", "B3", "B5"):
            module, name = self.paths[key].rsplit(".", 1)
            if module == "flash_mla":
                module = "flash_mla.__init__"
            body = f"def {name}({self._parameters(key)}):\n    return stock.{key.lower()}(locals())\n"
            self._write(module, f"from sglang import fake_stock as stock\n{LAYOUT}\n{body}\n")

    def _callers(self) -> None:
        """The one caller of each store function, with the keywords that it passes."""
        for key, module in (("A1", BY_KEY["A1"].consumers[0]), ("A2", BY_KEY["A2"].consumers[0])):
            owner, name = self.paths[key].rsplit(".", 1)
            (call,) = self.facts["callers"][key][module.replace(".", "/") + ".py"]
            defaults = {"use_fp4": False, "bf16_store": False, "fp8_2buff": False, "layout": "v4"}
            keywords = ", ".join(f"{k}=given.get({k!r}, {defaults.get(k)!r})" for k in call["keywords"])
            positional = "given['kv'], given['plan'], " if call["positional"] == 2 else ""
            self._write(
                module, f"from {owner} import {name}\ndef store(**given):\n    {name}({positional}{keywords})\n"
            )

    def _attention(self) -> None:
        backend = self.facts["backend"]
        (call,) = backend["decode_calls"][:1]
        rows = dict(self.facts["functions"])[self.paths["B1"]]
        imports = next(
            line for line in backend["flash_mla_imports"] if "import flash_mla_with_kvcache" not in line or "." in line
        )
        name = (
            "flash_mla_with_kvcache"
            if "import flash_mla_with_kvcache" in imports
            else "flash_mla.flash_mla_with_kvcache"
        )
        prepare, function = imports, name
        if "flash_mla_interface" in self.paths["B2"]:  # bound when the backend is made
            prepare, function = "pass", "self._flash_mla_with_kvcache"
        values = {
            "q": "q[:, None]", "k_cache": "self.cache", "tile_scheduler_metadata": "self.metadata", "head_dim_v": "512",
            "softmax_scale": "512 ** -0.5", "indices": "self.indices", "topk_length": "self.lengths",
            "attn_sink": "kw.get('attn_sink')", "extra_k_cache": "extra[0]", "extra_indices_in_kvcache": "extra[1]",
            "extra_topk_length": "extra[2]",
        }  # fmt: skip
        keywords = ", ".join(f"{k}={values.get(k, v)}" for k, v in call.items())
        names = [row[0] for row in rows]
        gather = "kw = dict(kwargs)" if "kwargs" in names else "kw = dict(attn_sink=attn_sink)"
        self._write(
            "sglang.srt.layers.attention.deepseek_v4_backend",
            f"""
import functools
class FlashMLASchedMeta:
    pass
class DeepseekV4AttnBackend:
    other_kernel = None  # a test's: q -> output
    copies_query = False
    def __init__(self, **given):
        self.__dict__.update(given, metadata=FlashMLASchedMeta())
        if {"flash_mla_interface" in self.paths["B2"]}:
            from {self.paths["B2"].rsplit(".", 1)[0]} import flash_mla_with_kvcache
            self._flash_mla_with_kvcache = functools.partial(flash_mla_with_kvcache, use_legacy=True)
    def forward({parameter_text(rows)}):
        {gather}
        extra = self.extras[layer.ratio] or (None, None, None)
        if self.other_kernel is not None:
            return self.other_kernel(q)
        q = q.clone() if self.copies_query else q
        {prepare}
        return {function}({keywords})[0].squeeze(1)
""",
        )
        module, name = self.paths["B3"].rsplit(".", 1)
        (head_slice,) = self.facts["model"]["head_slices"]
        leads = head_slice.startswith("slice(0")
        text = MODEL.format(
            parameters=parameter_text(self.facts["functions"][self.paths["B4"]]),
            head_slice=head_slice,
            padded_heads="64 if self.n_local_heads <= 64 else self.n_heads" if leads else "self.n_heads",
            sink="torch.nn.functional.pad(self.attn_sink[self.tp_rank * self.n_local_heads:][:self.n_local_heads], "
            "(0, q.shape[1] - self.n_local_heads))"
            if leads
            else "self.attn_sink",
            inverse_rope=self.facts["model"]["inverse_rope"][0]["call"],
        )
        imports = f"import torch\nfrom {module} import {name}\nfrom {module} import fused_q_norm_rope\n"
        self._write("sglang.srt.models.deepseek_v4", f"{imports}{text}")

    def _settings(self) -> None:
        facts = self.facts["deterministic"]
        args = "deterministic = False\ndef prepare_server_args(argv):\n    return argv\n"
        if facts["get_global_server_args"]:
            args += (
                "import types\ndef get_global_server_args():\n"
                "    return types.SimpleNamespace(enable_deterministic_inference=deterministic)\n"
            )
        self._write("sglang.srt.server_args", args)
        if facts["get_exec"]:
            self._write(
                "sglang.srt.runtime_context",
                "import types\nfrom sglang.srt import server_args\ndef get_exec():\n"
                "    flag = types.SimpleNamespace(enable_deterministic_inference=server_args.deterministic)\n"
                "    return types.SimpleNamespace(deterministic=flag)\n",
            )

    def module(self, name: str) -> Any:
        return importlib.import_module(name)

    @property
    def stock_calls(self) -> list[str]:
        """Kernels of SGLang that ran, but for B5."""
        return self.module("sglang.fake_stock").calls

    @property
    def stock_queries(self) -> list[str]:
        """Those of B5."""
        return self.module("sglang.fake_stock").queries

    def apply_hooks(self) -> None:
        self.module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()

    def backend_class(self) -> type:
        return self.module("sglang.srt.layers.attention.deepseek_v4_backend").DeepseekV4AttnBackend

    def model_class(self) -> type:
        return self.module("sglang.srt.models.deepseek_v4").MQALayer


def real_registry(version: str) -> str | None:
    """Text of the version's hook registry, from its wheel; None without the wheel."""
    wheel = find_wheel(version, default_wheels())
    if wheel is None:
        return None
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(REGISTRY_FILE).decode()


def forget_modules() -> dict[str, Any]:
    """Take SGLang's modules out of sys.modules; returns them."""
    names = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


@contextlib.contextmanager
def imported(version: str, root: Path, registry: str = STAND_IN_REGISTRY) -> Iterator[FakeSGLang]:
    """A FakeSGLang that can be imported; afterwards all is as before."""
    kept = forget_modules()
    sys.path.insert(0, str(root))
    try:
        yield FakeSGLang(version, root, registry)
    finally:
        sys.path.remove(str(root))
        forget_modules()
        sys.modules.update(kept)
        state.set_current(None)


class Mode:
    """A ForwardMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "target_verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "draft_extend_v2"

    def is_extend(self) -> bool:
        return self.name in ("extend", "target_verify")


def nan_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
