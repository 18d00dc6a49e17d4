"""Tiny random checkpoints of every family, with a draft head under the public checkpoints' tensor names."""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from windowed_mtp.engines.transformers import WindowedMTP
from windowed_mtp.engines.transformers.heads import load_head
from windowed_mtp.engines.transformers.heads.base import DraftHead

VOCAB = 97
HIDDEN = 32


def random_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Random weights for a module's tensors, scaled so that outputs differ clearly between tokens."""
    generator = torch.Generator().manual_seed(zlib.crc32(prefix.encode()))
    tensors = {}
    for name, t in module.state_dict().items():
        noise = torch.randn(t.shape, generator=generator)
        tensors[f"{prefix}{name}"] = t + 0.1 * noise if t.dim() == 1 else noise * t.shape[-1] ** -0.5
    return tensors


def unfused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split stacked expert weights into one tensor an expert, as the public checkpoints store them."""
    split = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("experts") or tensor.dim() != 3:
            split[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for part, values in zip(names, expert.chunk(len(names)), strict=True):
                split[f"{prefix}.{index}.{part}.weight"] = values.clone()
    return split


def save_with_head(model: PreTrainedModel, head: dict[str, Tensor], folder: Path) -> None:
    """Save a model, its weights made less uniform, with the head's tensors in the same file."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})


def qwen_head(config: Any, layer_class: Any, norm_class: Any, layers: int) -> dict[str, Tensor]:
    """Tensors ``mtp.*`` of the Qwen families."""
    config = type(config)(**{**config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1})
    head = random_tensors(nn.Linear(2 * HIDDEN, HIDDEN, bias=False), "mtp.fc.")
    for index in range(layers):
        head |= random_tensors(layer_class(config, 0), f"mtp.layers.{index}.")
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head |= random_tensors(norm_class(HIDDEN), f"mtp.{name}.")
    return unfused(head)


HYBRID: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=1024,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def qwen3_5(folder: Path, layers: int = 1) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    config = Qwen3_5TextConfig(**HYBRID, mtp_num_hidden_layers=layers)
    save_with_head(Qwen3_5ForCausalLM(config), qwen_head(config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, layers), folder)


def qwen3_5_moe(folder: Path) -> None:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

    config = Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS)
    head = qwen_head(config, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, layers=1)
    save_with_head(Qwen3_5MoeForCausalLM(config), head, folder)


def qwen3_next(folder: Path) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

    config = Qwen3NextConfig(**HYBRID, **EXPERTS, mlp_only_layers=[])
    head = qwen_head(config, Qwen3NextDecoderLayer, Qwen3NextRMSNorm, layers=1)
    save_with_head(Qwen3NextForCausalLM(config), head, folder)


def numbered_head(config: Any, layer_class: Any, norm_class: Any, layers: int) -> dict[str, Tensor]:
    """Tensors ``model.layers.{N + k}.*`` of the DeepSeek and GLM families, with their copies of the shared ones."""
    config.num_nextn_predict_layers, first, head = layers, config.num_hidden_layers, {}
    for index in range(first, first + layers):
        parts = {
            "": layer_class(config, config.first_k_dense_replace),
            "eh_proj.": nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
            "embed_tokens.": nn.Embedding(VOCAB, HIDDEN),
            "shared_head.head.": nn.Linear(HIDDEN, VOCAB, bias=False),
            **{f"{name}.": norm_class(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")},
        }
        for name, module in parts.items():
            head |= random_tensors(module, f"model.layers.{index}.{name}")
    return unfused(head)


NUMBERED: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, first_k_dense_replace=1,
    num_attention_heads=4, max_position_embeddings=1024, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, moe_intermediate_size=16, tie_word_embeddings=False,
)  # fmt: skip


def deepseek_v3(folder: Path, layers: int = 1) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

    config = DeepseekV3Config(
        **NUMBERED, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    )  # fmt: skip
    head = numbered_head(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, layers)
    save_with_head(DeepseekV3ForCausalLM(config), head, folder)


def glm4_moe(folder: Path) -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

    config = Glm4MoeConfig(**NUMBERED, num_key_value_heads=2, head_dim=16, attention_bias=True, use_qk_norm=True)
    save_with_head(Glm4MoeForCausalLM(config), numbered_head(config, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, 1), folder)


def nemotron_h(folder: Path) -> None:
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

    config = NemotronHConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, layers_block_type=["linear_attention", "moe", "full_attention"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, intermediate_size=48,
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=16, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, moe_latent_size=16,
        mtp_layers_block_type=["full_attention", "moe"], num_nextn_predict_layers=1,
    )  # fmt: skip
    head = random_tensors(NemotronHBlock(config, 2), "mtp.layers.0.")
    head |= random_tensors(NemotronHBlock(config, 1), "mtp.layers.1.")
    head |= random_tensors(nn.Linear(2 * HIDDEN, HIDDEN, bias=False), "mtp.layers.0.eh_proj.")
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        head |= random_tensors(NemotronHRMSNorm(HIDDEN), f"mtp.layers.{name}.")
    save_with_head(NemotronHForCausalLM(config), unfused(head), folder)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5-chained": functools.partial(qwen3_5, layers=3),
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_next": qwen3_next,
    "deepseek_v3": deepseek_v3,
    "deepseek_v3-chained": functools.partial(deepseek_v3, layers=3),
    "glm4_moe": glm4_moe,
    "nemotron_h": nemotron_h,
}


@functools.cache
def checkpoint(family: str) -> str:
    """Folder of a family's tiny checkpoint, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BUILDERS[family](folder)
    return str(folder)


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A family's tiny model, loaded from its checkpoint."""
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype).eval()


@functools.cache
def head(family: str) -> DraftHead:
    """A family's head, loaded once a process."""
    return load_head(model(family))


def drafter(family: str, **options: Any) -> WindowedMTP:
    """A drafter of a family."""
    return WindowedMTP(model(family), head(family), **options)


def feature_size(family: str) -> int:
    """Width of the target features that a family's head takes."""
    layers = head(family).feature_layers()
    return HIDDEN * (len(layers) if layers else 1)
