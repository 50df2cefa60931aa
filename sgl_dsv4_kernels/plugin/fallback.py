"""Falling back to SGLang's kernel: every reason is logged once and counted."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger("sgl_dsv4_kernels")
MOST_REASONS = 20
"""Reasons that are kept apart for one hook; a text that holds sizes could otherwise fill the log."""


class Declined(Exception):
    """Our kernel does not take this call. ``foreseen``: by design (prefill, the indexer's keys), so no fault."""

    def __init__(self, reason: str, *, foreseen: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.foreseen = foreseen


class Ledger:
    """What this process has served and declined. Under a CUDA graph a call counts once, when it is captured."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.served: Counter[str] = Counter()
        self.foreseen: Counter[tuple[str, str]] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    def decline(self, label: str, why: Declined) -> None:
        """Count and log a fallback of the hook ``label``. RuntimeError if strict and it was not foreseen."""
        counts = self.foreseen if why.foreseen else self.fallbacks
        reason = why.reason
        if (label, reason) not in counts and sum(name == label for name, _ in counts) >= MOST_REASONS:
            reason = "further reasons"
        counts[label, reason] += 1
        if self.strict and not why.foreseen:
            raise RuntimeError(f"sgl_dsv4_kernels: SGL_DSV4_STRICT=1, and {label} cannot serve a call: {why.reason}")
        if counts[label, reason] > 1:
            return
        if why.foreseen:
            logger.info("sgl_dsv4_kernels: %s leaves to SGLang: %s", label, reason)
        else:
            logger.warning("sgl_dsv4_kernels: %s falls back to SGLang's kernel: %s (logged once)", label, reason)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Counts by "label: reason"."""
        return {
            "served": dict(self.served),
            "foreseen": {f"{label}: {reason}": count for (label, reason), count in self.foreseen.items()},
            "fallbacks": {f"{label}: {reason}": count for (label, reason), count in self.fallbacks.items()},
        }
