"""Writes store_golden.npz: the bytes that SGLang's own store kernels leave in a cache, for machines without a GPU.

Needs a CUDA device and sglang 0.5.17: ``python test/data/make_store_golden.py [OUT.npz]``.
test/unit/test_store_golden.py makes the same inputs with `golden_cases` (integer arithmetic, the same on every machine)
and compares.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sgl_dsv4_kernels import CacheLayout, testing

EPS = 1e-6
RATIO = 4
ROWS = 108
POSITIONS = 256
BOUNDARY_GROUP = 3
"""The weights of this scale group are 1.75 = 448 / 2^8: a constant row's amax lies on a boundary between two scales."""
BOUNDARY_CONSTANTS = (1e4, 3000.0, 777.0, 54321.0)


class GoldenCase(NamedTuple):
    """One call and where its rows go: row i is written, at ``row_slots[i]``, only if ``stored[i]``."""

    entry: str  # "main", "decode" or "extend"
    layout: CacheLayout
    page_size: int
    pages: int
    kv: torch.Tensor
    weight: torch.Tensor
    source: torch.Tensor  # positions (main) or plan
    slots: torch.Tensor
    row_slots: torch.Tensor
    row_positions: torch.Tensor
    stored: torch.Tensor


def hashed(count: int, seed: int) -> torch.Tensor:
    """[count] int64 in [0, 2^24), the same on every machine (splitmix64's finalizer on a counter)."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.int64))


def bell(rows: int, columns: int, seed: int) -> torch.Tensor:
    """[rows, columns] fp32, bell-shaped in (-2, 2): sums of four uniform values."""
    total = sum(hashed(rows * columns, seed + i) for i in range(4)) - (1 << 25)
    return (total.float() * 2.0**-24).view(rows, columns)


def permutation(count: int, seed: int) -> torch.Tensor:
    return torch.argsort(hashed(count, seed) * count + torch.arange(count))


def make_kv(dtype: torch.dtype, seed: int) -> torch.Tensor:
    special = testing.special_rows(dtype)
    constant = torch.tensor(BOUNDARY_CONSTANTS)[:, None].expand(-1, 512)
    ordinary = bell(ROWS - len(special) - len(constant), 512, seed)
    size = (1 << hashed(len(ordinary), seed + 9) % 21) / 1024
    rows = torch.cat([special.float(), constant, ordinary * size[:, None]]).to(dtype)
    return rows[permutation(ROWS, seed + 11)].contiguous()


def make_case(entry: str, layout: CacheLayout, dtype: torch.dtype, page_size: int, seed: int) -> GoldenCase:
    kv = make_kv(dtype, seed)
    weight = 1 + 0.25 * bell(1, 512, seed + 20)[0]
    weight[64 * BOUNDARY_GROUP : 64 * BOUNDARY_GROUP + 64] = 1.75
    pages = -(-(ROWS + 20) // page_size)
    row_slots = permutation(pages * page_size, seed + 21)[:ROWS].contiguous()
    row_positions = hashed(ROWS, seed + 22) % (POSITIONS // RATIO) * RATIO
    left_out = hashed(ROWS, seed + 23) % 12 == 0
    seq_lens = row_positions + RATIO
    if entry == "main":
        row_slots[left_out] = -1
        source, slots = row_positions, row_slots.to(torch.int32)
    elif entry == "decode":
        seq_lens[left_out] += 1 + torch.arange(int(left_out.sum())) % (RATIO - 1)
        source, slots = testing.decode_plan(seq_lens), row_slots
    else:
        ragged = permutation(ROWS, seed + 24)
        slots = torch.empty_like(row_slots)
        slots[ragged] = row_slots
        source = testing.extend_plan(seq_lens, ragged, ~left_out)
    return GoldenCase(
        entry, layout, page_size, pages, kv, weight.to(dtype), source, slots, row_slots, row_positions, ~left_out
    )


def golden_cases() -> dict[str, GoldenCase]:
    """Name -> case: the compressed entry in all its forms, and the main entry as SGLang calls it (bf16, V4)."""
    cases = {}
    for entry in ("decode", "extend"):
        for dtype in (torch.float32, torch.bfloat16):
            for layout, page_size in ((CacheLayout.V4, 64), (CacheLayout.BF16, 1)):
                name = f"{entry}-{str(dtype).removeprefix('torch.')}-{layout.value}"
                cases[name] = make_case(entry, layout, dtype, page_size, seed=100 * (len(cases) + 1))
    cases["main-bfloat16-v4"] = make_case("main", CacheLayout.V4, torch.bfloat16, 128, seed=100 * (len(cases) + 1))
    return cases


def run_case(store, case: GoldenCase, freqs: torch.Tensor, device: torch.device | str, **options) -> torch.Tensor:
    """The cache after the call, copied to the CPU. ``store`` has our two functions; ``freqs``: [P, 32] complex64."""
    cache = testing.empty_cache(case.pages, case.page_size, case.layout, device)
    kv, weight, source, slots, freqs = (x.to(device) for x in (case.kv, case.weight, case.source, case.slots, freqs))
    options = {"page_size": case.page_size, "layout": case.layout, **options}
    if case.entry == "main":
        store.norm_rope_store(kv, weight, EPS, freqs, source, slots, cache, **options)
    else:
        options |= {"compress_ratio": RATIO, "is_decode": case.entry == "decode"}
        store.compress_norm_rope_store(kv, source, weight, EPS, freqs, slots, cache, **options)
    return cache.cpu()


def build(store, device: torch.device | str, made_by: str) -> dict[str, np.ndarray]:
    """All that the file holds: the frequency table, who made it, and a cache per case."""
    freqs = testing.yarn_freqs_cis(POSITIONS)
    content = {"freqs": torch.view_as_real(freqs).numpy(), "made_by": np.array(made_by)}
    for name, case in golden_cases().items():
        content[name] = run_case(store, case, freqs, device).numpy()
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("store_golden.npz"))
    out = parser.parse_args().out
    stock, reason = testing.stock_store()
    if stock is None:
        raise SystemExit(reason)
    version = importlib.metadata.version("sglang")
    made_by = f"sglang {version}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    np.savez_compressed(out, **build(stock, "cuda", made_by))
    print(f"{out}: {out.stat().st_size} bytes, {made_by}")


if __name__ == "__main__":
    main()
