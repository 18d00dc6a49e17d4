"""Tiny drafters in checkpoints of their own: EAGLE, one that drafts in parallel (DFlash), and an independent model.

The targets' next token is a permutation of the last one, plus a little of everything before. A DFlash drafter's queries
are the last token and masks; it is given attention that finds the last token from the first mask, and not from the
others. The independent draft model is given the permutation itself, and EAGLE's drafter the last token's embedding,
for the target's output head. Attention to what came before misleads all of them.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from models import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, followed_by, layer, llama_with_eagle3, save
from safetensors.torch import load_file
from torch import Tensor

DRAFT_LAYERS = 2
MASK = VOCAB - 1
THETA = 10.0
"""Rotary base of the DFlash drafter: near positions have to look different."""
NORMS = {f"self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}


def _looks_one_back(generator: torch.Generator) -> dict[str, Tensor]:
    """An attention layer whose scores are highest one position back, whatever stands there, and that copies it."""
    half = HEAD_DIM // 2
    angles = THETA ** -(torch.arange(half) / half)
    one = torch.cat([torch.ones(half), torch.zeros(half)])
    turned = torch.cat([angles.cos(), -angles.sin()])  # so that rotary embeddings align it with what is one back
    copied = torch.linalg.qr(torch.randn(HIDDEN, KV_HEADS * HEAD_DIM, generator=generator)).Q
    of_heads = copied.view(HIDDEN, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, dim=1).flatten(1)

    def noise(heads: int) -> Tensor:
        return torch.randn(heads * HEAD_DIM, HIDDEN, generator=generator) * 0.6 * HIDDEN**-0.5

    return {
        "q_proj.weight": noise(HEADS),
        "q_proj.bias": turned.repeat(HEADS),
        "k_proj.weight": noise(KV_HEADS),
        "k_proj.bias": one.repeat(KV_HEADS),
        "v_proj.weight": copied.T,
        "v_proj.bias": torch.zeros(KV_HEADS * HEAD_DIM),
        "o_proj.weight": 4 * of_heads,
        "o_proj.bias": torch.zeros(HIDDEN),
    }


@functools.cache
def qwen3_with_dflash() -> tuple[str, str]:
    """Folders of the target and of its drafter, made once a process."""
    folder, generator = Path(tempfile.mkdtemp(prefix="tiny-qwen3-dflash-")), torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    before = followed_by(generator)
    target = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": embedding[before],
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        target |= layer(prefix, generator, HIDDEN, strength=0.2)
        target |= {f"{prefix}{name}": norm for name, norm in NORMS.items()}
    drafter = {
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for index, strength in enumerate((0.2, 0.5)):
        prefix = f"layers.{index}."
        drafter |= layer(prefix, generator, HIDDEN, strength)
        drafter |= {f"{prefix}{name}": norm for name, norm in NORMS.items()}
        for name, tensor in _looks_one_back(generator).items():
            if index == 0 or name.endswith("bias"):
                drafter[f"{prefix}self_attn.{name}"] = tensor
    drafter["layers.0.self_attn.q_norm.weight"] = torch.full((HEAD_DIM,), 16.0)
    return (
        save(
            folder / "target", target, model_type="qwen3", architectures=["Qwen3ForCausalLM"], rms_norm_eps=1e-6,
            num_hidden_layers=LAYERS,
        ),
        save(
            folder / "drafter", drafter, model_type="qwen3", architectures=["DFlashDraftModel"], rms_norm_eps=1e-6,
            num_hidden_layers=DRAFT_LAYERS, attention_bias=True, block_size=4,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            dflash_config={"target_layer_ids": [0, 2], "mask_token_id": MASK},
        ),
    )  # fmt: skip


@functools.cache
def llama_with_draft_model() -> tuple[str, str]:
    """Folders of EAGLE-3's target and of an independent draft model for it, made once a process."""
    target, generator = llama_with_eagle3()[0], torch.Generator().manual_seed(1)
    tensors = load_file(Path(target) / "model.safetensors")
    drafter = {name: tensors[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for index in range(DRAFT_LAYERS):
        drafter |= layer(f"model.layers.{index}.", generator, HIDDEN, strength=3.0)
    folder = Path(tempfile.mkdtemp(prefix="tiny-draft-model-"))
    return target, save(folder / "drafter", drafter, architectures=["LlamaForCausalLM"], num_hidden_layers=DRAFT_LAYERS)


@functools.cache
def llama_with_eagle() -> tuple[str, str]:
    """Folders of EAGLE-3's target and of an EAGLE drafter for it, made once a process."""
    target, generator = llama_with_eagle3()[0], torch.Generator().manual_seed(2)
    drafter = {
        "embed_tokens.weight": load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"],
        "fc.weight": torch.cat([torch.eye(HIDDEN), 0.1 * torch.eye(HIDDEN)], dim=1),
        **layer("layers.0.", generator, HIDDEN, strength=5.0),
    }
    del drafter["layers.0.input_layernorm.weight"]
    folder = Path(tempfile.mkdtemp(prefix="tiny-eagle-"))
    return target, save(folder / "drafter", drafter, architectures=["LlamaForCausalLM"], num_hidden_layers=1)
