"""Registers, stack and spills of every kernel, from a build log with ptxas' -v output. Exit status 1 on any spill.

cmake --build build 2>&1 | tee build.log; python scripts/check_spills.py build.log     (no file: stdin)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import NamedTuple

COMPILING = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


class Kernel(NamedTuple):
    """One kernel of one architecture."""

    name: str
    architecture: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def parse(lines: list[str]) -> list[Kernel]:
    """Kernels of a log. ptxas prints, one after another: what it compiles, the stack line, the register line."""
    kernels = []
    name = architecture = None
    stack = (0, 0, 0)
    for line in lines:
        if match := COMPILING.search(line):
            name, architecture = match.groups()
            stack = (0, 0, 0)
        elif match := STACK.search(line):
            # The properties of a device function that was not inlined also come here: the larger counts.
            stack = tuple(max(old, int(new)) for old, new in zip(stack, match.groups(), strict=True))
        elif (match := USED.search(line)) and name:
            kernels.append(Kernel(name, architecture, int(match.group(1)), *stack))
            name = None
    return kernels


def demangle(names: list[str]) -> list[str]:
    """Readable names, or the names themselves where there is no c++filt."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    return subprocess.check_output([tool], input="\n".join(names), text=True).splitlines()


def shorten(name: str) -> str:
    """Without parameters, casts of template arguments and our own namespaces."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\(anonymous namespace\)::|sgl_dsv4::|\(bool\)|\(int\)", "", name)
    name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name)
    return re.sub(r"\([^()]*\)$", "", name)


def main() -> int:
    if len(sys.argv) > 1:
        with open(sys.argv[1], errors="replace") as file:
            lines = file.readlines()
    else:
        lines = sys.stdin.readlines()
    kernels = parse(lines)
    if not kernels:
        print("check_spills.py: no ptxas output (-Xptxas -v) in the log: nothing compiled?", file=sys.stderr)
        return 1
    names = demangle([kernel.name for kernel in kernels])
    table = sorted(zip(map(shorten, names), kernels, strict=True), key=lambda row: (row[0], row[1].architecture))

    # One line a kernel: an architecture's cell is its registers, with stack and spills where there are any.
    by_name: dict[str, list[str]] = {}
    for name, kernel in table:
        cell = f"{kernel.architecture.removeprefix('sm_')}:{kernel.registers}"
        if kernel.stack:
            cell += f" (stack {kernel.stack})"
        if kernel.spill_stores or kernel.spill_loads:
            cell += f" (SPILLS {kernel.spill_stores} B out, {kernel.spill_loads} B in)"
        by_name.setdefault(name, []).append(cell)
    print("registers by architecture")
    for name, cells in by_name.items():
        print(f"  {'  '.join(cells):52}  {name}")
    spilling = [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads]
    print(f"{len(kernels)} kernels, {len(spilling)} with spills")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
