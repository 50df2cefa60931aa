"""Each store kernel once, small: what compute-sanitizer is to watch.

Every entry x cache layout x input type x K (1, 4, and 1 with unaligned rows), with programmatic dependent launch and
without; among the rows are some that write nothing. Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor
is an allocation of its own.
"""

from __future__ import annotations

import itertools

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.testing import decode_plan, extend_plan, yarn_freqs_cis

N = 37
POSITIONS = 512
PAGES = 4
PAGE_SIZE = 16
RATIO = 4


def main() -> None:
    torch.manual_seed(0)
    freqs = yarn_freqs_cis(POSITIONS, "cuda")
    index = torch.arange(N)
    positions = (index * 7 % POSITIONS).masked_fill(index == 3, POSITIONS)  # row 3: past the table
    seq_lens = ((index * 12) % (POSITIONS - RATIO) // RATIO * RATIO + RATIO).masked_fill(index == 5, 0)
    slots = torch.randperm(PAGES * PAGE_SIZE)[:N]
    slots[[0, 1]] = torch.tensor([-1, PAGES * PAGE_SIZE])
    plans = {
        "decode": decode_plan((seq_lens + (index % 9 == 8).long()).cuda()),
        "extend": extend_plan(seq_lens.cuda(), torch.randperm(N).cuda(), (index % 5 != 4).cuda()),
    }
    positions, slots = positions.cuda(), slots.cuda()
    launches = 0
    entries, layouts, dtypes = ("main", "decode", "extend"), ("v4", "bf16"), (torch.float32, torch.bfloat16)
    for entry, layout, dtype, width, pdl in itertools.product(
        entries, map(dk.CacheLayout, layouts), dtypes, (1, 4, "unaligned"), (True, False)
    ):
        dk.settings.pdl = pdl
        unaligned = int(width == "unaligned")
        # The last row ends where the allocation ends.
        kv = torch.randn(N * 1536 + unaligned, device="cuda").to(dtype)[unaligned:].view(N, 1536)[:, -512:]
        weight = torch.ones(512, device="cuda", dtype=dtype)
        cache = torch.zeros(PAGES, layout.page_bytes(PAGE_SIZE), dtype=torch.uint8, device="cuda")
        keywords = {
            "page_size": PAGE_SIZE,
            "layout": layout,
            "tokens_per_block": None if unaligned else width,
        }
        if entry == "main":
            dk.norm_rope_store(kv, weight, 1e-6, freqs, positions, slots, cache, **keywords)
        else:
            keywords |= {"compress_ratio": RATIO, "is_decode": entry == "decode"}
            dk.compress_norm_rope_store(kv, plans[entry], weight, 1e-6, freqs, slots, cache, **keywords)
        launches += 1
    torch.cuda.synchronize()
    print(f"{launches} launches")


if __name__ == "__main__":
    main()
