"""A1 and A2: RMSNorm + RoPE + quantise + write a row into the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.plugin import state, verify
from sgl_dsv4_kernels.plugin.dispatch import is_traced, serve
from sgl_dsv4_kernels.plugin.fallback import Declined


def compress_norm_rope_store(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A1. Serves the latent of the C4 and C128 caches; the C4 indexer's keys (head size 128) stay with SGLang."""
    if is_traced():
        return original(*args, **kwargs)
    return serve(
        "A1", original, args, kwargs, _compressed, lambda call: dk.compress_norm_rope_store(**call), verify.store
    )


def fused_k_norm_rope_flashmla(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A2. Serves the sliding-window cache."""
    if is_traced():
        return original(*args, **kwargs)
    return serve("A2", original, args, kwargs, _sliding_window, lambda call: dk.norm_rope_store(**call), verify.store)


def _compressed(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of our op from those of A1."""
    kv, plan, weight = values["kv"], values["plan"], values["norm_weight"]
    if kv.shape[-1] != HEAD_DIM:
        raise Declined(f"head size {kv.shape[-1]} (the indexer's keys)", foreseen=kv.shape[-1] == 128)
    state.current().require("A1", kv.device)
    return {
        "kv": kv,
        "plan": plan[1],
        "weight": weight if weight.dtype == kv.dtype else weight.to(kv.dtype),  # as 0.5.19 does
        "eps": values["norm_eps"],
        "freqs_cis": values["freq_cis"],
        "slots": values["out_loc"],
        "cache": values["kvcache"],
        "page_size": values["page_size"],
        "compress_ratio": plan.compress_ratio,
        "is_decode": plan.is_decode,
    }


def _sliding_window(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of our op from those of A2."""
    kv = values["kv"]
    state.current().require("A2", kv.device)
    return {
        "kv": kv,
        "weight": values["kv_weight"],
        "eps": values["eps"],
        "freqs_cis": values["freqs_cis"],
        "positions": values["positions"],
        "slots": values["out_loc"],
        "cache": values["kvcache"],
        "page_size": values["page_size"],
    }
