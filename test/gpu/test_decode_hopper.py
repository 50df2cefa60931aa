"""The Hopper decode kernels on a GPU: every way to cut heads into blocks, dequantisation, the epilogue in the kernel.

test_decode_gpu.py runs the whole matrix of shapes with the default backend, which is this one on sm_90.
"""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sgl_dsv4_kernels as dk
from sgl_dsv4_kernels import sm90_decode, testing
from sgl_dsv4_kernels import testing_decode as td
from sgl_dsv4_kernels.layout import CacheLayout
from sgl_dsv4_kernels.ops import decode as ops
from sgl_dsv4_kernels.reference import decode as reference
from sgl_dsv4_kernels.reference.decode import Source
from sgl_dsv4_kernels.settings import settings

DEVICE = torch.device("cuda")
if reason := sm90_decode.missing(DEVICE):
    pytest.skip(f"backend 'sm90' {reason}", allow_module_level=True)


def decode(problem: td.Problem, **options) -> dk.DecodeOutput:
    return dk.sparse_decode(**problem.arguments(), **({"backend": "sm90"} | problem.options | options))


def check(result: dk.DecodeOutput, want: td.Truth, what: object) -> None:
    assert not result.out.isnan().any(), what
    assert td.relative_error(result.out, want.value) <= td.OUTPUT_BOUND, what
    assert td.lse_excess(result.lse, want) <= 0, what
    assert (result.out[want.empty] == 0).all(), what


@pytest.fixture(params=[8, 16, 32, 64])
def block_heads(request, monkeypatch):
    """Heads a block, whatever the plan says."""
    plan = sm90_decode.Plan(request.param, 1)
    monkeypatch.setattr(sm90_decode, "cached_plan", lambda *_, **__: plan)
    return request.param


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 7])
def test_block_heads(block_heads, heads, tokens):
    """All heads a block x heads, also blocks with fewer heads than they could take."""
    problem = td.random_problem(tokens, heads, 128, 512, rope=True, device=DEVICE, seed=heads)
    want = td.truth(problem)
    for splits in (1, 2, 3, 37):
        check(decode(problem, num_splits=splits), want, splits)


def test_one_tile(block_heads):
    """Equal weights, then any: products apart from the rescaling."""
    problem = td.random_problem(1, 64, 64, device=DEVICE, lengths=64, invalid=0.0, sink=False)
    check(decode(problem, num_splits=1), td.truth(problem), "any")
    problem.q.zero_()
    check(decode(problem, num_splits=1), td.truth(problem), "equal")


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 129])
def test_whole_tiles_of_holes(block_heads, tiles):
    """No key of a tile attended to: the first, one in the middle, the last, all but one."""
    problem = td.random_problem(1, 64, 64 * tiles, device=DEVICE, lengths=64 * tiles, seed=tiles)
    indices = problem.main.indices.view(tiles, 64)
    full = indices.clone()
    for holes in ([0], [tiles // 2], [tiles - 1], [t for t in range(tiles) if t != tiles // 2]):
        indices.copy_(full)
        indices[holes] = -1
        want = td.truth(problem)
        for splits in (1, 2):
            check(decode(problem, num_splits=splits), want, (holes, splits))


@pytest.mark.parametrize("splits", [1, 3, 10])
def test_lengths_that_were_not_guessed(block_heads, splits):
    """Blocks read the first row of a full list before they know the lengths: other rows, fewer, other lists, none.

    What lies behind a length is NaN or out of range, so nothing of it may be left.
    """
    lengths = [128, 127, 64, 63, 1, 0, 0, 128, 128, 65, -5, 0]
    extra_lengths = [512, 512, 512, 500, 512, 512, 1, 0, 1, 448, 600, 0]
    problem = td.random_problem(12, 64, 128, 512, device=DEVICE, lengths=lengths, extra_lengths=extra_lengths, seed=7)
    check(decode(problem, num_splits=splits), td.truth(problem), splits)


def test_long_rows(block_heads):
    """LSE of many tiles without a split: a factor a tile is multiplied into the sum."""
    problem = td.random_problem(2, 64, 64, 8256, device=DEVICE, lengths=64, extra_lengths=8256, seed=3)
    check(decode(problem, num_splits=1), td.truth(problem), "unsplit")


def test_partials(block_heads):
    problem = td.random_problem(5, 64, 128, 512, device=DEVICE, seed=9)
    o, lse = dk.sparse_decode_partial(**problem.arguments(), num_splits=7, backend="sm90")
    want_o, want_lse = reference.sparse_decode_partial(
        problem.q, problem.main, problem.extra, num_splits=7, dtype=torch.float64
    )
    empty = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (o[empty] == 0).all()
    assert td.relative_error(o, want_o) <= td.OUTPUT_BOUND
    assert (lse.double() - want_lse)[~empty].abs().max() <= 5e-6


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("output", reference.OUTPUTS)
def test_epilogue_in_the_kernel(block_heads, heads, output):
    """Against partials of one split and the combine kernel."""
    problem = td.random_problem(9, heads, 128, 512, device=DEVICE, rope=True, seed=5)
    o, lse = dk.sparse_decode_partial(**problem.arguments(), num_splits=1, backend="sm90")
    want = dk.combine_splits(o, lse, **problem.options, output=output, return_amax=True)
    got = decode(problem, num_splits=1, output=output, return_amax=True)
    torch.testing.assert_close(got.lse, want.lse, rtol=2.0**-22, atol=2e-6)
    torch.testing.assert_close(got.amax, want.amax, rtol=1e-5, atol=1e-7)
    assert (got.out.view(torch.uint8) == want.out.view(torch.uint8)).double().mean() > 0.99
    if got.scales is not None:
        assert got.scales.stride() == want.scales.stride()
        assert ((got.scales.double() / want.scales.double() - 1).abs() < 1e-5).double().mean() > 0.99


def test_reruns(block_heads):
    problem = td.random_problem(150, 64, 128, 512, device=DEVICE, seed=11)
    for splits in (1, 3):
        first = decode(problem, num_splits=splits)
        for _ in range(10):
            again = decode(problem, num_splits=splits)
            assert torch.equal(again.out, first.out)
            assert torch.equal(again.lse, first.lse)


def rows_of(arguments: dict, first: int, last: int) -> dict:
    """The same call for a few of its rows."""
    given = dict(arguments)
    for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"):
        if given.get(name) is not None:
            given[name] = given[name][first:last]
    for name in ("inverse_rope", "q_rope"):
        if given.get(name) is not None:
            freqs, positions = given[name]
            given[name] = freqs, positions[first:last]
    return given


def mixed_rows(tokens: int, heads: int) -> td.Problem:
    """Rows of no keys, of one tile, of odd and even numbers of tiles, in turn and anywhere."""
    generator = torch.Generator().manual_seed(tokens + heads)
    lengths = torch.randint(0, 129, (tokens,), generator=generator)
    extra_lengths = torch.randint(0, 513, (tokens,), generator=generator)
    for every, length, extra_length in ((7, 0, 0), (11, 1, 0), (13, 0, 64), (17, 128, 512)):
        lengths[::every], extra_lengths[::every] = length, extra_length
    lengths[tokens // 2 : tokens // 2 + 5] = extra_lengths[tokens // 2 : tokens // 2 + 5] = 0
    return td.random_problem(
        tokens, heads, 128, 512, rope=True, device=DEVICE, lengths=lengths, extra_lengths=extra_lengths, seed=heads
    )


# Heads a block, heads, rows. Of 132 SMs, more blocks than those and up to six times as many: they take one row after
# the other. Then more, which do not; and fewer heads than a block has room for.
MANY_ROWS = [
    (64, 64, 133), (64, 64, 300), (64, 64, 700), (64, 128, 67), (64, 128, 300), (64, 8, 150), (64, 32, 290),
    (64, 64, 1000), (32, 32, 133), (32, 32, 300), (32, 32, 700), (32, 64, 67), (32, 128, 190), (32, 8, 150),
    (32, 32, 1000), (16, 16, 133), (16, 16, 300), (16, 16, 700), (16, 64, 37), (16, 64, 190), (16, 8, 150),
    (8, 8, 133), (8, 8, 300), (8, 8, 700), (8, 64, 17), (8, 64, 90), (8, 8, 1000),
]  # fmt: skip


@pytest.mark.parametrize(("block_heads", "heads", "tokens"), MANY_ROWS, indirect=["block_heads"])
@pytest.mark.parametrize(("with_norm", "with_rope"), [(False, False), (True, True), (True, False), (False, True)])
def test_more_blocks_than_sms(block_heads, heads, tokens, with_norm, with_rope):
    """A row is the same bits among many, of which a block takes one after the other, and among few; and every time.

    With and without the query's norm and RoPE.
    """
    problem = mixed_rows(tokens, heads)
    given = problem.arguments() | problem.options | dict(num_splits=1, backend="sm90")
    if with_norm:
        given["q_norm_eps"] = 1e-6
    if with_rope:
        given["q_rope"] = problem.options["inverse_rope"]
    result = dk.sparse_decode(**given)
    if not with_norm and not with_rope:
        check(result, td.truth(problem), "truth")
    step = min(60, sm90_decode.count_sms(DEVICE) // -(-heads // block_heads))
    for first in range(0, tokens, step):
        few = dk.sparse_decode(**rows_of(given, first, first + step), return_amax=True)  # kernels of one row
        assert torch.equal(result.out[first : first + step], few.out), first
        assert torch.equal(result.lse[first : first + step], few.lse), first
    for _ in range(3):
        again = dk.sparse_decode(**given)
        assert torch.equal(result.out, again.out)
        assert torch.equal(result.lse, again.lse)


@pytest.mark.parametrize(
    ("block_heads", "kernel"),
    [(8, "raw_parts_kernel"), (16, "raw_parts_kernel"), (32, "raw_parts_kernel"), (64, "many_parts_kernel")],
    indirect=["block_heads"],
)
def test_the_kernel_of_many_rows_runs(block_heads, kernel):
    """A driver that refuses its tensor maps would leave all to the other kernel."""
    problem = mixed_rows(sm90_decode.count_sms(DEVICE) + 1, block_heads)
    decode(problem, num_splits=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode(problem, num_splits=1)
        torch.cuda.synchronize()
    assert any(kernel in event.key for event in profile.key_averages())


@pytest.mark.parametrize("pdl", [False, True])
def test_many_rows_in_a_graph(block_heads, monkeypatch, pdl):
    """Replays with other queries and lengths; two decodes in turn, so that one starts early behind the other."""
    monkeypatch.setattr(settings, "pdl", pdl)
    problem = mixed_rows(200, block_heads)
    given = problem.arguments() | problem.options | dict(num_splits=1, backend="sm90")
    changed = {"q": given["q"].flip(0).contiguous()}
    for name in ("topk_length", "extra_topk_length"):  # not longer: what lies behind a length is NaN
        changed[name] = torch.minimum(given[name], given[name].flip(0))
    want = [dk.sparse_decode(**given), dk.sparse_decode(**(given | changed))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = dk.sparse_decode(**given)
        second = dk.sparse_decode(**(given | dict(q=first.out)))
    second_want = dk.sparse_decode(**(given | dict(q=want[0].out)))
    graph.replay()
    assert torch.equal(first.out, want[0].out)
    assert torch.equal(second.out, second_want.out)
    for name, value in changed.items():
        given[name].copy_(value)
    graph.replay()
    assert torch.equal(first.out, want[1].out)
    assert torch.equal(first.lse, want[1].lse)


def test_many_rows_of_nan_and_of_infinity(block_heads):
    """What is not a number stays in its row and head: NaN keys, NaN queries, scores that overflow, sinks."""
    problem = mixed_rows(200, block_heads)
    problem.q[3] = math.nan
    problem.q[150, 7] = math.inf
    problem.q[170] *= 2.0**60
    problem.options["attn_sink"][5] = math.nan
    given = problem.arguments() | problem.options | dict(num_splits=1, backend="sm90")
    result = dk.sparse_decode(**given)
    for first in range(0, 200, 50):
        few = dk.sparse_decode(**rows_of(given, first, first + 50), return_amax=True)  # kernels of one row
        for got, want in ((result.out, few.out), (result.lse, few.lse)):
            assert torch.equal(got[first : first + 50].nan_to_num(nan=77.0), want.nan_to_num(nan=77.0)), first
    assert not result.out[4, :5].isnan().any()


@pytest.mark.parametrize("shift", [1, 8])
def test_more_blocks_than_sms_into_views(block_heads, shift):
    """Queries and outputs between others, whose vectors start anywhere; not a byte beside the outputs is written."""
    problem = mixed_rows(200, block_heads)
    given = problem.arguments() | problem.options | dict(num_splits=1, backend="sm90")
    want = dk.sparse_decode(**given, return_amax=True)  # kernels of one row
    q = torch.full((201, block_heads + 2, 528), math.nan, dtype=torch.bfloat16, device=DEVICE)
    wide = torch.full_like(q, 7.0)
    inner = (slice(0, 200), slice(1, block_heads + 1), slice(shift, shift + 512))
    q[inner] = problem.q
    got = dk.sparse_decode(**(given | dict(q=q[inner])), out=wide[inner])
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    wide[inner] = 7.0
    assert (wide == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "more", "splits"), [(1, 5, 10), (1, 40, 3), (2, 9, 4), (1, -100, 2), (1, 300, 2), (1, 300, 5)]
)
@pytest.mark.parametrize("shift", [0, 1])
def test_last_rows_in_splits(block_heads, heads, more, splits, shift, monkeypatch):
    """Every row has the bits that it has in a decode of rows of its kind alone, also in a graph; nothing beside the
    outputs is written, and partials that nobody wrote are not read. Fewer rows than SMs, more splits than SMs, more
    parts than a block takes; `shift`: outputs that start anywhere. What does not suit one launch is left to two.

    Args:
        heads: blocks of a row. more: rows beyond one for every SM, half of them split, or all beyond it.
    """
    partials = ops._partials
    monkeypatch.setattr(ops, "_partials", lambda *given: tuple(x.fill_(math.nan) for x in partials(*given)))
    sms = sm90_decode.count_sms(DEVICE) // heads
    tokens = sms + more
    whole = sms if 0 < more < sms else tokens // 2
    monkeypatch.setattr(sm90_decode, "cached_cut", lambda *_: sm90_decode.Cut(whole, splits))
    problem = mixed_rows(tokens, heads * block_heads)
    given = problem.arguments() | problem.options | dict(backend="sm90", q_norm_eps=1e-6)
    given["q_rope"] = problem.options["inverse_rope"]
    wide = torch.full((tokens + 2, heads * block_heads, 520), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out, lse = wide[1:-1, :, shift : shift + 512], torch.full((tokens, heads * block_heads), 7.0, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        dk.sparse_decode(**given, out=out, lse=lse)
        torch.cuda.synchronize()
    split_parts = splits * (tokens - whole)
    parts = whole + split_parts
    suits = split_parts <= sms if block_heads == 64 else parts > sms
    one_launch = shift == 0 and suits and parts <= sm90_decode.MOST_PARTS * sms
    launches = sum(event.count for event in profile.key_averages() if "sm90" in event.key)
    assert launches == (1 if one_launch else 2)
    eager, eager_lse = wide.clone(), lse.clone()
    out.fill_(7.0)
    lse.fill_(7.0)
    with torch.cuda.graph(graph):
        dk.sparse_decode(**given, out=out, lse=lse)
    graph.replay()
    for first, last, num_splits in ((0, whole, 1), (whole, tokens, splits)):
        want = dk.sparse_decode(**rows_of(given, first, last), num_splits=num_splits)
        for got, got_lse in ((wide, lse), (eager, eager_lse)):
            assert torch.equal(got[1:-1, :, shift : shift + 512][first:last], want.out)
            assert torch.equal(got_lse[first:last], want.lse)
    out.fill_(7.0)
    assert (wide == 7.0).all()


def cut_problem(block_heads: int, monkeypatch) -> tuple[dict, list[tuple[int, int, int]]]:
    """Arguments of a decode of whole rows and of rows in two splits, and (first row, last row, splits) of each kind."""
    sms = sm90_decode.count_sms(DEVICE)
    tokens = sms + 18
    monkeypatch.setattr(sm90_decode, "cached_cut", lambda *_: sm90_decode.Cut(sms, 2))
    problem = mixed_rows(tokens, block_heads)
    return problem.arguments() | problem.options | dict(backend="sm90"), [(0, sms, 1), (sms, tokens, 2)]


def assert_same_as_alone(result: dk.DecodeOutput, given: dict, kinds: list[tuple[int, int, int]]) -> None:
    """Rows of each kind have the bits that a decode of them alone gives, NaN where that has NaN."""
    for first, last, splits in kinds:
        want = dk.sparse_decode(**rows_of(given, first, last), num_splits=splits)
        for got, alone in ((result.out, want.out), (result.lse, want.lse)):
            assert torch.equal(got[first:last].nan_to_num(nan=77.0), alone.nan_to_num(nan=77.0)), (first, last)


def out_at(shift: int, given: dict) -> torch.Tensor:
    """Outputs whose rows start `shift` elements behind a multiple of 16 bytes: with 1 each kind of rows has a launch of
    its own."""
    tokens, heads, _ = given["q"].shape
    return torch.full((tokens, heads, 520), 7.0, dtype=torch.bfloat16, device=DEVICE)[:, :, shift : shift + 512]


@pytest.mark.parametrize("shift", [0, 1])
def test_cut_of_nan_and_of_infinity(block_heads, shift, monkeypatch):
    """What is not a number stays in its row and head, among whole rows and among split ones."""
    given, kinds = cut_problem(block_heads, monkeypatch)
    for _, last, _ in kinds:
        given["q"][last - 9] = math.nan
        given["q"][last - 7, 3] = math.inf
        given["q"][last - 5] *= 2.0**60
    given["attn_sink"][5] = math.nan
    result = dk.sparse_decode(**given, out=out_at(shift, given))
    assert_same_as_alone(result, given, kinds)
    for _, last, _ in kinds:
        any_keys = int(given["topk_length"][last - 9] + given["extra_topk_length"][last - 9]) > 0
        assert bool(result.out[last - 9].isnan().any()) == any_keys
        assert not result.out[last - 8, :5].isnan().any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shift", [0, 1])
def test_cut_of_views(block_heads, shift, dtype, monkeypatch):
    """Queries, lengths, indices and positions between others."""
    given, kinds = cut_problem(block_heads, monkeypatch)
    freqs, positions = given["inverse_rope"]
    given["inverse_rope"] = given["q_rope"] = (freqs, positions.to(dtype))
    result = dk.sparse_decode(**given, out=out_at(shift, given))
    assert_same_as_alone(result, given, kinds)

    def between(x: torch.Tensor, before: int, behind: int, filler: float = 0) -> torch.Tensor:
        wide = torch.full(
            (x.shape[0], *x.shape[1:-1], before + x.shape[-1] + behind), filler, dtype=x.dtype, device=DEVICE
        )
        view = wide[..., before : before + x.shape[-1]]
        view.copy_(x)
        return view

    views = {name: between(given[name], 3, 5, -1) for name in ("indices", "extra_indices")}
    views |= {name: between(given[name][:, None], 1, 1, 64)[:, 0] for name in ("topk_length", "extra_topk_length")}
    views["q"] = between(given["q"], 8, 8, math.nan)
    views["inverse_rope"] = views["q_rope"] = (freqs, between(positions.to(dtype)[:, None], 2, 1)[:, 0])
    again = dk.sparse_decode(**(given | views), out=out_at(shift, given))
    assert torch.equal(again.out, result.out)
    assert torch.equal(again.lse, result.lse)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_cuts_in_a_chain(block_heads, shift, pdl, monkeypatch):
    """In a graph, one decode behind the other, whose queries are the outputs of the one before; replayed."""
    monkeypatch.setattr(settings, "pdl", pdl)
    given, _ = cut_problem(block_heads, monkeypatch)

    def chain(outs: list[torch.Tensor], wait: bool = False) -> None:
        for q, out in zip([given["q"], *outs], outs, strict=False):
            dk.sparse_decode(**(given | dict(q=q)), out=out)
            if wait:
                torch.cuda.synchronize()

    want, got = ([out_at(shift, given) for _ in range(3)] for _ in range(2))
    chain(want, wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(got)
    for _ in range(3):
        for out in got:
            out.fill_(math.nan)
        graph.replay()
        for out, one in zip(got, want, strict=True):
            assert torch.equal(out, one)


def test_bad_partials():
    """What the op says of partials and splits that it cannot take."""
    problem = td.random_problem(4, 8, 128, 512, device=DEVICE)
    o_accum, lse_accum = torch.empty(3, 4, 8, 512, device=DEVICE), torch.empty(3, 4, 8, device=DEVICE)
    out, lse = torch.empty_like(problem.q), torch.empty(4, 8, device=DEVICE)
    amax = torch.empty(4, 8, device=DEVICE)

    def launch(*partials: torch.Tensor | None, amax: torch.Tensor | None = None, num_splits: int = 1) -> None:
        result = (out, lse, None, amax, *partials)
        epilogue = (None, None, None, 0)
        sm90_decode.launch(problem.q, problem.main, problem.extra, 0.1, epilogue, result, num_splits=num_splits)

    for message, given in (
        ("o_accum and lse_accum: expected both or neither", dict(partials=(o_accum, None))),
        ("o_accum and lse_accum: expected both or neither", dict(partials=(None, lse_accum))),
        (
            "o_accum: expected partials of 1 to 4 rows, got 5",
            dict(partials=(torch.empty(3, 5, 8, 512, device=DEVICE), torch.empty(3, 5, 8, device=DEVICE))),
        ),
        ("o_accum: expected bf16 outputs without amax", dict(partials=(o_accum, lse_accum), amax=amax)),
        ("num_splits: expected 1, or 2 .* got 3", dict(partials=(None, None), num_splits=3)),
        ("num_splits: expected 1, or 2 .* got 2", dict(partials=(None, None), num_splits=2, amax=amax)),
        ("num_splits: expected 1, or 2 .* got 2", dict(partials=(o_accum, lse_accum), num_splits=2)),
    ):
        partials = given.pop("partials")
        with pytest.raises((RuntimeError, ValueError), match=message):
            launch(*partials, **given)
    launch(o_accum[:, :2], lse_accum[:, :2])
    torch.cuda.synchronize()


def test_cut_as_chosen():
    """What a caller gets: 132 rows of 136 whole, the last four split, in one launch and the combine."""
    if sm90_decode.count_sms(DEVICE) != sm90_decode.H200_SMS:
        pytest.skip("the plan of another number of SMs")
    problem = td.random_problem(136, 64, 128, 512, extra_page_size=64, rope=True, device=DEVICE)
    decode(problem)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = decode(problem)
        torch.cuda.synchronize()
    kernels = sorted(event.key for event in profile.key_averages() if "sgl_dsv4" in event.key)
    assert [("many_parts_kernel" in kernel, "combine_kernel" in kernel) for kernel in kernels] in (
        [(True, False), (False, True)],
        [(False, True), (True, False)],
    )
    check(result, td.truth(problem), "truth")


@pytest.mark.parametrize("block_heads", [8, 16, 32], indirect=True)
@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("output", reference.OUTPUTS)
def test_two_splits_merged_on_chip(block_heads, heads, output):
    """The bits of partials and the combine kernel, which amax still takes: rows without keys, of one split, also of
    NaN, infinity and sinks of both; nothing beside the outputs is written."""
    problem = mixed_rows(75, heads)
    problem.q[3] = math.nan
    problem.q[50, 7] = math.inf
    problem.q[70] *= 2.0**60
    problem.options["attn_sink"][5:8] = torch.tensor([math.nan, math.inf, -math.inf])
    given = problem.arguments() | problem.options | dict(backend="sm90", num_splits=2, output=output, q_norm_eps=1e-6)
    given["q_rope"] = problem.options["inverse_rope"]
    want = dk.sparse_decode(**given, return_amax=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = dk.sparse_decode(**given)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "sgl_dsv4" in event.key]
    assert len(kernels) == 1, kernels
    bits = torch.int16 if output == "bf16" else torch.uint8
    assert torch.equal(got.out.view(bits), want.out.view(bits))
    assert torch.equal(got.lse.view(torch.int32), want.lse.view(torch.int32))
    if output != "bf16":
        assert torch.equal(*(x.scales.contiguous().view(torch.uint8) for x in (got, want)))
        return
    for shift in (1, 8):
        wide = torch.full((77, heads, 528), 7.0, dtype=torch.bfloat16, device=DEVICE)
        inner = wide[1:-1, :, shift : shift + 512]
        dk.sparse_decode(**given, out=inner)
        assert torch.equal(inner.contiguous().view(bits), want.out.view(bits))
        inner.fill_(7.0)
        assert (wide == 7.0).all()


@pytest.mark.parametrize("block_heads", [8, 16, 32], indirect=True)
@pytest.mark.parametrize("pdl", [False, True])
def test_pairs_in_a_graph(block_heads, monkeypatch, pdl):
    """More pairs than the SMs hold at once, of rows with many and few keys; each reads what the last one wrote."""
    monkeypatch.setattr(settings, "pdl", pdl)
    problem = mixed_rows(300, block_heads)
    given = problem.arguments() | problem.options | dict(num_splits=2, backend="sm90")
    want, steps = given["q"], 5
    for _ in range(steps):
        want = dk.sparse_decode(**(given | dict(q=want)), return_amax=True).out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = given["q"]
        for _ in range(steps):
            got = dk.sparse_decode(**(given | dict(q=got))).out
    for _ in range(3):
        got.fill_(7.0)
        graph.replay()
        assert torch.equal(got, want)


def test_chains_of_programmatic_launches(block_heads, monkeypatch):
    """Store, decode, combine, again and again, large and small grids in turn: the same bits as one after the other."""
    steps, most, page_size, heads = 60, 48, 64, 64
    freqs = testing.yarn_freqs_cis(most, DEVICE)
    kv = torch.randn(steps, most, 512, device=DEVICE).bfloat16()
    q = torch.randn(most, heads, 512, device=DEVICE).bfloat16()
    weight = torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.arange(most, device=DEVICE)
    indices = torch.arange(2 * page_size, dtype=torch.int32, device=DEVICE).repeat(most, 1)

    def run() -> list[torch.Tensor]:
        cache = torch.zeros(2, CacheLayout.V4.page_bytes(page_size), dtype=torch.uint8, device=DEVICE)
        outs = []
        for step in range(steps):
            rows = (1, most, 7)[step % 3]
            slots = ((positions + 5 * step) % (2 * page_size)).int()
            dk.norm_rope_store(
                kv[step, :rows], weight, 1e-6, freqs, positions[:rows], slots[:rows], cache, page_size=page_size
            )
            splits = (2, 1)[step % 2]
            result = dk.sparse_decode(
                q[:rows], cache, indices[:rows], page_size=page_size, num_splits=splits, backend="sm90",
                inverse_rope=(freqs, positions[:rows]),
            )  # fmt: skip
            outs.append(result.out)
        return outs

    results = []
    for pdl in (False, True, True):
        monkeypatch.setattr(settings, "pdl", pdl)
        results.append(run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_views(block_heads):
    """q and out that start anywhere; a cache that does not start at a multiple of 16 bytes: Triton, or refused."""
    problem = td.random_problem(3, 64, 128, 64, device=DEVICE)
    want = td.truth(problem)
    q = torch.empty(3 * 64 * 512 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(3, 64, 512)
    q.copy_(problem.q)
    problem.q = q
    out = torch.empty(3 * 64 * 520 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(3, 64, 520)[..., :512]
    for splits in (1, 2):
        check(decode(problem, num_splits=splits, out=out), want, splits)
    one = td.random_problem(1, 64, 128, 64, device=DEVICE)
    one.q = one.q.as_strided(one.q.shape, (64 * 512 + 1, 512, 1))  # the stride of a single row means nothing
    check(decode(one, num_splits=1), td.truth(one), "one row")
    for offset in (16, 64, 112):  # a row's bytes lie in five or six lines of 128; blocks of 10 and 2 tiles
        shifted = td.random_problem(3, 64, 128, 512, device=DEVICE, offset=offset)
        for splits in (1, 5):
            check(decode(shifted, num_splits=splits), td.truth(shifted), (offset, splits))
    odd = td.random_problem(3, 64, 128, 64, device=DEVICE, offset=8)
    check(decode(odd, backend=None), td.truth(odd), "triton")
    with pytest.raises(ValueError, match="cache: backend 'sm90' needs data"):
        decode(odd)


def code_cache() -> torch.Tensor:
    """A page of 256 tokens: token e has every finite code whose product is finite, and scale byte e."""
    cache = td.poisoned_cache(1, 256, device=DEVICE)
    codes = torch.arange(256, device=DEVICE).repeat(2)[:448].to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    for e in range(256):
        product = values * 2.0 ** (e - 127)
        row = torch.where(values.isnan() | (product.abs() > 3.38e38), 0, codes).to(torch.uint8)
        cache[0, e * 576 : e * 576 + 448] = row
        cache[0, e * 576 + 448 : (e + 1) * 576] = 0
        cache[0, 256 * 576 + e * 8 : 256 * 576 + e * 8 + 7] = e
    return cache


def single_keys(cache: torch.Tensor, heads: int) -> td.Problem:
    """256 rows, row e attends to token e alone, with score 0."""
    indices = torch.arange(256, device=DEVICE, dtype=torch.int32)[:, None]
    q = torch.zeros(256, heads, 512, device=DEVICE, dtype=torch.bfloat16)
    return td.Problem(q, Source(cache, indices, None, 256, CacheLayout.V4))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_every_code_and_scale(heads):
    """The dequantised value is code x scale, subnormals kept; scale 255 is NaN. At 16, 32 and 64 heads a block it is
    rounded once to bf16, at 8 it is not."""
    cache = code_cache()
    o, _ = dk.sparse_decode_partial(**single_keys(cache, heads).arguments(), num_splits=1, backend="sm90")
    rows = cache[0, : 255 * 576].view(255, 576)[:, :448].view(torch.float8_e4m3fn).double()
    scale = 2.0 ** (torch.arange(255, device=DEVICE, dtype=torch.float64) - 127)
    want = (rows * scale[:, None]).to(torch.float32 if heads == 8 else torch.bfloat16).float()
    for head in (0, heads - 1):
        assert torch.equal(o[0, :255, head, :448], want)
    assert o[0, 255].isnan().all()


@pytest.mark.parametrize("heads", [8, 64])
def test_every_nan(heads):
    """Both codes, in every channel group, and a NaN in the RoPE part: that row is NaN, no other."""
    cache = code_cache()
    problem = single_keys(cache, heads)
    for at, value in [(c, v) for c in (0, 17, 63, 200, 447) for v in (0x7F, 0xFF)] + [(449, 0x7F), (575, 0xFF)]:
        changed = cache.clone()
        changed[0, 5 * 576 + at] = value
        if at >= 448:
            changed[0, 5 * 576 + at - 1] = 0xFF
        arguments = problem.arguments() | dict(cache=changed)
        o, lse = dk.sparse_decode_partial(**arguments, num_splits=1, backend="sm90")
        assert o[0, 5].isnan().all(), (at, value)
        assert lse[0, 5].isnan().all()
        others = torch.arange(255, device=DEVICE) != 5
        assert not o[0, :255][others].isnan().any()


@pytest.mark.parametrize("tile", [0, 1, 2])
def test_scales_and_codes_of_any_tile(block_heads, tile):
    """Small, large and NaN scales and NaN codes of one key among 192 with equal weights, wherever it stands."""
    problem = td.random_problem(1, 64, 192, device=DEVICE, lengths=192, invalid=0.0, sink=False, seed=tile)
    problem.q.zero_()
    cache, page_size = problem.main.cache, problem.main.page_size
    page, place = divmod(int(problem.main.indices[0, 64 * tile + 37]), page_size)
    group, scale_at = 3, CacheLayout.V4.scale_offset(page_size) + place * 8

    def partial() -> torch.Tensor:
        return dk.sparse_decode_partial(**problem.arguments(), num_splits=1, backend="sm90")[0][0, 0]

    for e in (0, 6, 134, 135, 160):
        cache[page, scale_at + group] = e
        want, _ = reference.sparse_decode_partial(
            problem.q, problem.main, problem.extra, num_splits=1, dtype=torch.float64
        )
        for first in range(0, 512, 64):
            one = slice(first, first + 64)
            mine, theirs = partial()[:, one].double(), want[0, 0, :, one]
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max(), (e, first)
    cache[page, scale_at + group] = 255
    assert partial().isnan().all()
    cache[page, scale_at + group] = 120
    assert not partial().isnan().any()
    cache[page, place * 576 + 64 * group + 5] = 0xFF
    assert partial().isnan().all()


@pytest.mark.parametrize("tile", [0, 1, 2])
@pytest.mark.parametrize("largest", [150, 250])
def test_large_scales_next_to_others(block_heads, tile, largest):
    """Keys of one tile whose groups have large scales of several sizes, next to usual ones and the smallest, beside a
    RoPE part: with equal weights, and with others where scores stay small."""
    problem = td.random_problem(1, 64, 192, device=DEVICE, lengths=192, invalid=0.0, sink=False, seed=tile)
    cache, page_size = problem.main.cache, problem.main.page_size
    numbers = torch.Generator().manual_seed(tile)
    sizes = torch.tensor([0, 127, 134, 135, (135 + largest) // 2, largest - 1, largest])
    for key in (0, 1, 15, 16, 37, 63):
        page, place = divmod(int(problem.main.indices[0, 64 * tile + key]), page_size)
        data, scales = place * 576, CacheLayout.V4.scale_offset(page_size) + place * 8
        codes = torch.randint(0, 0x39, (448,), generator=numbers) | torch.randint(0, 2, (448,), generator=numbers) << 7
        cache[page, data : data + 448] = codes.to(torch.uint8).to(DEVICE)  # at most 1: sums stay finite
        cache[page, scales : scales + 7] = sizes[torch.randperm(7, generator=numbers)].to(torch.uint8).to(DEVICE)
    for q_scale, bound in [(2.0**-23, td.OUTPUT_BOUND)] * (largest == 150) + [(0.0, 1e-5)]:
        problem.q *= q_scale
        o, lse = dk.sparse_decode_partial(**problem.arguments(), num_splits=1, backend="sm90")
        want, want_lse = reference.sparse_decode_partial(
            problem.q, problem.main, problem.extra, num_splits=1, dtype=torch.float64
        )
        for first in range(0, 512, 64):
            one = slice(first, first + 64)
            assert td.relative_error(o[0, ..., one], want[0, ..., one]) <= bound, (q_scale, first)
        assert (lse.double() - want_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_scales_that_are_not_positive(block_heads, scale):
    """All keys alike; the smallest products weigh most."""
    problem = td.random_problem(3, 64, 128, 512, device=DEVICE, seed=3)
    problem.options["softmax_scale"] = scale
    want = td.truth(problem)
    for splits in (1, 3):
        check(decode(problem, num_splits=splits), want, splits)


def test_scores_that_overflow(block_heads):
    """Products that are finite, times a scale that makes them infinite: NaN in that row, as of any infinite score."""
    problem = td.random_problem(2, 64, 64, device=DEVICE, lengths=64, invalid=0.0, sink=False)
    problem.q[0] = problem.q[0].abs() * 2.0**100
    problem.options["softmax_scale"] = 2.0**40
    result = decode(problem, num_splits=1)
    for values in (result.out, result.lse):
        assert values[0].isnan().all()
        assert not values[1].isnan().any()


@pytest.mark.parametrize("size", [2.0**20, 2.0**34, 2.0**60])
def test_large_scores(block_heads, size):
    """One key has all the weight, also where neighbouring fp32 scores differ by more than the weights' range."""
    problem = td.random_problem(3, 64, 64, 64, device=DEVICE, lengths=64, extra_lengths=64, sink=False)
    problem.q *= size
    want = td.truth(problem)
    for splits in (1, 2):
        result = decode(problem, num_splits=splits)
        assert td.relative_error(result.out, want.value) <= td.OUTPUT_BOUND, splits
        torch.testing.assert_close(result.lse.double(), want.lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [8, 64])
def test_scores_far_below_the_largest(block_heads, heads):
    """Tiles more than 2^16 below an earlier one, and above a later one: the bound on the unit of a tile."""
    problem = td.random_problem(4, heads, 64, 512, device=DEVICE, lengths=64, extra_lengths=512, sink=False)
    problem.q *= 10
    want = td.truth(problem)
    for splits in (1, 2, 9):
        result = decode(problem, num_splits=splits)
        assert td.relative_error(result.out, want.value) <= 2 * td.OUTPUT_BOUND  # scores are as large as 100
        torch.testing.assert_close(result.lse.double(), want.lse, rtol=1e-6, atol=1e-5)
