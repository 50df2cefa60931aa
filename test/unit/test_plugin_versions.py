"""The plugin in every supported SGLang, end to end on torch's CPU, beside the same step of that SGLang alone."""

from __future__ import annotations

import sys

import pytest
from fake_sglang import STAND_IN_REGISTRY, VERSIONS, FakeSGLang, imported, nan_equal, real_registry
from plugin_world import World

from sgl_dsv4_kernels.plugin import install, state
from sgl_dsv4_kernels.plugin.options import Options


@pytest.fixture(params=["stand-in", "real"])
def registry(request, version):
    if request.param == "stand-in":
        return STAND_IN_REGISTRY
    text = real_registry(version)
    if text is None:
        pytest.skip(f"the wheel of sglang {version} is not in SGL_DSV4_WHEELS")
    return text


def run(fake: FakeSGLang, options: Options | None, **world):
    """A step; with options, the plugin is installed and its hooks applied before the caller's modules bind anything."""
    if options is not None:
        install.install(options)
        fake.apply_hooks()
    here = World(fake, **world)
    outputs = here.step()
    return here, outputs, list(fake.stock_calls)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [64, 16])
def test_step(version, registry, heads, tmp_path):
    ranks = dict(heads=heads, rank=0 if heads == 64 else 2)
    (tmp_path / "alone").mkdir()
    (tmp_path / "with").mkdir()
    with imported(version, tmp_path / "alone", registry) as fake:
        stock, expected, calls = run(fake, None, **ranks)
        assert calls == ["A2", "A1", "A1", *["B2", "B3"] * 3]
    with imported(version, tmp_path / "with", registry) as fake:
        ours, outputs, calls = run(fake, Options(strict=version != "0.5.12"), **ranks)
        plugin = state.current()
        assert calls == (["A1", "A1"] if version == "0.5.12" else [])
        assert set(plugin.problems) == ({"A1"} if version == "0.5.12" else set())
        assert plugin.fuses_inverse_rope
        served = {label.split()[0]: count for label, count in plugin.ledger.served.items()}
        want = {"A2": 1, "B2": 3, "B3": 3} | ({} if version == "0.5.12" else {"A1": 2})
        if heads == 64 or version not in ("0.5.12", "0.5.13"):  # those have a rank's heads between padded ones
            want["B5"] = 2  # the first decode comes before it
        assert served == want
        assert not plugin.ledger.fallbacks, plugin.ledger.as_dict()
    for ratio in expected:
        assert nan_equal(ours.caches[ratio], stock.caches[ratio]), ratio
        assert outputs[ratio].shape == expected[ratio].shape == (3, heads, 512)
        difference = (outputs[ratio].float() - expected[ratio].float()).norm() / expected[ratio].float().norm()
        assert difference < 0.004, (ratio, difference)  # two roundings less than the stock chain


@pytest.mark.parametrize("version", VERSIONS)
def test_padded_heads_are_not_computed(version, tmp_path):
    """What the decode returns to the backend: the rank's heads where the caller slices from 0, else all."""
    with imported(version, tmp_path) as fake:
        install.install(Options())
        fake.apply_hooks()
        world = World(fake, heads=8, rank=3)
        world.step()
        seen = []
        forward = world.backend.forward
        world.backend.forward = lambda **given: seen.append(forward(**given)) or seen[-1]
        world.attend(4, "decode")
        world.attend(4, "target_verify")
        trails = version not in ("0.5.12", "0.5.13")
        assert state.current().padding_trails == trails
        assert [tuple(out.shape) for out in seen] == [(3, 8 if trails else 64, 512), (3, 64, 512)]


@pytest.mark.parametrize("version", VERSIONS)
def test_off_touches_nothing(version, tmp_path):
    with imported(version, tmp_path) as fake:
        install.install(Options(kernels="off"))
        assert not state.is_installed()
        assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
        _, _, calls = run(fake, None)
        assert calls == ["A2", "A1", "A1", *["B2", "B3"] * 3]
