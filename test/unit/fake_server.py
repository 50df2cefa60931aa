"""A stand-in for SGLang's server, for tests of what drives servers: the same endpoints, no model.

Faults come from the environment: FAKE_DIE=1 (ends at start), FAKE_HANG=1 (never ready), FAKE_ERROR=1 (each generation
fails), FAKE_ERROR_BATCH=n (those of n prompts do), FAKE_NAN=1 (NaN logprobs), FAKE_CHILD=1 (a worker outlives a kill
-9), FAKE_ONE_RANK=1 (only one rank says what is active), and such log
lines: FAKE_FALLBACK=1, FAKE_EAGER=1, FAKE_INACTIVE=1, FAKE_MISMATCH=1. Of the servers whose SGL_DSV4_KERNELS is in
FAKE_ON: FAKE_SHIFT=x (added to logprobs), FAKE_FLIP=1 (other tokens), FAKE_SCALE=x (time of a token), FAKE_STUBBORN=1
(the server outlives its ranks).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

E = os.environ.get
ON = E("SGL_DSV4_KERNELS", "") in E("FAKE_ON", "none").split(",")
TOKEN_SECONDS = 0.0005 * (float(E("FAKE_SCALE", "1")) if ON else 1)
STOCK_KERNELS = ["flash_fwd_splitkv_mla_fp8_sparse_kernel<x>", "smxx::decode::flash_fwd_mla_combine_kernel<y>", "gemm"]
OUR_KERNELS = ["sparse_decode_kernel", "void sgl_dsv4::(anonymous namespace)::combine_kernel<8>(CombineParams)", "gemm"]
parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--tp-size", type=int, default=1)
args, _ = parser.parse_known_args()
aborted: set[str] = set()
running: set[str] = set()
lock = threading.Lock()


def token(prompt: list[int], place: int) -> int:
    """A token that depends on the prompt and the place."""
    flip = int(ON and E("FAKE_FLIP") == "1" and place > 2)
    return 3 + (zlib.crc32(json.dumps([prompt, place]).encode()) + flip) % 90


def result(prompt: list[int], tokens: int, batch: int) -> dict:
    """What /generate answers for one prompt; logprobs depend a little on the batch size, as a real server's do."""
    shift = 1e-3 * (batch > 1) + (float(E("FAKE_SHIFT", "0")) if ON else 0)
    value = float("nan") if E("FAKE_NAN") == "1" else -1.5 + shift
    pairs = [[value, token(prompt, place), None] for place in range(tokens)]
    ids = [pair[1] for pair in pairs]
    about = {"output_token_logprobs": pairs, "cached_tokens": len(prompt) // 256 * 256, "completion_tokens": tokens}
    return {"output_ids": ids, "meta_info": about}


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints, as far as they are used."""

    def log_message(self, *_) -> None:
        """No access log."""

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """/health, /server_info."""
        if self.path == "/health":
            self._answer(503 if E("FAKE_HANG") == "1" else 200)
        elif self.path == "/server_info":
            info = {"version": "0.0.fake", "model_path": "fake", "tp_size": args.tp_size}
            self._answer(200, json.dumps(info).encode())
        else:
            self._answer(404)

    def do_POST(self) -> None:
        """The rest."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/generate":
            with lock:
                running.add(str(id(self)))
            try:
                self._generate(body)
            finally:
                with lock:
                    running.discard(str(id(self)))
        elif self.path == "/flush_cache":
            self._answer(400 if running else 200)
        elif self.path == "/abort_request":
            aborted.add(body["rid"])
            self._answer(200)
        elif self.path == "/start_profile":
            threading.Timer(0.05, write_trace, (body,)).start()
            self._answer(200)
        else:
            self._answer(404)

    def _generate(self, body: dict) -> None:
        prompts, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if E("FAKE_ERROR") == "1" or len(prompts) == int(E("FAKE_ERROR_BATCH", "-1")):
            self._answer(400, b'{"error": "told to fail"}')
            return
        say_what_is_active()
        with lock:
            print(f"Decode batch, #running-req: {len(running)}, cuda graph: {E('FAKE_EAGER') != '1'}", flush=True)
        if not body.get("stream"):
            many = isinstance(prompts[0], list)
            time.sleep(TOKEN_SECONDS * tokens)
            answers = [result(prompt, tokens, len(prompts)) for prompt in (prompts if many else [prompts])]
            self._answer(200, json.dumps(answers if many else answers[0]).encode())
            return
        self.send_response(200)
        self.end_headers()
        batch = prompts if isinstance(prompts[0], list) else [prompts]
        interval = body["sampling_params"].get("stream_interval", 1)
        try:
            for place in range(tokens):
                if body.get("rid") in aborted:
                    break
                time.sleep(TOKEN_SECONDS)
                if place % interval and place + 1 < tokens:
                    continue
                for index, prompt in enumerate(batch):
                    event = (
                        result(prompt, place + 1, 1) if place < 8 else {"meta_info": {"completion_tokens": place + 1}}
                    )
                    event |= {"index": index} if batch is prompts else {}
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client hung up


@functools.cache
def say_what_is_active() -> None:
    """The plugin's line of each rank, at the first request."""
    if E("SGL_DSV4_KERNELS", "off") != "off":
        inactive = "A1 (told to)" if E("FAKE_INACTIVE") == "1" else "nothing"
        for rank in range(1 if E("FAKE_ONE_RANK") == "1" else args.tp_size):
            print(f"[TP{rank}] sgl_dsv4_kernels 0 in SGLang 0, sm_90: active A2; inactive {inactive}; more", flush=True)


def write_trace(body: dict) -> None:
    """Traces as the profiler writes them: one launch of each kernel a step, 10 us each, 5 us apart. That of rank 1 must
    not be taken for rank 0's."""
    names = (OUR_KERNELS if E("SGL_DSV4_KERNELS") in ("all", "decode") else STOCK_KERNELS) * body["num_steps"]
    events = [{"cat": "kernel", "name": name, "ts": 15 * i, "dur": 10} for i, name in enumerate(names)]
    other = [{"cat": "kernel", "name": str(i), "ts": i, "dur": 1} for i in range(1000)]
    for rank, found in enumerate((events, other)[: args.tp_size]):
        with gzip.open(Path(body["output_dir"]) / f"x-TP-{rank}.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [{"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}, *found]}, file)


def start_ranks() -> None:
    """A process for each tensor-parallel rank; like SGLang, the server ends all when one of them dies."""

    def end(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)  # the server leads a process group

    def watch(rank: subprocess.Popen[bytes]) -> None:
        rank.wait()
        if not (ON and E("FAKE_STUBBORN") == "1"):
            end()

    signal.signal(signal.SIGTERM, end)
    for number in range(args.tp_size):
        rank = subprocess.Popen([f"sglang::scheduler_TP{number}", "600"], executable="sleep")
        threading.Thread(target=watch, args=(rank,), daemon=True).start()


def main() -> None:
    """Serve."""
    if E("FAKE_DIE") == "1":
        sys.exit("RuntimeError: told to die")
    if E("FAKE_CHILD") == "1":
        subprocess.Popen(["sleep", "600"])
    if E("FAKE_FALLBACK") == "1":
        print("sgl_dsv4_kernels: B2 falls back to SGLang's kernel: told to (logged once)", flush=True)
    if E("FAKE_MISMATCH") == "1":
        print("sgl_dsv4_kernels: A2: 1 of 2 bytes differ; shapes {}; inputs in /x.pt (logged once)", flush=True)
    if args.tp_size > 1:
        start_ranks()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
