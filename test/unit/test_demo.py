"""The demo on the CPU: it succeeds, and it notices what is wrong."""

from __future__ import annotations

import pytest
import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import demo, demo_decode

ARGUMENTS = ["--device", "cpu", "--tokens", "64"]


def test_succeeds(capsys):
    assert demo.main(ARGUMENTS) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("ok")
    assert text.count("compress") > 8
    assert "splits   output error" in text


def test_notices_a_decode_error(monkeypatch, capsys):
    monkeypatch.setattr(demo_decode, "OUTPUT_BOUND", 1e-4)
    assert demo.main(ARGUMENTS) == 1
    assert "decode with 1 splits: error above its bound" in capsys.readouterr().out


@pytest.mark.parametrize("byte", [0, 583 * 3])
def test_notices_a_wrong_byte(monkeypatch, byte):
    store = dk.norm_rope_store

    def spoiled(kv, *arguments, **keywords):
        store(kv, *arguments, **keywords)
        if kv.shape[0] > 1:
            cache = arguments[-1]
            cache.view(torch.uint8)[0, byte] ^= 0x44

    monkeypatch.setattr(dk, "norm_rope_store", spoiled)
    assert demo.main(ARGUMENTS) == 1
