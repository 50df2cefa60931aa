"""SGLang servers with and without this package: the same answers, under load and after a crash.

    python test/e2e/check_serving.py --model DIR --server-args "--load-format dummy --max-running-requests 64 ..."
    python test/e2e/check_serving.py --model DIR1 DIR2 --tp 2 --checks abtd --server-args ...

Starts five servers side by side on one GPU: no plugin ("stock"), SGL_DSV4_KERNELS=off, store and all, and all in shadow
mode ("verify"). Checks:

  a  store: tokens and logprobs identical to stock, greedy, at every batch size
  e  off:   likewise
  b  all:   logprob differences to stock no larger than stock's own between batch sizes (mean and 99th percentile over
            the common prefixes), token agreement at least stock's own minus one point; each but for what the choice of
            prompts explains, at 95 % by resampling them
  v  SGL_DSV4_VERIFY=1: no mismatch between SGLang's kernels and ours on the same inputs
  c  all:   CUDA graphs on; mixed requests at concurrency 1 to 64 (prefix-cache hits, hang-ups and aborts in mid-flight,
            short and long prompts): no error, no NaN, no fallback counted, the same answers afterwards
  d  all:   kill -9 and restart: no process, port, GPU memory or shared-memory file left behind, the same answers
            again. With --tp the last rank is killed, and whatever does not end by itself is ended first, if stock's
            does not either
  t  stock and all: bench_serving.py with the options of --bench; not by default

Several models come one after the other; c and d take the last one. The servers that a part does not need are stopped
before t, c and d.

With --tp every rank must say that its hooks are active, and one server is driven at a time: on time-sliced GPUs, the
all-reduces of two servers wait for each other.

A batch travels as one request, so its composition, hence every bit of stock's answer, repeats; that too is checked,
because (a) and (e) mean nothing without it. Each check is a line; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))
from common import commit, run_facts
from serving import (
    LAUNCH,
    VARIANTS,
    Client,
    Server,
    ServingError,
    exit_on_sigterm,
    in_threads,
    port_is_free,
    print_ended,
    random_prompt,
    start_all,
    stop_all,
    vocab_size,
)

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark" / "bench_serving.py"
LENGTHS = (5, 40, 130, 257, 700, 1500)
OURS = "sgl_dsv4_kernels"
FALLBACK = "falls back"
"""In the plugin's lines: once for each reason that is not by design."""
RESAMPLES = 400
MISMATCH = "inputs in"
"""In the plugin's lines: shadow mode has found a difference, and names the file with the inputs."""


class Answer(NamedTuple):
    """Tokens of one prompt and their logprobs."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def finite(self) -> bool:
        """Whether every logprob is a number."""
        return all(math.isfinite(value) for value in self.logprobs)


def answer(result: dict) -> Answer:
    """The tokens and logprobs in one answer of /generate; NaN, which JSON may carry as null, stays NaN."""
    pairs = result["meta_info"]["output_token_logprobs"]
    values = tuple(math.nan if value is None else value for value, *_ in pairs)
    return Answer(tuple(token for _, token, *_ in pairs), values)


def ask(client: Client, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> list[Answer]:
    """Greedy answers in batches of one size, each starting from an empty prefix cache."""
    answers = []
    for first in range(0, len(prompts), batch):
        client.flush()
        answers += map(answer, client.generate(prompts[first : first + batch], tokens, return_logprob=True))
    return answers


class Difference(NamedTuple):
    """How far answers to the same prompts are apart; logprobs are compared where all tokens before are equal."""

    agreement: float
    logprobs: list[float]

    @property
    def mean(self) -> float:
        """Mean absolute logprob difference."""
        return statistics.fmean(self.logprobs) if self.logprobs else 0.0

    @property
    def p99(self) -> float:
        """99th percentile of the absolute logprob differences."""
        return sorted(self.logprobs)[int(0.99 * (len(self.logprobs) - 1))] if self.logprobs else 0.0

    def __str__(self) -> str:
        worst = max(self.logprobs, default=0.0)
        return f"agreement {self.agreement:.2%}, logprob mean {self.mean:.3g} p99 {self.p99:.3g} max {worst:.3g}"


def difference(pairs: Sequence[tuple[Answer, Answer]]) -> Difference:
    """Share of tokens in the common prefixes, and the logprob differences there."""
    equal, total, logprobs = 0, 0, []
    for ours, theirs in pairs:
        common = sum(
            1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(ours.tokens, theirs.tokens, strict=True))
        )
        equal += common
        total += len(ours.tokens)
        logprobs += [abs(a - b) for a, b in zip(ours.logprobs[:common], theirs.logprobs[:common], strict=True)]
    return Difference(equal / total, logprobs)


class Report:
    """Lines of results, printed as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.model = ""
        """Whose checks come now, where there are several models."""

    def add(self, part: str, what: str, passed: bool, detail: str = "") -> None:
        """One check."""
        what = f"{self.model + ', ' if self.model else ''}{what}{': ' + detail if detail else ''}"
        self.lines.append(f"{'ok    ' if passed else 'FAILED'} ({part}) {what}")
        print(self.lines[-1], flush=True)


def gpu_memory_mib() -> int | None:
    """GPU memory in use on all visible GPUs (on all, if nvidia-smi does not know them), or None without nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    programs = ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
    for smi, only in itertools.product(programs, [[f"--id={visible}"], []] if visible else [[]]):
        try:
            command = [smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits", *only]
            return sum(
                map(int, subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=30).split())
            )
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
    return None


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def our_lines(server: Server) -> list[str]:
    """The plugin's lines in a server's log."""
    return [line for line in server.log_text().splitlines() if OURS in line]


def check_active(report: Report, name: str, server: Server, ranks: int) -> None:
    """That the plugin says in this server, which has served, what it should: every hook active in each rank, or no word
    at all."""
    lines = [line[line.index(OURS) :][:300] for line in our_lines(server) if " -> " not in line]
    for line in dict.fromkeys(lines):
        print(f"       {name}: {line}")
    active = [line for line in lines if "; inactive nothing;" in line and "active nothing" not in line.split(";")[0]]
    if name in ("stock", "off"):
        report.add("-", f"{name}: no hook", not any("active " in line for line in lines))
    else:
        text = f"{len(active)} lines say so" + (f", {ranks} ranks" if ranks > 1 else "")
        report.add("-", f"{name}: every hook active", len(active) == ranks, text)


def drive(calls: Sequence[Callable[[], object]], args: argparse.Namespace) -> list:
    """Results of calls that drive one server each: at the same time, or one after the other with tensor parallelism."""
    return in_threads(calls) if args.tp == 1 else [call() for call in calls]


# ---- (a), (b), (e): answers


def check_identical(report: Report, part: str, name: str, ours: dict, stock: dict, repeat: dict) -> None:
    """Bits of the answers, at each batch size at which stock repeats its own."""
    for batch in stock:
        if stock[batch] != repeat[batch]:
            own = difference(list(zip(stock[batch], repeat[batch], strict=True)))
            report.add(part, f"{name} = stock, batch {batch}", False, f"stock does not repeat itself ({own})")
            continue
        wrong = sum(a != b for a, b in zip(ours[batch], stock[batch], strict=True))
        total = sum(len(a.tokens) for a in stock[batch])
        report.add(
            part,
            f"{name} = stock, batch {batch}",
            not wrong,
            f"{wrong} of {len(stock[batch])} prompts differ, {total} tokens",
        )


def check_close(report: Report, ours: dict, stock: dict) -> None:
    """(b): pooled over batch sizes, and over pairs of batch sizes for stock's own differences."""
    prompts = range(len(next(iter(stock.values()))))
    own_pairs = [[(stock[a][i], stock[b][i]) for a, b in itertools.combinations(stock, 2)] for i in prompts]
    met_pairs = [[(ours[batch][i], stock[batch][i]) for batch in stock] for i in prompts]

    def compare(chosen: Sequence[int]) -> tuple[Difference, Difference]:
        own, met = (difference([pair for i in chosen for pair in pairs[i]]) for pairs in (own_pairs, met_pairs))
        return own, met

    own, met = compare(prompts)
    print(f"       stock between batch sizes: {own}\n       all against stock:         {met}")
    for batch in stock:
        print(
            f"       all against stock, batch {batch}: {difference(list(zip(ours[batch], stock[batch], strict=True)))}"
        )

    def values(difference: Difference) -> tuple[float, float, float]:
        return difference.mean, difference.p99, 1 - difference.agreement

    draw = random.Random(0)
    resampled = []
    for _ in range(RESAMPLES):
        again_own, again_met = map(values, compare(draw.choices(prompts, k=len(prompts))))
        resampled.append([a - b for a, b in zip(again_met, again_own, strict=True)])
    names = ("logprob differences, mean", "logprob differences, p99", "tokens that disagree")
    for i, (what, form, margin) in enumerate(zip(names, (".4g", ".4g", ".2%"), (0.0, 0.0, 0.01), strict=True)):
        found, limit = values(met)[i], values(own)[i] + margin
        # What the choice of prompts adds: how far resampled excesses lie above the one that was met.
        excess = values(met)[i] - values(own)[i]
        chance = max(0.0, sorted(again[i] - excess for again in resampled)[int(0.95 * RESAMPLES)])
        detail = f"{found:{form}}, at most {limit:{form}} and {chance:{form}} by chance"
        report.add("b", what, found <= limit + chance, detail)


def check_answers(report: Report, servers: dict[str, Server], args: argparse.Namespace) -> None:
    """(a), (e) and (b)."""
    prompts = [random_prompt(LENGTHS[i % len(LENGTHS)], args.vocab, i) for i in range(args.prompts)]

    def everything(name: str) -> dict[int, list[Answer]]:
        return {batch: ask(servers[name].client, prompts, args.gen, batch) for batch in args.batches}

    names = [name for name in servers if name != "verify"]  # shadow mode is slow
    answers = dict(zip(names, drive([lambda n=name: everything(n) for name in names], args), strict=True))
    repeat = everything("stock")
    for name in names:
        bad = sum(not a.finite() for batch in args.batches for a in answers[name][batch])
        report.add("ab", f"{name}: finite logprobs", not bad, f"{bad} answers with NaN or infinity")
    distinct = len({a.tokens for a in repeat[args.batches[0]]})
    report.add("ab", "prompts have different answers", distinct > len(prompts) // 2, f"{distinct} of {len(prompts)}")
    for part, name in (("a", "store"), ("e", "off")):
        if part in args.checks:
            check_identical(report, part, name, answers[name], answers["stock"], repeat)
    if "b" in args.checks:
        check_close(report, answers["all"], answers["stock"])


def check_shadow(report: Report, server: Server, args: argparse.Namespace) -> None:
    """(v)."""
    prompts = [random_prompt(length, args.vocab, 7000 + length) for length in LENGTHS]
    for batch in (1, len(prompts)):
        ask(server.client, prompts, 8, batch)
    wrong = [line for line in our_lines(server) if MISMATCH in line or FALLBACK in line]
    report.add("v", "shadow mode: no mismatch, no fallback", not wrong, " | ".join(line[-400:] for line in wrong[:3]))


# ---- (c): load


class Load:
    """Mixed requests from a number of threads."""

    def __init__(self, client: Client, vocab: int, longest: int) -> None:
        self._client = client
        self._vocab = vocab
        self._longest = longest
        self._shared = random_prompt(1024, vocab, 77)
        self._lock = threading.Lock()
        self._rids = itertools.count()
        self.count: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self, concurrency: int, seconds: float) -> None:
        """That many threads, each sending one request after the other until the time is over."""
        deadline = time.monotonic() + seconds
        in_threads(
            [lambda i=i: self._worker(1000 * concurrency + i, deadline) for i in range(concurrency)], seconds + 180
        )

    def _worker(self, seed: int, deadline: float) -> None:
        draw = random.Random(seed)
        while time.monotonic() < deadline and len(self.errors) < 20:
            kind = draw.choices(("short", "shared", "long", "sampled", "hang up", "abort"), (6, 4, 1, 2, 2, 2))[0]
            try:
                self._one(kind, draw)
            except (ServingError, KeyError, ValueError) as error:
                with self._lock:
                    self.errors.append(f"{kind}: {error!r}"[:300])
                time.sleep(0.2)  # a dead server must not make this loop spin
            else:
                with self._lock:
                    self.count[kind] += 1

    def _one(self, kind: str, draw: random.Random) -> None:
        seed, tokens = draw.randrange(1 << 30), draw.randrange(4, 64)
        prompt = random_prompt(draw.randrange(1, 600), self._vocab, seed)
        if kind == "shared":
            prompt = self._shared + prompt[:50]
        if kind == "long":
            prompt = random_prompt(draw.randrange(600, self._longest), self._vocab, seed)
        if kind in ("hang up", "abort"):
            rid = f"e2e-{next(self._rids)}"
            events = self._client.stream(prompt, 2000, rid=rid)
            for place, _ in enumerate(events):
                if place == tokens:
                    break
            if kind == "abort":
                self._client.call("/abort_request", {"rid": rid})
                for _ in events:  # the server ends the stream
                    pass
            events.close()
            return
        more = {"sampling_params": {"temperature": 0.8, "max_new_tokens": tokens}} if kind == "sampled" else {}
        (result,) = self._client.generate([prompt], tokens, return_logprob=True, **more)
        with self._lock:
            self.count["cached tokens"] += result["meta_info"].get("cached_tokens", 0)
            if not answer(result).finite():
                self.errors.append(f"{kind}: logprobs with NaN or infinity")


def check_load(report: Report, server: Server, args: argparse.Namespace) -> None:
    """(c)."""
    probes = [random_prompt(length, args.vocab, 9000 + length) for length in LENGTHS]
    before = ask(server.client, probes, args.gen, len(probes))
    load = Load(server.client, args.vocab, args.longest)
    load.run(args.levels[-1], min(2, args.seconds))  # first use of a shape compiles; steady state from here on
    start = server.log.stat().st_size
    for level in args.levels:
        load.run(level, args.seconds / len(args.levels))
    report.add("c", f"load at concurrency {args.levels}", not load.errors, f"{dict(load.count)} {load.errors[:3]}")
    met = [kind for kind in ("short", "shared", "long", "sampled", "hang up", "abort") if load.count[kind]]
    report.add("c", "every kind of request", len(met) == 6, ", ".join(met))
    report.add("c", "prefix-cache hits", load.count["cached tokens"] > 0, f"{load.count['cached tokens']} tokens")
    fallbacks = [line for line in our_lines(server) if FALLBACK in line]
    report.add("c", "no fallback, from the start on", not fallbacks, " | ".join(line[-200:] for line in fallbacks[:3]))
    graphs = re.findall(r"Decode batch.*?#running-req: (\d+).*?cuda graph: (True|False)", server.log_text(start))
    eager = [running for running, graph in graphs if graph != "True"]
    report.add("c", "decode in CUDA graphs", bool(graphs) and not eager, f"{len(graphs)} log lines, {len(eager)} eager")
    bad = [line for line in server.log_text(start).splitlines() if "Traceback" in line or "CUDA error" in line]
    report.add("c", "no error in the log", not bad, " | ".join(bad[:3]))
    after = ask(server.client, probes, args.gen, len(probes))
    report.add("c", "the same answers after the load", after == before, f"{len(probes)} prompts")


# ---- (t): speed


def check_speed(report: Report, servers: dict[str, Server], model: str, args: argparse.Namespace) -> None:
    """(t)."""
    urls = ["--stock-url", servers["stock"].client.url, "--patched-url", servers["all"].client.url, "--model", model]
    options = [option.replace("{model}", Path(model).name) for option in shlex.split(args.bench)]
    command = [sys.executable, str(BENCHMARK), *urls, "--logs", str(servers["all"].log.parent), *options]
    sys.stdout.flush()
    try:
        status = subprocess.run(command, timeout=args.bench_seconds, check=False).returncode
        report.add("t", "benchmark", status == 0, f"status {status}")
    except subprocess.TimeoutExpired:
        report.add("t", "benchmark", False, f"not done in {args.bench_seconds:.0f} s")


# ---- (d): crash


def follow(server: Server, prompt: Sequence[int]) -> None:
    """Start a long request and leave it to itself."""

    def read() -> None:
        with contextlib.suppress(ServingError):
            list(server.client.stream(prompt, 2000))

    threading.Thread(target=read, daemon=True).start()


def check_crash(
    report: Report, server: Server, stock: Server | None, memory: int | None, shm: set[str], args: argparse.Namespace
) -> None:
    """(d), with no other server running but one without this package, which shows what SGLang's own do."""
    probes = [random_prompt(length, args.vocab, 9000 + length) for length in LENGTHS]
    before = ask(server.client, probes, args.gen, len(probes))

    def ends(killed: Server) -> bool:
        """Whether it ends within 20 s after a kill in the middle of a request."""
        follow(killed, probes[-1])
        time.sleep(0.5)
        killed.kill(args.tp - 1 if args.tp > 1 else None)
        return killed.wait_gone(20)

    may_stay = stock is not None and not ends(stock)
    if stock:
        stock.stop()
    ended, detail = ends(server), ""
    if not ended:
        detail = f"left: {server.members()}" + (", as stock's" if may_stay else "")
        print(f"{server.name} has not ended\n{server.log_tail()}")
        if may_stay:
            server.stop()
            ended = server.wait_gone(1)
    report.add("d", "kill -9: its processes end", ended, detail)
    report.add("d", "kill -9: port free", port_is_free(server.port))
    if memory is None:
        print("       kill -9: GPU memory not checked, nvidia-smi does not answer")
    else:
        used = gpu_memory_mib()
        for _ in range(40):
            if used is not None and used <= memory + 300:
                break
            time.sleep(0.5)
            used = gpu_memory_mib()
        report.add(
            "d", "kill -9: GPU memory free", used is not None and used <= memory + 300, f"{used} MiB, {memory} before"
        )
    left = sorted(shared_memory() - shm)
    ours = [name for name in left if "dsv4" in name.lower()]
    report.add("d", "kill -9: no shared memory of ours", not ours, f"{ours or 'none'}, others' {len(left) - len(ours)}")
    server.stop()  # what should have ended by itself
    server.log = server.log.with_suffix(".restart.log")
    begin = time.monotonic()
    start_all([server], args.start_seconds)
    after = ask(server.client, probes, args.gen, len(probes))
    report.add("d", "restart: the same answers", after == before, f"ready after {time.monotonic() - begin:.0f} s")


# ---- all


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, nargs="+", help="model path; several: see above")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of every server")
    parser.add_argument(
        "--server-args",
        default="",
        help="further flags of every server, as one string; all start together, and SGLang takes what another loads "
        "meanwhile for its own weights: --max-total-tokens N with --mem-fraction-static 0.75 leaves room",
    )
    parser.add_argument("--launch", default=LAUNCH, help="command that starts a server (default: sglang.launch_server)")
    parser.add_argument("--kernels", default="all", help='SGL_DSV4_KERNELS of "all" and "verify" (default: all)')
    parser.add_argument("--checks", default="abevcd", help="which of a b c d e t v (default: all but t)")
    parser.add_argument("--bench", default="", help="options of bench_serving.py, as one string; {model}: its name")
    parser.add_argument("--bench-seconds", type=float, default=600, help="time limit of (t), for each model")
    parser.add_argument("--port", type=int, default=30200, help="the first of five, for each model")
    parser.add_argument("--start-seconds", type=float, default=600, help="time that the servers have to start")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--gen", type=int, default=32, help="tokens generated for each prompt of (a), (b) and (e)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64], help="concurrencies of (c)")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the longest prompt of (c)")
    parser.add_argument("--seconds", type=float, default=60, help="duration of (c)")
    parser.add_argument(
        "--vocab", type=int, help="token ids are drawn below this (default: the model's config.json, or 100000)"
    )
    parser.add_argument("--logs", type=Path, help="folder for server logs (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="file that the lines go to, too, behind what was run")
    args = parser.parse_args(argv)
    if not args.checks or set(args.checks) - set("abcdetv"):
        parser.error(f"expected --checks among abcdetv, got {args.checks}")
    if "b" in args.checks and len(set(args.batches)) < 2:
        parser.error(f"expected two or more --batches for check b, got {args.batches}")
    names = [Path(model).name for model in args.model]
    if len(set(names)) != len(names):
        parser.error(f"expected models of different names, got {names}")
    args.vocab = args.vocab or min(map(vocab_size, args.model))
    return args


def environment(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Variables of a server."""
    return VARIANTS[name] | ({"SGL_DSV4_KERNELS": args.kernels} if name in ("all", "verify") else {})


def wanted(checks: str, tp: int) -> list[str]:
    """The servers that these checks need."""
    names = {
        "a": ("stock", "store"),
        "e": ("stock", "off"),
        "b": ("stock", "all"),
        "c": ("all",),
        "d": ("stock", "all") if tp > 1 else ("all",),
        "t": ("stock", "all"),
        "v": ("verify",),
    }
    needed = {name for check in checks for name in names[check]}
    return [name for name in VARIANTS if name in needed]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, check, end them."""
    args = parse(argv)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="check_serving_"))
    exit_on_sigterm()
    report = Report()
    memory, shm, begin = gpu_memory_mib(), shared_memory(), time.monotonic()
    flags = args.server_args + (f" --tp-size {args.tp}" if args.tp > 1 else "")
    ports = itertools.count(args.port)
    checks = dict.fromkeys(args.model, re.sub("[cd]", "", args.checks)) | {args.model[-1]: args.checks}
    models: dict[str, dict[str, Server]] = {}
    for model in args.model:
        folder = logs / Path(model).name if len(args.model) > 1 else logs
        command = [*shlex.split(args.launch), "--model-path", model, *shlex.split(flags)]
        dumps = {"SGL_DSV4_DUMP_DIR": str(folder)}
        models[model] = {
            name: Server(name, command, next(ports), folder / f"server_{name}.log", environment(name, args) | dumps)
            for name in wanted(checks[model], args.tp)
        }
    every = [server for servers in models.values() for server in servers.values()]

    def progress(what: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {report.model} {what}", file=sys.stderr, flush=True)

    def parts(model: str, servers: dict[str, Server], checks: str) -> None:
        def keep(*names: str) -> None:
            stop_all([server for name, server in servers.items() if name not in names])

        progress(f"starting {', '.join(servers)}; logs in {logs}")
        start_all(list(servers.values()), args.start_seconds)
        drive([lambda s=server: s.client.generate([[3, 4, 5]], 2) for server in servers.values()], args)
        for name, server in servers.items():
            check_active(report, name, server, args.tp)
        if set(checks) & set("abe"):
            progress("answers")
            check_answers(report, servers, args)
        if "v" in checks:
            progress("shadow mode")
            check_shadow(report, servers["verify"], args)
        if "t" in checks:
            keep("stock", "all")
            progress("benchmark")
            check_speed(report, servers, model, args)
        reference = servers["stock"] if args.tp > 1 and "d" in checks else None
        if set(checks) & set("cd"):
            keep("all", *(["stock"] if reference else []))
        if "c" in checks:
            progress("load")
            check_load(report, servers["all"], args)
        if "d" in checks:
            progress("crash")
            check_crash(report, servers["all"], reference, memory, shm, args)
        stop_all(list(servers.values()))

    try:
        for model, servers in models.items():
            report.model = Path(model).name if len(models) > 1 else ""
            parts(model, servers, checks[model])
    except ServingError as error:
        report.add("-", "servers answer", False, str(error))
        print_ended(every, sys.stdout)
    finally:
        stop_all(every)
    failed = [line for line in report.lines if line.startswith("FAILED")]
    seconds = time.monotonic() - begin
    summary = f"{len(failed)} of {len(report.lines)} checks failed, {seconds:.0f} s"
    print("\n".join(["", *failed, f"{summary}, logs in {logs}"]))
    if args.output:
        found = run_facts() if torch.cuda.is_available() else {"commit": commit()}
        names = " ".join(Path(model).name for model in args.model)
        about = [
            ", ".join(f"{name} {value}" for name, value in found.items()),
            f"{names}, SGL_DSV4_KERNELS={args.kernels}, flags: {flags.strip()}",
        ]
        args.output.write_text("\n".join([*about, *report.lines, summary]) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
