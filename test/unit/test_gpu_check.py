"""scripts/gpu_check.sh with stubs in the place of what needs a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = """set -euo pipefail
ROOT={root} VENV={root}/venv PY={root}/venv/bin/python
die() {{ exit 1; }}
set_up() {{ :; }}
need_optional() {{ :; }}
"""
PYTHON = """#!/bin/sh
[ "$1" != -c ] || exit 0
[ "$1" = -m ] || exec {python} "$@"
echo $$ >> {root}/started
exec sleep 60
"""
DOCTOR = """#!/bin/sh
echo $$ >> {root}/started
exec sleep 60
"""
SERVING = """import os, sys, time
sys.path.insert(0, {benchmark!r})
import serving
serving.exit_on_sigterm()
try:
    print(os.getpid(), file=open("{root}/started", "a"), flush=True)
    time.sleep(60)
finally:  # where the servers are ended
    time.sleep(1)
    print(os.getpid(), file=open("{root}/tidied", "a"))
"""


def lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] not in "ZX"


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("what", "pieces", "tidied"), [("e2e 1", 1, 0), ("e2e 2", 1, 1), ("tp2 1", 3, 0), ("tp2 2", 1, 1)]
)
def test_a_signal_ends_what_runs(tmp_path, what, pieces, tidied, number):
    """Pieces that start servers have the time to end them."""
    for name, text in {
        "scripts/env.sh": ENV,
        "venv/bin/python": PYTHON,
        "venv/bin/sgl-dsv4": DOCTOR,
        "benchmark/bench_serving.py": SERVING,
        "test/e2e/check_serving.py": SERVING,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(root=tmp_path, python=sys.executable, benchmark=str(ROOT / "benchmark")))
        path.chmod(0o755)
    script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    environment = {"PATH": "/usr/bin:/bin", "E2E_MODEL": "m", "OUT_DIR": str(tmp_path / "out")}
    run = subprocess.Popen(["bash", script, *what.split()], env=environment, stdout=subprocess.DEVNULL)

    def pids(name: str) -> list[str]:
        return (tmp_path / name).read_text().split() if (tmp_path / name).exists() else []

    deadline = time.monotonic() + 20
    while len(pids("started")) < pieces and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    status = run.wait(30)
    left = [pid for pid in map(int, pids("started")) if lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (status, left) == (130, [])
    assert len(pids("started")) == pieces
    assert len(pids("tidied")) == tidied
