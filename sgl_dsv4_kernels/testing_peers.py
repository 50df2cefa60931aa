"""Other people's sparse decodes on our problems: FlashMLA's Hopper kernel and SGLang's Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, CacheLayout
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


def cache_view(source: Source) -> torch.Tensor:
    """A V4 cache as SGLang hands it to FlashMLA: [pages, page_size, 1, 584] e4m3, whose token stride is fictitious."""
    token_bytes = CacheLayout.V4.data_bytes + CacheLayout.V4.scale_bytes
    pages = source.cache.view(torch.float8_e4m3fn)
    shape, stride = (pages.shape[0], source.page_size, 1, token_bytes), (pages.stride(0), token_bytes, token_bytes, 1)
    return pages.as_strided(shape, stride)


def flashmla_call(api: Any, problem: Problem) -> Peer:
    """FlashMLA on a problem of V4 caches whose indices lie inside the cache or are -1.

    It takes 64 or 128 heads; fewer are padded to 64, as SGLang does. Its scheduler metadata is made at the first call.
    """
    q, main, extra = problem.q, problem.main, problem.extra
    heads = q.shape[1]
    padded = 64 if heads <= 64 else 128
    wide = q.new_zeros(q.shape[0], 1, padded, HEAD_DIM)
    wide[:, 0, :heads] = q
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
