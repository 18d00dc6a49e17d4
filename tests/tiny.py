"""Tiny random checkpoints of every family, with a draft head under the public checkpoints' tensor names."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
HIDDEN = 32


def random_tensors(module: nn.Module, prefix: str, seed: int = 1) -> dict[str, Tensor]:
    """Random weights for a module's parameters, scaled so that outputs differ clearly between tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{prefix}{name}": torch.randn(t.shape, generator=generator) * (0.1 if t.dim() == 1 else t.shape[-1] ** -0.5)
        for name, t in module.state_dict().items()
        if t.is_floating_point()
    }


def save_with_head(model: PreTrainedModel, head: dict[str, Tensor], folder: Path) -> None:
    """Save a model, its weights made less uniform, with the head's tensors in the same file."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})


def qwen3_5(folder: Path, layers: int = 1) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        max_position_embeddings=1024, mtp_num_hidden_layers=layers, tie_word_embeddings=False,
    )  # fmt: skip
    layer_config = Qwen3_5TextConfig(**{**config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1})
    head = random_tensors(nn.Linear(2 * HIDDEN, HIDDEN, bias=False), "mtp.fc.")
    for index in range(layers):
        head |= random_tensors(Qwen3_5DecoderLayer(layer_config, 0), f"mtp.layers.{index}.", seed=2 + index)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head |= random_tensors(Qwen3_5RMSNorm(HIDDEN), f"mtp.{name}.")
    save_with_head(Qwen3_5ForCausalLM(config), head, folder)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5-chained": functools.partial(qwen3_5, layers=3),
}


@functools.cache
def checkpoint(family: str) -> str:
    """Folder of a family's tiny checkpoint, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    BUILDERS[family](folder)
    return str(folder)


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A family's tiny model, loaded from its checkpoint."""
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype).eval()
