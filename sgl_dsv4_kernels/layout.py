"""Byte layout of one page of the paged KV caches: the Python twin of csrc/common/cache_layout.h."""

from __future__ import annotations

import enum

HEAD_DIM = 512
"""Values of one latent row: nope part, then rope part."""
ROPE_DIM = 64
"""Values of the rotated tail: 32 (real, imaginary) pairs."""
NOPE_DIM = HEAD_DIM - ROPE_DIM
QUANT_GROUP = 64
"""Values that share one scale byte."""
NUM_SCALES = NOPE_DIM // QUANT_GROUP


class CacheLayout(enum.Enum):
    """Layout of a paged KV cache; a member's value is its lower-case name.

    A page of ``n`` tokens holds ``n`` data rows of ``data_bytes``, then ``n`` times ``scale_bytes``, then padding up to
    a multiple of ``page_align``. docs/cache_layout.md has a worked address.

    * ``V4``: [448 e4m3 | 64 bf16] and 7 UE8M0 scale bytes (+ 1 that is never written), pages a multiple of 576 bytes:
      the layout that FlashMLA calls MODEL1 and SGLang 584 bytes a token.
    * ``BF16``: 512 bf16 values, no scales.
    """

    V4 = "v4"
    BF16 = "bf16"

    @classmethod
    def parse(cls, layout: CacheLayout | str) -> CacheLayout:
        """A member, or its lower-case name, as a member. Raises ValueError for anything else."""
        try:
            return cls(layout)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"layout: expected a CacheLayout or one of {names}, got {layout!r}") from None

    @classmethod
    def from_code(cls, code: int) -> CacheLayout:
        """The member whose ``code`` this is."""
        return next(member for member in cls if member.code == code)

    @property
    def code(self) -> int:
        """The number that stands for this layout in the torch ops."""
        return _CODES[self]

    @property
    def data_bytes(self) -> int:
        """Bytes of one token's data row."""
        return NOPE_DIM + ROPE_DIM * 2 if self is CacheLayout.V4 else HEAD_DIM * 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of one token's scales."""
        return 8 if self is CacheLayout.V4 else 0

    @property
    def page_align(self) -> int:
        """A page's size is a multiple of this many bytes."""
        return 576 if self is CacheLayout.V4 else 1

    def scale_offset(self, page_size: int) -> int:
        """Offset of a page's scale bytes from the page's first byte."""
        return page_size * self.data_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of ``page_size`` tokens, padding included."""
        used = page_size * (self.data_bytes + self.scale_bytes)
        return -(-used // self.page_align) * self.page_align


_CODES = {CacheLayout.V4: 0, CacheLayout.BF16: 1}
