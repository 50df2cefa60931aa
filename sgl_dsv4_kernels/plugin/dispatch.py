"""The frame of a hooked call: ours if it takes the call, else SGLang's with the arguments as they came."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sgl_dsv4_kernels.plugin import state
from sgl_dsv4_kernels.plugin.fallback import Declined


def is_traced() -> bool:
    """torch.compile looks at SGLang's own code: contexts and counts cannot be traced."""
    return torch.compiler.is_compiling()


def serve(
    key: str,
    original: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    prepare: Callable[[dict[str, Any]], Any],
    run: Callable[[Any], Any],
    compare: Callable[[Any, Callable[[], Any]], Any],
) -> Any:
    """Run ``run(prepare(arguments by name))``; in shadow mode ``compare(prepared, SGLang's call)``.

    A Declined of ``prepare``, or any other Exception of ours, leads to SGLang's kernel. A RuntimeError does not: it is
    how torch reports a failed launch, also that of an earlier kernel, which must not be hidden.
    """
    plugin = state.current()
    hook = plugin.hooks[key]
    try:
        values = hook.binder.bind(args, kwargs)
        objection = hook.binder.objection(values)
        if objection is not None:
            raise Declined(objection)
        prepared = prepare(values)
        if plugin.options.verify:
            return compare(prepared, functools.partial(original, *args, **kwargs))
        result = run(prepared)
    except Declined as why:
        plugin.ledger.decline(hook.target.label, why)
    except Exception as error:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        plugin.ledger.decline(hook.target.label, Declined(f"{type(error).__name__}: {error}"))
    else:
        plugin.ledger.served[hook.target.label] += 1
        return result
    return original(*args, **kwargs)
