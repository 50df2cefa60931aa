"""Inputs for decode tests and benchmarks: caches whose unattended bytes are poison, indices, lengths, the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM, NUM_SCALES, ROPE_DIM, CacheLayout
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference.decode import Source

OUTPUT_BOUND = 0.0024
"""Bound of `relative_error` for any inputs: the result and the softmax weights are rounded to bf16 once each, which is
0.00166 each for log-uniform mantissas, 0.00235 together. FlashMLA has 0.0017 to 0.0022 on an H200;
test/gpu/test_decode_gpu.py compares with it on the same inputs."""

NAN_BYTE = 0xFF
"""As an e4m3 code, as a scale and, twice, as a bf16: NaN."""


def poisoned_cache(
    num_pages: int,
    page_size: int,
    layout: CacheLayout = CacheLayout.V4,
    *,
    page_stride: int | None = None,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """[num_pages, page bytes] uint8 that is NaN wherever it is read; so are padding, page tails and what surrounds it.

    Args:
        page_stride: bytes between pages, at least a page's size: a packed pool. offset: bytes before the first page.
    """
    page_bytes = layout.page_bytes(page_size)
    stride = page_bytes if page_stride is None else page_stride
    storage = torch.full((offset + num_pages * stride + 64,), NAN_BYTE, dtype=torch.uint8, device=device)
    return storage.as_strided((num_pages, page_bytes), (stride, 1), offset)


def fill_slots(
    cache: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    layout: CacheLayout = CacheLayout.V4,
    *,
    generator: torch.Generator | None = None,
    exponents: tuple[int, int] = (117, 121),
) -> None:
    """Write random rows to ``slots`` (int64, distinct): any finite code, scales 2^(e - 127) with e in ``exponents``."""
    device, count = cache.device, slots.numel()

    def random(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    page, place = (slots // page_size)[:, None], (slots % page_size)[:, None]
    data = torch.empty((count, layout.data_bytes), dtype=torch.uint8, device=device)
    normal = torch.randn((count, HEAD_DIM), generator=generator).to(device=device, dtype=torch.bfloat16)
    if layout is CacheLayout.V4:
        # Codes of normal values, so that rows look like quantised ones; a few of any finite code.
        codes = (normal[:, :NOPE_DIM].float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        other = random(0, 127, codes.shape).to(torch.uint8) | (random(0, 2, codes.shape) << 7).to(torch.uint8)
        data[:, :NOPE_DIM] = torch.where(random(0, 16, codes.shape) == 0, other, codes)
        data[:, NOPE_DIM:] = normal[:, NOPE_DIM:].contiguous().view(torch.uint8)
        scales = random(exponents[0], exponents[1] + 1, (count, NUM_SCALES)).to(torch.uint8)
        first = layout.scale_offset(page_size) + place * layout.scale_bytes
        cache[page, first + torch.arange(NUM_SCALES, device=device)] = scales
    else:
        data[:] = normal.view(torch.uint8)
    cache[page, place * layout.data_bytes + torch.arange(layout.data_bytes, device=device)] = data


def random_freqs(num_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[P, 32] complex64 of modulus 1."""
    angle = torch.rand((num_positions, ROPE_DIM // 2), generator=torch.Generator().manual_seed(5)) * 2 * math.pi
    return torch.polar(torch.ones_like(angle), angle).to(device)


@dataclass
class Problem:
    """One decode. ``arguments()`` are those of the public functions, ``main`` and ``extra`` those of the reference."""

    q: torch.Tensor
    main: Source
    extra: Source | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """attn_sink, inverse_rope, output, return_amax, softmax_scale."""

    def arguments(self) -> dict[str, Any]:
        result: dict[str, Any] = dict(
            q=self.q,
            cache=self.main.cache,
            indices=self.main.indices,
            topk_length=self.main.length,
            page_size=self.main.page_size,
            layout=self.main.layout,
        )
        if self.extra is not None:
            result |= dict(
                extra_cache=self.extra.cache,
                extra_indices=self.extra.indices,
                extra_topk_length=self.extra.length,
                extra_page_size=self.extra.page_size,
                extra_layout=self.extra.layout,
            )
        return result

    def rows(self, rows: slice) -> Problem:
        """Some rows of it, in the same caches."""

        options = dict(self.options)
        if options.get("inverse_rope") is not None:
            freqs, positions = options["inverse_rope"]
            options["inverse_rope"] = freqs, positions[rows]
        extra = None if self.extra is None else self.extra.rows(rows)
        return replace(self, q=self.q[rows], main=self.main.rows(rows), extra=extra, options=options)


def random_source(
    tokens: int,
    width: int,
    *,
    page_size: int,
    layout: CacheLayout = CacheLayout.V4,
    num_pages: int | None = None,
    lengths: list[int] | torch.Tensor | None = None,
    invalid: float = 0.1,
    page_stride: int | None = None,
    offset: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    exponents: tuple[int, int] = (117, 121),
) -> Source:
    """A cache and indices into it. Only attended slots hold numbers; slot 0 never does.

    Args:
        lengths: of each row, unclamped; None = a random mix of 0, 1, full, past full and in between.
        invalid: share of the indices that lie outside the cache. Repeats happen too. Past a row's length the indices
            are garbage: out of range, or of poisoned slots.
    """
    generator = torch.Generator().manual_seed(seed)
    num_pages = num_pages or max(2, -(-(width * 2) // page_size))
    slots = num_pages * page_size
    if lengths is None:
        length = torch.randint(0, width + 1, (tokens,), generator=generator)
        special = torch.tensor([width, 0, 1, width + 7, -3, max(width - 1, 0), 64])
        pick = torch.randint(0, 2 * len(special), (tokens,), generator=generator)
        length = torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], length)
    else:
        length = torch.as_tensor(lengths).expand(tokens).clone()
    good = torch.randint(1, slots, (max(1, slots // 2),), generator=generator).unique()
    bad_slots = torch.ones(slots, dtype=torch.bool)
    bad_slots[good] = False
    poison = bad_slots.nonzero().flatten()
    indices = good[torch.randint(0, good.numel(), (tokens, width), generator=generator)]
    outside = torch.tensor([-1, -2, -(2**31), slots, slots + 1, 2**31 - 1]).clamp(max=2**31 - 1)
    chosen = outside[torch.randint(0, len(outside), indices.shape, generator=generator)]
    indices = torch.where(torch.rand(indices.shape, generator=generator) < invalid, chosen, indices)
    garbage = torch.where(
        torch.rand(indices.shape, generator=generator) < 0.5,
        poison[torch.randint(0, poison.numel(), indices.shape, generator=generator)],
        chosen,
    )
    indices = torch.where(torch.arange(width) < length.clamp(0, width)[:, None], indices, garbage)
    cache = poisoned_cache(num_pages, page_size, layout, page_stride=page_stride, offset=offset, device=device)
    fill_slots(cache, good.to(device), page_size, layout, generator=generator, exponents=exponents)
    return Source(cache, indices.int().to(device), length.int().to(device), page_size, layout)


def random_queries(tokens: int, heads: int, *, seed: int = 1, device: torch.device | str = "cpu") -> torch.Tensor:
    """[T, h, 512] bf16."""
    q = torch.randn((tokens, heads, HEAD_DIM), generator=torch.Generator().manual_seed(seed))
    return q.to(torch.bfloat16).to(device)


def random_problem(
    tokens: int,
    heads: int,
    width: int = 128,
    extra_width: int = 0,
    *,
    page_size: int = 64,
    extra_page_size: int = 2,
    layout: CacheLayout = CacheLayout.V4,
    extra_layout: CacheLayout | None = None,
    lengths: list[int] | torch.Tensor | None = None,
    extra_lengths: list[int] | torch.Tensor | None = None,
    sink: bool = True,
    rope: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **source: Any,
) -> Problem:
    """A decode of random rows; ``source`` goes to `random_source`, both times."""
    main = random_source(
        tokens, width, page_size=page_size, layout=layout, lengths=lengths, seed=seed, device=device, **source
    )
    extra = None
    if extra_width:
        extra = random_source(
            tokens, extra_width, page_size=extra_page_size, layout=extra_layout or layout, lengths=extra_lengths,
            seed=seed + 1, device=device, **source,
        )  # fmt: skip
    options: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(seed + 2)
    if sink:
        attn_sink = torch.randn(heads, generator=generator)
        attn_sink[0], attn_sink[1] = -math.inf, math.inf
        options["attn_sink"] = attn_sink.to(device)
    if rope:
        positions = torch.randint(0, 64, (tokens,), generator=generator).to(device)
        options["inverse_rope"] = random_freqs(64, device), positions
    return Problem(random_queries(tokens, heads, seed=seed + 3, device=device), main, extra, options)


@dataclass
class Truth:
    """fp64: value [T, h, 512] behind sink and RoPE, lse [T, h] (natural; +inf in an empty row), and lse_slack [T, h]:
    what the LSE may be off because of `truncated_sums`, 0 on the CPU."""

    value: torch.Tensor
    lse: torch.Tensor
    lse_slack: torch.Tensor

    @property
    def empty(self) -> torch.Tensor:
        return self.lse == math.inf

    def of_heads(self, heads: int) -> Truth:
        """Of the first ``heads`` heads."""
        return Truth(self.value[:, :heads], self.lse[:, :heads], self.lse_slack[:, :heads])


def epilogue_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """attn_sink, freqs_cis [P, 64] fp32 and positions of a problem's options, as the reference takes them."""
    freqs, positions = options.get("inverse_rope") or (None, None)
    if freqs is not None and freqs.is_complex():
        freqs = torch.view_as_real(freqs).flatten(1)
    return dict(attn_sink=options.get("attn_sink"), freqs_cis=freqs, positions=positions)


MOST_SLACK = 5e-6
"""A larger `lse_slack` is not granted."""


def truncated_sums(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [T, h, 512] x keys [T, K, 512] -> [T, h, K] by a model of how tensor cores add: 16 products exactly, then the
    running sum, cut off at 24 bits. Where large partial sums cancel, it explains what an H200 gives: the LSE of one row
    of 36 keys 3.2e-6 off in every kernel, 2.9e-6 in this model, typically 3e-7 in both.
    """
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for first in range(0, HEAD_DIM, 16):
        part = slice(first, first + 16)
        total = total + torch.einsum("thd,tkd->thk", q[..., part].double(), keys[..., part].double())
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.trunc(mantissa * 2.0**24) * 2.0**-24, exponent)
    return total


def _attended_rows(source: Source) -> torch.Tensor:
    """Keys of a single row: [n, 512] bf16."""
    slots = source.indices[source.attended()].long()
    return reference.dequantize_rows(
        source.cache, slots, page_size=source.page_size, layout=source.layout, dtype=torch.bfloat16
    )


def lse_slack(problem: Problem) -> torch.Tensor:
    """[T, h] fp64: how far the LSE of truncated scores is from the LSE of exact ones."""
    sources = [source for source in (problem.main, problem.extra) if source is not None]
    scale = problem.options.get("softmax_scale", HEAD_DIM**-0.5)
    slack = torch.zeros(problem.q.shape[:2], dtype=torch.float64, device=problem.q.device)
    for row in range(problem.q.shape[0]):
        one = slice(row, row + 1)
        keys = torch.cat([_attended_rows(source.rows(one)) for source in sources])[None]
        exact = torch.einsum("thd,tkd->thk", problem.q[one].double(), keys.double())
        lse, moved = (torch.logsumexp(x * scale, -1) for x in (exact, truncated_sums(problem.q[one], keys)))
        slack[one] = (moved - lse).abs().nan_to_num(0.0).clamp(max=MOST_SLACK)  # NaN: no key, or not finite
    return slack


def truth(problem: Problem) -> Truth:
    """The reference in fp64, before any rounding of the result."""
    partials = reference.sparse_decode_partial(
        problem.q, problem.main, problem.extra, num_splits=1, dtype=torch.float64,
        softmax_scale=problem.options.get("softmax_scale", HEAD_DIM**-0.5),
    )  # fmt: skip
    value, lse = reference.merge_splits(*partials)
    last = epilogue_arguments(problem.options)
    value = reference.apply_sink(value, lse, last["attn_sink"])
    value = reference.rotate_back(value, lse, last["freqs_cis"], last["positions"])
    return Truth(value, lse, lse_slack(problem) if problem.q.is_cuda else torch.zeros_like(lse))


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm of the truth (fp64)."""
    return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))


def lse_excess(lse: torch.Tensor, want: Truth, absolute: float = 2e-6) -> float:
    """By how much the worst LSE misses absolute + 2^-23 |lse| + slack; <= 0 is inside. Empty rows must be equal."""
    if not torch.equal(lse == math.inf, want.empty):
        return math.inf
    finite = ~want.empty
    error = (lse.double() - want.lse).abs() - absolute - 2.0**-23 * want.lse.abs() - want.lse_slack
    return float(error[finite].max()) if bool(finite.any()) else 0.0
