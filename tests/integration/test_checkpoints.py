"""Checkpoints as people have them: multimodal wrappers, several files, tied embeddings, stretched positions."""

from pathlib import Path

import pytest
import tiny
import torch
from checks import prompt
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.loading import Checkpoint
from windowed_mtp.errors import CheckpointError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.25,
}


def save_qwen(folder: Path, **changes) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    config = Qwen3_5TextConfig(**{**tiny.HYBRID, **changes})
    head = tiny.qwen_head(config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 1)
    tiny.save_with_head(Qwen3_5ForCausalLM(config), head, folder)


def save_wrapper(folder: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": tiny.HIDDEN,
        "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    text = {**tiny.HYBRID, "rope_parameters": rope}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    head = tiny.qwen_head(config.text_config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 1)
    tiny.save_with_head(Qwen3_5ForConditionalGeneration(config), head, folder)


def check(model: PreTrainedModel) -> WindowedMTP:
    """Greedy output equals plain greedy on short and long prompts."""
    made = WindowedMTP.from_model(model, window=SinkWindow(4, 16), keep="ring", prefill="pruned")
    for length in (5, 60):
        ids = prompt(length)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        options["attention_mask"] = torch.ones_like(ids)
        truth = model.generate(ids, **options)
        assert model.generate(ids, custom_generate=made, **options).equal(truth)
    return made


@pytest.mark.parametrize("load", [AutoModelForImageTextToText, AutoModelForCausalLM], ids=lambda load: load.__name__)
def test_a_multimodal_wrapper_decodes_text(load, tmp_path: Path):
    save_wrapper(tmp_path)
    check(load.from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_several_files(tmp_path: Path):
    save_qwen(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32).eval()
    single = WindowedMTP.from_model(model)
    split_in_two(tmp_path / "one" / "model.safetensors", tmp_path / "two")
    several = WindowedMTP.from_model(model, checkpoint=str(tmp_path / "two"))
    for a, b in zip(
        single.head.modules[0].state_dict().items(), several.head.modules[0].state_dict().items(), strict=True
    ):
        assert a[0] == b[0] and a[1].equal(b[1])
    (tmp_path / "two" / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-2\.safetensors in its index, but the file is missing"):
        WindowedMTP.from_model(model, checkpoint=str(tmp_path / "two"))


def split_in_two(source: Path, folder: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors = load_file(source)
    file_of = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file_name in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file_name}, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def test_tied_embeddings(tmp_path: Path):
    save_qwen(tmp_path, tie_word_embeddings=True)
    check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_yarn_of_the_target_reaches_the_draft(tmp_path: Path):
    save_qwen(tmp_path, rope_parameters=YARN)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rotary = check(model).head.rotary
    assert rotary.rope_type == "yarn"
    hidden, positions = torch.zeros(1, 3, tiny.HIDDEN), torch.arange(3).expand(3, 1, -1) + 500
    for drafted, targets in zip(rotary(hidden, positions), model.model.rotary_emb(hidden, positions), strict=True):
        assert drafted.equal(targets)
    default = tiny.head("qwen3_5").rotary(hidden, positions)
    assert not rotary(hidden, positions)[0].allclose(default[0])


def test_a_stray_file_beside_the_model_does_not_take_its_tensors_place(tmp_path: Path):
    for name, value in (("model", 1.0), ("optimizer", 0.0)):
        save_file({"mtp.a": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    save_file({"mtp.b": torch.ones(2)}, tmp_path / "mtp.safetensors")
    read = Checkpoint(str(tmp_path)).read(["mtp.a", "mtp.b"])
    assert read["mtp.a"].tolist() == read["mtp.b"].tolist() == [1.0, 1.0]
