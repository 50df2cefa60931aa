#!/usr/bin/env bash
# Sets up what is missing (scripts/env.sh) and runs the demo; arguments go to it (--help).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
set_up
cd "$VENV"  # away from the source tree, whose folder would hide the installed package
exec "$PY" -m sgl_dsv4_kernels.demo "$@"
