"""Does the plugin fit a version of SGLang? Judges the facts that sglang_contract.py reads; says what moved."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sgl_dsv4_kernels.ops.store import PLAN_BYTES
from sgl_dsv4_kernels.plugin.attention import DECODE_MODES
from sgl_dsv4_kernels.plugin.targets import BY_KEY, TARGETS, Binder, Target, signature_problem

Facts = dict[str, Any]
SEQ_LEN, RAGGED_ID = ("uint32_t", "seq_len", 0), ("uint16_t", "ragged_id", 4)
INVERSE_ROPE = (
    "fused_rope_inplace(o[..., -self.qk_rope_head_dim:], None, self.freqs_cis, positions=positions, inverse=True)"
)
# Conditions under which the model skips fused_rope_inplace, and what in attention.py rules them out.
KNOWN_GUARDS = {
    "not (_is_npu)",
    "not (_FP8_WO_A_GEMM and _wo_a_fp8_mxscale_fused_invrope is not None and (not _is_npu))",
    "not (self.wo_a_fp8 and _wo_a_fp8_mxscale_fused_invrope is not None and (not _is_npu))",
    "not (wo_a_quant_freqs is not None)",  # HIP's unified cache, whose backend is another class
    "not fuse_rope_wo_a",
    "inv_rope is None and (not fuse_rope_wo_a)",
}
KNOWN_SLICES = (
    ["slice(0, self.n_local_heads)"],
    ["slice(rank * self.n_local_heads, (rank + 1) * self.n_local_heads)"],  # 0.5.12, 0.5.13
)
KNOWN_VALUES = {
    "fuse_rope_wo_a": {"self.use_fused_wo_a and 0 < o.shape[0] <= _FUSED_WO_A_MAX_TOKENS"},
    "inv_rope": None,  # any, if it begins with what _is_hip is needed for
}
# Who is handed the query in MQALayer, from its norm and RoPE to the backend. Nobody else may read what query.py defers.
KNOWN_READERS = {
    *("self.wq_b", "q.view", "torch.empty_like", "fused_q_norm_rope"),  # up to B5
    *("self._compute_q_b", "self._forward_prepare", "self._forward_prepare_multi_stream"),  # pass it on
    *("self._forward_prepare_low_ratio_multi_stream", "self._forward_prepare_multi_stream_hip"),
    "self._forward_prepare_multi_stream_npu",
    *("attn_backend.forward", "attn_q.new_empty"),  # B1, or the shape alone
    "bcg_deepseek_v4_attention_with_output",  # breakable CUDA graphs: not deferred
    *("fused_rope_inplace", "q_rope_store", "q_out.copy_", "q.stride", "q_out.stride", "tuple"),  # V4.1: no B5 with eps
    "self._compute_kv_to_cache",  # HIP
    "self._forward_mega",  # without a B5
}
KNOWN_QUERY_KERNELS = {"83b887bfc85d3496", "4073762fef0c503d"}  # the second one can leave the norm out (0.5.22)
KNOWN_FRAMEWORK = {"registry": {"115b20be4e55e99b"}, "load_plugins": {"3d4728b3bfc0ef2e"}}
OUR_VARIABLES = ("KERNELS", "VERIFY", "STRICT", "DECODE_MAX_TOKENS", "DUMP_DIR", "PDL", "CHECK")
EXTERNAL = {  # kernels outside SGLang's wheel: 0.5.12's flash_mla, sgl_kernel's from 0.5.13 on
    "flash_mla.flash_mla_with_kvcache": "flash_mla",
    "sgl_kernel.flash_mla.flash_mla_with_kvcache": "sgl_kernel",
}


def signature(rows: list[list[str | None]]) -> inspect.Signature:
    """Of `parameters`. A default that is no literal is its last name in lower case: KVLayout.V4 -> "v4"."""
    kinds = {
        "plain": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "args": inspect.Parameter.VAR_POSITIONAL,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
        "kwargs": inspect.Parameter.VAR_KEYWORD,
    }
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[kind], default=inspect.Parameter.empty if text is None else _value(text))
            for name, kind, text in rows
        ]
    )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text.rsplit(".", 1)[-1].lower()


def locate(target: Target, facts: Facts) -> tuple[str | None, str]:
    """The path that `plugin.install.locate` would choose, or None and why."""
    tried = []
    imports = facts["backend"]["flash_mla_imports"]
    for path in target.paths:
        if path.beside is not None and not facts["modules"].get(path.beside):
            continue
        if path.name in facts["functions"]:
            problem = signature_problem(target, signature(facts["functions"][path.name]))
            if problem is None:
                return path.name, ""
            tried.append(f"{path.name} {problem}")
        elif path.name in EXTERNAL and any(EXTERNAL[path.name] in line for line in imports):
            return path.name, ""
    where = facts["defined_in"].get(target.key) or []
    tried += [f"it is now defined in {', '.join(where)}"] if where and not tried else []
    return None, "; ".join(tried) or "it is gone"


def problems(version: str, facts: Facts) -> list[str]:
    """What in this version does not fit the plugin, in words. Empty: all fits."""
    checks = (_names, _arguments, _records, _query, _tail, _around)
    found = [text for check in checks for text in check(version, facts)]
    return [f"sglang {version}: {text}" for text in found]


def _names(version: str, facts: Facts) -> Iterator[str]:
    for target in TARGETS:
        path, why = locate(target, facts)
        if path is None and not (target.key == "A1" and version == "0.5.12"):
            yield f"{target.label} has moved or changed: {why}"
        elif path is not None and path in facts["functions"] and target.key in facts["defined_in"]:
            module = path.rsplit(".", 1)[0].replace(".", "/")
            if f"{module}.py" not in facts["defined_in"][target.key] and target.key != "B3":
                yield f"{target.label} is only an alias at {path}; defined in {facts['defined_in'][target.key]}"


def _arguments(version: str, facts: Facts) -> Iterator[str]:
    for key in ("A1", "A2", "B3", "B5"):
        target = BY_KEY[key]
        path, _ = locate(target, facts)
        if path is None:
            continue
        binder = Binder(target, signature(facts["functions"][path]))
        known = {*target.reads, *target.neutral}
        for file, found in facts["callers"][key].items():
            for call in found:
                new = [name for name in call["keywords"] if name not in known and name != "**"]
                given = {*binder.positional[: call["positional"]], *call["keywords"], *binder.defaults}
                missing = [name for name in target.reads if name not in given and "**" not in call["keywords"]]
                if new:
                    yield f"{file} calls {target.label} with {', '.join(new)}, which targets.py does not know"
                if missing:
                    yield f"{file} calls {target.label} without {', '.join(missing)}"
    reads = {*BY_KEY["B2"].reads, *BY_KEY["B2"].neutral}
    if not facts["backend"]["decode_calls"]:
        yield "the backend no longer calls flash_mla_with_kvcache"
    for call in facts["backend"]["decode_calls"]:
        if new := [name for name in call if name not in reads]:
            yield f"the backend calls flash_mla_with_kvcache with {', '.join(new)}, which targets.py does not know"
        wrong = {n: v for n, v in call.items() if n in ("block_table", "cache_seqlens") and v != "None"}
        if wrong or call.get("is_fp8_kvcache") != "True":
            yield f"the backend calls flash_mla_with_kvcache with other values: {wrong or call.get('is_fp8_kvcache')}"
    if not set(DECODE_MODES[:3]) <= set(facts["forward_mode"]):
        yield f"ForwardMode lacks {sorted(set(DECODE_MODES[:3]) - set(facts['forward_mode']))}"
    if "is_extend" not in facts["forward_mode"]:
        yield "ForwardMode lacks is_extend"


def _records(version: str, facts: Facts) -> Iterator[str]:
    for name, wanted in (("DecodePlan", (SEQ_LEN,)), ("CompressPlan", (SEQ_LEN, RAGGED_ID))):
        fields, at = [], 0
        for kind, field in facts["plan_records"].get(name, []):
            fields.append((kind, field, at))
            at += int(re.search(r"\d+", kind).group()) // 8
        if at != PLAN_BYTES:
            yield f"{name} has {at} bytes, expected {PLAN_BYTES}"
        for want in wanted:
            if want not in fields:
                yield f"{name}.{want[1]} is not {want[0]} at byte {want[2]}: {fields}"
    for name, index in (("CompressorDecodePlan", "plan_d"), ("CompressorPrefillPlan", "plan_c")):
        plan = facts["plan_tuples"].get(name, {"fields": [], "is_decode": None})
        if plan["fields"][:2] != ["compress_ratio", index]:
            yield f"{name}[1] is not {index}: its fields are {plan['fields']}"
        if plan["is_decode"] != f"return {name == 'CompressorDecodePlan'}":
            yield f"{name}.is_decode is {plan['is_decode']}"


def _query(version: str, facts: Facts) -> Iterator[str]:
    query = facts["query"]
    if new := sorted(set(query["readers"]) - KNOWN_READERS):
        yield f"MQALayer hands the query to {', '.join(new)}: does it read what plugin/query.py has deferred?"
    if query["streams"]:
        yield f"MQALayer makes the query on another stream: {', '.join(query['streams'])}"
    if query["kernel"] not in KNOWN_QUERY_KERNELS:
        yield f"fused_q_norm_rope's kernel has changed: read its arithmetic, then add its digest {query['kernel']}"


def _tail(version: str, facts: Facts) -> Iterator[str]:
    model = facts["model"]
    ropes = model["inverse_rope"]
    if len(ropes) != 1 or ropes[0]["call"] != INVERSE_ROPE:
        yield f"MQALayer.forward rotates its output back otherwise: {[r['call'] for r in ropes]}"
    for guard in (guard for rope in ropes for guard in rope["guards"]):
        if guard not in KNOWN_GUARDS:
            yield f"MQALayer.forward rotates back only if {guard}: attention.py must know when that is false"
    for name, text in model["assigned"].items():
        known = KNOWN_VALUES[name]
        if (known is not None and text not in known) or (known is None and "if _is_hip else None" not in text):
            yield f"MQALayer.forward: {name} = {text}"
    for item in model["returns_before"]:
        early = item["value"] == "return x" and not item["after_attention"]
        if not early and "self.use_mega_attention" not in item["guards"]:
            yield f"MQALayer.forward may leave before the inverse RoPE: {item['value']} if {item['guards']}"
    if model["head_slices"] not in KNOWN_SLICES or not model["slices_result"]:
        yield f"MQALayer.forward takes the rank's heads otherwise: {model['head_slices']}"


def _around(version: str, facts: Facts) -> Iterator[str]:
    for name in facts["backend"]["overriding_forward"]:
        yield f"{name} overrides DeepseekV4AttnBackend.forward: the B1 hook does not see its calls"
    if not all("get_mla_metadata()[0]" in text for text in facts["backend"]["metadata"] if text != "None"):
        yield f"FlashMLA's metadata comes from elsewhere: {facts['backend']['metadata']}"
    if facts["plugins"]["group"] != "sglang.srt.plugins":
        yield f"plugins have another entry point group: {facts['plugins']['group']}"
    for part in ("registry", "load_plugins"):
        if facts["plugins"][part] not in KNOWN_FRAMEWORK[part]:
            yield f"the plugin framework's {part} has changed: read it, then add its digest {facts['plugins'][part]}"
    if not any("managers/scheduler.py" in f for f in facts["plugins"]["loaded_in"]):
        yield "the scheduler process no longer loads plugins"
    if not any(facts["deterministic"].values()):
        yield "enable_deterministic_inference can no longer be read as state.py does"
    if taken := {f"SGL_DSV4_{name}" for name in OUR_VARIABLES} & {f"SGL{n[6:]}" for n in facts["environment"]}:
        yield f"SGLang has variables of its own by these names, which it fills from ours: {', '.join(sorted(taken))}"
    if [row[0] for row in facts["prepare_server_args"]] != ["argv"]:
        yield f"prepare_server_args takes {facts['prepare_server_args']}: shadow mode adds a flag to argv"
