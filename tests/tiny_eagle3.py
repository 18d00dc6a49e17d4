"""Tiny random EAGLE-3 drafters, in the layouts that public ones are published in, and targets for them."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 48
DRAFT_VOCAB = 61


@dataclass(frozen=True)
class Drafter:
    """What one published drafter differs in from another.

    ``config`` is what its config.json says beside the sizes, in the layout of the variant; the other fields are what
    that means, for a reference to go by.
    """

    target: str = "llama"
    layers: tuple[int, ...] = (2, 3, 5)
    draft_vocab: int = DRAFT_VOCAB
    embedding_rows: int = 0
    norm_before_residual: bool = False
    norm_output: bool = False
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    layer_name: str = "midlayer"
    nested: bool = False
    config: dict[str, Any] = field(default_factory=dict, hash=False)


DRAFTERS = {
    # The first published layout: the target's embedding, a draft vocabulary.
    "draft-vocabulary": Drafter(config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}),
    # The same as a full model: everything below "model.", an embedding of its own (padded), the whole vocabulary.
    "whole-vocabulary": Drafter(
        draft_vocab=tiny.VOCAB, embedding_rows=104, norm_before_residual=True, norm_output=True, rope_factor=2.0,
        layer_name="model.layers.0",
        config={
            "eagle_aux_hidden_state_layer_ids": [5, 3, 2], "norm_before_residual": True, "norm_output": True,
            "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    # The layout of the speculators library; the ids name the layers that give the features.
    "speculators": Drafter(
        norm_before_residual=True, rope_theta=500.0, layer_name="layers.0", nested=True,
        config={
            "speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "rope_theta": 500.0,
        },
    ),
    # On a hybrid target, whose recurrent layers are rolled back.
    "hybrid": Drafter(
        target="qwen3_5", layers=(0, 1), config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    ),
}  # fmt: skip


def weights(name: str) -> dict[str, Tensor]:
    """A drafter's tensors by the names of the first layout, float32; ``d2t`` and ``t2d`` where it has them."""
    drafter, hidden = DRAFTERS[name], tiny.HIDDEN
    generator = torch.Generator().manual_seed(len(name))
    shapes = {
        "fc": (hidden, hidden * len(drafter.layers)),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INTERMEDIATE, hidden),
        "midlayer.mlp.up_proj": (INTERMEDIATE, hidden),
        "midlayer.mlp.down_proj": (hidden, INTERMEDIATE),
        "lm_head": (drafter.draft_vocab, hidden),
    }
    if drafter.embedding_rows:
        shapes["embed_tokens"] = (drafter.embedding_rows, hidden)
    made = {f"{k}.weight": torch.randn(s, generator=generator) * s[1] ** -0.5 for k, s in shapes.items()}
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        made[f"{norm}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    for name_of, scale in (("q_proj", 3.0), ("k_proj", 3.0)):  # attention that looks at some keys more than at others
        made[f"midlayer.self_attn.{name_of}.weight"] *= scale
    if drafter.draft_vocab < tiny.VOCAB:
        ids = torch.randperm(tiny.VOCAB, generator=generator)[: drafter.draft_vocab].sort().values
        made["d2t"] = ids - torch.arange(drafter.draft_vocab)
        made["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return made


def config(name: str) -> dict[str, Any]:
    """A drafter's config.json."""
    drafter = DRAFTERS[name]
    layer = {
        "hidden_size": tiny.HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": drafter.embedding_rows or tiny.VOCAB, "max_position_embeddings": 1024, "rope_scaling": None,
    }  # fmt: skip
    if drafter.nested:
        layer["rope_theta"] = drafter.config["rope_theta"]
        return {"transformer_layer_config": layer, "draft_vocab_size": drafter.draft_vocab, **drafter.config}
    return {"model_type": "llama", "draft_vocab_size": drafter.draft_vocab, **layer, **drafter.config}


def save(folder: Path, name: str, drop: str = "", tensors: dict[str, Tensor] | None = None, **changes: Any) -> str:
    """Save a drafter with config fields changed (``None`` for null), tensors replaced, or one dropped."""
    made = {**weights(name), **(tensors or {})}
    made.pop(drop, None)
    layer_name = DRAFTERS[name].layer_name
    prefix = "model." if layer_name.startswith("model.") else ""
    named = {
        key.replace("midlayer", layer_name)
        if key.startswith("midlayer")
        else key if key in ("d2t", "t2d", "lm_head.weight") else f"{prefix}{key}": tensor
        for key, tensor in made.items()
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config(name), **changes}))
    return str(folder)


@functools.cache
def checkpoint(name: str) -> str:
    """Folder of a tiny drafter, made once a process."""
    return save(Path(tempfile.mkdtemp(prefix=f"tiny-eagle3-{name}-")), name)


def llama(layers: int = 6, **changes: Any) -> LlamaForCausalLM:
    """A tiny Llama, not saved anywhere."""
    sizes: dict[str, Any] = {
        "vocab_size": tiny.VOCAB, "hidden_size": tiny.HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


@functools.cache
def target(name: str) -> PreTrainedModel:
    """The model that a drafter is for, loaded from its checkpoint."""
    if DRAFTERS[name].target != "llama":
        return tiny.model(DRAFTERS[name].target)
    return _llama()


@functools.cache
def _llama() -> PreTrainedModel:
    folder = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    tiny.save_with_head(llama(), {}, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
