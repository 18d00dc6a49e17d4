"""What the doctor reads from checkpoints' names, configs and counters; without vLLM."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from windowed_mtp.checkpoint import Inventory
from windowed_mtp.cli import main
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.doctor_acceptance import acceptance
from windowed_mtp.engines.vllm.doctor_head import (
    expected_layers,
    head_findings,
    head_names,
    head_presence,
    unseen_head,
)
from windowed_mtp.engines.vllm.doctor_quantisation import Answer, quantisation_findings, stored_modules
from windowed_mtp.engines.vllm.doctor_rope import rope_findings, rope_of

METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 3000.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 0.0
vllm:num_requests_running{{engine="0"}} 3.0
"""


@pytest.mark.parametrize(
    ("drafts", "accepted", "level", "match"),
    [
        (1000, 1400, "ok", "AL is 2.40 over 1,000 steps, accepted by position 1.40 0.00"),
        (1000, 10, "problem", "AL is 1.01 over 1,000 steps"),
        (50, 70, "warning", "AL is 2.40 over 50 steps"),
        (0, 0, "warning", "has not drafted yet"),
    ],
)
def test_acceptance_by_the_counters(drafts: int, accepted: int, level: str, match: str):
    found = acceptance(METRICS.format(drafts=float(drafts), accepted=float(accepted)))
    assert found.level == level and match in found.cause
    assert (found.remedy is None) == (level == "ok")


def test_counters_of_several_engines_are_added_up():
    first, second = METRICS.format(drafts="400", accepted="400"), METRICS.format(drafts="600", accepted="1100")
    assert "AL is 2.50 over 1,000 steps" in acceptance(first + second.replace('engine="0"', 'engine="1"')).cause


def test_other_metrics_are_refused():
    with pytest.raises(PluginError, match="hold no vllm:spec_decode counters"):
        acceptance("vllm:num_requests_running 3.0\n")


NAMES = {
    "mtp.fc.weight": True,
    "model.language_model.mtp.layers.0.self_attn.q_proj.weight": True,
    "model.mtp_layers.0.input_layernorm.weight": True,
    "model.layers.61.eh_proj.weight": True,
    "language_model.model.layers.61.mlp.experts.3.up_proj.weight": True,
    "model.layers.60.mlp.down_proj.weight": False,
    "model.embed_tokens.weight": False,
    "model.prompted.weight": False,
    "visual.blocks.70.attn.qkv.weight": False,
}


def test_tensors_of_a_head_are_told_by_name_or_by_layer():
    assert head_names(list(NAMES), 61) == sorted(name for name, belongs in NAMES.items() if belongs)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mtp_num_hidden_layers": 1}, 1),
        ({"text_config": {"num_nextn_predict_layers": 3}}, 3),
        ({"num_nextn_predict_layers": 0}, 0),
        ({}, None),
    ],
)
def test_layers_that_a_config_names(config: dict[str, Any], expected: int | None):
    assert expected_layers(config) == expected


def test_a_head_that_is_missing_or_incomplete():
    one = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"]
    assert head_presence([], 1).level == "problem"
    assert head_presence(one, 1).level == head_presence(one, None).level == "ok"
    assert "15" not in head_presence(one, 1).cause and "2 tensors of 1 layer" in head_presence(one, 1).cause
    wrong = head_presence(one, 3)
    assert wrong.level == "problem" and "says 3 layers of MTP, but the checkpoint holds tensors of 1" in wrong.cause


BF16, FP8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
UP, EXPERTS = "mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("tensors", "modules"),
    [
        ({f"{UP}.weight": BF16, "mtp.layers.0.mlp.gate.weight": BF16, "mtp.norm.weight": BF16}, {UP: False}),
        ({f"{UP}.weight": FP8}, {UP: True}),
        ({f"{UP}.weight": FP8, f"{UP}.weight_scale_inv": BF16, "mtp.fc.weight": BF16}, {UP: True, "mtp.fc": False}),
        ({f"{UP}.qweight": INT32, f"{UP}.scales": BF16}, {UP: True}),
        ({f"{UP}.weight_packed": INT32, f"{UP}.weight_scale": BF16, f"{UP}.weight_shape": INT32}, {UP: True}),
        ({"mtp.k_proj.weight": BF16, "mtp.k_proj.k_scale": BF16, "mtp.k_proj.bias": BF16}, {"mtp.k_proj": False}),
        ({f"{EXPERTS}.0.up_proj.weight": BF16, f"{EXPERTS}.1.up_proj.weight": BF16}, {EXPERTS: False}),
        ({f"{EXPERTS}.0.up_proj.weight": FP8, f"{EXPERTS}.0.up_proj.weight_scale": BF16}, {EXPERTS: True}),
        ({f"{EXPERTS}.gate_up_proj": BF16, f"{EXPERTS}.down_proj": BF16}, {EXPERTS: False}),
        ({f"{EXPERTS}.gate_up_proj_blocks": torch.uint8, f"{EXPERTS}.gate_up_proj_scales": BF16}, {EXPERTS: True}),
        ({"model.layers.61.eh_proj.weight": BF16}, {}),
    ],
)
def test_which_modules_of_a_head_are_stored_quantised(
    tensors: dict[str, torch.dtype], modules: dict[str, bool], tmp_path: Path
):
    save_file({name: torch.zeros(2, 2, dtype=dtype) for name, dtype in tensors.items()}, tmp_path / "model.safetensors")
    inventory = Inventory.read(tmp_path)
    assert inventory.dtypes(tensors).keys() == tensors.keys()
    assert stored_modules(inventory, list(tensors)) == modules


def test_scales_tell_where_a_file_is_absent(tmp_path: Path):
    index = {f"{UP}.weight": "away.safetensors", f"{UP}.weight_scale": "away.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert stored_modules(Inventory.read(tmp_path), list(index)) == {UP: True}


@pytest.mark.parametrize(
    ("answer", "level", "match"),
    [
        (Answer("mtp.gate_up_proj", quantised=False), "ok", "where vLLM's fp8 expects it"),
        (Answer("mtp.gate_up_proj", quantised=True), "warning", "vLLM would load mtp.gate_up_proj as quantised"),
        (
            Answer("mtp.gate_up_proj", None, "some shards"),
            "problem",
            "would not load the head's mtp.gate_up_proj: some",
        ),
        (
            Answer("mtp.gate_up_proj", None),
            "warning",
            "be told which of the head's modules vLLM would load as quantised (fp8)",
        ),
        (None, "warning", "be told which of the head's modules vLLM would load as quantised (fp8)"),
    ],
)
def test_what_vllm_answers_of_a_plain_head(answer: Answer | None, level: str, match: str, tmp_path: Path):
    save_file({f"{UP}.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    ask = None if answer is None else lambda module: answer
    [found] = quantisation_findings(Inventory.read(tmp_path), [f"{UP}.weight"], ask, "fp8")
    assert found.level == level and match in found.cause


def plain(module: str) -> Answer:
    return Answer(module, quantised=False)


def checkpoint(folder: Path, norm: torch.Tensor, sharded: bool) -> Path:
    folder.mkdir()
    target = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    head = {"mtp.norm.weight": norm, "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    if not sharded:
        save_file(target | head, folder / "model.safetensors")
        return folder
    for name, part in (("a.safetensors", target), ("b.safetensors", head)):
        save_file(part, folder / name)
    files = {**dict.fromkeys(target, "a.safetensors"), **dict.fromkeys(head, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_that_was_never_trained(sharded: bool, tmp_path: Path):
    trained = Inventory.read(checkpoint(tmp_path / "trained", torch.tensor([1.0, 0.9]), sharded))
    assert len(trained.file_of) == 3
    assert [found.level for found in head_findings(trained, {"mtp_num_hidden_layers": 1}, 1, plain, None)] == ["ok"]
    fresh = Inventory.read(checkpoint(tmp_path / "fresh", torch.ones(2), sharded))
    found = list(head_findings(fresh, {"mtp_num_hidden_layers": 1}, 1, plain, None))
    assert [each.level for each in found] == ["ok", "warning"] and "may be random" in found[1].cause


def test_a_checkpoint_that_is_not_here_cannot_be_looked_at(tmp_path: Path):
    found = unseen_head("nobody/such-a-model-7b")
    assert found.level == "warning" and "not on this machine" in found.cause and found.remedy is not None
    [empty] = head_findings(Inventory.read(tmp_path), {}, 1, plain, None)
    assert empty.level == "warning" and "no safetensors files" in empty.cause


YARN = {"rope_type": "yarn", "factor": 4.0}


def test_rope_settings_of_either_style_are_one():
    new = {"rope_parameters": {**YARN, "rope_theta": 1e6}}
    old = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6}
    assert rope_of(new) == rope_of(old)
    assert rope_of({})["theta"] == 10000.0


@pytest.mark.parametrize(
    ("target", "draft", "trained", "found"),
    [
        ({}, {}, None, [("rope", "ok")]),
        ({}, {}, 4096, [("rope", "ok")]),
        ({}, {}, 4095, [("length", "warning")]),
        ({"rope_scaling": YARN}, {}, None, [("rope", "problem")]),
        ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "factor": 2.0}}, None, [("rope", "problem")]),
        ({"rope_scaling": YARN}, {"rope_scaling": YARN}, None, [("rope", "ok")]),
        ({}, {"rope_scaling": YARN}, None, [("rope", "warning")]),
        ({"rope_theta": 1e6}, {"rope_theta": 1e4}, 512, [("rope", "warning"), ("length", "warning")]),
    ],
)
def test_positions_of_a_draft(target: Any, draft: Any, trained: int | None, found: list[tuple[str, str]]):
    made = list(rope_findings(target, draft, trained, 4096))
    assert [(each.check, each.level) for each in made] == found
    assert all((each.remedy is None) == (each.level == "ok") for each in made)


def test_bad_usage_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cases = [
        (["m", "--metrics", str(tmp_path / "none")], "cannot read"),
        (["m", "--metrics", "http://127.0.0.1:9/metrics"], "cannot read http://127.0.0.1:9/metrics: "),
        (["m", "--json", str(tmp_path / "none" / "out.json")], "does not exist"),
        (["m", "--engine", "other"], "other"),
    ]
    if find_spec("vllm") is None:
        cases.append((["m", "-tp", "2", "--max-model-len", "9"], "vLLM is not installed here"))
    for given, match in cases:
        assert main(["doctor", *given]) == 2
        shown = capsys.readouterr()
        assert match in shown.err and shown.err.startswith("Error: ") and shown.out == ""


def test_the_short_help_flag_is_ours(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "-h"]) == 0
    assert "--metrics" in capsys.readouterr().out
