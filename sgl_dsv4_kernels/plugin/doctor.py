"""`sgl-dsv4 doctor`: is everything in place to serve with our kernels, and if not, what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import testing, testing_decode
from sgl_dsv4_kernels.plugin import probe, state
from sgl_dsv4_kernels.plugin.options import Options
from sgl_dsv4_kernels.plugin.targets import TARGETS

OK, ABSENT, FAILED = "ok", "absent", "failed"
EXIT_CODES = {OK: 0, FAILED: 1, ABSENT: 3}
"""0: all is well. 1: something is broken. 3: nothing is broken, but something is not there (a GPU, SGLang), or off."""
GROUP, ENTRY_MODULE = "sglang.srt.plugins", "sgl_dsv4_plugin"


@dataclass(frozen=True)
class Check:
    name: str
    state: str
    text: str


def run() -> list[Check]:
    """All checks, each of which may fail without ending the others."""
    checks: list[Check] = []
    for part in (_package, _gpus, _sglang, _self_tests):
        try:
            checks += part()
        except Exception as error:
            checks.append(Check(part.__name__.strip("_"), FAILED, f"{type(error).__name__}: {error}"))
    return checks


def exit_code(checks: list[Check]) -> int:
    states = {check.state for check in checks}
    return EXIT_CODES[FAILED if FAILED in states else ABSENT if ABSENT in states else OK]


def as_json(checks: list[Check]) -> dict[str, object]:
    return {"exit_code": exit_code(checks), "checks": [asdict(check) for check in checks]}


def _package() -> Iterator[Check]:
    info = dk.build_info()
    built = f"CUDA {info['cuda']} for {info['architectures']}" if info["cuda"] != "none" else "no CUDA code"
    yield Check("sgl_dsv4_kernels", OK, f"{state.version('sgl-dsv4-kernels')}, torch {info['torch']} headers, {built}")
    yield Check("torch", OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def _gpus() -> Iterator[Check]:
    count = torch.cuda.device_count()
    if count == 0:
        yield Check("gpu", ABSENT, "torch sees none; the kernels run on it, the CPU path is for tests")
    for number in range(count):
        device = torch.device("cuda", number)
        name = f"{torch.cuda.get_device_name(device)}, {state.architecture(device)}"
        problems = [p for p in (probe.store_problem(device), probe.decode_problem(device)) if p is not None]
        yield Check(f"gpu {number}", FAILED if problems else OK, "; ".join([name, *problems]))


def _sglang() -> Iterator[Check]:
    if importlib.util.find_spec("sglang") is None:
        yield Check("sglang", ABSENT, "not installed in this Python")
        return
    yield Check("sglang", OK, state.version("sglang"))
    options = Options.from_env()
    names = [entry.name for entry in importlib.metadata.entry_points(group=GROUP) if entry.module == ENTRY_MODULE]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if not names:
        yield Check("entry point", FAILED, f"none of ours in group {GROUP}: install the package with pip")
        return
    if allowed and names[0] not in [name.strip() for name in allowed.split(",")]:
        yield Check("entry point", ABSENT, f"SGLANG_PLUGINS={allowed} leaves {names[0]} out")
        return
    yield Check("entry point", OK, names[0])
    if options.kernels == "off":
        yield Check("hooks", ABSENT, "SGL_DSV4_KERNELS=off")
        return
    yield from _hooks(options)


def _hooks(options: Options) -> Iterator[Check]:
    """As a server's process has them: SGLang loads the plugin and applies its hooks."""
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    except SystemExit as error:  # SGL_DSV4_STRICT=1
        yield Check("hooks", FAILED, str(error))
        return
    if not state.is_installed():
        yield Check("hooks", FAILED, "SGLang has not run the plugin: see its log")
        return
    plugin = state.current()
    plugin.check_bindings()
    for target in TARGETS:
        name = f"hook {target.label}"
        if not options.wants(target.part):
            yield Check(name, ABSENT, f"SGL_DSV4_KERNELS={options.kernels}")
        elif target.key in plugin.problems:
            yield Check(name, FAILED, plugin.problems[target.key])
        else:
            yield Check(name, OK, plugin.hooks[target.key].path)


def _self_tests() -> Iterator[Check]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, test in (("store", _store_test), ("decode", _decode_test)):
        yield _guarded(f"self-test {name}", lambda test=test: test(device))


def _guarded(name: str, test: Callable[[], tuple[bool, str]]) -> Check:
    try:
        passed, text = test()
    except Exception as error:
        return Check(name, FAILED, f"{type(error).__name__}: {error}")
    return Check(name, OK if passed else FAILED, text)


def _store_test(device: torch.device) -> tuple[bool, str]:
    """Both entry points beside the reference on the CPU. A CPU sums and roots its own way, so a code may be its
    neighbour: few bytes may differ."""
    rows, page_size = 128, 64
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((rows, 512), generator=generator)
    weight = torch.rand(512, generator=generator) + 0.5
    freqs = testing.yarn_freqs_cis(4 * rows + 4)
    caches = {}
    for place in {device, torch.device("cpu")}:
        window, compressed = (testing.empty_cache(2, page_size, device=place) for _ in range(2))
        rest = [t.to(place) for t in (freqs, torch.arange(rows), torch.arange(rows))]
        dk.norm_rope_store(
            kv.bfloat16().to(place), weight.bfloat16().to(place), 1e-6, *rest, window, page_size=page_size
        )
        plan = testing.decode_plan(4 * torch.arange(1, rows + 1)).to(place)
        dk.compress_norm_rope_store(
            kv.to(place), plan, weight.to(place), 1e-6, rest[0], rest[2], compressed,
            page_size=page_size, compress_ratio=4, is_decode=True,
        )  # fmt: skip
        caches[place] = torch.stack([window, compressed]).cpu()
    ours, reference = caches[device], caches[torch.device("cpu")]
    differing = int((ours != reference).sum())
    written = int((ours != testing.empty_cache(2, page_size)).sum())
    text = f"{device.type}: {2 * rows} rows, {differing} of {ours.numel()} bytes unlike the reference on the CPU"
    return written > rows * 512 and differing <= 1e-3 * ours.numel(), text


def _decode_test(device: torch.device) -> tuple[bool, str]:
    """Errors against fp64."""
    problem = testing_decode.random_problem(4, 16, 128, 512, device=device, seed=3, rope=True)
    prologue = dict(q_norm_eps=1e-6, q_rope=problem.options["inverse_rope"])
    query = dk.query_norm_rope(problem.q, norm_eps=prologue["q_norm_eps"], rope=prologue["q_rope"])
    want = testing_decode.truth(dataclasses.replace(problem, q=query))
    result = dk.sparse_decode(**problem.arguments(), **problem.options, **prologue)
    error = testing_decode.relative_error(result.out, want.value)
    excess = testing_decode.lse_excess(result.lse, want)
    bound = testing_decode.OUTPUT_BOUND
    return error <= bound and excess <= 0, f"{device.type}: output error {error:.5f} of at most {bound} against fp64"
