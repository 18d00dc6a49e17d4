"""A tiny Llama whose greedy choices have large margins, and an EAGLE-3 drafter for it that is right now and then.

The target's next token is a permutation of the last one, plus a little of everything before. The drafter is given the
permutation applied twice, which is right for its first proposal, and attention strong enough to mislead it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 128, 256, 4, 2, 32, 4
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "model_type": "llama", "dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def random(prefix: str, shapes: dict[str, tuple[int, int, float]], generator: torch.Generator) -> dict[str, Tensor]:
    """Matrices by name, each of so many rows and columns, that make numbers of about this size from numbers of one."""
    return {
        f"{prefix}{name}.weight": torch.randn(rows, columns, generator=generator) * scale * columns**-0.5
        for name, (rows, columns, scale) in shapes.items()
    }


def attention(prefix: str, generator: torch.Generator, inputs: int, strength: float) -> dict[str, Tensor]:
    """A layer's attention; ``strength`` is the size of what it adds."""
    shapes = {
        "q_proj": (HEADS * HEAD_DIM, inputs, 2.0),
        "k_proj": (KV_HEADS * HEAD_DIM, inputs, 2.0),
        "v_proj": (KV_HEADS * HEAD_DIM, inputs, 1.0),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM, strength),
    }
    return random(f"{prefix}self_attn.", shapes, generator)


def mlp(prefix: str, generator: torch.Generator, width: int, strength: float) -> dict[str, Tensor]:
    """A gated MLP; ``strength`` is the size of what it adds."""
    shapes = {
        "gate_proj": (width, HIDDEN, 1.0),
        "up_proj": (width, HIDDEN, 1.0),
        "down_proj": (HIDDEN, width, strength),
    }
    return random(prefix, shapes, generator)


def norms(prefix: str) -> dict[str, Tensor]:
    """A layer's two norms."""
    return {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}


def layer(prefix: str, generator: torch.Generator, inputs: int, strength: float) -> dict[str, Tensor]:
    """A decoder layer's tensors; ``strength`` is the size of what it adds."""
    parts = attention(prefix, generator, inputs, strength), mlp(f"{prefix}mlp.", generator, INTERMEDIATE, strength)
    return {**parts[0], **parts[1], **norms(prefix)}


def followed_by(generator: torch.Generator, vocab: int = VOCAB) -> Tensor:
    """``[vocab]``: the token that each token follows, a permutation."""
    return torch.randperm(vocab, generator=generator).argsort()


def save(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    """Write a checkpoint in bfloat16; ``config`` goes over `CONFIG`."""
    folder.mkdir(parents=True)
    save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


@functools.cache
def llama_with_eagle3(vocab: int = VOCAB, sharpness: float = 1.0, misled: float = 3.0) -> tuple[str, str]:
    """Folders of the target and of its drafter, made once a process.

    ``sharpness`` is a factor of their logits, and ``misled`` the size of what the drafter's layer adds.
    """
    folder, generator = Path(tempfile.mkdtemp(prefix="tiny-llama-eagle3-")), torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab, HIDDEN, generator=generator)
    before = followed_by(generator, vocab)
    target = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": sharpness * embedding[before],
    }
    for index in range(LAYERS):
        target |= layer(f"model.layers.{index}.", generator, HIDDEN, strength=0.2)
    drafter = {
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)], dim=1),
        "norm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": sharpness * embedding[before[before]],
        **layer("midlayer.", generator, 2 * HIDDEN, strength=misled),
    }
    return (
        save(
            folder / "target", target, architectures=["LlamaForCausalLM"], num_hidden_layers=LAYERS, vocab_size=vocab,
        ),
        save(
            folder / "eagle3", drafter, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1,
            vocab_size=vocab, draft_vocab_size=vocab, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        ),
    )  # fmt: skip


def random_prompts(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
