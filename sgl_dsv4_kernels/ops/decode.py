"""Decode ops: sparse MLA attention over the paged caches, split over the keys, and the merge of the splits."""

from __future__ import annotations

import torch

from sgl_dsv4_kernels import sm90_decode
from sgl_dsv4_kernels.checks import check_stride, check_tensor
from sgl_dsv4_kernels.layout import HEAD_DIM, CacheLayout
from sgl_dsv4_kernels.ops.query import Prologue, Rope, check_prologue, check_rope
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference.decode import OUTPUTS, DecodeOutput, Source, listed_keys, op_arguments
from sgl_dsv4_kernels.reference.query import query_norm_rope
from sgl_dsv4_kernels.settings import settings
from sgl_dsv4_kernels.split_partition import batch_invariant_num_splits, cached_num_splits, choose_num_splits

HEADS = (8, 16, 32, 64, 128)
"""Numbers of heads that the kernels take."""
BACKENDS = ("sm90", "triton", "torch")


def sparse_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    page_size: int,
    softmax_scale: float | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    layout: CacheLayout | str = CacheLayout.V4,
    extra_layout: CacheLayout | str | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    q_norm_eps: float | None = None,
    q_rope: Rope | None = None,
    inverse_rope: Rope | None = None,
    output: str = "bf16",
    return_amax: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeOutput:
    """Sparse MLA decode: every row attends to listed slots of a cache, and of a second one; a row of the cache is both
    key and value.

    Args:
        q: [T, h, 512] bf16, h one of 8, 16, 32, 64, 128; stride(2) = 1, the others free.
        cache: [pages, >= layout.page_bytes(page_size)], a dtype of one byte, stride(1) = 1; stride(0) and the storage
            offset are free.
        indices: [T, K] int32 slots, page = slot // page_size; stride(1) = 1. One outside [0, pages * page_size) is not
            attended; a repeated one counts each time.
        topk_length: [T] int32, clamped into [0, K]: entries at or past it do not matter. None = K.
        page_size: tokens a page, any positive int.
        softmax_scale: None = 512^-0.5.
        attn_sink: [h] fp32, a score (natural log) without a value: out = softmax(s) V / (1 + exp(sink - lse)).
        extra_cache, extra_page_size, extra_indices, extra_topk_length: the second cache, attended in the same softmax;
            the first three come together or not at all.
        layout, extra_layout: a CacheLayout or its lower-case name; extra_layout None = layout.
        num_splits: None = chosen from shapes (`split_partition.choose_num_splits`, `sm90_decode.choose_plan`; with bf16
            outputs alone it may be for the last rows only, `sm90_decode.choose_cut`). 1 = no partials in memory.
        batch_invariant: fix the split size, so that a row's bits do not depend on T or on other rows. Not together with
            num_splits.
        backend: None (the fastest here), "sm90" (Hopper, layout v4), "triton" (CUDA from sm_80 on) or "torch" (the
            reference).
        q_norm_eps, q_rope: what `query_norm_rope` does with norm_eps and rope is done to q first, in the same kernel:
            the output is that of the two calls.
        inverse_rope: (freqs_cis, positions): [P, 32] complex64 or [P, 64] fp32 (cos, sin), and [T] int32 or int64.
            Rotates the last 64 channels back. A position outside [0, P) gives NaN there; SGL_DSV4_CHECK=1 makes it a
            ValueError.
        output: "bf16"; "fp8_group128": scales [T, h*4] fp32, strides (1, align(T, 4)); "fp8_group128_ue8m0": scales
            [T, h] int32 words of four exponent bytes; "fp8_group32_ue8m0": scales [T, h*4] such words, strides
            (1, align(T, 4)). The lowest byte of a word belongs to the lowest channels.
        return_amax: also return max |value| over the 512 final values before rounding.
        out: [T, h, 512] bf16 to write to, stride(2) = 1, only with output "bf16". lse: [T, h] fp32 to write to.

    Returns:
        DecodeOutput(out, lse, scales, amax).

    Raises:
        TypeError: a dtype or type other than above. ValueError: a shape, stride, device, or value other than above, or
        a backend that this device or build lacks. RuntimeError: a launch failed.
    """
    main, extra, layout_codes = _check_attention(
        q, cache, indices, topk_length, page_size, layout,
        extra_cache, extra_indices, extra_topk_length, extra_page_size, extra_layout,
    )  # fmt: skip
    backend = _usable_backend(backend, q.device, main, extra)
    scale = _check_scale(softmax_scale)
    prologue = check_prologue("q_norm_eps", q_norm_eps, "q_rope", q_rope, q.shape[0], q.device)
    freqs, positions = _check_epilogue(q.shape[0], q.shape[1], q.device, attn_sink, inverse_rope, output)
    result = _outputs(q.shape[0], q.shape[1], q.device, output, return_amax, out, lse)
    code = OUTPUTS.index(output)
    free = num_splits is None and not batch_invariant and output == "bf16" and not return_amax
    cut = _choose_cut(q, main, extra, backend) if free else None
    if cut is None:
        splits = _resolve_num_splits(q, main, extra, num_splits, batch_invariant, backend)
        merged = splits == 1 or (
            backend == "sm90" and not return_amax and sm90_decode.merges(q, main, extra, splits, batch_invariant)
        )
        cut = sm90_decode.Cut(q.shape[0] if merged else 0, splits)
    if q.shape[0] == 0:
        return result

    ops = torch.ops.sgl_dsv4_kernels
    attention = (*op_arguments(q, main, extra), scale, *layout_codes, batch_invariant, *prologue)
    whole = (*attention, attn_sink, freqs, positions, code, backend, *result)
    if cut.whole == q.shape[0]:
        ops.sparse_decode(*whole, num_splits=cut.num_splits)
        return result

    def rest(x: torch.Tensor | None) -> torch.Tensor | None:
        return _some(x, slice(cut.whole, None)) if cut.whole else x

    partials = _partials(rest(q), cut.num_splits)
    if cut.whole == 0:
        ops.sparse_decode_partial(*attention, False, backend, *partials)
    else:
        ops.sparse_decode(*whole, *partials)
    ops.combine_splits(*partials, attn_sink, freqs, rest(positions), code, settings.pdl, *map(rest, result))
    return result


def sparse_decode_partial(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    page_size: int,
    num_splits: int,
    softmax_scale: float | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    layout: CacheLayout | str = CacheLayout.V4,
    extra_layout: CacheLayout | str | None = None,
    backend: str | None = None,
    q_norm_eps: float | None = None,
    q_rope: Rope | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every split alone, for `combine_splits`. Which keys a split has: split_partition.py.

    Args:
        num_splits: S, any positive int. The others, and what is raised, as in `sparse_decode`.

    Returns:
        o_accum [S, T, h, 512] fp32, each split normalised by its own sum, 0 in an empty split; lse_accum [S, T, h] fp32
        in log2, -inf in an empty split. No sink in either.
    """
    main, extra, layout_codes = _check_attention(
        q, cache, indices, topk_length, page_size, layout,
        extra_cache, extra_indices, extra_topk_length, extra_page_size, extra_layout,
    )  # fmt: skip
    backend = _usable_backend(backend, q.device, main, extra)
    scale = _check_scale(softmax_scale)
    _check_positive("num_splits", num_splits)
    prologue = check_prologue("q_norm_eps", q_norm_eps, "q_rope", q_rope, q.shape[0], q.device)
    o_accum, lse_accum = _partials(q, num_splits)
    if q.shape[0] > 0:
        torch.ops.sgl_dsv4_kernels.sparse_decode_partial(
            *op_arguments(q, main, extra), scale, *layout_codes, False, *prologue, True, backend, o_accum, lse_accum
        )
    return o_accum, lse_accum


def combine_splits(
    o_accum: torch.Tensor,
    lse_accum: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    inverse_rope: Rope | None = None,
    output: str = "bf16",
    return_amax: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> DecodeOutput:
    """Merge the partials of `sparse_decode_partial` and run the epilogue.

    Args:
        o_accum: [S, T, h, 512] fp32, S >= 1, stride(3) = 1, the other strides multiples of 4. The O of a split whose
            LSE is -inf is not read.
        lse_accum: [S, T, h] fp32, log2. The others, what is returned and what is raised, as in `sparse_decode`.
    """
    check_tensor("o_accum", o_accum, shape=("splits", "tokens", "heads", HEAD_DIM), dtype=torch.float32)
    check_stride("o_accum", o_accum, 3, 1)
    splits, tokens, heads, _ = o_accum.shape
    if splits < 1 or heads < 1:
        raise ValueError(f"o_accum: expected at least one split and one head, got shape {list(o_accum.shape)}")
    device = o_accum.device
    check_tensor("lse_accum", lse_accum, shape=(splits, tokens, heads), dtype=torch.float32, device=device)
    freqs, positions = _check_epilogue(tokens, heads, device, attn_sink, inverse_rope, output)
    result = _outputs(tokens, heads, device, output, return_amax, out, lse)
    if tokens > 0:
        torch.ops.sgl_dsv4_kernels.combine_splits(
            o_accum, lse_accum, attn_sink, freqs, positions, OUTPUTS.index(output), settings.pdl, *result
        )
    return result


# ---- choices ----


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """The backend to run on ``device``; ValueError if it lacks the one asked for."""
    if backend is not None and backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend: expected None or one of {names}, got {backend!r}")
    if backend is None and device.type != "cuda":
        return "torch"
    lacking = sm90_decode.missing(device) if backend in (None, "sm90") else None
    if backend is None:
        backend = "sm90" if lacking is None and settings.sm90 else "triton"
    elif lacking is not None:
        raise ValueError(f"backend: 'sm90' {lacking}")
    if backend == "triton":
        _check_triton(device)
    return backend


def _usable_backend(backend: str | None, device: torch.device, main: Source, extra: Source | None) -> str:
    """The backend to run on these caches: where "sm90" was not asked for and does not take them, "triton"."""
    resolved = resolve_backend(backend, device)
    if resolved != "sm90" or (reason := sm90_decode.unsupported(main, extra)) is None:
        return resolved
    if backend is not None:
        raise ValueError(reason)
    return resolve_backend("triton", device)


def _check_triton(device: torch.device) -> None:
    try:
        from sgl_dsv4_kernels import triton_launch
    except ImportError as error:
        raise ValueError(f"backend: 'triton' needs the package triton ({error})") from error
    if triton_launch.interpreted():
        return
    if device.type != "cuda":
        raise ValueError(f"backend: 'triton' needs a CUDA device or TRITON_INTERPRET=1, got tensors on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(f"backend: 'triton' needs sm_80 or newer, {device} is sm_{capability[0]}{capability[1]}")


_check_triton._dynamo_marked_constant = True  # as in sm90_decode.py


def _resolve_num_splits(
    q: torch.Tensor, main: Source, extra: Source | None, num_splits: int | None, batch_invariant: bool, backend: str
) -> int:
    if num_splits is not None:
        if batch_invariant:
            raise ValueError(f"num_splits: expected None with batch_invariant=True, got {num_splits!r}")
        _check_positive("num_splits", num_splits)
        return num_splits
    keys = listed_keys(main, extra)
    if batch_invariant:
        return batch_invariant_num_splits(keys)
    if q.device.type != "cuda":
        return 1
    if backend == "sm90":
        return sm90_decode.plan_of(q, main, extra).num_splits
    # Tracing goes through the plain function: a cache lookup is not traceable.
    choose = choose_num_splits if torch.compiler.is_compiling() else cached_num_splits
    return choose(q.shape[0], q.shape[1], keys, sm90_decode.count_sms(q.device))


def _choose_cut(q: torch.Tensor, main: Source, extra: Source | None, backend: str) -> sm90_decode.Cut | None:
    """How many of the rows are decoded whole, where the others are split."""
    return sm90_decode.cut_of(q, main, extra) if backend == "sm90" else None


# ---- checks ----


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected a positive int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")


def _check_scale(softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return HEAD_DIM**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale: expected a float or None, got {softmax_scale!r}")
    return float(softmax_scale)


def _check_source(
    prefix: str,
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    length: torch.Tensor | None,
    page_size: int,
    layout: CacheLayout,
) -> Source:
    """Check one cache with its indices; ``prefix`` is "" or "extra_"."""
    tokens, device = q.shape[0], q.device
    _check_positive(f"{prefix}page_size", page_size)
    name = f"{prefix}cache"
    check_tensor(name, cache, shape=("pages", "page bytes"), device=device)
    if cache.element_size() != 1:
        raise TypeError(f"{name}: expected a dtype of one byte (torch.uint8, torch.float8_e4m3fn), got {cache.dtype}")
    check_stride(name, cache, 1, 1)
    needed = layout.page_bytes(page_size)
    if cache.shape[1] < needed:
        raise ValueError(f"{name}: expected at least {needed} bytes a page of {page_size} tokens, got {cache.shape[1]}")
    if cache.shape[0] > 1 and cache.stride(0) < needed:
        raise ValueError(f"{name}: expected stride(0) >= {needed}, got {cache.stride(0)}")
    check_tensor(f"{prefix}indices", indices, shape=(tokens, "topk"), dtype=torch.int32, device=device)
    check_stride(f"{prefix}indices", indices, 1, 1)
    if length is not None:
        check_tensor(f"{prefix}topk_length", length, shape=(tokens,), dtype=torch.int32, device=device)
    return Source(cache, indices, length, page_size, layout)


def _check_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    page_size: int,
    layout: CacheLayout | str,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_page_size: int | None,
    extra_layout: CacheLayout | str | None,
) -> tuple[Source, Source | None, tuple[int, int]]:
    """Check what the two attention ops share; returns the caches and their layouts' codes."""
    check_tensor("q", q, shape=("tokens", "heads", HEAD_DIM), dtype=torch.bfloat16)
    if q.shape[1] not in HEADS:
        raise ValueError(f"q: expected {', '.join(map(str, HEADS[:-1]))} or {HEADS[-1]} heads, got {q.shape[1]}")
    check_stride("q", q, 2, 1)
    layout = CacheLayout.parse(layout)
    main = _check_source("", q, cache, indices, topk_length, page_size, layout)
    given = {"extra_cache": extra_cache, "extra_indices": extra_indices, "extra_page_size": extra_page_size}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        if extra_topk_length is not None:
            raise ValueError("extra_topk_length: expected None without extra_cache, got a tensor")
        return main, None, (layout.code, layout.code)
    if missing:
        present = ", ".join(name for name in given if name not in missing)
        raise ValueError(f"{missing[0]}: expected together with {present}, got None")
    second = layout if extra_layout is None else CacheLayout.parse(extra_layout)
    extra = _check_source("extra_", q, extra_cache, extra_indices, extra_topk_length, extra_page_size, second)
    return main, extra, (layout.code, second.code)


def _check_epilogue(
    tokens: int,
    heads: int,
    device: torch.device,
    attn_sink: torch.Tensor | None,
    inverse_rope: Rope | None,
    output: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check sink, RoPE and output kind; returns freqs_cis as [P, 64] fp32 and positions, or two None."""
    if output not in OUTPUTS:
        raise ValueError(f"output: expected one of {', '.join(map(repr, OUTPUTS))}, got {output!r}")
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, shape=(heads,), dtype=torch.float32, device=device)
        check_stride("attn_sink", attn_sink, 0, 1)
    return check_rope("inverse_rope", inverse_rope, tokens, device)


# ---- tensors ----


def _partials(q: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = q.shape
    o_accum = torch.empty((num_splits, tokens, heads, dim), dtype=torch.float32, device=q.device)
    return o_accum, torch.empty((num_splits, tokens, heads), dtype=torch.float32, device=q.device)


def _outputs(
    tokens: int,
    heads: int,
    device: torch.device,
    output: str,
    return_amax: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> DecodeOutput:
    """The caller's outputs, checked, or new ones."""
    if out is None:
        dtype = torch.bfloat16 if output == "bf16" else torch.float8_e4m3fn
        out = torch.empty((tokens, heads, HEAD_DIM), dtype=dtype, device=device)
    elif output != "bf16":
        raise ValueError(f"out: expected None with output {output!r}, got a tensor")
    else:
        check_tensor("out", out, shape=(tokens, heads, HEAD_DIM), dtype=torch.bfloat16, device=device)
        check_stride("out", out, 2, 1)
    if lse is None:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    else:
        check_tensor("lse", lse, shape=(tokens, heads), dtype=torch.float32, device=device)
    amax = torch.empty((tokens, heads), dtype=torch.float32, device=device) if return_amax else None
    return DecodeOutput(out, lse, reference.empty_scales(tokens, heads, output, device), amax)


def _some(x: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if x is None else x[rows]


# ---- implementations of the torch ops ----


def _prepare(
    q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size, extra_page_size, layout,
    extra_layout, prologue: Prologue, backend: str,
) -> tuple[torch.Tensor, Source, Source | None, Prologue, str]:  # fmt: skip
    """The query, the caches, what is left for the backend's kernel to do to the query, and the backend: "triton" where
    torch.compile took a cache for aligned that is not."""
    main, extra = Source(cache, indices, topk_length, page_size, CacheLayout.from_code(layout)), None
    if extra_cache is not None:
        second = CacheLayout.from_code(extra_layout)
        extra = Source(extra_cache, extra_indices, extra_topk_length, extra_page_size, second)
    if backend == "sm90" and sm90_decode.unsupported(main, extra):
        backend = "triton"
    if backend == "torch":
        q, prologue = query_norm_rope(q, *prologue), (None, None, None)
    return q, main, extra, prologue, backend


def _rows(
    rows: slice, q: torch.Tensor, main: Source, extra: Source | None, prologue: Prologue
) -> tuple[torch.Tensor, Source, Source | None, Prologue]:
    """What belongs to some of the rows."""
    eps, freqs, positions = prologue
    return q[rows], main.rows(rows), None if extra is None else extra.rows(rows), (eps, freqs, _some(positions, rows))


def _write(results: tuple[torch.Tensor | None, ...], targets: tuple[torch.Tensor | None, ...]) -> None:
    for result, target in zip(results, targets, strict=True):
        if target is not None:
            target.copy_(result)


def _sparse_decode_op(
    q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size, extra_page_size,
    softmax_scale, layout, extra_layout, batch_invariant, q_norm_eps, q_freqs_cis, q_positions, attn_sink, freqs_cis,
    positions, output, backend, out, lse, scales, amax, o_accum=None, lse_accum=None, num_splits=1,
) -> None:  # fmt: skip
    q, main, extra, prologue, backend = _prepare(
        q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size, extra_page_size,
        layout, extra_layout, (q_norm_eps, q_freqs_cis, q_positions), backend,
    )  # fmt: skip
    if backend == "sm90":
        epilogue = (attn_sink, freqs_cis, positions, output)
        result = (out, lse, scales, amax, o_accum, lse_accum)
        sm90_decode.launch(
            q, main, extra, softmax_scale, epilogue, result, num_splits=num_splits, prologue=prologue,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return
    if (o_accum is None) != (lse_accum is None):
        raise ValueError("o_accum and lse_accum: expected both or neither")
    if o_accum is not None:
        rest, first = (slice(q.shape[0] - o_accum.shape[1], None), slice(q.shape[0] - o_accum.shape[1]))
        _decode_partial(
            *_rows(rest, q, main, extra, prologue), softmax_scale, False, batch_invariant, backend, o_accum, lse_accum
        )
        q, main, extra, prologue = _rows(first, q, main, extra, prologue)
        positions, out, lse = (_some(x, first) for x in (positions, out, lse))
    if backend == "triton":
        from sgl_dsv4_kernels import triton_launch

        epilogue = triton_launch.Epilogue(output, scales, amax, attn_sink, freqs_cis, positions)
        triton_launch.launch(
            q, main, extra, softmax_scale, out, lse, prologue=prologue, epilogue=epilogue,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return
    results = reference.sparse_decode(
        q, main, extra, softmax_scale=softmax_scale, attn_sink=attn_sink, freqs_cis=freqs_cis, positions=positions,
        output=OUTPUTS[output], return_amax=amax is not None,
    )  # fmt: skip
    _write(results, (out, lse, scales, amax))


def _sparse_decode_partial_op(
    q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size, extra_page_size,
    softmax_scale, layout, extra_layout, batch_invariant, q_norm_eps, q_freqs_cis, q_positions, fill_empty, backend,
    o_accum, lse_accum,
) -> None:  # fmt: skip
    q, main, extra, prologue, backend = _prepare(
        q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size, extra_page_size,
        layout, extra_layout, (q_norm_eps, q_freqs_cis, q_positions), backend,
    )  # fmt: skip
    _decode_partial(q, main, extra, prologue, softmax_scale, fill_empty, batch_invariant, backend, o_accum, lse_accum)


def _decode_partial(
    q, main, extra, prologue, softmax_scale, fill_empty, batch_invariant, backend, o_accum, lse_accum
) -> None:  # fmt: skip
    if backend == "triton":
        from sgl_dsv4_kernels import triton_launch

        triton_launch.launch(
            q, main, extra, softmax_scale, o_accum, lse_accum, prologue=prologue, fill_empty=fill_empty,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return
    if backend == "sm90":
        sm90_decode.launch_partial(
            q, main, extra, softmax_scale, o_accum, lse_accum, prologue=prologue, fill_empty=fill_empty,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return
    results = reference.sparse_decode_partial(q, main, extra, num_splits=o_accum.shape[0], softmax_scale=softmax_scale)
    _write(results, (o_accum, lse_accum))


def _combine_splits_op(
    o_accum, lse_accum, attn_sink, freqs_cis, positions, output, pdl, out, lse, scales, amax
) -> None:  # fmt: skip
    results = reference.combine_splits(
        o_accum, lse_accum, attn_sink=attn_sink, freqs_cis=freqs_cis, positions=positions, output=OUTPUTS[output],
        return_amax=amax is not None,
    )  # fmt: skip
    _write(results, (out, lse, scales, amax))


def register(library: torch.library.Library) -> None:
    """Register the Python implementations and the fakes. The CUDA implementation of combine_splits is compiled."""
    for key in ("CPU", "CUDA"):
        library.impl("sparse_decode", _sparse_decode_op, key)
        library.impl("sparse_decode_partial", _sparse_decode_partial_op, key)
    library.impl("combine_splits", _combine_splits_op, "CPU")
    for name in ("sparse_decode", "sparse_decode_partial", "combine_splits"):
        torch.library.register_fake(f"{library.ns}::{name}", lambda *args: None)
