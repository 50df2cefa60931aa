# Sourced by the other scripts: a virtual environment with torch, the build tools and sgl_dsv4_kernels in it.
#
#   set_up [extra requirement ...]   makes all that is missing; afterwards $PY is the environment's Python
#
# SGL_DSV4_VENV    folder of the environment (default: .venv in the source tree)
# SGL_DSV4_WHEEL   install this wheel instead of building one
# PYTHON           Python >= 3.10 to start from (default: python3). If it has torch >= 2.10, the environment uses that
#                  torch and all else that Python has; nothing is downloaded that is there already.
# SGL_DSV4_CPU_ONLY, SGL_DSV4_CUDA_ARCHS: see cmake/build_facts.py
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SGL_DSV4_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Module, version that is good enough, and what pip installs otherwise (no other dependency is looked at, so that nothing
# is downloaded where these are there). cmake 3.31.8 is the first to know sm_100f.
RUNTIME=("torch 2.10 torch==2.13.0" "numpy 1.0 numpy")
BUILD_TOOLS=("cmake 3.31.8 cmake==4.4.5" "ninja 1.11 ninja==1.13.2" "scikit_build_core 0.11 scikit-build-core==1.1.2")

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# apt_get PACKAGE ... : only as root, and only where something was found missing
apt_get() {
  [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return 1
  say "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -q && apt-get install -y -q --no-install-recommends "$@"; } >&2
}

# missing ENTRY ... : the pip requirements of those entries ("module minimum requirement") that $PY has not got
missing() {
  "$PY" - "$@" << 'PYTHON'
import importlib.metadata, re, shutil, subprocess, sys

def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version)[:3]]

def version(module):
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        if module not in ("cmake", "ninja") or shutil.which(module) is None:
            return None
        shown = subprocess.run([module, "--version"], capture_output=True, text=True).stdout
        return re.search(r"\d+(\.\d+)+", shown).group()

for entry in sys.argv[1:]:
    module, minimum, requirement = entry.split()
    found = version(module)
    if found is None or numbers(found) < numbers(minimum):
        print(requirement)
PYTHON
}

# need ENTRY ... : install what is missing
need() {
  local wanted
  wanted="$(missing "$@")"
  [ -z "$wanted" ] && return
  say "pip install" $wanted
  "$PY" -m pip install -q $wanted
}

# need_optional ENTRY ... : the same, but going without is fine
need_optional() {
  local wanted
  wanted="$(missing "$@")"
  [ -z "$wanted" ] && return
  "$PY" -m pip install -q --retries 0 --timeout 5 $wanted > /dev/null 2>&1 || say "going without" $wanted
}

make_venv() {
  local base="${PYTHON:-python3}" options=() has_torch
  if ! command -v "$base" > /dev/null; then
    [ "$base" = python3 ] && apt_get python3 python3-venv || die "no $base found: install Python 3.10 or newer"
  fi
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python >= 3.10 needed, $("$base" --version) found"
  has_torch="$("$base" - << 'PYTHON'
import importlib.metadata, re
try:
    print(int([int(n) for n in re.findall(r"\d+", importlib.metadata.version("torch"))[:2]] >= [2, 10]))
except importlib.metadata.PackageNotFoundError:
    print(0)
PYTHON
)"
  if [ "$has_torch" = 1 ] && "$base" -c 'import venv, pip' 2> /dev/null; then
    # Its pip serves the environment too: a pip of our own could bring an older setuptools than that torch asks for.
    options=(--system-site-packages --without-pip)
  else
    has_torch=0
    "$base" -c 'import ensurepip, venv' 2> /dev/null || apt_get python3-venv ||
      die "Python's venv module is missing: apt-get install python3-venv"
  fi
  say "virtual environment $VENV ($("$base" --version)${options[*]:+, ${options[*]}})"
  "$base" -m venv "${options[@]}" "$VENV"
  # If the base is itself a virtual environment, --system-site-packages shows what lies below it, not the base.
  if [ "$has_torch" = 1 ] && ! "$PY" -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null; then
    "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_environment.pth"
  fi
}

need_compiler() {
  command -v "${CXX:-c++}" > /dev/null || apt_get g++ || die "no C++ compiler found: apt-get install g++"
}

# Where CUDA code is to be compiled: points the build at this machine's nvcc, or else at NVIDIA's packages, in a folder of
# their own, because torch may depend on another minor version of some of them.
need_toolkit() {
  [ -n "$("$PY" "$ROOT/cmake/build_facts.py" archs)" ] || return 0
  if [ "$("$PY" "$ROOT/cmake/build_facts.py" needs-toolkit)" = 0 ]; then
    CUDACXX="$(cd "$ROOT/cmake" && "$PY" -c 'import build_facts; print(build_facts.nvcc())')"
    export CUDACXX
    return
  fi
  local home="$VENV/cuda/nvidia/cu13"
  if [ ! -x "$home/bin/nvcc" ]; then
    local wanted
    wanted="$(cd "$ROOT/cmake" && "$PY" -c 'import build_backend; print(*build_backend.TOOLKIT)')"
    say "no nvcc found: pip install $wanted"
    "$PY" -m pip install -q --target "$VENV/cuda" $wanted
  fi
  # The packages' libraries lie in lib, and their nvcc looks for them in lib64.
  export CUDACXX="$home/bin/nvcc" CUDAToolkit_ROOT="$home" LIBRARY_PATH="$home/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
}

# What the installed package was made of: sources, torch, and what is compiled for.
fingerprint() {
  if [ -n "${SGL_DSV4_WHEEL:-}" ]; then
    sha256sum "$SGL_DSV4_WHEEL"
    return
  fi
  (
    cd "$ROOT"
    find CMakeLists.txt pyproject.toml README.md cmake csrc sgl_dsv4_kernels -type f ! -name '*.pyc' -print0 | sort -z |
      xargs -0 sha256sum
    "$PY" cmake/build_facts.py archs
    "$PY" -c 'import importlib.metadata as m; print(m.version("torch"))'
  ) | sha256sum
}

install_package() {
  local stamp="$VENV/sgl_dsv4_kernels.sha256" now
  now="$(fingerprint)"
  [ "$(cat "$stamp" 2> /dev/null)" = "$now" ] && return
  if [ -n "${SGL_DSV4_WHEEL:-}" ]; then
    say "installing $SGL_DSV4_WHEEL"
    "$PY" -m pip install -q --force-reinstall --no-deps "$SGL_DSV4_WHEEL"
  else
    need_compiler
    need "${BUILD_TOOLS[@]}"
    need_toolkit
    local archs
    archs="$("$PY" "$ROOT/cmake/build_facts.py" archs)"
    say "building sgl_dsv4_kernels for ${archs:-the CPU alone}"
    "$PY" -m pip install -q --no-build-isolation --no-deps ${VERBOSE_BUILD:+-v} "$ROOT"
  fi
  echo "$now" > "$stamp"
}

set_up() {
  [ -x "$PY" ] || make_venv
  export PATH="$VENV/bin:$PATH"
  need "${RUNTIME[@]}" "$@"
  install_package
}
