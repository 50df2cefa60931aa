"""B1 to B4: the decode, for the heads that this rank has, with the inverse RoPE in its epilogue.

`MQALayer.forward` (B4) calls `DeepseekV4AttnBackend.forward` (B1), which calls `flash_mla_with_kvcache` (B2), and then
`fused_rope_inplace(inverse=True)` (B3) on what came back. B4 and B1 only note whose call it is. If B2 has rotated its
output, B3 of that very output returns without rotating it again; a B4 that ends without that B3 is an error, because
the output has then been used wrongly.

B5 (query.py) may have left the query raw, for B2 to normalise and rotate. Whoever else reads the query in B1 finds
rubbish: B2 fills it in before SGLang's kernel runs, and a B1 that has not come to B2 at all is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels.layout import HEAD_DIM, NOPE_DIM
from sgl_dsv4_kernels.ops.decode import HEADS
from sgl_dsv4_kernels.plugin import state, verify
from sgl_dsv4_kernels.plugin.dispatch import is_traced, serve
from sgl_dsv4_kernels.plugin.fallback import Declined

V4_BYTES = dk.CacheLayout.V4.data_bytes + dk.CacheLayout.V4.scale_bytes
"""What SGLang calls the bytes of a token in a V4 cache, and gives as the last dimension of its cache views."""
DECODE_MODES = ("is_decode", "is_target_verify", "is_draft_extend_v2", "is_draft_extend")
"""Methods of SGLang's ForwardMode; the last one is 0.5.12's."""
ELSEWHERE = ("_is_hip", "_is_npu", "_is_xpu", "_wo_a_fp8_mxscale_fused_invrope")
"""Globals of SGLang's model that, if true, send the output past `fused_rope_inplace`."""
OTHER_TAILS = ("use_fused_wo_a", "use_mega_attention")
"""Attributes of MQALayer that do so (0.5.21 and 0.5.22, Blackwell)."""


@dataclass(slots=True)
class AttentionCall:
    """The backend call in progress (B1)."""

    layer: Any
    mode: Any


@dataclass(slots=True)
class RawQuery:
    """A query before `fused_q_norm_rope` (B5)."""

    raw: torch.Tensor
    """[T, h, 512]. Referenced until the layer's forward ends: by then every stream has joined that reads it."""
    output: torch.Tensor
    """[T, h, 512] of the same heads, which SGLang passes on; rubbish unless ``filled``."""
    eps: float
    fill: Callable[[], None]
    """SGLang's kernel: writes ``output``."""
    filled: bool = False
    used: bool = False
    """A decode of ours has taken ``raw``."""

    def is_lost(self) -> bool:
        """Neither did our decode take the raw query, nor was it made ready for anybody else."""
        return not (self.filled or self.used)

    def complete(self) -> None:
        """Fill ``output``, once."""
        if not self.filled:
            self.fill()
            self.filled = True

    def lies_in(self, q: torch.Tensor) -> bool:
        return self.output.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()

    def is_heads_of(self, q: torch.Tensor, heads: int) -> bool:
        """Whether ``output`` is the first ``heads`` heads of q [T, 1, h, 512]."""
        rows, own = self.output.shape[:2]
        return (
            (rows, own, q.data_ptr()) == (q.shape[0], heads, self.output.data_ptr())
            and (rows == 1 or q.stride(0) == self.output.stride(0))
            and q.stride(2) == self.output.stride(1)
        )


@dataclass(slots=True)
class ModelCall:
    """The layer's forward in progress (B4)."""

    attention: Any
    """The layer that B1 gets."""
    freqs_cis: torch.Tensor
    positions: torch.Tensor
    rotated: torch.Tensor | None = None
    """[T, h, 512]: an output that B2 has rotated and B3 has not seen yet."""
    mode: Any = None
    query: RawQuery | None = None


@dataclass(slots=True)
class Request:
    """One decode of ours."""

    arguments: dict[str, Any]
    """Of `sparse_decode`, without ``out``."""
    heads: int
    """Heads that are computed, the first of q."""
    returned_heads: int
    """Heads of the tensor that is returned."""
    model: ModelCall | None
    """Whose inverse RoPE is done too."""
    query: RawQuery | None
    """Whose raw values are ``q``."""


_attention: ContextVar[AttentionCall | None] = ContextVar("sgl_dsv4_attention", default=None)
_model: ContextVar[ModelCall | None] = ContextVar("sgl_dsv4_model", default=None)


def model_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """B4, `MQALayer.forward`: notes RoPE table and positions. RuntimeError if a rotated output was left over."""
    if is_traced():
        return original(*args, **kwargs)
    call = _model_call(state.current(), args, kwargs)
    token = _model.set(call)
    try:
        result = original(*args, **kwargs)
    finally:
        _model.reset(token)
    if call is not None and call.rotated is not None:
        raise RuntimeError(
            "sgl_dsv4_kernels: the decode has applied the inverse RoPE, and this SGLang then went another way than "
            "fused_rope_inplace: the layer's output is wrong. SGL_DSV4_KERNELS=store serves without our decode."
        )
    if call is not None and call.query is not None and call.query.is_lost():
        raise RuntimeError(
            "sgl_dsv4_kernels: the query's norm and RoPE were left to the decode, and this SGLang then went another "
            "way than DeepseekV4AttnBackend.forward: the layer's output is wrong. "
            "SGL_DSV4_KERNELS=store,decode leaves the query to SGLang."
        )
    return result


def model_call() -> ModelCall | None:
    """The layer's forward in progress."""
    return _model.get()


def _model_call(plugin: state.Plugin, args: tuple, kwargs: dict[str, Any]) -> ModelCall | None:
    """What B2 needs to rotate; None where it is not certain that B3 follows."""
    values = plugin.hooks["B4"].binder.bind(args, kwargs)
    layer, positions = args[0], values.get("positions")
    freqs_cis = getattr(layer, "freqs_cis", None)
    if not isinstance(positions, torch.Tensor) or not isinstance(freqs_cis, torch.Tensor):
        return None
    if not plugin.started:
        plugin.start(positions.device)
    if not plugin.fuses_inverse_rope:
        return None
    names = plugin.model_names
    if any(names.get(name) for name in ELSEWHERE) or any(getattr(layer, name, False) for name in OTHER_TAILS):
        return None
    in_breakable_graph = names.get("is_in_breakable_cuda_graph")
    if in_breakable_graph is not None and in_breakable_graph() and values["forward_batch"].forward_mode.is_extend():
        return None  # the output is copied into another tensor, and some rows are padding
    mode = values["forward_batch"].forward_mode
    return ModelCall(getattr(layer, "attn_mqa", None), freqs_cis, positions, mode=mode)


def backend_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """B1, `DeepseekV4AttnBackend.forward`: notes the layer and the forward mode."""
    if is_traced():
        return original(*args, **kwargs)
    values = state.current().hooks["B1"].binder.bind(args, kwargs)
    token = _attention.set(AttentionCall(values["layer"], values["forward_batch"].forward_mode))
    try:
        result = original(*args, **kwargs)
        if _give_up_on_lost_query():
            result = original(*args, **kwargs)
        return result
    finally:
        _attention.reset(token)


def _give_up_on_lost_query() -> bool:
    """After a backend call that has not come to B2, or with a copy of the query: make the query ready, and defer none
    from now on. True if there was such a query."""
    model = _model.get()
    if model is None or model.query is None or not model.query.is_lost():
        return False
    plugin = state.current()
    plugin.problems["B5"] = "this backend reads the query elsewhere than in flash_mla_with_kvcache"
    plugin.ledger.decline(plugin.hooks["B5"].target.label, Declined(plugin.problems["B5"]))
    model.query.complete()
    return True


def flash_mla_with_kvcache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """B2: returns (out [T, 1, heads, 512], lse [T, heads, 1]), heads being the rank's own where the caller slices."""
    call = _attention.get()
    if call is None or is_traced():
        return original(*args, **kwargs)  # not DeepSeek-V4's
    return serve("B2", _with_query(original), args, kwargs, lambda values: _request(values, call), _run, _compare)


def _with_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's kernel, which reads a query: one that was left raw is made ready first."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _complete_query(state.current().hooks["B2"].binder.bind(args, kwargs)["q"])
        return original(*args, **kwargs)

    return run


def _complete_query(q: torch.Tensor) -> None:
    """If ``q`` is a view of the layer's query, and that was left raw: fill it. (A copy of it cannot be helped here.)"""
    model = _model.get()
    if model is not None and model.query is not None and model.query.lies_in(q):
        model.query.complete()


def fused_rope_inplace(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """B3: passes over the output that B2 has rotated, once."""
    call = None if is_traced() else _model.get()
    if call is None or call.rotated is None:
        return original(*args, **kwargs)
    hook = state.current().hooks["B3"]
    values = hook.binder.bind(args, kwargs)
    q, rotated = values["q"], call.rotated
    if not values.get("inverse") or q.untyped_storage().data_ptr() != rotated.untyped_storage().data_ptr():
        return original(*args, **kwargs)
    head, channel = divmod(q.storage_offset() - rotated.storage_offset(), HEAD_DIM)
    same = (
        channel == NOPE_DIM
        and head + q.shape[1] <= rotated.shape[1]
        and (q.shape[0], q.stride()) == (rotated.shape[0], rotated.stride())
        and values["k"] is None
        and values["positions"].data_ptr() == call.positions.data_ptr()
        and values["freqs_cis"].data_ptr() == call.freqs_cis.data_ptr()
    )
    if not same:
        raise RuntimeError(
            "sgl_dsv4_kernels: SGLang rotates back another part of the decode's output, or by other positions, than "
            "our decode already has. SGL_DSV4_KERNELS=store serves without our decode."
        )
    call.rotated = None
    state.current().ledger.served[hook.target.label] += 1
    return None


def _request(values: dict[str, Any], call: AttentionCall) -> Request:
    """Our decode's arguments from those of B2; Declined if it does not take them."""
    plugin = state.current()
    q, indices = values["q"], values["indices"]
    if not any(getattr(call.mode, name, bool)() for name in DECODE_MODES):
        raise Declined("prefill", foreseen=True)
    if type(values["tile_scheduler_metadata"]).__name__ != "FlashMLASchedMeta":
        raise Declined(f"tile_scheduler_metadata is a {type(values['tile_scheduler_metadata']).__name__}")
    if indices is None:
        raise Declined("indices is None (dense attention)")
    if q.dim() != 4 or q.shape[1] != 1 or q.shape[3] != HEAD_DIM or q.dtype != torch.bfloat16:
        raise Declined(f"q is {q.dtype} [T, *{list(q.shape[1:])}], expected torch.bfloat16 [T, 1, h, {HEAD_DIM}]")
    plugin.require("B2", q.device)

    rows, padded = q.shape[0], q.shape[2]
    own = getattr(call.layer, "tp_q_head_num", padded) if plugin.padding_trails else padded
    heads = next((count for count in HEADS if own <= count <= padded), None)
    if heads is None:
        raise Declined(f"{own} of {padded} heads")
    plugin.require_few_rows(heads, rows, q.device)

    cache, page_size = _pages("k_cache", values["k_cache"])
    arguments = {
        "q": q[:, 0, :heads],
        "cache": cache,
        "page_size": page_size,
        "indices": _rows_of("indices", indices),
        "topk_length": values["topk_length"],
        "softmax_scale": values["softmax_scale"],
        "attn_sink": None if values["attn_sink"] is None else values["attn_sink"][:heads],
        "batch_invariant": plugin.batch_invariant,
    }
    if values["extra_k_cache"] is not None:
        extra, extra_page_size = _pages("extra_k_cache", values["extra_k_cache"])
        arguments |= {
            "extra_cache": extra,
            "extra_page_size": extra_page_size,
            "extra_indices": _rows_of("extra_indices_in_kvcache", values["extra_indices_in_kvcache"]),
            "extra_topk_length": values["extra_topk_length"],
        }
    model = _model.get() if plugin.fuses_inverse_rope else None
    if model is not None and (model.attention is not call.layer or model.positions.shape != (rows,)):
        model = None
    query = None
    if model is not None:
        arguments["inverse_rope"] = (model.freqs_cis, model.positions)
        query = model.query if model.query is not None and model.query.is_heads_of(q, heads) else None
    if query is not None:
        rope = (model.freqs_cis, model.positions)
        arguments |= {"q": query.raw, "q_norm_eps": query.eps, "q_rope": rope}
    else:
        _complete_query(q)
    # In a breakable CUDA graph, which takes target-verify for an extend, the caller copies into a padded tensor.
    return Request(arguments, heads, padded if call.mode.is_extend() else heads, model, query)


def _pages(name: str, cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """SGLang's view [pages, page_size, 1, 584] of a V4 cache as [pages, page bytes], and the page size. The view's
    second stride says 584 where the layout has 576 and a separate scale: only the page's stride is true."""
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != V4_BYTES or cache.element_size() != 1:
        raise Declined(f"{name} is {cache.dtype} [pages, *{list(cache.shape[1:])}], not a V4 cache ({V4_BYTES} bytes)")
    page_size = cache.shape[1]
    needed = dk.CacheLayout.V4.page_bytes(page_size)
    if cache.stride(0) < needed and cache.shape[0] > 1:
        raise Declined(f"{name} has pages of {cache.stride(0)} bytes, a V4 page of {page_size} tokens has {needed}")
    return cache.as_strided((cache.shape[0], needed), (cache.stride(0), 1)), page_size


def _rows_of(name: str, indices: torch.Tensor | None) -> torch.Tensor:
    if indices is None or indices.dim() != 3 or indices.shape[1] != 1:
        shape = None if indices is None else list(indices.shape)
        raise Declined(f"{name} has shape {shape}, expected [T, 1, K]")
    return indices[:, 0]


def _run(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    q = request.arguments["q"]
    # The heads between are padding that no caller looks at.
    out = torch.empty((q.shape[0], 1, request.returned_heads, HEAD_DIM), dtype=q.dtype, device=q.device)
    own = out[:, 0, : request.heads]
    result = dk.sparse_decode(**request.arguments, out=own)
    if request.model is not None:
        request.model.rotated = own
    if request.query is not None:
        request.query.used = True
    return out, result.lse.unsqueeze(-1)


def _compare(request: Request, stock: Callable[[], Any]) -> Any:
    return verify.decode(request.arguments, stock)
