"""Facts that the build asks for: `python build_facts.py torch | archs | needs-toolkit`.

torch          folder of the installed torch. It is looked for on sys.path and, because an isolated build hides the
               environment that it builds for, in the site-packages of that environment too; SGL_DSV4_TORCH_DIR wins.
archs          CMake's list of CUDA architectures, empty for the CPU part alone:
               SGL_DSV4_CPU_ONLY=1 -> empty; SGL_DSV4_CUDA_ARCHS -> that list ("release" = RELEASE below); else the
               architecture of the first GPU; no GPU -> empty.
needs-toolkit  1 if CUDA code is to be compiled and no nvcc is on this machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

MINIMUM_TORCH = (2, 10)
# 80, 86, 89: Ampere and Ada; 90a: Hopper; 100f, 120f: the two Blackwell families; PTX of the lowest for the rest.
RELEASE = "80;86-real;89-real;90a-real;100f-real;120f-real"


def torch_dir() -> Path:
    """Folder of the torch package whose headers are used; SystemExit if there is none or it is too old."""
    if override := os.environ.get("SGL_DSV4_TORCH_DIR"):
        candidates = [Path(override)]
    else:
        roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        roots += [sysconfig.get_path("purelib", vars=base), sysconfig.get_path("platlib", vars=base)]
        roots += [site.getusersitepackages()]
        spec = importlib.util.find_spec("torch")
        candidates = [Path(spec.origin).parent] if spec and spec.origin else []
        candidates += [Path(root) / "torch" for root in dict.fromkeys(roots)]
    for candidate in candidates:
        header = candidate / "include/torch/headeronly/version.h"
        if not header.is_file() or not (candidate / "lib/libtorch_cpu.so").is_file():
            continue
        text = header.read_text()
        found = tuple(
            int(re.search(rf"#define TORCH_VERSION_{part} (\d+)", text).group(1)) for part in ("MAJOR", "MINOR")
        )
        if found >= MINIMUM_TORCH:
            return candidate
        print(f"torch {found[0]}.{found[1]} in {candidate} is older than 2.10", file=sys.stderr)
    looked = "\n  ".join(map(str, candidates))
    raise SystemExit(
        "sgl_dsv4_kernels is built against the headers of an installed torch >= 2.10, and none is there. Install torch "
        f"first (pip install 'torch>=2.10') or set SGL_DSV4_TORCH_DIR. Looked in:\n  {looked}"
    )


def gpu_architecture() -> str | None:
    """The first GPU's architecture in CMake's form ("90a-real"), None without a GPU."""
    smi = shutil.which("nvidia-smi") or next(
        (p for p in ("/usr/local/nvidia/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi") if os.access(p, os.X_OK)), None
    )
    if smi is None:
        return None
    query = subprocess.run(
        [smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    match = re.match(r"(\d+)\.(\d+)", query.stdout.strip())
    if query.returncode != 0 or match is None:
        return None
    major, minor = match.groups()
    # Instructions of one architecture (wgmma) or one family need the letter.
    suffix = {"9": "a", "10": "f", "11": "f", "12": "f"}.get(major, "")
    return f"{major}{'0' if suffix == 'f' else minor}{suffix}-real"


def architectures() -> str:
    """CMake's CUDA_ARCHITECTURES list, empty for the CPU part alone."""
    if os.environ.get("SGL_DSV4_CPU_ONLY", "0") not in ("", "0"):
        return ""
    if asked := os.environ.get("SGL_DSV4_CUDA_ARCHS"):
        return RELEASE if asked == "release" else asked
    return gpu_architecture() or ""


def nvcc() -> str | None:
    """The CUDA compiler of this machine, None if there is none."""
    for candidate in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


if __name__ == "__main__":
    facts = {
        "torch": torch_dir,
        "archs": architectures,
        "needs-toolkit": lambda: int(bool(architectures()) and nvcc() is None),
    }
    print(facts[sys.argv[1]]())
