"""Other people's kernels on our problems: FlashMLA's Hopper decode, SGLang's Triton decode, and what SGLang runs before
and after FlashMLA."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, CacheLayout
from sgl_dsv4_kernels.plugin.targets import BY_KEY
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.testing_decode import Problem

Peer = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""A call that returns out [T, h, 512] bf16 and lse [T, h] (natural log, without the sink for FlashMLA)."""


def flashmla() -> tuple[Any, str]:
    """The module flash_mla.flash_mla_interface and "", or None and the reason why it is not there."""
    try:
        from flash_mla import flash_mla_interface
    except Exception as error:
        return None, f"FlashMLA cannot be imported: {type(error).__name__}: {error}"
    return flash_mla_interface, ""


def sglang_triton() -> tuple[Any, str]:
    """SGLang's flash_mla_sparse_decode_triton (made for sm_120) and "", or None and the reason."""
    try:
        from sglang.kernels.ops.attention.flash_mla_sm120_triton import flash_mla_sparse_decode_triton
    except Exception as error:
        return None, f"SGLang's Triton decode cannot be imported: {type(error).__name__}: {error}"
    return flash_mla_sparse_decode_triton, ""


def sglang_function(*names: str) -> tuple[Any, str]:
    """The first of some functions, by dotted names, that can be imported and "", or None and the reason."""
    reason = ""
    for path in names:
        module, name = path.rsplit(".", 1)
        try:
            return getattr(importlib.import_module(module), name), ""
        except Exception as error:
            reason = reason or f"SGLang's {name} cannot be imported: {type(error).__name__}: {error}"
    return None, reason


def hooked_function(key: str) -> tuple[Any, str]:
    """The same of what a hook of the plugin replaces, such as "B5", wherever the installed SGLang has it."""
    return sglang_function(*(path.name for path in BY_KEY[key].paths))


class SglangSteps(NamedTuple):
    """SGLang's own kernels around the decode of a layer."""

    norm_rope: Callable[..., None]
    """fused_q_norm_rope(q_input, q_output, eps, freqs_cis, positions)"""
    rope_inplace: Callable[..., None]
    """fused_rope_inplace(q, k, freqs_cis, positions, inverse)"""
    quantise: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """sglang_per_token_group_quant_fp8(x, group_size, ...)"""


def sglang_steps() -> tuple[SglangSteps | None, str]:
    """SGLang's kernels and "", or None and the reason why they are not there."""
    found = (
        hooked_function("B5"),
        hooked_function("B3"),
        sglang_function("sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8"),
    )
    for function, reason in found:
        if function is None:
            return None, reason
    return SglangSteps(*(function for function, _ in found)), ""


def cache_view(source: Source) -> torch.Tensor:
    """A V4 cache as SGLang hands it to FlashMLA: [pages, page_size, 1, 584] e4m3, whose token stride is fictitious."""
    token_bytes = CacheLayout.V4.data_bytes + CacheLayout.V4.scale_bytes
    pages = source.cache.view(torch.float8_e4m3fn)
    shape, stride = (pages.shape[0], source.page_size, 1, token_bytes), (pages.stride(0), token_bytes, token_bytes, 1)
    return pages.as_strided(shape, stride)


def padded_query(q: torch.Tensor) -> torch.Tensor:
    """q [T, h, 512] as FlashMLA takes it: [T, 1, 64 or 128, 512], zeros after the last head."""
    wide = q.new_zeros(q.shape[0], 1, 64 if q.shape[1] <= 64 else 128, HEAD_DIM)
    wide[:, 0, : q.shape[1]] = q
    return wide


def flashmla_call(api: Any, problem: Problem, wide: torch.Tensor | None = None) -> Peer:
    """FlashMLA on a problem of V4 caches whose indices lie inside the cache or are -1.

    It takes 64 or 128 heads; fewer are padded to 64, as SGLang does. Its scheduler metadata is made at the first call.
    ``wide``: the padded query that it reads, None = one of the problem's.
    """
    q, main, extra = problem.q, problem.main, problem.extra
    heads = q.shape[1]
    wide = padded_query(q) if wide is None else wide
    padded = wide.shape[2]
    sink = problem.options.get("attn_sink")
    if sink is not None:
        sink = torch.nn.functional.pad(sink, (0, padded - heads))
    keywords = {
        "q": wide,
        "k_cache": cache_view(main),
        "indices": main.indices[:, None].contiguous(),
        "topk_length": main.length,
        "attn_sink": sink,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": HEAD_DIM,
        "tile_scheduler_metadata": api.FlashMLASchedMeta(),
        "softmax_scale": problem.options.get("softmax_scale", HEAD_DIM**-0.5),
        "is_fp8_kvcache": True,
    }
    if extra is not None:
        keywords |= {
            "extra_k_cache": cache_view(extra),
            "extra_indices_in_kvcache": extra.indices[:, None].contiguous(),
            "extra_topk_length": extra.length,
        }

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = api.flash_mla_with_kvcache(**keywords)
        return out[:, 0, :heads], lse.reshape(q.shape[0], padded)[:, :heads]

    return call


def sglang_triton_call(function: Any, problem: Problem) -> Peer:
    """SGLang's Triton decode on a problem of V4 caches (contiguous pages, at least one key a row)."""
    main, extra = problem.main, problem.extra

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(
            problem.q[:, None], cache_view(main), main.indices, main.length, problem.options.get("attn_sink"), HEAD_DIM,
            problem.options.get("softmax_scale", HEAD_DIM**-0.5), None if extra is None else cache_view(extra),
            None if extra is None else extra.indices, None if extra is None else extra.length,
        )  # fmt: skip
        return out[:, 0], lse[..., 0]

    return call


def sglang_chain_call(
    api: Any,
    sglang: SglangSteps,
    problem: Problem,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    fp8: bool = False,
) -> Callable[[], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """What SGLang 0.5.17 runs between the query's projection and wo_a.

    Norm and RoPE of problem.q into the padded query, FlashMLA's split and combine kernels, inverse RoPE, and with
    ``fp8`` the quantisation of SGLANG_OPT_FP8_WO_A_GEMM=1.

    The call returns the output [T, h, 512] bf16, or e4m3 [T * G, 4096] and its scales: G groups of 8 heads.
    """
    freqs, positions = rope
    tokens, heads = problem.q.shape[:2]
    wide = padded_query(problem.q)
    decode = flashmla_call(api, problem, wide)

    def call() -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        sglang.norm_rope(problem.q, wide[:, 0, :heads], eps, freqs, positions)
        out = decode()[0]
        sglang.rope_inplace(out[..., NOPE_DIM:], None, freqs, positions=positions, inverse=True)
        if not fp8:
            return out
        groups = out.view(tokens, heads // 8, 8 * HEAD_DIM).reshape(-1, 8 * HEAD_DIM).contiguous()
        return sglang.quantise(groups, group_size=128, scale_ue8m0=False)

    return call
