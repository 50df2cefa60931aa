"""Finds the targets of targets.py in this SGLang and registers the hooks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from sgl_dsv4_kernels.plugin import attention, query, state, store, verify
from sgl_dsv4_kernels.plugin.options import Options
from sgl_dsv4_kernels.plugin.targets import BY_KEY, TARGETS, Binder, Target, signature_problem

logger = logging.getLogger("sgl_dsv4_kernels")

WRAPPERS: dict[str, Callable[..., Any]] = {
    "A1": store.compress_norm_rope_store,
    "A2": store.fused_k_norm_rope_flashmla,
    "B1": attention.backend_forward,
    "B2": attention.flash_mla_with_kvcache,
    "B3": attention.fused_rope_inplace,
    "B4": attention.model_forward,
    "B5": query.fused_q_norm_rope,
}


class Located(NamedTuple):
    path: str
    function: Callable[..., Any]
    signature: inspect.Signature


def install(options: Options) -> None:
    """Register the hooks that ``options`` want. With kernels "off" SGLang is not touched at all.

    Raises:
        RuntimeError: a target is missing and ``options.strict``. ImportError: SGLang has no hook registry.
    """
    if options.kernels == "off":
        logger.info("sgl_dsv4_kernels: SGL_DSV4_KERNELS=off, SGLang runs its own kernels")
        return
    if state.is_installed():
        return  # SGLang loads plugins once a process; a second call would wrap the wrappers
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = state.Plugin(options)
    for target in TARGETS:
        if not options.wants(target.part):
            continue
        try:
            found = locate(target)
        except LookupError as error:
            plugin.problems[target.key] = str(error)
            continue
        plugin.hooks[target.key] = state.Hook(
            target, found.path, found.function, Binder(target, found.signature), lambda path=found.path: resolve(path)
        )
    if plugin.problems and options.strict:
        text = "; ".join(f"{BY_KEY[key].label}: {why}" for key, why in plugin.problems.items())
        raise RuntimeError(f"not every hook has its place in this SGLang: {text}")
    state.set_current(plugin)
    for key, hook in plugin.hooks.items():
        HookRegistry.register(hook.path, WRAPPERS[key], HookType.AROUND)
    if options.verify:
        verify.disable_cuda_graphs(HookRegistry, HookType)
    for key, why in plugin.problems.items():
        logger.warning("sgl_dsv4_kernels: no hook for %s: %s", BY_KEY[key].label, why)


def locate(target: Target) -> Located:
    """The first path of ``target`` that exists here and has a signature that its wrapper knows. LookupError says what
    was tried."""
    tried = []
    for path in target.paths:
        try:
            if path.beside is not None and not _module_exists(path.beside):
                raise LookupError(f"without {path.beside} it is another function")
            function = resolve(path.name)
            signature = inspect.signature(function)
        except Exception as error:
            tried.append(f"{path.name}: {error}")
            continue
        problem = signature_problem(target, signature)
        if problem is None:
            return Located(path.name, function, signature)
        tried.append(f"{path.name} {problem}")
    raise LookupError("; ".join(tried))


def resolve(path: str) -> Any:
    """The object at a dotted path: a module's function, or a class's."""
    owner, name = path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError as error:
        if error.name != owner or "." not in owner:
            raise
    module, class_name = owner.rsplit(".", 1)
    return getattr(getattr(importlib.import_module(module), class_name), name)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
