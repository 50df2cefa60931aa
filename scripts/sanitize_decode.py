"""The decode kernels once, small: what compute-sanitizer is to watch.

Hopper: every number of heads a block with every output, one block of heads and several, split and unsplit, the query's
norm and RoPE in it likewise, batch invariant; more blocks than SMs, also with the last rows split. The query kernel.
Combine: split counts of each of its variants with every output. All that with programmatic dependent launch and
without. Triton: a few of its variants, each of which is compiled first. Everywhere a second cache, short and empty
rows. Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.reference.decode import OUTPUTS
from sgl_dsv4_kernels.settings import settings

DEVICE = torch.device("cuda")
COMBINE_SPLITS = (1, 2, 3, 7, 12, 37)  # one of each compiled variant
TOKENS = 4


def make_problem(heads: int) -> td.Problem:
    """Rows of six and two tiles of 64 keys, so that both buffers of a tile come around; short ones, an empty one."""
    lengths, extra_lengths = [330, 3, 0, 0], [70, 0, 40, 0]
    return td.random_problem(
        TOKENS, heads, 330, 70, lengths=lengths, extra_lengths=extra_lengths, rope=True, device=DEVICE
    )


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, every row at an address that is 2 bytes past a multiple of 4."""
    view = torch.empty((*x.shape[:-1], x.shape[-1] + 2), dtype=x.dtype, device=x.device)[..., 1:-1]
    return view.copy_(x)


def sm90(heads: int, block_heads: int) -> None:
    """One number of heads a block, whatever the plan says."""
    problem = make_problem(heads)
    given = problem.arguments() | problem.options | dict(backend="sm90")
    plan = sm90_decode.Plan(block_heads, 1)
    with mock.patch.object(sm90_decode, "cached_plan", return_value=plan):
        for output in OUTPUTS:
            dk.sparse_decode(**given, num_splits=1, output=output, return_amax=True)
        for output in ("bf16", "fp8_group32_ue8m0"):
            dk.sparse_decode(**given, num_splits=2, output=output)  # merged on chip, but for 64 heads a block
        dk.sparse_decode(**given, num_splits=3, return_amax=True)
        dk.sparse_decode_partial(**problem.arguments(), num_splits=9, backend="sm90")  # empty splits are filled
        out = unaligned(torch.zeros_like(problem.q))
        dk.sparse_decode(**(given | dict(q=unaligned(problem.q))), num_splits=1, out=out)
        main_alone = dict(q=problem.q, cache=problem.main.cache, indices=problem.main.indices)  # no lengths
        dk.sparse_decode(**main_alone, page_size=problem.main.page_size, num_splits=2, backend="sm90")
        for q in (problem.q, unaligned(problem.q)):
            fused = given | dict(q=q, q_norm_eps=1e-6, q_rope=problem.options["inverse_rope"])
            for num_splits in (1, 3):
                dk.sparse_decode(**fused, num_splits=num_splits)
    dk.sparse_decode(**given, batch_invariant=True)  # as planned


def many_rows(heads: int, block_heads: int) -> None:
    """More blocks than SMs: rows of three tiles, of one, without keys."""
    tokens = 2 * sm90_decode.count_sms(DEVICE) * block_heads // heads + 5
    lengths = [(130, 3, 0, 64)[row % 4] for row in range(tokens)]
    extra_lengths = [(40, 0, 0)[row % 3] for row in range(tokens)]
    problem = td.random_problem(
        tokens, heads, 130, 40, lengths=lengths, extra_lengths=extra_lengths, rope=True, device=DEVICE
    )
    given = problem.arguments() | problem.options | dict(backend="sm90", num_splits=1)
    with mock.patch.object(sm90_decode, "cached_plan", return_value=sm90_decode.Plan(block_heads, 1)):
        dk.sparse_decode(**given)
        dk.sparse_decode(**given, q_norm_eps=1e-6, q_rope=problem.options["inverse_rope"])
        cut = sm90_decode.Cut(tokens - 5, 3)
        with mock.patch.object(sm90_decode, "cached_cut", return_value=cut):
            dk.sparse_decode(**(given | dict(num_splits=None)))


def triton() -> None:
    """Batch invariant: the tiles of large batches, which a small one does not take."""
    for heads, options in [
        (8, dict(num_splits=3)),
        (8, dict(num_splits=1, output="fp8_group128", return_amax=True)),
        (32, dict(num_splits=1, output="fp8_group128_ue8m0")),
        (64, dict(batch_invariant=True)),
        (64, dict(num_splits=1, output="fp8_group32_ue8m0", return_amax=True)),
        (64, dict(num_splits=1, q_norm_eps=1e-6)),
    ]:
        problem = make_problem(heads)
        if "q_norm_eps" in options:
            options["q_rope"] = problem.options["inverse_rope"]
        dk.sparse_decode(**problem.arguments(), **problem.options, **options, backend="triton")


def query() -> None:
    """Whole vectors of 16 bytes, and single values."""
    problem = make_problem(8)
    for q in (problem.q, unaligned(problem.q)):
        dk.query_norm_rope(q, norm_eps=1e-6, rope=problem.options["inverse_rope"])
        dk.query_norm_rope(q, rope=problem.options["inverse_rope"])
        dk.query_norm_rope(q, norm_eps=1e-6)


def combine(heads: int) -> None:
    problem = make_problem(heads)
    for splits, output in itertools.product(COMBINE_SPLITS, OUTPUTS):
        o_accum = torch.randn(splits, TOKENS, heads, 512, device=DEVICE)
        lse_accum = torch.randn(splits, TOKENS, heads, device=DEVICE)
        lse_accum[splits // 2, 0] = lse_accum[:, 1] = -torch.inf
        dk.combine_splits(o_accum, lse_accum, **problem.options, output=output, return_amax=splits % 2 == 1)


HEADS = [(8, 8), (8, 64), (16, 16), (32, 32), (64, 8), (64, 16), (64, 32), (64, 64), (128, 64)]
"""Of the query, and of a block."""


def main() -> None:
    hopper = sm90_decode.missing(DEVICE) is None
    for pdl, cases in ((True, HEADS), (False, [(64, 16), (64, 64)])):
        settings.pdl = pdl
        for heads, block_heads in cases if hopper else ():
            sm90(heads, block_heads)
        if hopper:
            for heads, block_heads in ((64, 64), (128, 64), (32, 32), (64, 32), (16, 16), (8, 8)):
                many_rows(heads, block_heads)
        query()
        combine(8)
    combine(128)
    triton()
    torch.cuda.synchronize()
    print(f"sm90 {'with ' + str(HEADS) if hopper else 'missing'}, query, combine, triton")


if __name__ == "__main__":
    main()
