"""The bundled checkpoint is what its README says, and the code that trains it computes what it should."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5
from typer.testing import CliRunner

from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.reference import acceptance, checkpoint_path
from windowed_mtp.reference.delta_rule import chunked_gated_delta_rule, trainable_delta_rule
from windowed_mtp.reference.model import load_checkpoint
from windowed_mtp.reference.train import app
from windowed_mtp.workloads.stdlib import documents, heldout_text, split_of

HEAD_TENSORS = {
    "fc.weight": (256, 512),
    "pre_fc_norm_embedding.weight": (256,),
    "pre_fc_norm_hidden.weight": (256,),
    "norm.weight": (256,),
    "layers.0.input_layernorm.weight": (256,),
    "layers.0.post_attention_layernorm.weight": (256,),
    "layers.0.self_attn.q_proj.weight": (512, 256),
    "layers.0.self_attn.k_proj.weight": (128, 256),
    "layers.0.self_attn.v_proj.weight": (128, 256),
    "layers.0.self_attn.o_proj.weight": (256, 256),
    "layers.0.self_attn.q_norm.weight": (64,),
    "layers.0.self_attn.k_norm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (480, 256),
    "layers.0.mlp.up_proj.weight": (480, 256),
    "layers.0.mlp.down_proj.weight": (256, 480),
}


@pytest.fixture(scope="module")
def checkpoint():
    return load_checkpoint(checkpoint_path())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoint_path(), local_files_only=True)


@pytest.fixture(scope="module")
def heldout(tokenizer):
    """Held-out tokens, shape (3, 1024)."""
    ids = [tokenizer(heldout_text(20_000, seed))["input_ids"][:1024] for seed in range(3)]
    return torch.tensor(ids)


def test_files_are_small():
    assert sum(path.stat().st_size for path in checkpoint_path().iterdir()) <= 8_000_000


def test_config():
    config = json.loads((checkpoint_path() / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 1
    assert "mrope_section" not in config["rope_parameters"]
    generation = json.loads((checkpoint_path() / "generation_config.json").read_text())
    assert config["eos_token_id"] == config["pad_token_id"] == 0
    assert generation["eos_token_id"] == generation["pad_token_id"] == 0


def test_tensors():
    with safe_open(checkpoint_path() / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    head = {n.removeprefix("mtp."): tuple(t.shape) for n, t in tensors.items() if n.startswith("mtp.")}
    assert head == HEAD_TENSORS
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors


def test_auto_classes_load_it():
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), local_files_only=True, output_loading_info=True
    )
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_tokenizer_round_trip(tokenizer):
    text = heldout_text(30_000, seed=1) + " \t\n漢字 é\r\n<|endoftext|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert max(ids) < len(tokenizer) == 2048
    assert len(ids) < len(text) / 2


def test_target_predicts_heldout_text(checkpoint, heldout):
    assert acceptance.next_token_loss(checkpoint[0], heldout.flatten(), 1024) < 2.2


def test_drafts_are_accepted(checkpoint, heldout):
    model, head = checkpoint
    ids = acceptance.greedy_continuation(model, heldout[:, :512], 44)
    matches = acceptance.draft_matches(model, head, ids, depth=4, last=40)
    assert matches.shape == (4, 3, 40)
    first, *deeper = acceptance.conditional_acceptance(matches)
    assert first > 0.55 and min(deeper) > 0.5
    assert acceptance.acceptance_length(matches) > 2


def test_acceptance_arithmetic():
    matches = torch.tensor([[[1, 1, 0, 1]], [[1, 0, 1, 0]]], dtype=torch.bool)
    assert acceptance.conditional_acceptance(matches) == [0.75, pytest.approx(1 / 3)]
    # base 0: 2 drafts and 1 token, on to base 3: 1 draft and 1 token
    assert acceptance.acceptance_length(matches) == 2.5


@pytest.mark.parametrize("last", [None, 5])
def test_unroll_equals_drafting_from_one_position(checkpoint, last):
    model, head = load_checkpoint(checkpoint_path(), torch.float32)
    ids = torch.randint(1, 2048, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, embeddings = model.model(input_ids=ids).last_hidden_state, model.model.embed_tokens(ids)
        outputs = head.unroll(embeddings, hidden, steps=3, last=last)
        base = 18  # the third from the last of 21 bases
        entries = hidden[:, : base + 1]
        for step, output in enumerate(outputs, start=1):
            tokens = embeddings[:, 1 : base + step + 1]
            x = head.fc(torch.cat([head.pre_fc_norm_embedding(tokens), head.pre_fc_norm_hidden(entries)], dim=-1))
            rotary = head.rotary(x, torch.arange(base + step).expand(3, 1, -1))
            own = head.norm(head.layers[0](x, position_embeddings=rotary, attention_mask=None))[:, -1:]
            torch.testing.assert_close(output[:, -3:-2], own, rtol=1e-4, atol=1e-4)
            entries = torch.cat([entries, own], dim=1)


def test_trainable_delta_rule_equals_transformers():
    torch.manual_seed(0)
    shapes = [(2, 100, 2, 16)] * 2 + [(2, 100, 2, 24)]
    inputs = [torch.randn(shape) for shape in shapes] + [-torch.rand(2, 100, 2), torch.rand(2, 100, 2)]
    weight = torch.randn(2, 100, 2, 24)
    results = []
    for rule in (modeling_qwen3_5.torch_chunk_gated_delta_rule, chunked_gated_delta_rule):
        q, k, v, g, beta = leaves = [x.clone().requires_grad_() for x in inputs]
        output, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        (output * weight).sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_trainable_delta_rule_is_taken_back():
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    with pytest.raises(KeyError), trainable_delta_rule():
        assert modeling_qwen3_5.torch_chunk_gated_delta_rule is chunked_gated_delta_rule
        raise KeyError
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is original


def test_training_runs(tmp_path, heldout):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (data / name).write_bytes((checkpoint_path() / name).read_bytes())
    stream = heldout.flatten().numpy().astype(np.uint16)
    np.savez(data / "tokens.npz", train=stream, heldout=stream[:300], python="3")
    options = ["--max-steps", "2", "--length", "16", "--batch", "2", "--draft-steps", "2"]
    result = CliRunner().invoke(app, ["fit", str(data), str(out), *options])
    assert result.exit_code == 0, result.output
    events = [json.loads(line)["event"] for line in (out / "training.log").read_text().splitlines()]
    assert {"start", "target", "head", "held-out loss", "acceptance"} <= set(events)
    load_checkpoint(out)


def test_split_is_by_name_alone():
    train, heldout = ({name for name, _ in documents(split)} for split in ("train", "heldout"))
    assert not train & heldout
    assert 0.02 < len(heldout) / len(train | heldout) < 0.1
    assert split_of("statistics.py") == "heldout" and split_of("json/decoder.py") == "train"


def test_heldout_text_has_the_length_asked_for():
    text = heldout_text(100_000, seed=3)
    assert len(text) == 100_000 and text == heldout_text(100_000, seed=3)
    assert text[:1000] != heldout_text(1000, seed=4)


@pytest.mark.parametrize("characters", [0, -1, 10**9])
def test_heldout_text_refuses_what_it_does_not_have(characters):
    with pytest.raises(WindowedMTPError, match="ask for 1 to"):
        heldout_text(characters)
