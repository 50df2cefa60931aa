"""The command line, without a GPU and without SGLang."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys

import pytest
import torch
from fake_sglang import imported

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import cli
from sgl_dsv4_kernels.plugin import doctor


@pytest.fixture
def without_sglang(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sglang" else find(name, *rest)
    )


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def states(checks) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_doctor_without_gpu_and_sglang(without_sglang, without_gpu, capsys):
    assert cli.main(["doctor"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("absent  gpu") for line in lines)
    assert any(line.startswith("absent  sglang") for line in lines)
    assert sum(line.startswith("ok      self-test") for line in lines) == 2
    assert lines[-1].startswith("nothing is broken")


def test_doctor_json(without_sglang, without_gpu, capsys):
    assert cli.main(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 3
    assert {"name", "state", "text"} == set(report["checks"][0])


@pytest.mark.parametrize(
    ("name", "check"), [("sparse_decode", "self-test decode"), ("norm_rope_store", "self-test store")]
)
def test_doctor_finds_a_broken_kernel(without_sglang, without_gpu, monkeypatch, capsys, name, check):
    def broken(*args, **kwargs):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(dk, name, broken)
    assert cli.main(["doctor", "--json"]) == 1
    (found,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["state"] == "failed"]
    assert found == {"name": check, "state": "failed", "text": "RuntimeError: launch failed"}


def test_doctor_finds_wrong_results(without_sglang, without_gpu, monkeypatch):
    right = dk.sparse_decode
    monkeypatch.setattr(dk, "sparse_decode", lambda **kw: (r := right(**kw))._replace(out=r.out * 1.01))
    assert states(doctor.run())["self-test decode"] == "failed"


def test_doctor_unknown_argument(capsys):
    assert cli.main(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err


LOAD_PLUGINS = """
def load_plugins():
    from sgl_dsv4_plugin import register
    from sglang.srt.plugins.hook_registry import HookRegistry
    register()
    HookRegistry.apply_hooks()
"""


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    with imported("0.5.17", tmp_path) as fake:
        (tmp_path / "sglang/srt/plugins/__init__.py").write_text(LOAD_PLUGINS)
        entry = importlib.metadata.EntryPoint("sgl_dsv4_kernels", "sgl_dsv4_plugin:register", doctor.GROUP)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
        yield fake


HOOKS = ("A1", "A2", "B1", "B2", "B3", "B4", "B5")


def hooks(checks) -> dict[str, str]:
    return {check.name.split()[1]: check.state for check in checks if check.name.startswith("hook ")}


def test_doctor_hooks(sglang, without_gpu):
    checks = doctor.run()
    assert hooks(checks) == dict.fromkeys(HOOKS, "ok")
    assert doctor.exit_code(checks) == 3  # no GPU


def test_doctor_a_switch_and_a_missing_function(sglang, without_gpu, monkeypatch):
    monkeypatch.setenv("SGL_DSV4_KERNELS", "store")
    del sglang.module("sglang.kernels.ops.attention.dsv4.compress").compress_norm_rope_store
    checks = doctor.run()
    assert hooks(checks) == {"A1": "failed", "A2": "ok"} | dict.fromkeys(HOOKS[2:], "absent")
    assert doctor.exit_code(checks) == 1


@pytest.mark.parametrize(
    ("name", "value", "check", "state"),
    [
        ("SGL_DSV4_KERNELS", "off", "hooks", "absent"),
        ("SGL_DSV4_KERNELS", "some", "sglang", "failed"),
        ("SGLANG_PLUGINS", "other", "entry point", "absent"),
        ("SGLANG_PLUGINS", "other, sgl_dsv4_kernels", "entry point", "ok"),
    ],
)
def test_doctor_environment(sglang, without_gpu, monkeypatch, name, value, check, state):
    monkeypatch.setenv(name, value)
    assert states(doctor.run())[check] == state


def test_doctor_without_an_entry_point(sglang, without_gpu, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert states(doctor.run())["entry point"] == "failed"


def test_doctor_strict(sglang, without_gpu, monkeypatch):
    monkeypatch.setenv("SGL_DSV4_STRICT", "1")
    del sglang.module("sglang.kernels.ops.attention.dsv4.compress").compress_norm_rope_store
    (found,) = [check for check in doctor.run() if check.name == "hooks"]
    assert found.state == "failed"
    assert "A1 compress_norm_rope_store" in found.text


def test_the_installed_package_has_the_entry_points():
    """pyproject.toml's, as pip wrote them."""
    try:
        files = importlib.metadata.distribution("sgl-dsv4-kernels").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only on the path")
    found = {(entry.group, entry.name): entry.value for entry in files}
    if not found:
        pytest.skip("the installed package is older than its entry points")
    assert found["sglang.srt.plugins", "sgl_dsv4_kernels"] == "sgl_dsv4_plugin:register"
    assert found["console_scripts", "sgl-dsv4"] == "sgl_dsv4_kernels.cli:main"


def serve(*arguments: str):
    args, rest = cli._parser().parse_known_args(["serve", *arguments])
    return cli.serve_command(args, rest, {"PATH": "/bin"})


def test_serve_passes_all_else_through():
    flags = ["--model-path", "m", "--tp", "8", "--dsv4-attn-backend", "trtllm", "--dsv4-prefill-backend=flashmla"]
    command, environment = serve(*flags)
    assert command == [sys.executable, "-m", "sglang.launch_server", *flags]
    assert environment == {"PATH": "/bin"}


def test_serve_switches():
    command, environment = serve("--dsv4-kernels", "store", "--dsv4-strict", "--dsv4-verify", "--port", "1")
    assert command[3:] == ["--port", "1", "--disable-cuda-graph"]
    assert environment == {
        "PATH": "/bin",
        "SGL_DSV4_KERNELS": "store",
        "SGL_DSV4_STRICT": "1",
        "SGL_DSV4_VERIFY": "1",
    }


def test_serve_replaces_the_process(monkeypatch):
    spec = importlib.machinery.ModuleSpec("sglang", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    called = []
    monkeypatch.setattr(cli.os, "execve", lambda *args: called.append(args))
    cli.main(["serve", "--dsv4-kernels", "off", "--help-me"])
    ((path, command, environment),) = called
    assert path == command[0] == sys.executable
    assert command[-1] == "--help-me"
    assert environment["SGL_DSV4_KERNELS"] == "off"


def test_serve_without_sglang(without_sglang, capsys):
    assert cli.main(["serve"]) == 3
    assert "SGLang is not installed" in capsys.readouterr().err


def test_bench(tmp_path, monkeypatch, capfd):
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / cli.BENCHMARKS["decode"]).write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    monkeypatch.setenv(cli.SOURCE_VARIABLE, str(tmp_path))
    assert cli.main(["bench", "decode", "--csv", "x.csv"]) == 7
    assert "['--csv', 'x.csv']" in capfd.readouterr().out
    assert cli.main(["bench", "store"]) == 3
    assert cli.SOURCE_VARIABLE in capfd.readouterr().err
    monkeypatch.delenv(cli.SOURCE_VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert cli.find_benchmark("decode") == tmp_path / "benchmark" / cli.BENCHMARKS["decode"]


def test_wrong_usage():
    for arguments in ([], ["fly"], ["bench", "all"], ["serve", "--dsv4-kernels", "some"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
