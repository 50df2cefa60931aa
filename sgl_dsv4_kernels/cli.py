"""Command line: ``sgl-dsv4 doctor``, ``sgl-dsv4 serve``, ``sgl-dsv4 bench``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_dsv4_kernels.plugin.options import KERNELS

BENCHMARKS = {
    "store": "bench_norm_rope_store.py",
    "decode": "bench_sparse_decode.py",
    "chain": "bench_decode_chain.py",
    "serving": "bench_serving.py",
}
SOURCE_VARIABLE = "SGL_DSV4_SOURCE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. 2 = wrong usage."""
    args, rest = _parser().parse_known_args(arguments)
    return args.run(args, rest)


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: what we do not know goes on to SGLang or the benchmark as it is.
    parser = argparse.ArgumentParser(prog="sgl-dsv4", description="DeepSeek-V4 kernels for SGLang", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="doctor | serve | bench")

    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check the installation",
        description="Checks package, GPU, SGLang and hooks, and runs both kernels once. Exit code: 0 all is well, "
        "1 something is broken, 3 nothing is broken but something is not there or switched off.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor.set_defaults(run=_doctor)

    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="start sglang.launch_server with the plugin",
        description="Starts python -m sglang.launch_server; flags that are not named here go to it unchanged.",
    )
    serve.add_argument("--dsv4-kernels", choices=KERNELS, help="SGL_DSV4_KERNELS (default: all)")
    serve.add_argument("--dsv4-verify", action="store_true", help="SGL_DSV4_VERIFY=1, without CUDA graphs: slow")
    serve.add_argument(
        "--dsv4-strict", action="store_true", help="SGL_DSV4_STRICT=1: an unforeseen fallback is an error"
    )
    serve.set_defaults(run=_serve)

    bench = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="run a benchmark of the source folder",
        description="Runs a script of benchmark/ in the source folder, which the wheel does not hold: in "
        f"${SOURCE_VARIABLE}, the current folder, or beside the imported package. Other flags go to the script.",
    )
    bench.add_argument("benchmark", choices=tuple(BENCHMARKS))
    bench.set_defaults(run=_bench)
    return parser


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        print(f"sgl-dsv4 doctor: unknown arguments: {' '.join(rest)}", file=sys.stderr)
        return 2
    from sgl_dsv4_kernels.plugin import doctor

    checks = doctor.run()
    code = doctor.exit_code(checks)
    if args.json:
        print(json.dumps(doctor.as_json(checks), indent=2))
        return code
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:6}  {check.name:{width}}  {check.text}")
    print({0: "all is well", 1: "something is broken", 3: "nothing is broken, but not everything is there"}[code])
    return code


def serve_command(
    args: argparse.Namespace, rest: list[str], environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that replaces this process, and its environment."""
    environment = dict(environment)
    if args.dsv4_kernels:
        environment["SGL_DSV4_KERNELS"] = args.dsv4_kernels
    if args.dsv4_strict:
        environment["SGL_DSV4_STRICT"] = "1"
    if args.dsv4_verify:
        environment["SGL_DSV4_VERIFY"] = "1"
        rest = [*rest, *(["--disable-cuda-graph"] if "--disable-cuda-graph" not in rest else [])]
    return [sys.executable, "-m", "sglang.launch_server", *rest], environment


def _serve(args: argparse.Namespace, rest: list[str]) -> int:
    import importlib.util

    if importlib.util.find_spec("sglang") is None:
        print(f"sgl-dsv4 serve: SGLang is not installed in {sys.executable}", file=sys.stderr)
        return 3
    rest = rest[1:] if rest[:1] == ["--"] else rest
    command, environment = serve_command(args, rest, dict(os.environ))
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # the server has this process's id, signals and exit code


def find_benchmark(name: str) -> Path | None:
    """The script of a benchmark in a source folder, or None."""
    package = Path(__file__).resolve().parents[1]
    named = os.environ.get(SOURCE_VARIABLE)
    for folder in [Path(named)] if named else [Path.cwd(), package]:
        script = folder / "benchmark" / BENCHMARKS[name]
        if script.is_file():
            return script
    return None


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    script = find_benchmark(args.benchmark)
    if script is None:
        print(
            f"sgl-dsv4 bench: no benchmark/{BENCHMARKS[args.benchmark]} here. The benchmarks are in the source folder, "
            f"not in the wheel: run this there, or set {SOURCE_VARIABLE} to it.",
            file=sys.stderr,
        )
        return 3
    return subprocess.run([sys.executable, str(script), *rest], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
