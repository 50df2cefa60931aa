"""The decode kernels once, small: what compute-sanitizer is to watch.

Every backend, split and unsplit, every output, with a second cache, short and empty rows, and the combine kernel for
split counts of each of its variants. Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation
of its own.
"""

from __future__ import annotations

import itertools

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.reference.decode import OUTPUTS

HEADS = (8, 32, 64)
COMBINE_SPLITS = (1, 2, 3, 7, 12, 37)  # one of each compiled variant


def main() -> None:
    device = torch.device("cuda")
    calls = 0
    backends = ["triton"] if sm90_decode.missing(device) else ["sm90", "triton"]
    for backend, heads in itertools.product(backends, HEADS):
        problem = td.random_problem(
            3, heads, 70, 40, lengths=[70, 3, 0], extra_lengths=[9, 0, 40], rope=True, device=device
        )
        for output in OUTPUTS:
            for splits in (1, 3):
                arguments = problem.arguments() | problem.options
                dk.sparse_decode(**arguments, num_splits=splits, output=output, return_amax=True, backend=backend)
                calls += 1
        prologue = dict(q_norm_eps=1e-6, q_rope=problem.options["inverse_rope"])
        dk.sparse_decode(**problem.arguments(), **problem.options, **prologue, num_splits=1, backend=backend)
        dk.query_norm_rope(problem.q.flatten(1)[:, 1:513].unflatten(1, (1, 512)), norm_eps=1e-6)  # unaligned
        calls += 2
    for heads, splits in itertools.product(HEADS, COMBINE_SPLITS):
        o_accum = torch.randn(splits, 3, heads, 512, device=device)
        lse_accum = torch.randn(splits, 3, heads, device=device)
        lse_accum[splits // 2, 0] = -torch.inf
        dk.combine_splits(o_accum, lse_accum, attn_sink=torch.randn(heads, device=device))
        calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
