"""DeepSeek-V4's norm + RoPE + store into the FlashMLA cache, both entry points, against a torch reference."""

import sys

import pytest
import torch

import sgl_dsv4_kernels as dk

try:
    from sglang.test.ci.ci_register import register_cuda_ci
except Exception:  # outside of SGLang's CI the marker means nothing

    def register_cuda_ci(*args, **kwargs):
        pass


register_cuda_ci(est_time=20, stage="base-b-kernel-unit", runner_config="1-gpu-large")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEAD_DIM, ROPE_DIM, NOPE_DIM, GROUP = 512, 64, 448, 64
DATA_BYTES, SCALE_BYTES, PAGE_ALIGN = 576, 8, 576
EPS = 1e-6
POSITIONS = 2048
POISON = 0xA5
NUM_TOKENS = [1, 8, 64, 256, 2048]


def num_tokens_with_four_per_block():
    """Enough rows that the store takes K = 4 on this GPU: far more than every SM can hold with K = 1."""
    if not torch.cuda.is_available():
        return 16384
    return 64 * torch.cuda.get_device_properties(0).multi_processor_count


def make_inputs(num_tokens, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    kv = torch.randn(num_tokens, HEAD_DIM, generator=g, device="cuda")
    kv *= torch.exp2(torch.randint(-6, 7, (num_tokens, 1), generator=g, device="cuda").float())
    weight = 1 + 0.2 * torch.randn(HEAD_DIM, generator=g, device="cuda")
    angle = torch.rand(POSITIONS, ROPE_DIM // 2, generator=g, device="cuda") * 6.2832
    freqs_cis = torch.polar(torch.ones_like(angle), angle)
    positions = torch.randint(0, POSITIONS // 4, (num_tokens,), generator=g, device="cuda") * 4
    slots = torch.randperm(num_tokens + 300, generator=g, device="cuda")[:num_tokens]
    skipped = torch.randint(0, 8, (num_tokens,), generator=g, device="cuda") == 0
    skipped[0] = False
    return kv.to(dtype), weight.to(dtype), freqs_cis, positions, slots, skipped


def reference(kv, weight, freqs_cis, positions):
    """[N, 512] fp64: RMSNorm, then RoPE of the last 64 values."""
    x = kv.double()
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    pairs = torch.view_as_complex(x[:, NOPE_DIM:].unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * freqs_cis[positions]).flatten(-2)
    return torch.cat([x[:, :NOPE_DIM], rotated], -1)


def new_cache(num_slots, page_size):
    page_bytes = -(-page_size * (DATA_BYTES + SCALE_BYTES) // PAGE_ALIGN) * PAGE_ALIGN
    return torch.full((-(-num_slots // page_size), page_bytes), POISON, dtype=torch.uint8, device="cuda")


def check_rows(cache, slots, page_size, expected):
    """Dequantise the rows with their 7 exponents and compare."""
    page, row = slots // page_size, slots % page_size

    def take(start, count):
        return cache[page[:, None], start[:, None] + torch.arange(count, device="cuda")].contiguous()

    codes = take(row * DATA_BYTES, NOPE_DIM).view(torch.float8_e4m3fn).double().unflatten(-1, (-1, GROUP))
    rope = take(row * DATA_BYTES + NOPE_DIM, ROPE_DIM * 2).view(torch.bfloat16).double()
    exponents = take(page_size * DATA_BYTES + row * SCALE_BYTES, NOPE_DIM // GROUP)
    assert (exponents < 255).all()
    scale = torch.exp2(exponents.double() - 127)[..., None]
    nope = codes * scale
    assert nope.isfinite().all()
    assert rope.isfinite().all()
    wanted = expected[:, :NOPE_DIM].unflatten(-1, (-1, GROUP))
    # e4m3 has 3 mantissa bits: half a step is at most 1/17 of a value, or 2^-10 below the normal numbers. The
    # compressed entry rounds to bf16 first, 2^-9 of a value: 1/17 + 2^-9 < 1/16.
    assert ((nope - wanted).abs() <= wanted.abs() / 16 + scale * 2.0**-10).all()
    torch.testing.assert_close(rope, expected[:, NOPE_DIM:], rtol=2e-2, atol=2e-2)
    # A scale half as large would not hold the largest value (up to the rounding of fp32 and bf16).
    amax = wanted.abs().amax(-1).clamp(min=1e-4)
    assert (amax > 448 * scale[..., 0] / 2 * (1 - 2.0**-8)).all()


def check_untouched(cache, slots, page_size):
    page, row = slots // page_size, slots % page_size
    for start, count in ((row * DATA_BYTES, DATA_BYTES), (page_size * DATA_BYTES + row * SCALE_BYTES, SCALE_BYTES - 1)):
        cache[page[:, None], start[:, None] + torch.arange(count, device="cuda")] = POISON
    assert (cache == POISON).all()


@pytest.mark.parametrize("num_tokens", [*NUM_TOKENS, num_tokens_with_four_per_block()])
@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_main_store(num_tokens, page_size, position_dtype):
    kv, weight, freqs_cis, positions, slots, skipped = make_inputs(num_tokens, torch.bfloat16)
    wide = torch.full((num_tokens, 1024 + HEAD_DIM), torch.nan, dtype=kv.dtype, device="cuda")
    wide[:, 1024:] = kv
    cache = new_cache(num_tokens + 300, page_size)
    out_loc = torch.where(skipped, -1, slots).to(torch.int32)
    dk.norm_rope_store(
        wide[:, 1024:], weight, EPS, freqs_cis, positions.to(position_dtype), out_loc, cache, page_size=page_size
    )
    kept = ~skipped
    check_rows(cache, slots[kept], page_size, reference(kv, weight, freqs_cis, positions)[kept])
    check_untouched(cache, slots[kept], page_size)


@pytest.mark.parametrize("num_tokens", [*NUM_TOKENS, num_tokens_with_four_per_block()])
@pytest.mark.parametrize(("page_size", "ratio"), [(64, 4), (2, 128)])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "extend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_store(num_tokens, page_size, ratio, is_decode, dtype):
    kv, weight, freqs_cis, positions, slots, skipped = make_inputs(num_tokens, dtype)
    positions = positions // ratio * ratio
    plan = torch.zeros(num_tokens, 4, dtype=torch.int32, device="cuda")
    plan[:, 0] = positions + ratio
    if is_decode:
        plan[:, 0] += skipped
        out_loc = slots
    else:
        ragged = torch.randperm(num_tokens, device="cuda")
        plan[:, 0] = torch.where(skipped, -1, plan[:, 0])
        plan[:, 1] = ragged
        out_loc = torch.empty_like(slots)
        out_loc[ragged] = slots
    cache = new_cache(num_tokens + 300, page_size)
    dk.compress_norm_rope_store(
        kv,
        plan.view(torch.uint8),
        weight,
        EPS,
        freqs_cis,
        out_loc,
        cache,
        page_size=page_size,
        compress_ratio=ratio,
        is_decode=is_decode,
    )
    kept = ~skipped
    check_rows(cache, slots[kept], page_size, reference(kv, weight, freqs_cis, positions)[kept])
    check_untouched(cache, slots[kept], page_size)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
