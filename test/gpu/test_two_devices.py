"""Two GPUs in one process, and one each in two processes.

The kernels keep facts for each device (shared-memory limits, whether there is code, the number of SMs), which must not
depend on the device that is current or that came first. One call of each op with another device current is in that op's
own tests.

    python test/gpu/test_two_devices.py 1 0     a digest of the results on these devices, one if all have the same
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode, testing
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.plugin import probe

pytestmark = pytest.mark.timeout(300)
FIRST, SECOND = (torch.device("cuda", number) for number in range(2))
BACKENDS = ("triton", "sm90") if sm90_decode.missing(FIRST) is None else ("triton",)
HEADS = (16, 32, 64)
ROWS = 200
RUNS = ("1 0", "threads 0 1", "rank 0", "rank 1")
"""Devices in the order of their first use, neither current; both at once; one process for each, its device current."""


def new_cache(device: torch.device) -> torch.Tensor:
    return testing.empty_cache(-(-ROWS // 64), 64, device=device)


def window(device: torch.device) -> dict[str, object]:
    """Arguments of `norm_rope_store`, without the cache: rows at positions and slots 0, 1, ..."""
    kv = torch.randn((ROWS, 512), generator=torch.Generator().manual_seed(0)).to(device)
    places = torch.arange(ROWS, device=device)
    common = dict(kv=kv, weight=torch.linspace(0.5, 1.5, 512).to(device), eps=1e-6, slots=places, page_size=64)
    return common | dict(freqs_cis=testing.yarn_freqs_cis(4 * ROWS + 4, device), positions=places)


def compressed(device: torch.device) -> dict[str, object]:
    """Arguments of `compress_norm_rope_store`: the same rows as latents of four tokens each."""
    plan = testing.decode_plan(4 * torch.arange(1, ROWS + 1)).to(device)
    rows = window(device)
    del rows["positions"]
    return rows | dict(plan=plan, compress_ratio=4, is_decode=True)


def decode(problem: td.Problem, **changed) -> dk.DecodeOutput:
    return dk.sparse_decode(**(problem.arguments() | problem.options | changed))


def results(device: torch.device, backends: tuple[str, ...] = BACKENDS) -> list[torch.Tensor]:
    """Bytes that stores, decodes and combine kernels write on a device, from the same inputs everywhere; on the CPU."""
    written = []
    for op, arguments in ((dk.norm_rope_store, window), (dk.compress_norm_rope_store, compressed)):
        cache = new_cache(device)
        op(**arguments(device), cache=cache)
        written.append(testing.storage_bytes(cache))
    for heads in HEADS:
        problem = td.random_problem(6, heads, 128, 512, rope=True, device=device)
        for backend in backends:
            for splits in (1, 3):  # 3: with the combine kernel
                written += decode(problem, backend=backend, num_splits=splits)[:2]
    return [tensor.cpu().contiguous().view(torch.uint8) for tensor in written]


def results_of(devices: list[int], apart: bool) -> list[list[torch.Tensor]]:
    """Of several devices, none of them current: one after the other, or each in a thread of its own, all at once."""
    found: dict[int, list[torch.Tensor]] = {}

    def run(number: int) -> None:
        with torch.cuda.device(1 - number):
            found[number] = results(torch.device("cuda", number))
            assert torch.cuda.current_device() == 1 - number

    threads = [threading.Thread(target=run, args=(number,)) for number in devices]
    for thread in threads:
        thread.start()
        if not apart:
            thread.join()
    for thread in threads:
        thread.join()
    return [found[number] for number in devices]


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What this file prints as a program, in new processes that run side by side: there each device is new, too."""
    processes = {
        run: subprocess.Popen([sys.executable, __file__, *run.split()], stdout=subprocess.PIPE, text=True)
        for run in RUNS
    }
    try:
        return {run: process.communicate(timeout=90)[0].strip() for run, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()


@pytest.fixture(scope="module")
def expected() -> str:
    """The digest of the first device, which is current."""
    with torch.cuda.device(FIRST):
        return digest(results(FIRST))


@pytest.mark.parametrize("run", RUNS)
def test_new_process(expected, outputs, run):
    assert outputs[run] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_stream_of_the_device_that_is_not_current(backend):
    """The kernels run on the current stream of their tensors' device: behind what is slow there."""
    rows, problem = window(SECOND), td.random_problem(6, 32, 128, 512, rope=True, device=SECOND)
    want_cache, cache = new_cache(SECOND), new_cache(SECOND)
    dk.norm_rope_store(**rows, cache=want_cache)
    want = decode(problem, backend=backend)
    late_kv, late_q = torch.zeros_like(rows["kv"]), torch.zeros_like(problem.q)
    torch.cuda.synchronize(SECOND)
    stream = torch.cuda.Stream(SECOND)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late_kv.copy_(rows["kv"])
        late_q.copy_(problem.q)
        with torch.cuda.device(FIRST):
            dk.norm_rope_store(**(rows | {"kv": late_kv}), cache=cache)
            got = decode(problem, backend=backend, q=late_q)
    stream.synchronize()
    assert torch.equal(cache, want_cache)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_on_the_second_device(backend):
    """As a rank captures its step: its device is current, but not the first."""
    rows, problem = window(SECOND), td.random_problem(6, 16, 128, 512, rope=True, device=SECOND)
    with torch.cuda.device(SECOND):
        want_cache, cache = new_cache(SECOND), new_cache(SECOND)
        dk.norm_rope_store(**rows, cache=want_cache)
        want = decode(problem, backend=backend, num_splits=3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(SECOND)):  # the default one may be another device's
            dk.norm_rope_store(**rows, cache=cache)
            got = decode(problem, backend=backend, num_splits=3)
        got.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(cache, want_cache)
    assert torch.equal(got.out, want.out)


def test_tensors_on_two_devices_are_refused():
    cache = new_cache(FIRST)
    before = cache.clone()
    with pytest.raises(ValueError, match="cache: expected device cuda:1, got cuda:0"):
        dk.norm_rope_store(**window(SECOND), cache=cache)
    assert torch.equal(cache, before)
    problem, other = (td.random_problem(6, 16, 128, 64, device=device) for device in (FIRST, SECOND))
    with pytest.raises(ValueError, match="extra_cache: expected device cuda:0, got cuda:1"):
        decode(problem, extra_cache=other.extra.cache)


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_probes(device):
    assert probe.store_problem(device) is None
    assert probe.decode_problem(device) is None


if __name__ == "__main__":
    mode = [word for word in sys.argv[1:] if not word.isdigit()]
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if mode == ["rank"]:
        torch.cuda.set_device(numbers[0])
        every = [results(torch.device("cuda", numbers[0]))]
    else:
        every = results_of(numbers, apart=mode == ["threads"])
    print(*sorted({digest(tensors) for tensors in every}))
