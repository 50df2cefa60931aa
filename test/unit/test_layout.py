"""The twins of the byte layout (csrc/common/cache_layout.h, layout.py) against each other and against known numbers."""

from __future__ import annotations

import pytest
import torch

from sgl_dsv4_kernels import CacheLayout
from sgl_dsv4_kernels import layout as layout_module

PAGE_SIZES = [1 << bits for bits in range(13)] + [3, 96, 1000]


def cpp_fact(layout: CacheLayout, fact: str, page_size: int = 1) -> int:
    return torch.ops.sgl_dsv4_kernels.cache_layout_fact(layout.code, fact, page_size)


@pytest.mark.parametrize("layout", CacheLayout)
def test_cpp_and_python_agree(layout):
    for fact in ("data_bytes", "scale_bytes", "page_align"):
        assert cpp_fact(layout, fact) == getattr(layout, fact)
    for page_size in PAGE_SIZES:
        assert cpp_fact(layout, "scale_offset", page_size) == layout.scale_offset(page_size)
        assert cpp_fact(layout, "page_bytes", page_size) == layout.page_bytes(page_size)


@pytest.mark.parametrize(
    ("page_size", "page_bytes"),
    [(1, 1152), (2, 1728), (64, 37440), (128, 74880), (256, 149760), (1 << 30, 627065225280)],
)
def test_v4_page_bytes(page_size, page_bytes):
    """The strides of SGLang's C128, C4 and sliding-window pools, and one past 32 bits."""
    assert CacheLayout.V4.page_bytes(page_size) == page_bytes
    assert cpp_fact(CacheLayout.V4, "page_bytes", page_size) == page_bytes


@pytest.mark.parametrize(("page_size", "page_bytes"), [(1, 1024), (64, 65536), (256, 262144)])
def test_bf16_page_bytes(page_size, page_bytes):
    assert CacheLayout.BF16.page_bytes(page_size) == page_bytes
    assert CacheLayout.BF16.scale_bytes == 0


def test_worked_address():
    """Slot 130 of a V4 cache with 64 tokens a page: page 2, row 2."""
    layout, page_size, slot = CacheLayout.V4, 64, 130
    page, row = divmod(slot, page_size)
    start = page * layout.page_bytes(page_size)
    assert start + row * layout.data_bytes == 76032
    assert start + row * layout.data_bytes + layout_module.NOPE_DIM == 76480
    assert start + layout.scale_offset(page_size) + row * layout.scale_bytes == 111760
    assert start + layout.page_bytes(page_size) == 112320


@pytest.mark.parametrize("layout", CacheLayout)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_holds_its_rows(layout, page_size):
    used = layout.scale_offset(page_size) + page_size * layout.scale_bytes
    assert used <= layout.page_bytes(page_size) < used + layout.page_align
    assert layout.page_bytes(page_size) % layout.page_align == 0


def test_codes():
    """The codes are part of the op schemas: a change breaks every older caller."""
    assert {layout.value: layout.code for layout in CacheLayout} == {"v4": 0, "bf16": 1}


@pytest.mark.parametrize("layout", CacheLayout)
def test_parse(layout):
    assert CacheLayout.parse(layout) is layout
    assert CacheLayout.parse(layout.value) is layout


@pytest.mark.parametrize("bad", ["V4", "fp8", 0, None])
def test_parse_names_what_came(bad):
    with pytest.raises(ValueError, match=f"layout: expected a CacheLayout or one of 'v4', 'bf16', got {bad!r}"):
        CacheLayout.parse(bad)


def test_cpp_rejects_unknown():
    with pytest.raises(RuntimeError, match=r"layout: expected 0 \(v4\) or 1 \(bf16\), got 2"):
        torch.ops.sgl_dsv4_kernels.cache_layout_fact(2, "data_bytes", 1)
    with pytest.raises(RuntimeError, match=r"fact: expected data_bytes.*, got colour"):
        torch.ops.sgl_dsv4_kernels.cache_layout_fact(0, "colour", 1)
