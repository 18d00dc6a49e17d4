"""What the doctor says of a quantised head, against the settings as vLLM resolves and matches them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from models_mtp import LAYERS, glm4_moe
from safetensors import safe_open
from safetensors.torch import save_file

from windowed_mtp.engines.vllm.doctor import checkpoint_findings
from windowed_mtp.engines.vllm.doctor_quantisation import Answer, asker
from windowed_mtp.engines.vllm.findings import Finding
from windowed_mtp.engines.vllm.serve_flags import serve_config
from windowed_mtp.reference import checkpoint_path

MTP = {"method": "mtp", "num_speculative_tokens": 3}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PARTS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LEFT_OUT = ["mtp.fc", *(f"mtp.layers.0.{part}" for part in PARTS)]
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, "dynamic": False}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}


def fp8(module: str) -> dict[str, torch.Tensor]:
    return {f"{module}.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn), f"{module}.weight_scale": torch.ones(1)}


def packed(module: str) -> dict[str, torch.Tensor]:
    return {f"{module}.qweight": torch.zeros(2, 2, dtype=torch.int32), f"{module}.scales": torch.ones(1)}


def folder_of(
    source: str | Path, folder: Path, in_config: Any = None, in_file: Any = None, stored: Any = None, head: str = "mtp."
) -> Path:
    """A checkpoint by its tensors' names alone: the values are made up, and modules of the head quantised."""
    folder.mkdir()
    for file in Path(source).glob("*.json"):
        shutil.copy(file, folder)
    with safe_open(Path(source) / "model.safetensors", "pt") as opened:
        names = list(opened.keys())
    tensors = {name: torch.tensor([1.0, 0.5], dtype=torch.bfloat16) for name in names}
    if stored is not None:
        for name in [name for name in names if name.startswith(head) and ("proj" in name or "fc" in name)]:
            if "eh_proj" not in name:
                del tensors[name]
                tensors |= stored(name.removesuffix(".weight"))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if in_config is not None:
        config["quantization_config"] = in_config
    (folder / "config.json").write_text(json.dumps(config))
    if in_file is not None:
        made = {"producer": {"name": "modelopt"}, "quantization": in_file}
        (folder / "hf_quant_config.json").write_text(json.dumps(made))
    return folder


def found_in(folder: Path, *others: str) -> list[Finding]:
    flags = ["--dtype", "bfloat16", "--max-model-len", "512", "--speculative-config", json.dumps(MTP), *others]
    findings = checkpoint_findings(serve_config([str(folder), *flags]))
    return [finding for finding in findings if finding.check == "quantisation"]


CASES: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "nothing": ({}, None, ""),
    "tensors without settings": ({"stored": fp8}, "warning", "is quantised, but with no settings of quantisation vLLM"),
    "fp8, every name": ({"in_config": {**FP8, "modules_to_not_convert": LEFT_OUT}}, "ok", "vLLM's fp8 expects it"),
    "fp8, a part of the name": (
        {"in_config": {**FP8, "modules_to_not_convert": ["mtp"]}},
        "warning",
        "is not quantised, but with fp8 and its list of modules left out vLLM would load mtp.fc as quantised",
    ),
    "fp8, some shards": (
        {"in_config": {**FP8, "modules_to_not_convert": [*LEFT_OUT[:-2], LEFT_OUT[-1]]}},
        "problem",
        "mtp.layers.0.mlp.gate_up_proj: Detected some but not all shards of",
    ),
    "fp8, stored so": ({"in_config": FP8, "stored": fp8}, "ok", "vLLM's fp8 expects it"),
    "fp8, stored so and left out": (
        {"in_config": {**FP8, "modules_to_not_convert": LEFT_OUT}, "stored": fp8},
        "warning",
        "is quantised, but with fp8 and its list of modules left out vLLM would load mtp.fc as it is",
    ),
    "compressed-tensors, pattern": ({"in_config": {**PACKED, "ignore": ["lm_head", "re:mtp.*"]}}, "ok", ""),
    "compressed-tensors, pattern elsewhere": (
        {"in_config": {**PACKED, "ignore": ["lm_head", "re:layers.*"]}},
        "warning",
        "is not quantised",
    ),
    "compressed-tensors, a part of the name": (
        {"in_config": {**PACKED, "ignore": ["mtp.layers.0", "mtp.fc"]}},
        "warning",
        "vLLM would load mtp.layers.0.mlp.down_proj as quantised",
    ),
    "gptq, dynamic": ({"in_config": {**GPTQ, "dynamic": {"-:.*mtp.*": {}}}}, "ok", "auto_gptq"),
    "gptq, not left out": ({"in_config": GPTQ}, "warning", "is not quantised, but with auto_gptq"),
    "awq, told by the tensors": ({"in_config": AWQ}, "ok", "awq"),
    "awq, a part of the name": ({"in_config": {**AWQ, "modules_to_not_convert": ["mtp"]}}, "ok", "awq"),
    "awq, stored so": ({"in_config": AWQ, "stored": packed}, "ok", "awq"),
    "modelopt's file, pattern": ({"in_file": {**MODELOPT, "exclude_modules": ["lm_head", "mtp*"]}}, "ok", "modelopt"),
    "modelopt's file, not left out": (
        {"in_file": {**MODELOPT, "exclude_modules": ["lm_head"]}},
        "warning",
        "is not quantised, but with modelopt and its list of modules left out vLLM would load mtp.fc as quantised",
    ),
    "modelopt's file, stored so": ({"in_file": {**MODELOPT, "exclude_modules": []}, "stored": fp8}, "ok", "modelopt"),
    "nvfp4, fc is left out by vLLM": (
        {"in_file": {**NVFP4, "exclude_modules": [name for name in LEFT_OUT if name != "mtp.fc"]}},
        "ok",
        "modelopt_fp4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_head_and_its_settings(case: str, tmp_path: Path):
    made, level, match = CASES[case]
    found = found_in(folder_of(checkpoint_path(), tmp_path / "made", **made))
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(match in each.cause for each in found)


def test_what_vllm_quantises_while_it_loads_is_stored_plainly(tmp_path: Path):
    folder = folder_of(checkpoint_path(), tmp_path / "made")
    [found] = found_in(folder, "--quantization", "fp8_per_tensor")
    assert found.level == "ok"


HEAD = f"model.layers.{LAYERS}."
OTHERS = [f"{HEAD}{part}" for part in PARTS[:4]] + [f"{HEAD}mlp.shared_experts.{part[4:]}" for part in PARTS[4:]]


@pytest.mark.parametrize(
    ("settings", "level", "match"),
    [
        ({**FP8, "modules_to_not_convert": [*OTHERS, f"{HEAD}mlp.experts"]}, "ok", "fp8"),
        ({**FP8, "modules_to_not_convert": OTHERS}, "warning", f"would load {HEAD}mlp.experts as quantised"),
        ({**PACKED, "ignore": [f"re:.*layers.{LAYERS}.*"]}, "ok", "compressed-tensors"),
        ({**PACKED, "ignore": OTHERS}, "warning", f"would load {HEAD}mlp.experts as quantised"),
        ({**GPTQ, "dynamic": {rf"-:.*layers\.{LAYERS}\..*": {}}}, "ok", "auto_gptq"),
    ],
    ids=["fp8", "fp8 but the experts", "compressed-tensors", "compressed-tensors but the experts", "gptq"],
)
def test_experts_of_a_head(settings: dict[str, Any], level: str, match: str, tmp_path: Path):
    [found] = found_in(folder_of(glm4_moe(), tmp_path / "made", settings, head=HEAD), "--skip-tokenizer-init")
    assert found.level == level and match in found.cause


def test_quantised_experts_of_a_head(tmp_path: Path):
    folder = folder_of(glm4_moe(), tmp_path / "made", FP8, stored=fp8, head=HEAD)
    assert [found.level for found in found_in(folder, "--skip-tokenizer-init")] == ["ok"]


def test_a_head_whose_modules_vllm_renames_is_not_judged(tmp_path: Path):
    settings = {**FP8, "modules_to_not_convert": LEFT_OUT}
    config = serve_config(
        [
            *(str(folder_of(checkpoint_path(), tmp_path / "made", settings)), "--dtype", "bfloat16"),
            *("--max-model-len", "512", "--speculative-config", json.dumps(MTP)),
        ]
    )
    ask = asker(config)
    assert ask is not None
    assert ask("model.mtp_layers.0.mlp.up_proj") == Answer("model.mtp_layers.0.mlp.up_proj", None)
    assert ask("mtp.layers.0.mlp.up_proj") == Answer("mtp.layers.0.mlp.gate_up_proj", quantised=False)
    assert ask("model.layers.9.mlp.up_proj") == Answer("model.layers.9.mlp.gate_up_proj", quantised=True)
