"""The GPU tests may run in several processes at once, which share its memory."""

from __future__ import annotations

import pytest
import torch

SPARE_BYTES = 2 << 30
"""What torch may keep of the memory that a test no longer needs."""


@pytest.fixture(autouse=True)
def leave_memory_to_others():
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > SPARE_BYTES:
        torch.cuda.empty_cache()
