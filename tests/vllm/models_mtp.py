"""Tiny targets with an MTP head: DeepSeek-V3's with latent attention, GLM-4.5's with full attention and experts.

As in `models`, the target's next token is a permutation of the last one, plus a little of everything before. The head
is given the last token's embedding, so its proposals are right but for an attention that is strong enough to mislead
it now and then.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from models import HIDDEN, VOCAB, attention, followed_by, mlp, norms, random, save
from torch import Tensor

LAYERS = 3
LATENT_HEADS, LATENT, ROTARY, NOPE, VALUE = 2, 512, 64, 32, 32
"""Number of heads, and sizes of a latent key, of its rotary part, and of a head's other part and value; a kernel on the
CPU has the sum of latent key and rotary part compiled in."""
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
"""DeepSeek's own rotary embedding. Without scaling, vLLM 0.32 on a CPU rotates queries of several heads wrongly."""
EXPERTS, EXPERT = 4, 64
"""Number of routed experts, and the width of one."""


def _latent_attention(
    prefix: str, generator: torch.Generator, strength: float, nope: int, value: int
) -> dict[str, Tensor]:
    shapes = {
        "q_proj": (LATENT_HEADS * (nope + ROTARY), HIDDEN, 2.0),
        "kv_a_proj_with_mqa": (LATENT + ROTARY, HIDDEN, 2.0),
        "kv_b_proj": (LATENT_HEADS * (nope + value), LATENT, 1.0),
        "o_proj": (HIDDEN, LATENT_HEADS * value, strength),
    }
    return random(f"{prefix}self_attn.", shapes, generator) | {
        f"{prefix}self_attn.kv_a_layernorm.weight": torch.ones(LATENT)
    }


def _experts(prefix: str, generator: torch.Generator, strength: float) -> dict[str, Tensor]:
    tensors = random(f"{prefix}mlp.", {"gate": (EXPERTS, HIDDEN, 1.0)}, generator)
    tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    for name in (*(f"mlp.experts.{index}." for index in range(EXPERTS)), "mlp.shared_experts."):
        tensors |= mlp(f"{prefix}{name}", generator, EXPERT, strength)
    return tensors


def _latent_layer(prefix: str, generator: torch.Generator, strength: float, nope: int, value: int) -> dict[str, Tensor]:
    dense = mlp(f"{prefix}mlp.", generator, 256, strength)
    return _latent_attention(prefix, generator, strength, nope, value) | dense | norms(prefix)


def _full_layer(prefix: str, generator: torch.Generator, strength: float) -> dict[str, Tensor]:
    return attention(prefix, generator, HIDDEN, strength) | _experts(prefix, generator, strength) | norms(prefix)


def _target_and_head(layer: Any, strength: float) -> dict[str, Tensor]:
    """All tensors of a checkpoint; ``strength`` is the size of what the head's layer adds."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    output = embedding[followed_by(generator)]
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": output,
    }
    for index in range(LAYERS):
        tensors |= layer(f"model.layers.{index}.", generator, 0.2)
    head = f"model.layers.{LAYERS}."
    return (
        tensors
        | layer(head, generator, strength)
        | {
            f"{head}eh_proj.weight": torch.cat([torch.eye(HIDDEN), 0.1 * torch.eye(HIDDEN)], dim=1),
            f"{head}embed_tokens.weight": embedding,
            f"{head}shared_head.head.weight": output,
        }
        | {f"{head}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    )


def _checkpoint(name: str, tensors: dict[str, Tensor], **config: Any) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{name}-")) / "target"
    return save(
        folder, tensors, num_hidden_layers=LAYERS, num_nextn_predict_layers=1, n_routed_experts=EXPERTS,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=EXPERT, n_group=1, topk_group=1, **config,
    )  # fmt: skip


@functools.cache
def deepseek_v3(nope: int = NOPE, value: int = VALUE) -> str:
    """Folder of a target with multi-head latent attention and a head of the same kind, made once a process.

    ``nope`` and ``value`` are the sizes of a head's part without rotation, and of its value.
    """
    return _checkpoint(
        "deepseek-v3", _target_and_head(functools.partial(_latent_layer, nope=nope, value=value), strength=5.0),
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
        num_attention_heads=LATENT_HEADS, num_key_value_heads=LATENT_HEADS, head_dim=ROTARY,
        rope_parameters=YARN,
        q_lora_rank=None, kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY, qk_nope_head_dim=nope, v_head_dim=value,
        first_k_dense_replace=LAYERS + 1,
    )  # fmt: skip


@functools.cache
def glm4_moe() -> str:
    """Folder of a target with full attention and a head of the same kind, made once a process."""
    return _checkpoint(
        "glm4-moe", _target_and_head(_full_layer, strength=5.0),
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", first_k_dense_replace=0,
    )  # fmt: skip
