"""What the plugin is in this process: switches, hooks and their state, counts."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_dsv4_kernels.ops.decode import resolve_backend
from sgl_dsv4_kernels.plugin import choice
from sgl_dsv4_kernels.plugin.fallback import Declined, Ledger
from sgl_dsv4_kernels.plugin.options import Options
from sgl_dsv4_kernels.plugin.probe import decode_problem, store_problem
from sgl_dsv4_kernels.plugin.targets import BY_KEY, Binder, Target

logger = logging.getLogger("sgl_dsv4_kernels")


@dataclass
class Hook:
    """One registered hook."""

    target: Target
    path: str
    original: Callable[..., Any]
    """SGLang's function, as it was when the hook was registered."""
    binder: Binder
    find: Callable[[], object]
    """What the path holds now."""

    def binding_problem(self) -> str | None:
        """Why calls do not reach the hook. SGLang only logs a hook that it cannot apply."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        patched = getattr(HookRegistry, "_patched", None)
        if patched is not None and self.path not in patched:
            return f"SGLang has not applied the hook to {self.path}"
        if self.find() is self.original:
            return f"{self.path} still is SGLang's own"
        for name in self.target.consumers:
            if getattr(sys.modules.get(name), self.target.function, None) is self.original:
                return f"{name} still calls SGLang's own {self.target.function}"
        return None


@dataclass
class Plugin:
    """One process's plugin. Made by `install`; `current` returns it."""

    options: Options
    hooks: dict[str, Hook] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Key of a target -> why its hook does nothing."""
    padding_trails: bool = False
    """The rank's heads come first in a padded q, and the caller slices the result with ``[:, :n_local]`` (0.5.14)."""
    model_names: dict[str, Any] = field(default_factory=dict)
    """Globals of SGLang's model file, once the hooks are checked."""
    started: bool = False
    ledger: Ledger = field(init=False)
    _devices: dict[tuple[str, torch.device], str | None] = field(default_factory=dict)
    _backends: dict[torch.device, str] = field(default_factory=dict)
    _batch_invariant: bool | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.options.strict)

    def is_active(self, key: str) -> bool:
        return key in self.hooks and key not in self.problems

    @property
    def fuses_inverse_rope(self) -> bool:
        """Only if every hook of it is bound."""
        return self.started and all(self.is_active(key) for key in ("B1", "B2", "B3", "B4"))

    @property
    def fuses_query(self) -> bool:
        """Whether the query's norm and RoPE may be left to our decode."""
        return self.fuses_inverse_rope and self.is_active("B5")

    @property
    def batch_invariant(self) -> bool:
        """SGLang's --enable-deterministic-inference, read at the first decode: it is not known when plugins load."""
        if self._batch_invariant is None:
            try:
                self._batch_invariant = _deterministic_inference()
            except LookupError as error:
                self.ledger.decline("deterministic inference", Declined(f"{error}; batch_invariant=True is used"))
                self._batch_invariant = True
        return self._batch_invariant

    def require_few_rows(self, heads: int, rows: int, device: torch.device) -> None:
        """Raise Declined for a decode that SGLang's kernel is faster with."""
        if device not in self._backends:
            self._backends[device] = resolve_backend(None, device)
        options = dict(most_rows=self.options.decode_max_tokens, batch_invariant=self.batch_invariant)
        if not choice.takes_decode(heads, rows, backend=self._backends[device], **options):
            raise Declined(f"more rows than our kernel is faster with at {heads} heads", foreseen=True)

    def require(self, key: str, device: torch.device) -> None:
        """Raise Declined if the hook may not serve on ``device``. The first call of a process checks all hooks."""
        if not self.started:
            self.start(device)
        if key in self.problems:
            raise Declined(self.problems[key])
        part = BY_KEY[key].part
        place = (part, device)
        if place not in self._devices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return  # a probe is no part of SGLang's graph; an error will say what it would have said
            self._devices[place] = store_problem(device) if part == "store" else decode_problem(device)
        problem = self._devices[place]
        if problem is not None:
            raise Declined(problem)

    def check_bindings(self) -> None:
        """Look whether each hook is really bound; fills ``problems``. Needs SGLang to have applied its hooks."""
        for key, hook in self.hooks.items():
            problem = hook.binding_problem()
            if problem is not None:
                self.problems[key] = problem
        if "B1" in self.problems and "B2" in self.hooks:
            self.problems.setdefault("B2", f"needs B1 ({self.problems['B1']})")
        if "B4" in self.hooks:
            forward = inspect.unwrap(self.hooks["B4"].original)
            self.padding_trails, self.model_names = padding_trails(forward), forward.__globals__

    def start(self, device: torch.device) -> None:
        """Check all hooks and log the process's one line. RuntimeError if strict and something is missing."""
        self.started = True
        self.check_bindings()
        logger.info("%s", self.summary(device))
        if self.problems and self.options.strict:
            text = "; ".join(f"{BY_KEY[key].label}: {why}" for key, why in self.problems.items())
            raise RuntimeError(f"sgl_dsv4_kernels: SGL_DSV4_STRICT=1, and not every hook is active: {text}")

    def summary(self, device: torch.device) -> str:
        """Version, architecture, what is active, what is not and why."""
        active = [BY_KEY[key].label for key in self.hooks if self.is_active(key)]
        idle = [f"{BY_KEY[key].label} ({why})" for key, why in self.problems.items()]
        words = [
            f"sgl_dsv4_kernels {version('sgl-dsv4-kernels')} in SGLang {version('sglang')}, {architecture(device)}:",
            f"active {', '.join(active) or 'nothing'};",
            f"inactive {', '.join(idle) or 'nothing'};",
            f"inverse RoPE {'in our decode' if self.fuses_inverse_rope else 'by SGLang'};",
            f"SGL_DSV4_KERNELS={self.options.kernels}",
        ]
        if self.options.wants("fused"):
            where = "by SGLang" if not self.fuses_query else "in our decode"
            if self.fuses_query and not self.padding_trails:
                where += ", by SGLang where a rank has padded heads"
            words.insert(-1, f"the query's norm and RoPE {where};")
        if self.options.verify:
            words.append("SGL_DSV4_VERIFY=1 (SGLang's kernels serve, ours are compared)")
        return " ".join(words)


_current: Plugin | None = None


def current() -> Plugin:
    """The process's plugin. RuntimeError before `install`."""
    if _current is None:
        raise RuntimeError("sgl_dsv4_kernels: the plugin is not installed in this process")
    return _current


def is_installed() -> bool:
    return _current is not None


def set_current(plugin: Plugin | None) -> None:
    global _current
    _current = plugin


def padding_trails(forward: Callable[..., Any]) -> bool:
    """Whether ``MQALayer.forward`` slices the padded heads off behind its own (0.5.14), not around them by rank. False
    if its source cannot be read: all heads are then computed, which is right everywhere."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    return "slice(0,self.n_local_heads)" in "".join(source.split())


def _deterministic_inference() -> bool:
    """The server's --enable-deterministic-inference; LookupError if SGLang keeps it elsewhere than known."""
    try:
        from sglang.srt.runtime_context import get_exec  # 0.5.17

        return bool(get_exec().deterministic.enable_deterministic_inference)
    except Exception as first:
        try:
            from sglang.srt.server_args import get_global_server_args  # to 0.5.19

            return bool(get_global_server_args().enable_deterministic_inference)
        except Exception as second:
            raise LookupError(f"enable_deterministic_inference cannot be read ({first}; {second})") from second


def version(distribution: str) -> str:
    """Of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def architecture(device: torch.device) -> str:
    """sm_90 for an H200; cpu."""
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
