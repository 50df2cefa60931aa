"""Does the plugin fit every supported SGLang? From the committed facts; and the facts from the wheels (slow)."""

from __future__ import annotations

import copy
import json
import subprocess

import pytest
import torch
from fake_sglang import CONTRACT, VERSIONS
from sglang_contract import Wheel, default_wheels, get_wheel, read
from sglang_contract_check import locate, problems

from sgl_dsv4_kernels.plugin.targets import BY_KEY, TARGETS
from sgl_dsv4_kernels.testing import decode_plan, extend_plan


def test_versions():
    assert [f"0.5.{minor}" for minor in range(12, 24)] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_fits(version):
    assert problems(version, CONTRACT[version]) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_places(version):
    """The paths that the page on SGLang names, not just any that exists."""
    minor = int(version.rsplit(".", 1)[1])
    ops = "sglang.kernels.ops.attention.dsv4" if minor >= 17 else "sglang.jit_kernel.dsv4"
    rope = {12: "sglang.jit_kernel.deepseek_v4", 23: f"{ops}.norm_rope"}.get(minor, f"{ops}.elementwise")
    flash_mla = {12: "flash_mla", 23: "sglang.kernels.ops.attention.flash_mla_interface"}.get(
        minor, "sgl_kernel.flash_mla"
    )
    expected = {
        "A1": None if minor == 12 else f"{ops}.compress.compress_norm_rope_store",
        "A2": f"{rope}.fused_k_norm_rope_flashmla",
        "B1": "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.forward",
        "B2": f"{flash_mla}.flash_mla_with_kvcache",
        "B3": f"{rope}.fused_rope_inplace",
        "B4": "sglang.srt.models.deepseek_v4.MQALayer.forward",
        "B5": f"{rope}.fused_q_norm_rope",
    }
    assert {target.key: locate(target, CONTRACT[version])[0] for target in TARGETS} == expected


def test_our_own_records_are_sglangs():
    """The plans that our tests write have their fields where SGLang's structs have them, which `problems` checks."""
    plan = extend_plan(torch.tensor([8]), torch.tensor([5])).view(torch.int32)
    assert plan[0, 0] == 8
    assert plan[0, 1] & 0xFFFF == 5
    assert decode_plan(torch.tensor([8])).view(torch.int32)[0, 0] == 8


# ---- a version that breaks us says what moved ----

LATEST = VERSIONS[-1]
A1 = BY_KEY["A1"].paths[0].name


def moved(facts):
    del facts["functions"][A1]
    facts["defined_in"]["A1"] = ["sglang/kernels/ops/new_place.py"]


def renamed_parameter(facts):
    facts["functions"][A1][2][0] = "weight"


def new_required_parameter(facts):
    facts["functions"][A1].append(["stream", "keyword", None])


def new_keyword(facts):
    for calls in facts["callers"]["A1"].values():
        calls[0]["keywords"].append("fancy")


def dropped_keyword(facts):
    for calls in facts["callers"]["A2"].values():
        calls[0]["keywords"].remove("positions")


def longer_record(facts):
    facts["plan_records"]["DecodePlan"].append(["int32_t", "more"])


def swapped_fields(facts):
    fields = facts["plan_records"]["CompressPlan"]
    fields[1], fields[2] = fields[2], fields[1]


def other_tuple(facts):
    facts["plan_tuples"]["CompressorDecodePlan"]["fields"].insert(1, "stride")


def new_reader(facts):
    facts["query"]["readers"].append("self.indexer")


def query_on_a_side_stream(facts):
    facts["query"]["streams"].append("torch.cuda.stream(stream_q)")


def other_query_kernel(facts):
    facts["query"]["kernel"] = "0" * 16


def new_guard(facts):
    facts["model"]["inverse_rope"][0]["guards"].append("not self.fused_everything")


def two_rotations(facts):
    facts["model"]["inverse_rope"] *= 2


def other_positions(facts):
    facts["model"]["inverse_rope"][0]["call"] = facts["model"]["inverse_rope"][0]["call"].replace(
        "positions=p", "positions=2*p"
    )


def early_return(facts):
    facts["model"]["returns_before"].append({"value": "return o", "guards": ["x"], "after_attention": True})


def other_slice(facts):
    facts["model"]["head_slices"] = ["slice(1, self.n_local_heads)"]


def subclass(facts):
    facts["backend"]["overriding_forward"].append("new_backend.py:NewBackend")


def decode_keyword(facts):
    facts["backend"]["decode_calls"][0]["window"] = "128"


def decode_with_table(facts):
    facts["backend"]["decode_calls"][0]["block_table"] = "table"


def decode_gone(facts):
    facts["backend"]["decode_calls"] = []


def other_registry(facts):
    facts["plugins"]["registry"] = "0" * 16


def other_group(facts):
    facts["plugins"]["group"] = "sglang.plugins"


def scheduler_without_plugins(facts):
    facts["plugins"]["loaded_in"] = ["sglang/launch_server.py"]


def unreadable_flag(facts):
    facts["deterministic"] = {"get_exec": False, "get_global_server_args": False}


def taken_variable(facts):
    facts["environment"].append("SGLANG_DSV4_VERIFY")


def modes(facts):
    facts["forward_mode"].remove("is_target_verify")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            moved,
            "A1 compress_norm_rope_store has moved or changed: it is now defined in sglang/kernels/ops/new_place.py",
        ),
        (renamed_parameter, "has no parameter norm_weight"),
        (new_required_parameter, "has a new parameter without a default: stream"),
        (new_keyword, "compressor_v2.py calls A1 compress_norm_rope_store with fancy"),
        (dropped_keyword, "calls A2 fused_k_norm_rope_flashmla without positions"),
        (longer_record, "DecodePlan has 20 bytes, expected 16"),
        (swapped_fields, "CompressPlan.ragged_id is not uint16_t at byte 4"),
        (other_tuple, "CompressorDecodePlan[1] is not plan_d"),
        (new_reader, "hands the query to self.indexer"),
        (query_on_a_side_stream, "makes the query on another stream: torch.cuda.stream(stream_q)"),
        (other_query_kernel, "fused_q_norm_rope's kernel has changed"),
        (new_guard, "rotates back only if not self.fused_everything"),
        (two_rotations, "rotates its output back otherwise"),
        (other_positions, "rotates its output back otherwise"),
        (early_return, "may leave before the inverse RoPE"),
        (other_slice, "takes the rank's heads otherwise"),
        (subclass, "NewBackend overrides DeepseekV4AttnBackend.forward"),
        (decode_keyword, "calls flash_mla_with_kvcache with window"),
        (decode_with_table, "with other values"),
        (decode_gone, "no longer calls flash_mla_with_kvcache"),
        (other_registry, "the plugin framework's registry has changed"),
        (other_group, "another entry point group"),
        (scheduler_without_plugins, "the scheduler process no longer loads plugins"),
        (unreadable_flag, "enable_deterministic_inference can no longer be read"),
        (taken_variable, "fills from ours: SGL_DSV4_VERIFY"),
        (modes, "ForwardMode lacks ['is_target_verify']"),
    ],
)
def test_a_change_is_named(change, words):
    facts = copy.deepcopy(CONTRACT[LATEST])
    change(facts)
    found = problems("0.5.24", facts)
    assert any(words in text and text.startswith("sglang 0.5.24: ") for text in found), found


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_snapshot_is_what_the_wheel_holds(version):
    """Needs the wheel: in SGL_DSV4_WHEELS, or 8 to 40 MB from the package index."""
    try:
        wheel = get_wheel(version, default_wheels())
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no wheel of sglang {version} at hand, and none to be downloaded: {error}")
    assert json.loads(json.dumps(read(Wheel(wheel)))) == CONTRACT[version]
