"""What is hooked: the one table of SGLang's names, for 0.5.12 to 0.5.23.

A target is found by what exists: its first path that imports and whose signature has the parameters that our wrapper
reads. Versions are comments only. test/data/sglang_contract.json holds what each version really has, and
test/unit/test_contract.py compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True)
class Path:
    """Dotted path of a candidate; ``beside``: a module that must exist too, where the name alone does not tell."""

    name: str
    beside: str | None = None


@dataclass(frozen=True)
class Target:
    """A function of SGLang that a hook wraps."""

    key: str
    part: str
    """The switch it belongs to: "store", "decode" or "fused"."""
    paths: tuple[Path, ...]
    """Newest first."""
    reads: tuple[str, ...]
    """Parameters that the wrapper reads."""
    neutral: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters that must have this value for our kernel to serve the call. A parameter in neither list must have its
    default: what it means is not known here."""
    context_only: bool = False
    """The wrapper only notes whose call it is, and always calls the original: other parameters do not matter."""
    consumers: tuple[str, ...] = ()
    """Modules that hold the name by ``from ... import``: if imported, they must hold the wrapper."""

    @property
    def function(self) -> str:
        """The function's own name."""
        return self.paths[0].name.rsplit(".", 1)[1]

    @property
    def label(self) -> str:
        """Key and name, for logs: a method with its class."""
        owner = self.paths[0].name.split(".")[-2]
        return f"{self.key} {owner + '.' if owner[0].isupper() else ''}{self.function}"


_OPS = "sglang.kernels.ops.attention"
_MODEL = "sglang.srt.models.deepseek_v4"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_NORM_ROPE_MODULES = (
    f"{_OPS}.dsv4.norm_rope",  # 0.5.23
    f"{_OPS}.dsv4.elementwise",  # 0.5.17
    "sglang.jit_kernel.dsv4.elementwise",  # 0.5.13
    "sglang.jit_kernel.deepseek_v4",  # 0.5.12
)


def _paths(function: str, *modules: str) -> tuple[Path, ...]:
    return tuple(Path(f"{module}.{function}") for module in modules)


TARGETS: tuple[Target, ...] = (
    Target(  # compressed latent (C4, C128) -> cache; also the C4 indexer's keys, which stay with SGLang
        key="A1",
        part="store",
        paths=_paths(
            "compress_norm_rope_store",
            f"{_OPS}.dsv4.compress",  # 0.5.17
            "sglang.jit_kernel.dsv4.compress",  # 0.5.12
        ),
        reads=("kv", "plan", "norm_weight", "norm_eps", "freq_cis", "out_loc", "kvcache", "page_size"),
        neutral=MappingProxyType(
            {
                "use_fp4": False,  # 0.5.13
                "bf16_store": False,  # 0.5.14
                "kvcache_scale": None,  # 0.5.20, as the next four
                "rope_cache": None,
                "fp4_k_write_metadata": None,
                "fp8_2buff": False,
                "kvcache_rope": None,
                "layout": "v4",  # 0.5.21
            }
        ),
        consumers=("sglang.srt.layers.attention.dsv4.compressor_v2",),
    ),
    Target(  # sliding-window latent -> cache
        key="A2",
        part="store",
        paths=_paths("fused_k_norm_rope_flashmla", *_NORM_ROPE_MODULES),
        reads=("kv", "kv_weight", "eps", "freqs_cis", "positions", "out_loc", "kvcache", "page_size"),
        neutral=MappingProxyType({"layout": "v4", "q": None}),  # 0.5.21
        consumers=("sglang.srt.mem_cache.deepseek_v4_memory_pool",),
    ),
    Target(  # whose attention it is: heads of this rank, forward mode
        key="B1",
        part="decode",
        paths=(Path(f"{_BACKEND}.DeepseekV4AttnBackend.forward"),),
        reads=("layer", "forward_batch"),
        context_only=True,
    ),
    Target(  # the decode itself; DeepSeek-V3.2's backends call it too
        key="B2",
        part="decode",
        paths=(
            Path(f"{_OPS}.flash_mla_interface.flash_mla_with_kvcache"),  # 0.5.23
            Path("flash_mla.flash_mla_with_kvcache", beside="sglang.jit_kernel.deepseek_v4"),  # 0.5.12
            Path("sgl_kernel.flash_mla.flash_mla_with_kvcache"),  # 0.5.13
        ),
        reads=(
            "q",
            "k_cache",
            "tile_scheduler_metadata",
            "softmax_scale",
            "indices",
            "topk_length",
            "attn_sink",
            "extra_k_cache",
            "extra_indices_in_kvcache",
            "extra_topk_length",
        ),
        neutral=MappingProxyType(
            {
                "block_table": None,
                "cache_seqlens": None,
                "head_dim_v": 512,
                "num_splits": None,
                "causal": False,
                "descale_q": None,
                "descale_k": None,
                "is_fp8_kvcache": True,
                "kv_format": None,  # 0.5.23
                "use_legacy": True,  # 0.5.23
            }
        ),
    ),
    Target(  # inverse RoPE of the attention's output, which our decode has then done already
        key="B3",
        part="decode",
        paths=_paths("fused_rope_inplace", *_NORM_ROPE_MODULES),
        reads=("q", "k", "freqs_cis", "positions", "inverse"),
        context_only=True,
        consumers=(_MODEL,),
    ),
    Target(  # what B3 will rotate with: the layer's table and the positions
        key="B4",
        part="decode",
        paths=(Path(f"{_MODEL}.MQALayer.forward"),),
        reads=("positions", "forward_batch"),
        context_only=True,
    ),
    Target(  # the query's RMSNorm and RoPE, which our decode can do as it loads the query
        key="B5",
        part="fused",
        paths=_paths("fused_q_norm_rope", *_NORM_ROPE_MODULES),
        reads=("q_input", "q_output", "eps", "freqs_cis", "positions"),
        consumers=(_MODEL,),
    ),
)
BY_KEY = MappingProxyType({target.key: target for target in TARGETS})


def signature_problem(target: Target, signature: inspect.Signature) -> str | None:
    """Why the wrapper cannot stand before a function of this signature; None if it can."""
    parameters = signature.parameters
    missing = [name for name in target.reads if name not in parameters]
    if missing:
        return f"has no parameter {', '.join(missing)}"
    if target.context_only:
        return None
    if target.key == "A1" and "use_fp4" not in parameters:
        # 0.5.12 quantises values that it has not rounded to bf16 first: other bytes than ours.
        return "is that of 0.5.12, whose bytes differ"
    known = {*target.reads, *target.neutral}
    new = [p.name for p in parameters.values() if p.name not in known and p.default is inspect.Parameter.empty]
    return f"has a new parameter without a default: {', '.join(new)}" if new else None


class Binder:
    """Arguments of a call by name, for one signature. `inspect.Signature.bind` takes 10 us a call; this takes one."""

    def __init__(self, target: Target, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = tuple(p.name for p in parameters if p.kind in by_position)
        self.defaults = {
            p.name: p.default for p in parameters if p.name in target.reads and p.default is not inspect.Parameter.empty
        }
        unknown = {p.name: p.default for p in parameters if p.name not in target.reads}
        self.only = {} if target.context_only else {**unknown, **target.neutral}
        self.reads = frozenset(target.reads)

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All that was passed, and the defaults of parameters that the wrapper reads."""
        return {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}

    def objection(self, values: dict[str, Any]) -> str | None:
        """Why a call with these arguments is not ours, as far as the table tells."""
        for name, value in values.items():
            if name in self.reads:
                continue
            if name not in self.only:
                return f"argument {name} is unknown"
            want = self.only[name]
            if value is not want and (isinstance(value, torch.Tensor) or value != want):
                shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                return f"{name} is {shown}, expected {want!r}"
        return None
