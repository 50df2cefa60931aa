"""The frame of a hooked call: ours if it takes the call, else SGLang's with the arguments as they came."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sgl_dsv4_kernels.plugin import state
from sgl_dsv4_kernels.plugin.fallback import Declined

MOST_CHARACTERS = 300
"""Of an error's text in the log."""


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

    A Declined, or any other Exception of ours, leads to SGLang's kernel. Two kinds do not. An AcceleratorError is one
    of the GPU, perhaps of an earlier kernel, and must not be hidden. Nor must a RuntimeError of ``run``: it is how a
    failed launch is reported.
    """
    plugin = state.current()
    hook = plugin.hooks[key]
    try:
        try:
            values = hook.binder.bind(args, kwargs)
            objection = hook.binder.objection(values)
            if objection is not None:
                raise Declined(objection)
            prepared = prepare(values)
        except (Declined, torch.AcceleratorError):
            raise
        except Exception as error:
            raise Declined(_describe(error)) from error
        if plugin.options.verify:
            return compare(prepared, functools.partial(original, *args, **kwargs))
        result = run(prepared)
    except Declined as why:
        plugin.ledger.decline(hook.target.label, why)
    except (ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError) as error:  # of this call
        plugin.ledger.decline(hook.target.label, Declined(_describe(error)))
    except RuntimeError:
        raise
    except Exception as error:  # of every such call: a kernel that Triton cannot compile would be tried again each time
        plugin.problems[key] = _describe(error)
        plugin.ledger.decline(hook.target.label, Declined(plugin.problems[key]))
    else:
        plugin.ledger.served[hook.target.label] += 1
        return result
    return original(*args, **kwargs)


def _describe(error: Exception) -> str:
    """Type and first line: a compiler's message holds whole programs."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:MOST_CHARACTERS]}"
