"""What the binary says of itself, and what runs for CUDA tensors in each kind of build."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import ops

OPS = ("norm_rope_store", "compress_norm_rope_store", "sparse_decode", "sparse_decode_partial", "combine_splits")


def test_build_info():
    info = dk.build_info()
    assert set(info) == {"torch", "cuda", "architectures"}
    assert (info["cuda"] == "none") == (info["architectures"] == "")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_op_has_an_implementation(name, key):
    """Also for CUDA in a build without CUDA code: an error that says so, not torch's about a missing kernel."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sgl_dsv4_kernels::{name}", key)


def test_the_error_without_cuda_code():
    with pytest.raises(RuntimeError, match=r"this build holds no CUDA code.*SGL_DSV4_CUDA_ARCHS"):
        ops._without_cuda_code()


def test_import_does_not_touch_cuda():
    script = "import sgl_dsv4_kernels, torch; assert not torch.cuda.is_initialized()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
