"""The argument checks that every public function shares."""

from __future__ import annotations

import pytest
import torch

from sgl_dsv4_kernels.checks import check_stride, check_tensor, freqs_as_float

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "kwargs", "error", "text"),
    [
        ([1.0], {}, TypeError, r"^x: expected a torch.Tensor, got list$"),
        (torch.zeros(2), {"dtype": torch.int32}, TypeError, r"^x: expected dtype torch.int32, got torch.float32$"),
        (
            torch.zeros(2),
            {"dtype": (torch.int32, torch.int64)},
            TypeError,
            r"^x: expected dtype torch.int32 or torch.int64, got torch.float32$",
        ),
        (torch.zeros(2, 3), {"shape": ("tokens", 4)}, ValueError, r"^x: expected shape \[tokens, 4\], got \[2, 3\]$"),
        (torch.zeros(2), {"shape": (None, 4)}, ValueError, r"^x: expected shape \[\*, 4\], got \[2\]$"),
        (torch.zeros(2, 3), {"device": torch.device("meta")}, ValueError, r"^x: expected device meta, got cpu$"),
    ],
)
def test_check_tensor_says_what_came(value, kwargs, error, text):
    with pytest.raises(error, match=text):
        check_tensor("x", value, **kwargs)


def test_check_tensor_accepts():
    check_tensor("x", torch.zeros(2, 3), shape=("tokens", 3), dtype=(torch.int32, torch.float32), device=CPU)
    check_tensor("x", torch.zeros(0, 3), shape=(None, 3), dtype=torch.float32)


def test_check_stride():
    value = torch.zeros(4, 6)
    check_stride("x", value, 0, 6)
    check_stride("x", value[:1, ::2], 0, 1)  # one row: any stride
    with pytest.raises(ValueError, match=r"^x: expected stride\(1\) = 1, got 2$"):
        check_stride("x", value[:, ::2], 1, 1)


def test_freqs_complex_and_float_share_memory():
    freqs = torch.randn(5, 32, dtype=torch.complex64)
    as_float = freqs_as_float(freqs, CPU)
    assert as_float.shape == (5, 64)
    assert as_float.data_ptr() == freqs.data_ptr()
    assert torch.equal(as_float[:, 0::2], freqs.real)
    assert torch.equal(as_float[:, 1::2], freqs.imag)
    assert freqs_as_float(as_float, CPU) is as_float


def test_conjugated_freqs_are_not_taken_for_plain_ones():
    """A lazy conjugate holds the memory of the plain table."""
    with pytest.raises((RuntimeError, ValueError), match="conj"):
        freqs_as_float(torch.randn(5, 32, dtype=torch.complex64).conj(), CPU)


@pytest.mark.parametrize(
    ("freqs", "error", "text"),
    [
        (
            torch.zeros(5, 64, dtype=torch.float64),
            TypeError,
            "dtype torch.complex64 or torch.float32, got torch.float64",
        ),
        (torch.zeros(5, 64, dtype=torch.complex64), ValueError, r"shape \[positions, 32\], got \[5, 64\]"),
        (torch.zeros(5, 32), ValueError, r"shape \[positions, 64\], got \[5, 32\]"),
        (torch.zeros(5, 128)[:, ::2], ValueError, r"stride\(1\) = 1, got 2"),
        (torch.zeros(5, 64, dtype=torch.complex64)[:, ::2], ValueError, r"stride\(1\) = 1, got 2"),
        (torch.zeros(5, 40, dtype=torch.complex64)[:, :32], ValueError, r"stride\(0\) = 32, got 40"),
        (torch.zeros(5, 72)[:, :64], ValueError, r"stride\(0\) = 64, got 72"),
        (torch.zeros(5, 64, device="meta"), ValueError, "device cpu, got meta"),
    ],
)
def test_freqs_errors(freqs, error, text):
    with pytest.raises(error, match=f"freqs_cis: expected {text}"):
        freqs_as_float(freqs, CPU)
