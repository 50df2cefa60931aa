"""benchmark/bench_serving.py and test/e2e/check_serving.py against servers that only pretend (fake_server.py)."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "test" / "e2e")]

import bench_serving  # noqa: E402
import check_serving  # noqa: E402
import decode_profile  # noqa: E402
import equal_servers  # noqa: E402
import serving  # noqa: E402

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_server.py')}"


@pytest.fixture
def port():
    """The first of ten free ports in a row; afterwards, no server may be left on them."""
    start = 20000 + os.getpid() * 10 % 20000  # test runs side by side keep apart
    first = next(p for p in range(start, 60000, 10) if all(serving.port_is_free(p + i) for i in range(10)))
    yield first
    pattern = "fake_server.py .*--port (" + "|".join(str(first + i) for i in range(10)) + ")"
    assert subprocess.run(["pgrep", "-f", "--", pattern], capture_output=True, check=False).stdout == b""


def bench(port, tmp_path, *more):
    """A short run of the benchmark; its exit status."""
    sizes = "--concurrency 1 4 --ctx 300 --gen 17 --runs 3 --profile 4 --profile-steps 2 --vocab 100 --timeout 20"
    start = ["--model", "fake", "--launch", FAKE, "--port", str(port), "--start-seconds", "20"]
    output = ["--csv", str(tmp_path / "serving.csv"), "--logs", str(tmp_path / "logs")]
    return bench_serving.main([*start, *sizes.split(), *output, *more])


def check(port, tmp_path, checks, *more):
    """A short run of the end-to-end check; its exit status. --model among ``more`` counts instead of "fake"."""
    sizes = "--prompts 8 --gen 6 --batches 1 4 --levels 1 8 --seconds 0.6 --longest 700 --vocab 100 --start-seconds 20"
    start = ["--model", "fake", "--launch", FAKE, "--port", str(port), "--logs", str(tmp_path), "--checks", checks]
    return check_serving.main([*start, *sizes.split(), *more])


def rows(path):
    """Rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def model_folders(tmp_path, **heads):
    """Folders of models with so many heads."""
    for name, count in heads.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": 100, "num_attention_heads": {count}}}')
    return [str(tmp_path / name) for name in heads]


# ---- the benchmark


def test_bench_measures_the_slower_server(port, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_ON", "all")
    monkeypatch.setenv("FAKE_SCALE", "4")
    pytest.importorskip("matplotlib")
    assert bench(port, tmp_path, "--plot", str(tmp_path / "serving.png")) == 0
    table = rows(tmp_path / "serving.csv")
    assert [row["concurrency"] for row in table] == ["1", "4"]
    assert all(float(row["tpot_ratio"]) > 1.5 and float(row["throughput_ratio"]) < 0.7 for row in table)
    assert float(table[0]["ttft_ratio"]) > 0
    assert table[1]["ttft_ratio"] == ""  # 1 and 8 by default, and 8 is not measured here
    assert table[0]["sglang"] == "0.0.fake"
    groups = {row["group"]: row for row in rows(tmp_path / "serving_profile.csv")}
    assert float(groups["split"]["stock_us_per_step"]) == 10
    assert float(groups["split"]["patched_us_per_step"]) == 0
    assert float(groups["ours: decode"]["patched_us_per_step"]) == 10
    assert float(groups["ours: combine"]["patched_launches_per_step"]) == 1
    assert float(groups["other"]["stock_us_per_step"]) == 10
    assert float(groups["replaced"]["stock_us_per_step"]) == 20
    assert float(groups["replaced"]["us_ratio"]) == 1
    assert groups["ours: decode"]["us_ratio"] == ""
    assert float(groups["GPU sum"]["stock_us_per_step"]) == 30
    assert float(groups["wall span"]["stock_us_per_step"]) == pytest.approx((15 * 5 + 10) / 2)
    assert (tmp_path / "serving.png").stat().st_size > 1000
    assert "spread %" in capsys.readouterr().out


def test_bench_uses_servers_that_run(port, tmp_path):
    server = serving.Server("mine", FAKE.split(), port, tmp_path / "mine.log")
    try:
        serving.start_all([server], 20)
        urls = ["--stock-url", server.client.url, "--patched-url", server.client.url]
        assert bench(port, tmp_path, "--profile", "--ttft", *urls) == 0
        assert not server.ended()
    finally:
        server.stop()


@pytest.mark.parametrize(("fault", "text"), [("FAKE_DIE", "told to die"), ("FAKE_ERROR", "told to fail")])
def test_bench_shows_why_it_failed(port, tmp_path, monkeypatch, capsys, fault, text):
    monkeypatch.setenv(fault, "1")
    assert bench(port, tmp_path) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("most", "status"), [("1.0", 0), ("0.35", 1)])
def test_bench_fails_where_the_kernels_take_too_long(port, tmp_path, capsys, most, status):
    assert bench(port, tmp_path, "--most-replaced", most) == status
    assert f"replaced kernels, concurrency 4: 1.0 of stock's time, at most {most}" in capsys.readouterr().out


def test_bench_keeps_what_it_has_measured(port, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR_BATCH", "4")
    assert bench(port, tmp_path) == 1
    assert [row["concurrency"] for row in rows(tmp_path / "serving.csv")] == ["1"]


def test_bench_does_not_wait_for_ever(port, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_HANG", "1")
    begin = time.monotonic()
    assert bench(port, tmp_path, "--start-seconds", "2") == 1
    assert time.monotonic() - begin < 15
    assert "not ready in time" in capsys.readouterr().err


def test_bench_refuses_a_taken_port(port, tmp_path, capsys):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert bench(port, tmp_path) == 1
    assert f"port {port} is in use" in capsys.readouterr().err


def test_bench_names_the_missing_model():
    with pytest.raises(SystemExit):
        bench_serving.parse(["--stock-url", "http://x"])


def test_sigterm_ends_the_servers(port, tmp_path):
    command = [sys.executable, str(ROOT / "benchmark" / "bench_serving.py"), "--model", "fake", "--launch", FAKE]
    command += ["--port", str(port), "--runs", "10000", "--logs", str(tmp_path)]
    bench = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while serving.port_is_free(port + 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    bench.terminate()
    assert bench.wait(30) == 143
    assert serving.port_is_free(port)
    assert serving.port_is_free(port + 1)


# ---- pieces


def test_profile_does_not_count_waiting():
    """A kernel that starts before the one ahead of it in its stream has ended; another stream; one inside another."""
    kernels = [(7, 0, 10), (7, 2, 12), (8, 3, 4), (7, 13, 1), (7, 20, 5)]
    events = [{"name": str(i), "ts": ts, "dur": dur, "args": {"stream": s}} for i, (s, ts, dur) in enumerate(kernels)]
    assert decode_profile.own_times(reversed(events)) == [("0", 10), ("1", 4), ("2", 4), ("3", 0), ("4", 5)]


def test_low_decile():
    assert bench_serving.low_decile([3.0]) == 3.0
    assert bench_serving.low_decile([float(i) for i in range(10, 0, -1)]) == 1.0
    assert bench_serving.low_decile([float(i) for i in range(11, 0, -1)]) == 2.0


def event(index, tokens):
    return {"index": index, "meta_info": {"completion_tokens": tokens}}


def test_tpot_begins_when_all_have_their_first_token():
    """Two prompts: first tokens after 1 and 3 s, last ones after 5 and 7."""
    times = iter([0.0, 1.0, 3.0, 5.0, 7.0])
    events = [event(1, 1), event(0, 1), event(0, 17), event(1, 17)]
    client = types.SimpleNamespace(stream=lambda *_, **__: iter(events))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_serving.time, "perf_counter", lambda: next(times))
        assert bench_serving.request_seconds(client, [[3], [4]], 17) == (7, 4)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([event(0, 1), event(0, 17)], "prompt 1 was not answered"),
        ([event(0, 1), event(1, 1), event(0, 17), event(1, 3)], "prompt 1 was not answered"),
        ([event(0, 1), event(0, 17), event(1, 1), event(1, 17)], "did not decode together"),
        ([event(0, 17), event(1, 17)], "did not decode together"),
        ([{"error": "told to"}], "told to"),
    ],
)
def test_request_that_is_not_answered(events, text):
    client = types.SimpleNamespace(url="http://x", stream=lambda *_, **__: iter(events))
    with pytest.raises(serving.ServingError, match=text):
        bench_serving.request_seconds(client, [[3], [4]], 17)


def test_low_is_of_requests_that_nothing_delayed(monkeypatch):
    """A token takes 1 ms; in two rounds of three it takes longer."""
    calls = []

    def seconds(*_):
        calls.append(1)
        return 1.0, 0.016 + 0.01 * (len(calls) > 4)  # a warm-up of each server, and the first round

    monkeypatch.setattr(bench_serving, "request_seconds", seconds)
    args = bench_serving.parse(["--model", "x", "--gen", "17", "--runs", "3"])
    clients = dict.fromkeys(bench_serving.SIDES, types.SimpleNamespace(generate=lambda *_: None))
    row = bench_serving.measure(clients, [[3]], args)
    assert row["stock_tpot_low_ms"] == row["patched_tpot_low_ms"] == pytest.approx(1)
    assert row["tpot_low_ratio"] == 1
    assert row["patched_tpot_ms"] == pytest.approx(26 / 16)
    assert row["stock_tokens_per_s"] == 17


def test_plot_has_a_colour_for_each_group(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    new_figure = bench_serving.new_figure
    monkeypatch.setattr(bench_serving, "new_figure", lambda **o: figures.append(new_figure(**o)) or figures[0])
    row = {"concurrency": 1, "stock_tpot_ms": 2.0, "patched_tpot_ms": 1.0, "tpot_ratio": 0.5}
    us = {"concurrency": 1, "stock_us_per_step": 1.0, "patched_us_per_step": 1.0}
    bench_serving.plot(tmp_path / "x.png", [row], [us | {"group": group} for group in decode_profile.GROUPS], "title")
    bars = figures[0].axes[2].containers
    assert len({bar.patches[0].get_facecolor() for bar in bars}) == len(bars) == len(decode_profile.GROUPS)
    (legend,) = figures[0].legends
    (left, bottom), (right, top) = legend.get_window_extent().get_points()
    assert 0 <= left < right <= figures[0].bbox.width
    assert 0 <= bottom < top <= figures[0].bbox.height


def test_profile_refuses_a_trace_with_a_prefill(tmp_path):
    trace = tmp_path / "t.json"
    trace.write_text('{"traceEvents": [{"cat": "kernel", "name": "sparse_attn_fwd_kernel", "ts": 0, "dur": 1}]}')
    with pytest.raises(serving.ServingError, match="not decode alone"):
        decode_profile.kernels(trace)
    trace.write_text('{"traceEvents": []}')
    with pytest.raises(serving.ServingError, match="no kernels"):
        decode_profile.kernels(trace)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<...>", "split"),
        ("void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>", "combine"),
        ("smxx::decode::get_mla_metadata_kernel(GetDecodeSchedMetaParams)", "metadata"),
        ("void fused_k_norm_rope_flashmla<bf16>(P)", "A2 (window store)"),
        ("void fused_norm_rope_flashmla<float>(P)", "A1 (compressed store)"),
        ("void fused_norm_rope_indexer<float>(P)", "other"),
        ("void deepseek_rope_kernel<true, true, long>(P)", "inverse rope"),
        ("void sgl_dsv4::store_warp_per_token<float>(StoreParams)", "ours: store"),
        ("void sgl_dsv4::(anonymous namespace)::combine_kernel<8>(CombineParams)", "ours: combine"),
        ("void sgl_dsv4::query_norm_rope_kernel(QueryParams)", "ours: query"),
        ("sparse_decode_kernel", "ours: decode"),
        ("void sgl_dsv4::sm90::sparse_decode_kernel<8>(DecodeParams)", "ours: decode"),
    ],
)
def test_group_of_a_kernel(kernel, group):
    assert decode_profile.group_of(kernel) == group


def test_difference_stops_at_the_first_other_token():
    ours = check_serving.Answer((1, 2, 9, 4), (-1.0, -2.0, -3.0, -4.0))
    theirs = check_serving.Answer((1, 2, 3, 4), (-1.0, -2.5, -9.0, -9.0))
    met = check_serving.difference([(ours, theirs)])
    assert met.agreement == 0.5
    assert met.logprobs == [0.0, 0.5]


def test_in_threads_raises_the_first_error_and_has_a_bound():
    assert serving.in_threads([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        serving.in_threads([lambda: 1 / 0, lambda: 2])
    with pytest.raises(serving.ServingError, match="did not end"):
        serving.in_threads([lambda: time.sleep(2)], seconds=0.1)


# ---- the end-to-end check


def test_check_passes_on_equal_servers(port, tmp_path, capsys):
    assert check(port, tmp_path, "abevcd") == 0
    output = capsys.readouterr().out
    assert "FAILED" not in output
    for part in "aebvcd":
        assert f"ok     ({part})" in output


@pytest.mark.parametrize(
    ("checks", "faults", "line"),
    [
        ("a", {"FAKE_ON": "store", "FAKE_SHIFT": "1e-7"}, "(a) store = stock, batch 1"),
        ("e", {"FAKE_ON": "off", "FAKE_FLIP": "1"}, "(e) off = stock, batch 4"),
        ("b", {"FAKE_ON": "all", "FAKE_SHIFT": "0.01"}, "(b) logprob differences, mean"),
        ("b", {"FAKE_ON": "all", "FAKE_FLIP": "1"}, "(b) tokens that disagree"),
        ("a", {"FAKE_INACTIVE": "1"}, "(-) store: every hook active"),
        ("v", {"FAKE_MISMATCH": "1"}, "(v) shadow mode"),
        ("b", {"FAKE_NAN": "1"}, "(ab) all: finite logprobs"),
        ("c", {"FAKE_FALLBACK": "1"}, "(c) no fallback"),
        ("c", {"FAKE_EAGER": "1"}, "(c) decode in CUDA graphs"),
        ("c", {"FAKE_NAN": "1"}, "logprobs with NaN"),
        ("a", {"FAKE_ERROR": "1"}, "told to fail"),
        ("a", {"FAKE_DIE": "1"}, "told to die"),
    ],
)
def test_check_finds(port, tmp_path, monkeypatch, capsys, checks, faults, line):
    for name, value in faults.items():
        monkeypatch.setenv(name, value)
    assert check(port, tmp_path, checks) == 1
    output = capsys.readouterr().out
    assert line in output.partition("\n\nFAILED")[2]  # the list of what failed


def test_check_finds_a_worker_that_outlives_the_server(port, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_CHILD", "1")
    monkeypatch.setattr(serving.Server, "wait_gone", lambda self, seconds, wait=serving.Server.wait_gone: wait(self, 1))
    assert check(port, tmp_path, "d") == 1
    assert "FAILED (d) kill -9: its processes end" in capsys.readouterr().out


# ---- equal servers


def test_equal_servers(port, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_ON", "all")
    monkeypatch.setenv("FAKE_SCALE", "6")
    start = ["--model", "fake", "--launch", FAKE, "--port", str(port), "--start-seconds", "20", "--logs", str(tmp_path)]
    sizes = "--servers stock all stock --concurrency 1 4 --ctx 30 --gen 9 --runs 9 --case-seconds 0"
    assert equal_servers.main([*start, *sizes.split(), "--csv", str(tmp_path / "equal.csv")]) == 0
    found = rows(tmp_path / "equal.csv")
    assert len(found) == 2 * 3 * 3
    assert {row["server"] for row in found} == {"stock", "stock2", "all"}
    assert all(float(row["tpot_ms"]) > 0 and row["gen"] == "9" for row in found)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["concurrency", "server", "rounds", "tpot_ms", "ratio", "least_ms"]
    assert all(float(line.split()[4]) > 1.5 for line in lines if " all " in line)
    assert [line.split()[:3] for line in lines] == [[c, s, "3"] for c in "14" for s in ("stock", "all", "stock2")]


def test_summary_of_equal_servers():
    times = {"stock": (1.0, 3.0, 2.0), "stock2": (4.0, 4.0, 4.0), "all": (1.5, 1.5, 9.0)}
    found = [{"concurrency": 8, "server": name, "tpot_ms": t} for name, values in times.items() for t in values]
    lines = equal_servers.summary(found, equal_servers.named(["stock", "stock", "all"]))
    assert [(line["server"], line["tpot_ms"], line["ratio"], line["least_ms"]) for line in lines] == [
        ("stock", "2.000", "0.571", "1.000"),
        ("stock2", "4.000", "1.143", "4.000"),
        ("all", "1.500", "0.429", "1.500"),
    ]


def test_equal_servers_needs_stock(capsys):
    with pytest.raises(SystemExit):
        equal_servers.parse(["--model", "x", "--servers", "all", "off"])
    assert "expected stock among --servers, got ['all', 'off']" in capsys.readouterr().err


# ---- tensor parallelism: two models one after the other, two ranks each


def test_check_of_two_ranks_and_two_models(port, tmp_path, capfd):
    models = model_folders(tmp_path, wide=64, narrow=32)
    sizes = "--concurrency 1 4 --ctx 300 --gen 9 --runs 3 --ttft --profile 4 --profile-steps 2"
    options = f"{sizes} --most-replaced 1.0 --csv {tmp_path}/{{model}}.csv"
    more = ["--bench", options, "--output", str(tmp_path / "found.txt")]
    assert check(port, tmp_path, "abtd", "--tp", "2", "--model", *models, *more) == 0
    found = (tmp_path / "found.txt").read_text()
    assert "\nwide narrow, SGL_DSV4_KERNELS=all, flags: --tp-size 2\nok     (-) wide" in found
    assert str(tmp_path) not in found
    output = capfd.readouterr().out
    assert "ok     (-) wide, all: every hook active: 2 lines say so, 2 ranks" in output
    for model in ("wide", "narrow"):
        assert f"ok     (a) {model}, store = stock, batch 4" in output
        assert f"ok     (t) {model}, benchmark" in output
    assert "ok     (d) narrow, restart: the same answers" in output
    for model, heads in (("wide", "32"), ("narrow", "16")):
        (row, _) = rows(tmp_path / f"{model}.csv")
        assert (row["model"], row["tp"], row["heads_per_rank"]) == (model, "2", heads)
        groups = {row["group"]: row for row in rows(tmp_path / f"{model}_profile.csv")}
        assert float(groups["GPU sum"]["stock_us_per_step"]) == 30  # of rank 0


@pytest.mark.parametrize(("tp", "at_the_end"), [(1, ["all"]), (2, ["stock", "all"])])
def test_servers_run_while_they_are_needed(port, tmp_path, monkeypatch, tp, at_the_end):
    """And no server of one model beside those of another."""
    started, running = [], []

    def start(self, start=serving.Server.start):
        started.append(self)
        assert all(server.ended() or server.log.parent == self.log.parent for server in started[:-1])
        start(self)

    def record(*_):
        running.append([f"{server.log.parent.name} {server.name}" for server in started if not server.ended()])

    monkeypatch.setattr(serving.Server, "start", start)
    for part in ("speed", "load", "crash"):
        monkeypatch.setattr(check_serving, f"check_{part}", record)
    models = model_folders(tmp_path, wide=64, narrow=32)
    assert check(port, tmp_path, "avtcd", "--tp", str(tp), "--batches", "4", "--model", *models) == 0
    speed = [[f"{model} stock", f"{model} all"] for model in ("wide", "narrow")]
    assert running == [*speed, *[[f"narrow {name}" for name in at_the_end]] * 2]


def test_stopped_servers_are_not_blamed(port, tmp_path, monkeypatch, capsys):
    def check_speed(*_):
        raise serving.ServingError("out of order")

    monkeypatch.setattr(check_serving, "check_speed", check_speed)
    assert check(port, tmp_path, "at", "--batches", "4") == 1
    output = capsys.readouterr().out
    assert "FAILED (-) servers answer: out of order" in output
    assert "has ended" not in output


@pytest.mark.parametrize(
    ("checks", "faults", "line"),
    [
        ("a", {"FAKE_ONE_RANK": "1"}, "(-) store: every hook active: 1 lines say so, 2 ranks"),
        ("d", {"FAKE_ON": "all", "FAKE_STUBBORN": "1"}, "(d) kill -9: its processes end"),
        ("t", {}, "(t) benchmark: status 1"),
    ],
)
def test_check_of_two_ranks_finds(port, tmp_path, monkeypatch, capsys, checks, faults, line):
    for name, value in faults.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(serving.Server, "wait_gone", lambda self, seconds, wait=serving.Server.wait_gone: wait(self, 1))
    bench = "--concurrency 1 --ctx 300 --gen 9 --runs 1 --ttft --profile 1 --profile-steps 2 --most-replaced 0.35"
    assert check(port, tmp_path, checks, "--tp", "2", "--bench", bench) == 1
    assert line in capsys.readouterr().out.partition("\n\nFAILED")[2]


def test_check_of_two_ranks_ends_what_stock_leaves_too(port, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_ON", ",all")
    monkeypatch.setenv("FAKE_STUBBORN", "1")
    monkeypatch.setattr(serving.Server, "wait_gone", lambda self, seconds, wait=serving.Server.wait_gone: wait(self, 1))
    assert check(port, tmp_path, "d", "--tp", "2") == 0
    output = capsys.readouterr().out
    assert "ok     (d) kill -9: its processes end: left: [" in output
    assert "], as stock's" in output


@pytest.mark.parametrize(("worse", "passed"), [(0, True), (1, True), (20, False)])
@pytest.mark.parametrize("what", ["mean", "p99", "tokens"])
def test_differences_by_chance(what, worse, passed):
    """Of 48 prompts every second one differs between stock's batches, and every other one from stock; ``worse`` more
    do, for the 99th percentile all that do by ten times as much."""

    def answers(tokens, logprobs):
        return [check_serving.Answer((t, 9), (x, x)) for t, x in zip(tokens, logprobs, strict=True)]

    same = [1] * 48, [-1.0] * 48
    even, odd = (set(range(first, 48, 2)) for first in (0, 1))
    more = odd | set(range(0, 2 * worse, 2))
    far = 0.1 if what == "p99" and worse > 1 else 0.01
    if what == "tokens":
        stock = {1: answers(*same), 8: answers([1 + (i in even) for i in range(48)], same[1])}
        ours = {b: answers([a.tokens[0] + 5 * (i in more) for i, a in enumerate(stock[b])], same[1]) for b in stock}
    else:
        stock = {1: answers(*same), 8: answers(same[0], [-1 - 0.01 * (i in even) for i in range(48)])}
        ours = {b: answers(same[0], [a.logprobs[0] - far * (i in more) for i, a in enumerate(stock[b])]) for b in stock}
    report = check_serving.Report()
    check_serving.check_close(report, ours, stock)
    line = report.lines[["mean", "p99", "tokens"].index(what)]
    assert what in line
    assert line.startswith("ok" if passed else "FAILED"), line


def test_closeness_needs_two_batch_sizes():
    with pytest.raises(SystemExit):
        check_serving.parse(["--model", "x", "--checks", "b", "--batches", "8"])


def test_one_server_at_a_time_with_tensor_parallelism():
    def overlapping(tp):
        running, most = [], []

        def call():
            running.append(1)
            time.sleep(0.05)
            most.append(len(running))
            running.pop()

        check_serving.drive([call] * 3, check_serving.parse(["--model", "x", "--tp", str(tp)]))
        return max(most) > 1

    assert overlapping(1)
    assert not overlapping(2)


def test_check_of_other_kernels():
    args = check_serving.parse(["--model", "x", "--kernels", "store,decode"])
    kernels = [check_serving.environment(name, args).get("SGL_DSV4_KERNELS") for name in check_serving.VARIANTS]
    assert kernels == [None, "off", "store", "store,decode", "store,decode"]


def test_check_refuses_models_of_one_name():
    with pytest.raises(SystemExit):
        check_serving.parse(["--model", "a/x", "b/x"])
