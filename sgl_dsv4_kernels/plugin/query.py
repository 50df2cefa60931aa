"""B5: RMSNorm and RoPE of the query, left to the decode (B2), which does them as it loads the query.

`MQALayer.forward` (B4) calls `fused_q_norm_rope(raw, output, ...)`, and passes ``output`` to the backend (B1), whose
decode is the only one to read it. In the modes that our decode serves B5 writes nothing and notes the raw query;
attention.py has what happens then, and what if somebody else asks for ``output`` after all. Both ends run on SGLang's
main stream; the indexer and the stores on the side streams read other tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sgl_dsv4_kernels.layout import HEAD_DIM
from sgl_dsv4_kernels.ops.decode import HEADS
from sgl_dsv4_kernels.plugin import attention, state, verify
from sgl_dsv4_kernels.plugin.attention import DECODE_MODES, ModelCall, RawQuery
from sgl_dsv4_kernels.plugin.dispatch import is_traced, serve
from sgl_dsv4_kernels.plugin.fallback import Declined


def fused_q_norm_rope(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """B5. Defers the query of the layer's forward in progress; any other call (DSpark's own layer) is SGLang's."""
    call = None if is_traced() else attention.model_call()
    if call is None or not state.current().fuses_query:
        return original(*args, **kwargs)

    def prepare(values: dict[str, Any]) -> RawQuery:
        _check(values, call)
        fill = functools.partial(original, *args, **kwargs)
        return RawQuery(values["q_input"], values["q_output"], values["eps"], fill)

    def defer(query: RawQuery) -> None:
        call.query = query

    def compare(query: RawQuery, stock: Callable[[], None]) -> None:
        stock()
        query.filled = True
        call.query = query  # for our decode, which is compared too
        verify.query({"q": query.raw, "norm_eps": query.eps, "rope": (call.freqs_cis, call.positions)}, query.output)

    return serve("B5", original, args, kwargs, prepare, defer, compare)


def _check(values: dict[str, Any], call: ModelCall) -> None:
    """Declined unless our decode will take this query, as far as that can be known before it."""
    plugin = state.current()
    raw, output = values["q_input"], values["q_output"]
    if not any(getattr(call.mode, name, bool)() for name in DECODE_MODES):
        raise Declined("prefill", foreseen=True)
    if values["eps"] is None:
        raise Declined("a query without a norm (V4.1)", foreseen=True)
    if output.dtype != torch.bfloat16 or raw.dtype != torch.bfloat16:
        raise Declined(f"a query of {raw.dtype} as {output.dtype}", foreseen=output.dtype == torch.float8_e4m3fn)
    if raw.dim() != 3 or raw.shape != output.shape or raw.shape[2] != HEAD_DIM:
        shapes = f"q_input is {list(raw.shape)}, q_output {list(output.shape)}"
        raise Declined(f"{shapes}, expected [T, h, {HEAD_DIM}] twice")
    if raw.stride(2) != 1 or raw.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
        raise Declined("q_input and q_output overlap, or q_input is strided")
    if values["positions"].data_ptr() != call.positions.data_ptr() or call.positions.shape != raw.shape[:1]:
        raise Declined("positions are not the layer's")
    if values["freqs_cis"].data_ptr() != call.freqs_cis.data_ptr():
        raise Declined("freqs_cis is not the layer's")
    rows, heads = raw.shape[:2]
    if heads not in HEADS:
        raise Declined(f"{heads} heads")
    if not plugin.padding_trails and not output.is_contiguous():
        raise Declined("the rank's heads lie between padded ones (0.5.12, 0.5.13)", foreseen=True)
    plugin.require_few_rows(heads, rows, raw.device)
    if call.query is not None:
        raise Declined("a second query in one layer")
    if not plugin.options.verify and not plugin.ledger.served[plugin.hooks["B2"].target.label]:
        raise Declined("our decode has not served yet", foreseen=True)
