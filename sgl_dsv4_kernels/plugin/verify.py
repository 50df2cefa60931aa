"""Shadow mode (SGL_DSV4_VERIFY=1): SGLang's kernel serves the call, ours gets the same inputs, results are compared.

Store: byte for byte, on the pages that the call touches. Query: bit for bit. Decode: both against the fp64 reference.
The first mismatch of a hook is logged with its shapes, and its inputs, cut down to what the call needs, go to a file
for `load_dump` and `replay`. Shadow mode waits for the GPU in every call, so it runs without CUDA graphs.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.checks import freqs_as_float
from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.plugin import state
from sgl_dsv4_kernels.plugin.fallback import Declined
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference.store import PlannedRows, resolve_plan

logger = logging.getLogger("sgl_dsv4_kernels")

# Relative error of a decode's output against fp64: ours may be twice the stock kernel's, and both kernels' is about
# 0.002, of which 0.0017 is the rounding to bf16. LSE: absolute.
OUTPUT_FLOOR = 0.004
LSE_FLOOR = 1e-4

_dumped: set[str] = set()


def disable_cuda_graphs(registry: Any, hook_type: Any) -> None:
    """Hook SGLang's parser of command lines. Where it is not what starts the server (sglang.Engine), a call inside a
    capture is not compared, and says so."""
    registry.register("sglang.srt.server_args.prepare_server_args", _without_cuda_graphs, hook_type.AROUND)


def _without_cuda_graphs(original: Callable[..., Any], argv: list[str], *args: Any, **kwargs: Any) -> Any:
    if "--disable-cuda-graph" not in argv:
        logger.warning("sgl_dsv4_kernels: SGL_DSV4_VERIFY=1 compares every call, so --disable-cuda-graph was added")
        argv = [*argv, "--disable-cuda-graph"]
    return original(argv, *args, **kwargs)


def _require_eager(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Declined("SGL_DSV4_VERIFY=1 cannot compare inside a CUDA graph capture; start with --disable-cuda-graph")


# ---- store ----


def store(arguments: dict[str, Any], stock: Callable[[], None]) -> None:
    """Let ``stock`` write, and compare with what our op writes into a copy of the pages."""
    cache, page_size = arguments["cache"].view(torch.uint8), arguments["page_size"]
    _require_eager(cache.device)
    rows = _written_rows(arguments)
    in_cache = rows.wanted & (rows.slots >= 0) & (rows.slots < cache.shape[0] * page_size)
    slots = rows.slots[in_cache]
    pages = (slots // page_size).unique()
    before = cache[pages]
    stock()
    expected = cache[pages]
    small = {**arguments, "cache": before.clone(), "slots": _renumber(arguments["slots"], pages, page_size)}
    run_store(small)
    # Rows that name one slot: which one wins is undefined.
    distinct, count = slots.unique(return_counts=True)
    disputed = _renumber(distinct[count > 1], pages, page_size)
    differing = small["cache"] != expected
    _clear_slots(differing, disputed, page_size)
    key = "A1" if "plan" in arguments else "A2"
    _report(
        key,
        int(differing.sum()),
        f"{int(differing.sum())} of {differing.numel()} bytes of {pages.numel()} pages differ",
        lambda: {
            "arguments": {**_cut_freqs(small, rows), "cache": before},
            "expected": expected,
            "actual": small["cache"],
        },
    )


def run_store(arguments: dict[str, Any]) -> None:
    """Our op, A1's if there is a plan."""
    (dk.compress_norm_rope_store if "plan" in arguments else dk.norm_rope_store)(**arguments)


def _written_rows(arguments: dict[str, Any]) -> PlannedRows:
    """Position, slot and whether it is to be written, of each row."""
    slots = arguments["slots"]
    if "plan" in arguments:
        return resolve_plan(arguments["plan"], slots, arguments["compress_ratio"], arguments["is_decode"])
    wanted = torch.ones_like(slots, dtype=torch.bool)
    return PlannedRows(arguments["positions"].long(), slots.long(), wanted)


def _renumber(slots: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots of a cache as slots of ``cache[pages]``; -1 where the page is not among them. pages: sorted."""
    if pages.numel() == 0:
        return torch.full_like(slots, -1)
    page = torch.div(slots, page_size, rounding_mode="floor").to(pages.dtype)
    place = torch.searchsorted(pages, page).clamp(max=pages.numel() - 1)
    known = (pages[place] == page) & (slots >= 0)
    return torch.where(known, place * page_size + slots % page_size, -1).to(slots.dtype)


def _clear_slots(differing: torch.Tensor, slots: torch.Tensor, page_size: int) -> None:
    layout = dk.CacheLayout.V4
    page, place = (slots // page_size)[:, None], (slots % page_size)[:, None]
    data = torch.arange(layout.data_bytes, device=slots.device)
    differing[page, place * layout.data_bytes + data] = False
    scales = torch.arange(layout.scale_bytes, device=slots.device)
    differing[page, layout.scale_offset(page_size) + place * layout.scale_bytes + scales] = False


def _cut_freqs(arguments: dict[str, Any], rows: PlannedRows) -> dict[str, Any]:
    """The RoPE table up to the last position in use: the whole one can be hundreds of megabytes."""
    last = int(rows.positions[rows.wanted].max()) if bool(rows.wanted.any()) else 0
    return {**arguments, "freqs_cis": arguments["freqs_cis"][: max(last, 0) + 1]}


# ---- query ----


def query(arguments: dict[str, Any], expected: torch.Tensor) -> None:
    """Our op's bits beside ``expected``, SGLang's. Each value that is NaN there must be one here."""
    _require_eager(expected.device)
    actual = dk.query_norm_rope(**arguments)
    differing = int(((actual != expected) & ~(actual.isnan() & expected.isnan())).sum())
    _report(
        "B5",
        differing,
        f"{differing} of {actual.numel()} values differ",
        lambda: {"arguments": _cut_rope(arguments, "rope"), "expected": expected, "actual": actual},
    )


# ---- decode ----


def decode(arguments: dict[str, Any], stock: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return what ``stock`` gives; ours, of the same heads, must not be much further from fp64."""
    q = arguments["q"]
    _require_eager(q.device)
    served = stock()
    ours = dk.sparse_decode(**arguments)
    rows, heads = q.shape[:2]
    theirs_out = served[0].reshape(rows, -1, HEAD_DIM)[:, :heads]
    truth, unrotated = _truth(arguments)
    mine, theirs = _relative_error(ours.out, truth.out), _relative_error(theirs_out, unrotated.out)
    texts = []
    if not mine <= max(2 * theirs, OUTPUT_FLOOR):
        texts.append(f"output error {mine:.3g} against fp64, SGLang's {theirs:.3g}")
    lse = _largest_difference(ours.lse, truth.lse)
    if not lse <= LSE_FLOOR:
        texts.append(f"LSE error {lse:.3g} against fp64")
    if served[1] is not None:
        apart = _largest_difference(ours.lse, served[1].reshape(rows, -1)[:, :heads])
        if not apart <= 2 * LSE_FLOOR:
            texts.append(f"LSE {apart:.3g} from SGLang's")
    _report(
        "B2",
        len(texts),
        "; ".join(texts),
        lambda: {"arguments": _cut_caches(arguments), "expected": theirs_out, "actual": ours.out, "lse": ours.lse},
    )
    return served


def _sources(arguments: dict[str, Any]) -> tuple[reference.Source, reference.Source | None]:
    layout = dk.CacheLayout.V4
    main = reference.Source(
        arguments["cache"], arguments["indices"], arguments["topk_length"], arguments["page_size"], layout
    )
    if arguments.get("extra_cache") is None:
        return main, None
    return main, reference.Source(
        arguments["extra_cache"],
        arguments["extra_indices"],
        arguments["extra_topk_length"],
        arguments["extra_page_size"],
        layout,
    )


def _truth(arguments: dict[str, Any]) -> tuple[reference.DecodeOutput, reference.DecodeOutput]:
    """In fp64, rounded to bf16 and fp32 at the end: with the inverse RoPE that the arguments ask for, and without."""
    main, extra = _sources(arguments)
    scale = arguments["softmax_scale"]
    partials = reference.sparse_decode_partial(
        _finished_query(arguments),
        main,
        extra,
        num_splits=1,
        softmax_scale=HEAD_DIM**-0.5 if scale is None else scale,
        dtype=torch.float64,
    )
    unrotated = reference.combine_splits(*partials, attn_sink=arguments["attn_sink"])
    rope = arguments.get("inverse_rope")
    if rope is None:
        return unrotated, unrotated
    freqs, positions = freqs_as_float(rope[0], rope[0].device), rope[1]
    rotated = reference.combine_splits(
        *partials, attn_sink=arguments["attn_sink"], freqs_cis=freqs, positions=positions
    )
    return rotated, unrotated


def _finished_query(arguments: dict[str, Any]) -> torch.Tensor:
    """What the products take."""
    return dk.query_norm_rope(arguments["q"], norm_eps=arguments.get("q_norm_eps"), rope=arguments.get("q_rope"))


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Equal infinities, and two NaN, do not differ; one NaN gives NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().masked_fill(same, 0.0).amax().item() if a.numel() else 0.0


def _relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN if one has a NaN where the other has none."""
    out, want = out.double(), want.double()
    both = out.isnan() & want.isnan()
    out, want = out.masked_fill(both, 0.0), want.masked_fill(both, 0.0)
    return ((out - want).norm() / want.norm().clamp(min=1e-30)).item()


def _cut_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call on caches of only the pages that it reads."""
    small = dict(arguments)
    main, extra = _sources(arguments)
    for prefix, source in (("", main), ("extra_", extra)):
        if source is None:
            continue
        pages = (source.indices[source.attended()].long() // source.page_size).unique()
        small[f"{prefix}cache"] = source.cache.view(torch.uint8)[pages]
        small[f"{prefix}indices"] = _renumber(source.indices, pages, source.page_size)
    return _cut_rope(_cut_rope(small, "inverse_rope"), "q_rope")


def _cut_rope(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """A pair (table, positions) without what lies behind the last position."""
    if name not in arguments:
        return arguments
    freqs, positions = arguments[name]
    return {**arguments, name: (freqs[: int(positions.max()) + 1], positions)}


# ---- dumps ----


def _report(key: str, mismatches: int, text: str, contents: Callable[[], dict[str, Any]]) -> None:
    plugin = state.current()
    label = plugin.hooks[key].target.label
    plugin.ledger.served[f"{label}, compared"] += 1
    if not mismatches:
        return
    plugin.ledger.served[f"{label}, MISMATCHED"] += 1
    if key in _dumped:
        return
    _dumped.add(key)
    dump = {"hook": key, "text": text, **contents()}
    path = Path(plugin.options.dump_dir or tempfile.gettempdir()) / f"sgl_dsv4_mismatch_{key}_{os.getpid()}.pt"
    torch.save(_to_cpu(dump), path)
    shapes = {name: list(v.shape) for name, v in dump["arguments"].items() if isinstance(v, torch.Tensor)}
    logger.error("sgl_dsv4_kernels: %s: %s; shapes %s; inputs in %s (logged once)", label, text, shapes, path)
    if plugin.options.strict:
        raise RuntimeError(f"sgl_dsv4_kernels: SGL_DSV4_STRICT=1, and shadow mode found: {label}: {text}; see {path}")


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _to_cpu(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_cpu(entry) for entry in value)
    return value


def load_dump(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What shadow mode wrote: hook, text, arguments (of our op), expected (SGLang's result), actual (ours)."""
    return torch.load(path, map_location=device, weights_only=True)


def replay(dump: dict[str, Any]) -> torch.Tensor:
    """Run our op on a dump's arguments: the cache's pages (store), the output (decode) or the query, as ``expected``
    holds."""
    arguments = dict(dump["arguments"])
    if dump["hook"] == "B5":
        return dk.query_norm_rope(**arguments)
    if dump["hook"] == "B2":
        return dk.sparse_decode(**arguments).out
    arguments["cache"] = arguments["cache"].clone()
    run_store(arguments)
    return arguments["cache"]
