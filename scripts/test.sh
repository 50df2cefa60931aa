#!/usr/bin/env bash
# Sets up what is missing (scripts/env.sh) and runs the tests, all but the slow ones; arguments go to pytest. Tests that
# need a GPU skip where there is none.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
arguments=() tests=("$ROOT/test")
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then  # paths are relative to here, and pytest starts elsewhere
    argument="$(realpath "${argument%%::*}")${argument#"${argument%%::*}"}"
    tests=()
  fi
  arguments+=("$argument")
done
set_up "pytest 7.0 pytest" "hypothesis 6.0 hypothesis" "triton 3.6 triton==3.6.0"
need_optional "pytest_timeout 2.0 pytest-timeout"
cd "$VENV"  # away from the source tree, whose folder would hide the installed package
exec "$PY" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -m "not slow" -p no:cacheprovider \
  -W "ignore:Unknown config option" "${arguments[@]}" "${tests[@]}"
