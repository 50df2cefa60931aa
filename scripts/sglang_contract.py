#!/usr/bin/env python3
"""What the plugin relies on in SGLang, read from its wheels without importing them.

    python scripts/sglang_contract.py                   # write the snapshot anew, from the wheels of all its versions
    python scripts/sglang_contract.py --check 0.5.24    # does the plugin fit another version? Says what moved.
    python scripts/sglang_contract.py --add 0.5.24      # the same, and into the snapshot if it fits

Wheels are downloaded once, with pip, into --wheels (default: $SGL_DSV4_WHEELS, or ~/.cache/sgl_dsv4_kernels/wheels).
The snapshot test/data/sglang_contract.json holds facts only: names, parameters, keywords, conditions, digests.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_contract_check import problems

from sgl_dsv4_kernels.plugin.attention import ELSEWHERE, OTHER_TAILS
from sgl_dsv4_kernels.plugin.targets import BY_KEY, TARGETS

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "test" / "data" / "sglang_contract.json"
VERSIONS = [f"0.5.{minor}" for minor in range(12, 24)]
# The wheels are made for one Python each; the facts are the same in all of them.
WHEEL_TAGS = ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_34_x86_64")

MODEL = "sglang/srt/models/deepseek_v4.py"
BACKEND = "sglang/srt/layers/attention/deepseek_v4_backend.py"
REGISTRY = "sglang/srt/plugins/hook_registry.py"
PLUGINS = "sglang/srt/plugins/__init__.py"
SERVER_ARGS = "sglang/srt/server_args.py"
Facts = dict[str, Any]


# ---- wheels ----


def default_wheels() -> Path:
    return Path(os.environ.get("SGL_DSV4_WHEELS") or Path.home() / ".cache" / "sgl_dsv4_kernels" / "wheels")


def find_wheel(version: str, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"sglang-{version}-*.whl"))), None)


def get_wheel(version: str, folder: Path) -> Path:
    """The wheel of a version, downloaded if it is not in ``folder``. subprocess.CalledProcessError if pip cannot."""
    if find_wheel(version, folder) is None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", *WHEEL_TAGS]
        subprocess.run([*command, f"sglang=={version}", "-d", str(folder)], check=True)
    wheel = find_wheel(version, folder)
    assert wheel is not None, f"pip left no sglang {version} in {folder}"
    return wheel


class Wheel:
    """The Python and CUDA sources of one wheel."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.startswith("sglang/") and n.endswith((".py", ".cuh"))]
            self.text = {name: archive.read(name).decode("utf-8", "replace") for name in names if "/test" not in name}
        self._trees: dict[str, ast.Module] = {}

    def tree(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self.text[name])
        return self._trees[name]

    def module_file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self.text), None)

    def definition(self, path: str) -> ast.FunctionDef | None:
        """The function at a dotted path, through an alias in the same module."""
        owner, name = path.rsplit(".", 1)
        file = self.module_file(owner)
        if file is not None:
            body = self.tree(file).body
        else:
            module, _, class_name = owner.rpartition(".")
            file = self.module_file(module)
            owner_class = None if file is None else find_class(self.tree(file), class_name)
            if owner_class is None:
                return None
            body = owner_class.body
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        for node in body:
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
                return self.definition(f"{owner}.{ast.unparse(node.value)}")
        return None

    def files_with(self, word: str) -> Iterator[str]:
        return (name for name in sorted(self.text) if name.endswith(".py") and word in self.text[name])


# ---- reading ----


def find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def find_function(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    return next((n for n in getattr(tree, "body", []) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def parameters(node: ast.FunctionDef) -> list[list[str | None]]:
    """[name, kind, default's source or None] of each parameter; kind as in inspect, its first letters."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    rows = [[p.arg, "plain", None if d is None else ast.unparse(d)] for p, d in zip(plain, defaults, strict=True)]
    rows += [[a.vararg.arg, "args", None]] if a.vararg else []
    named = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    rows += [[p.arg, "keyword", None if d is None else ast.unparse(d)] for p, d in named]
    return rows + ([[a.kwarg.arg, "kwargs", None]] if a.kwarg else [])


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method of that name."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [n for n in found if name in (getattr(n.func, "id", None), getattr(n.func, "attr", None))]


def call_facts(node: ast.Call) -> Facts:
    return {"positional": len(node.args), "keywords": [k.arg or "**" for k in node.keywords]}


def guards(root: ast.AST, wanted: ast.AST) -> list[str] | None:
    """Conditions around a node, outermost first; those of an else branch as not (...)."""
    for node in ast.iter_child_nodes(root):
        inner = [] if node is wanted else guards(node, wanted)
        if inner is None:
            continue
        if isinstance(root, ast.If):
            test = ast.unparse(root.test)
            return [test if node in root.body else f"not ({test})", *inner]
        return inner
    return None


def digest(text: str) -> str:
    """Of code without its layout: a formatter's parentheses, commas and line breaks do not count."""
    return hashlib.sha256(re.sub(r"[\s(),]", "", text).encode()).hexdigest()[:16]


def structs(text: str) -> dict[str, list[list[str]]]:
    """Fields [type, name] of the plan records in a CUDA header."""
    found = {}
    for name, body in re.findall(r"struct alignas\(\d+\) (\w+Plan) \{(.*?)\n\};", text, re.S):
        lines = [re.sub(r"//.*", "", line) for line in body.splitlines()]
        fields = [re.fullmatch(r"\s+(u?int(?:16|32|64)_t) (\w+);\s*", line) for line in lines]
        found[name] = [[f.group(1), f.group(2)] for f in fields if f]
    return found


def read(wheel: Wheel) -> Facts:
    """All facts of one version."""
    facts: Facts = {"functions": {}, "defined_in": {}, "callers": {}, "modules": {}}
    for target in TARGETS:
        for path in target.paths:
            node = wheel.definition(path.name)
            if node is not None:
                facts["functions"][path.name] = parameters(node)
            if path.beside is not None:
                facts["modules"][path.beside] = wheel.module_file(path.beside) is not None
        if target.key in ("B1", "B4"):
            continue
        word = target.function
        files = list(wheel.files_with(f"{word}("))
        facts["defined_in"][target.key] = [f for f in files if find_function(wheel.tree(f), word)]
        facts["callers"][target.key] = {
            f: [call_facts(c) for c in found] for f in files if (found := calls(wheel.tree(f), word))
        }
    facts |= _plans(wheel) | _model(wheel) | _query(wheel) | _backend(wheel) | _framework(wheel)
    return facts


def _plans(wheel: Wheel) -> Facts:
    header = next(n for n in wheel.text if n.endswith("sgl_kernel/deepseek_v4/compress_v2.cuh"))
    tuples = {}
    file = next(f for f in wheel.files_with("class CompressorDecodePlan") if f.endswith("dsv4/compress.py"))
    for name in ("CompressorDecodePlan", "CompressorPrefillPlan"):
        node = find_class(wheel.tree(file), name)
        is_decode = find_function(node, "is_decode")
        tuples[name] = {
            "fields": [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)],
            "is_decode": None if is_decode is None else ast.unparse(is_decode.body[-1]),
        }
    return {"plan_records": structs(wheel.text[header]), "plan_tuples": tuples}


def _model(wheel: Wheel) -> Facts:
    forward = wheel.definition(BY_KEY["B4"].paths[0].name)
    rope = [c for c in calls(forward, "fused_rope_inplace") if any(k.arg == "inverse" for k in c.keywords)]
    attention = min(c.lineno for c in calls(forward, "forward") if ast.unparse(c.func) == "attn_backend.forward")
    last = max((c.lineno for c in rope), default=0)
    returns = [n for n in ast.walk(forward) if isinstance(n, ast.Return) and n.lineno < last]
    names = {n.id for n in ast.walk(wheel.tree(MODEL)) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(wheel.tree(MODEL)) if isinstance(n, ast.Attribute)}
    return {
        "model": {
            "head_slices": sorted(
                ast.unparse(n.value)
                for n in ast.walk(forward)
                if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "tp_slice"
            ),
            "slices_result": "o = o[:, tp_slice, :]" in ast.unparse(forward),
            "inverse_rope": [{"call": ast.unparse(c), "guards": guards(forward, c)} for c in rope],
            "returns_before": [
                {"value": ast.unparse(n), "guards": guards(forward, n), "after_attention": n.lineno > attention}
                for n in sorted(returns, key=lambda n: n.lineno)
            ],
            "assigned": {
                name: ast.unparse(n.value)
                for n in ast.walk(forward)
                if isinstance(n, ast.Assign) and (name := ast.unparse(n.targets[0])) in ("fuse_rope_wo_a", "inv_rope")
            },
            "knows": sorted((names | attributes) & {*ELSEWHERE, *OTHER_TAILS, "is_in_breakable_cuda_graph"}),
        }
    }


def _query(wheel: Wheel) -> Facts:
    """Who is handed the query in the model between `fused_q_norm_rope` and the backend, and on which stream."""
    readers, streams = set(), set()
    for method in find_class(wheel.tree(MODEL), "MQALayer").body:
        made = calls(method, "_compute_q_b")
        if not made and getattr(method, "name", "") not in ("forward", "_compute_q_b"):
            continue
        first = min((c.lineno for c in made), default=0)
        for node in ast.walk(method):
            if isinstance(node, ast.With) and calls(node, "_compute_q_b"):
                streams.add(ast.unparse(node.items[0].context_expr))
            elif isinstance(node, ast.Call) and node.lineno >= first and _takes_query(node):
                readers.add(ast.unparse(node.func))
    header = wheel.text[next(n for n in wheel.text if n.endswith("deepseek_v4/main_norm_rope.cuh"))]
    kernel = re.search(r"Q_KERNEL void fused_q_norm_rope\(.*?\n}\n", header, re.S).group()
    return {"query": {"readers": sorted(readers), "streams": sorted(streams), "kernel": digest(kernel)}}


def _takes_query(node: ast.Call) -> bool:
    """Whether one of the query's names is in an argument, or has this method."""
    inside = [*node.args, *(k.value for k in node.keywords), getattr(node.func, "value", node.func)]
    names = {n.id for part in inside for n in ast.walk(part) if isinstance(n, ast.Name)}
    return bool(names & {"q", "q_out", "q_padded", "attn_q", "attn_k"})


def _backend(wheel: Wheel) -> Facts:
    tree = wheel.tree(BACKEND)
    overriding = []
    for file in wheel.files_with("DeepseekV4AttnBackend"):
        for node in wheel.tree(file).body:
            bases = [ast.unparse(b) for b in getattr(node, "bases", [])]
            if isinstance(node, ast.ClassDef) and "DeepseekV4AttnBackend" in bases and find_function(node, "forward"):
                overriding.append(f"{file}:{node.name}")
    metadata = find_function(tree, "_create_flashmla_metadata")
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and _names_flash_mla(n)]
    returned = [n.value for n in ast.walk(metadata) if isinstance(n, ast.Return) and n.value is not None]
    return {
        "backend": {
            "overriding_forward": overriding,
            "flash_mla_imports": sorted({ast.unparse(n) for n in imports}),
            "metadata": [ast.unparse(value) for value in returned],
            "decode_calls": [
                {k.arg: ast.unparse(k.value) for k in c.keywords}
                for c in calls(tree, "flash_mla_with_kvcache") + calls(tree, "_flash_mla_with_kvcache")
            ],
        },
        "forward_mode": sorted(
            n.name
            for n in find_class(wheel.tree("sglang/srt/model_executor/forward_batch_info.py"), "ForwardMode").body
            if isinstance(n, ast.FunctionDef)
        ),
    }


def _names_flash_mla(node: ast.Import | ast.ImportFrom) -> bool:
    names = {a.name.split(".")[-1] for a in node.names}
    return bool(names & {"flash_mla_with_kvcache", "flash_mla", "flash_mla_interface"})


def _framework(wheel: Wheel) -> Facts:
    registry, plugins = wheel.text[REGISTRY], wheel.text[PLUGINS]
    classes = [find_class(wheel.tree(REGISTRY), name) for name in ("HookType", "HookRegistry")]
    functions = [find_function(wheel.tree(REGISTRY), name) for name in ("_propagate_patch", "_wrap_fn")]
    code = "".join(ast.get_source_segment(registry, node) for node in (*classes, *functions))
    load = find_function(wheel.tree(PLUGINS), "load_plugins")
    prepare = find_function(wheel.tree(SERVER_ARGS), "prepare_server_args")
    legacy = find_function(wheel.tree(SERVER_ARGS), "get_global_server_args")
    return {
        "plugins": {
            "registry": digest(code),
            "load_plugins": digest(ast.get_source_segment(plugins, load)),
            "group": re.search(r'GENERAL_PLUGINS_GROUP = "(.*)"', plugins).group(1),
            "loaded_in": [f for f in wheel.files_with("load_plugins()") if f != PLUGINS and "multimodal_gen" not in f],
        },
        "deterministic": {
            "get_exec": any(wheel.files_with("get_exec().deterministic.enable_deterministic_inference"))
            or 'NS("exec.deterministic")' in wheel.text[SERVER_ARGS],
            "get_global_server_args": legacy is not None and any(isinstance(n, ast.Return) for n in ast.walk(legacy)),
        },
        "prepare_server_args": parameters(prepare),
        # SGLang copies every variable SGL_X to SGLANG_X, so its own names must not be ours.
        "environment": sorted({name for text in wheel.text.values() for name in re.findall(r"SGLANG_DSV4_\w+", text)}),
    }


# ---- the snapshot ----


def load() -> dict[str, Facts]:
    return json.loads(SNAPSHOT.read_text())


def save(snapshot: dict[str, Facts]) -> None:
    """One line a fact of a version, so that a change shows in a diff."""
    lines = []
    for version, facts in sorted(snapshot.items(), key=lambda item: int(item[0].rsplit(".", 1)[1])):
        entries = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
        lines.append(f"{json.dumps(version)}: {{\n" + ",\n".join(entries) + "\n}")
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=default_wheels())
    parser.add_argument("--check", metavar="VERSION")
    parser.add_argument("--add", metavar="VERSION")
    args = parser.parse_args()
    versions = [v for v in (args.check, args.add) if v] or VERSIONS
    snapshot = load() if SNAPSHOT.is_file() else {}
    found = []
    for version in versions:
        facts = read(Wheel(get_wheel(version, args.wheels)))
        found += problems(version, facts)
        if version != args.check:
            snapshot[version] = facts
    print("\n".join(found) or f"{', '.join(versions)}: the plugin fits")
    if not args.check and not (args.add and found):
        save(snapshot)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
