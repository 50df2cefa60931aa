"""Servers and requests, shared by bench_serving.py and test/e2e/check_serving.py. Standard library only.

A `Server` is a process group of its own, so that stopping it ends its workers and nothing else. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

Json = dict[str, object]
LAUNCH = f"{shlex.quote(sys.executable)} -m sglang.launch_server"
VARIANTS = {
    "stock": {"SGLANG_PLUGINS": "none"},  # a list of plugins that may load: none has that name
    "off": {"SGL_DSV4_KERNELS": "off"},
    "store": {"SGL_DSV4_KERNELS": "store"},
    "all": {"SGL_DSV4_KERNELS": "all", "SGL_DSV4_DECODE_MAX_TOKENS": "100000"},  # our decode at every batch size
    "verify": {"SGL_DSV4_KERNELS": "all", "SGL_DSV4_DECODE_MAX_TOKENS": "100000", "SGL_DSV4_VERIFY": "1"},
}
"""Environments of servers, by what they show of this package."""
BROKEN = (OSError, http.client.HTTPException)
"""What urllib raises where a connection fails or breaks."""


class ServingError(RuntimeError):
    """A server that did not start, or that did not answer as expected."""


class Client:
    """Requests to one server.

    Args:
        url: ``http://host:port``.
        timeout: seconds without a byte from the server after which a request fails.
    """

    def __init__(self, url: str, timeout: float = 120) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def open(self, path: str, body: Json | None = None, timeout: float | None = None):
        """The open response of a GET, or of a POST if there is a body. ServingError says what the server answered."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=timeout or self.timeout)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            raise ServingError(f"{self.url}{path}: status {error.code}: {text}") from error
        except BROKEN as error:
            raise ServingError(f"{self.url}{path}: {error!r}") from error

    def call(self, path: str, body: Json | None = None, timeout: float | None = None) -> bytes:
        """The whole answer."""
        try:
            with self.open(path, body, timeout) as response:
                return response.read()
        except BROKEN as error:  # while reading
            raise ServingError(f"{self.url}{path}: {error!r}") from error

    def healthy(self) -> bool:
        """Whether the server answers /health."""
        try:
            self.call("/health", timeout=2)
        except ServingError:
            return False
        return True

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **more: object) -> list[Json]:
        """One batch request of token-id prompts, greedy, exactly ``tokens`` new tokens each; the answers in order."""
        body = {"input_ids": list(prompts), "sampling_params": greedy(tokens), **more}
        return json.loads(self.call("/generate", body))

    def stream(
        self, prompt: Sequence[int] | Sequence[Sequence[int]], tokens: int, interval: int | None = None, **more: object
    ) -> Iterator[Json]:
        """One streamed request: its events in order. Closing the iterator hangs up.

        Args:
            prompt: of several prompts, each event says in "index" whose it is.
            interval: tokens from one event of a prompt to the next, the first after 1; None: the server's.
        """
        sampling = greedy(tokens) | ({"stream_interval": interval} if interval else {})
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, **more}
        try:
            with self.open("/generate", body) as response:
                for line in response:
                    if line.startswith(b"data:") and b"[DONE]" not in line:
                        yield json.loads(line[5:])
        except BROKEN as error:
            raise ServingError(f"{self.url}/generate (stream): {error!r}") from error

    def flush(self) -> None:
        """Empty the prefix cache. The server refuses for a moment after the last request, so this tries for 20 s."""
        for attempt in range(12):
            try:
                self.call("/flush_cache", {})
                return
            except ServingError as error:
                refused = error
            time.sleep(0.005 * 2**attempt)
        raise refused


def greedy(tokens: int) -> Json:
    """Sampling parameters: the most likely token each time, ``tokens`` of them."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    """Token ids in [3, vocab), the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, vocab) for _ in range(length)]


def model_config(model: str | None) -> Json:
    """config.json of a local model folder; empty for a model that is not one."""
    config = Path(model or "") / "config.json"
    return json.loads(config.read_text()) if model and config.is_file() else {}


def vocab_size(model: str | None) -> int:
    """Of a local model folder; a number that every DeepSeek-V4 allows for a model that is not one."""
    return model_config(model).get("vocab_size", 100_000)


class Server:
    """A server that this process starts and ends.

    Args:
        name: what messages and the log file call it.
        command: program and arguments without host and port.
        port: on 127.0.0.1.
        log: file that takes its output.
        env: changes to this process's environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        """Whether `stop` has ended it, or tried."""
        self.client = Client(f"http://127.0.0.1:{port}")

    def start(self) -> None:
        """Start the process; raises ServingError if the port is taken."""
        if not port_is_free(self.port):
            raise ServingError(f"{self.name}: port {self.port} is in use")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.stopped = False
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Process id, also the process group's."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def ended(self) -> bool:
        """Whether the first process has ended."""
        return self._process is None or self._process.poll() is not None

    def wait_ready(self, deadline: float) -> None:
        """Wait until it answers; ServingError with the log's end if it dies, or at ``deadline`` (time.monotonic())."""
        while not self.client.healthy():
            if self.ended():
                raise ServingError(f"{self.name} ended with status {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServingError(f"{self.name} was not ready in time\n{self.log_tail()}")
            time.sleep(0.2)

    def members(self) -> list[int]:
        """Ids of the living processes of its group."""
        return processes_of_group(self.pid)

    def wait_gone(self, seconds: float) -> bool:
        """Whether the whole group has ended within that time."""
        deadline = time.monotonic() + seconds
        while True:
            # Reaped, the first process has no thread left that holds its port; a zombie may have.
            if self.ended() and not self.members():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def rank_pid(self, rank: int) -> int:
        """Process id of a tensor-parallel rank, by the title that SGLang gives it; ServingError if there is none."""
        title = f"sglang::scheduler_TP{rank}".encode()
        for pid in self.members():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if title in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise ServingError(f"{self.name}: no process is called {title.decode()}")

    def kill(self, rank: int | None = None) -> None:
        """kill -9 of the first process alone, or of a tensor-parallel rank, as an out-of-memory killer would."""
        os.kill(self.pid if rank is None else self.rank_pid(rank), signal.SIGKILL)

    def stop(self) -> None:
        """End it: SIGTERM to the first process, to the group, then SIGKILL to the group; 20 s at most."""
        if self._process is None:
            return
        self.stopped = True
        self.ended()
        for send, number, seconds in (
            (os.kill, signal.SIGTERM, 10),
            (os.killpg, signal.SIGTERM, 5),
            (os.killpg, signal.SIGKILL, 5),
        ):
            if not self.members():
                return
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)
            if self.wait_gone(seconds):
                return

    def log_text(self, start: int = 0) -> str:
        """The log from a byte offset on."""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_tail(self, lines: int = 25) -> str:
        """The first errors and the last lines of the log."""
        text = [line[:300] for line in self.log_text().splitlines() if "server_args=" not in line]
        errors = [line for line in text[:-lines] if "Error" in line or "Traceback" in line][:8]
        return "\n".join([f"---- {self.log}", *errors, *(["..."] if errors else []), *text[-lines:], "----"])


def start_all(servers: Sequence[Server], seconds: float) -> None:
    """Start servers at the same time and wait for all; ServingError if one fails (the caller stops them)."""
    deadline = time.monotonic() + seconds
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready(deadline)


def stop_all(servers: Sequence[Server]) -> None:
    """End servers at the same time."""
    in_threads([server.stop for server in servers], 60)


def print_ended(servers: Sequence[Server], file: TextIO) -> None:
    """The end of the log of each server that has ended by itself."""
    for server in servers:
        if server.ended() and not server.stopped and server.log.exists():
            print(f"{server.name} has ended\n{server.log_tail()}", file=file)


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that `finally` ends the servers, which are no part of this process group.

    Only the first counts: the copy that `timeout` passes on must not break off that `finally`.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def processes_of_group(group: int) -> list[int]:
    """Ids of the processes of a process group, zombies aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if int(process_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def in_threads(calls: Sequence, seconds: float = 600) -> list:
    """The results of calls that run at the same time; raises the first error, or ServingError at the time limit."""
    results: list = [None] * len(calls)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise ServingError(f"requests did not end in {seconds:.0f} s")
    return results
