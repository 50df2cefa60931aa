"""A served model in small: caches, one layer of each compress ratio, a step of stores and decodes."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from fake_sglang import FakeSGLang, Mode

from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.plugin.targets import BY_KEY
from sgl_dsv4_kernels.testing import decode_plan, extend_plan, yarn_freqs_cis

PAGE_SIZES = {0: 256, 4: 64, 128: 2}
PAGES = {0: 3, 4: 3, 128: 40}
POSITIONS = 600


class Plan(NamedTuple):
    """CompressorDecodePlan or CompressorPrefillPlan."""

    compress_ratio: int
    plan_d: torch.Tensor
    is_decode: bool


def new_cache(ratio: int) -> torch.Tensor:
    return torch.zeros(PAGES[ratio], CacheLayout.V4.page_bytes(PAGE_SIZES[ratio]), dtype=torch.uint8)


def view584(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """As the backend views a pool for FlashMLA."""
    return cache[:, : page_size * 584].view(torch.float8_e4m3fn).view(cache.shape[0], page_size, 1, 584)


class World:
    """One rank. n_heads: of the model; heads: of the rank."""

    def __init__(self, sglang: FakeSGLang, *, rows: int = 3, n_heads: int = 64, heads: int = 64, rank: int = 0) -> None:
        generator = torch.Generator().manual_seed(7)
        self.sglang, self.rows, self.heads, self.generator = sglang, rows, heads, generator
        self.caches = {ratio: new_cache(ratio) for ratio in PAGE_SIZES}
        self.freqs = yarn_freqs_cis(POSITIONS)
        self.positions = torch.randint(400, POSITIONS, (rows,), generator=generator)
        swa = torch.randint(0, 128, (rows, 1, 128), generator=generator).int()
        extras = {0: None}
        for ratio in (4, 128):
            width = 64
            indices = torch.randint(0, 60, (rows, 1, width), generator=generator).int()
            indices[:, :, 50:] = -1
            lengths = torch.randint(1, width, (rows,), generator=generator).int()
            extras[ratio] = (view584(self.caches[ratio], PAGE_SIZES[ratio]), indices, lengths)
        self.backend = sglang.backend_class()(
            cache=view584(self.caches[0], PAGE_SIZES[0]),
            indices=swa,
            lengths=torch.randint(1, 128, (rows,), generator=generator).int(),
            extras=extras,
        )
        sink = torch.randn(n_heads, generator=generator)
        self.queries = torch.randn((rows, heads, 512), generator=generator).bfloat16()
        self.layers = {}
        for ratio in PAGE_SIZES:
            attention = types.SimpleNamespace(ratio=ratio, tp_q_head_num=heads, layer_id=ratio)
            self.layers[ratio] = sglang.model_class()(
                self.backend, attention, self.freqs, sink, n_heads, heads, rank, lambda x: self.queries.clone()
            )

    def store_swa(self, **other: Any) -> None:
        """130 rows of the sliding window, a slice of a wider product, one row without a slot."""
        count = 130
        wide = torch.randn((count, 1536), generator=self.generator).bfloat16()
        slots = torch.arange(count).int()
        slots[-1] = -1
        arguments = dict(
            kv=wide[:, 1024:],
            kv_weight=torch.rand(512, generator=self.generator).bfloat16() + 0.5,
            eps=1e-6,
            freqs_cis=self.freqs,
            positions=torch.arange(count),
            out_loc=slots,
            kvcache=self.caches[0],
            page_size=256,
        )
        self.sglang.module(BY_KEY["A2"].consumers[0]).store(**{**arguments, **other})

    def store_compressed(self, ratio: int, *, is_decode: bool = True, **other: Any) -> None:
        """64 compressed rows; in a decode every second sequence has no full group."""
        count = 64
        number = torch.arange(count)
        lengths = ratio * (1 + number % (POSITIONS // ratio)) + (number % 2 if is_decode else 0)
        plan = decode_plan(lengths) if is_decode else extend_plan(lengths, number.flip(0))
        arguments = dict(
            kv=torch.randn((count, 512), generator=self.generator),
            plan=Plan(ratio, plan, is_decode),
            norm_weight=torch.rand(512, generator=self.generator) + 0.5,
            norm_eps=1e-6,
            freq_cis=self.freqs,
            out_loc=torch.arange(count),
            kvcache=self.caches[ratio],
            page_size=PAGE_SIZES[ratio],
        )
        self.sglang.module(BY_KEY["A1"].consumers[0]).store(**{**arguments, **other})

    def attend(self, ratio: int, mode: str = "decode") -> torch.Tensor:
        batch = types.SimpleNamespace(forward_mode=Mode(mode))
        x = torch.empty((self.rows, 8), dtype=torch.bfloat16)
        return self.layers[ratio].forward(x, self.positions, batch)

    def step(self) -> dict[int, torch.Tensor]:
        """Stores, then every layer's attention; the outputs by ratio."""
        self.store_swa()
        for ratio in (4, 128):
            self.store_compressed(ratio, is_decode=ratio == 4)
        return {ratio: self.attend(ratio) for ratio in PAGE_SIZES}
