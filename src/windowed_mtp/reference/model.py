"""The reference checkpoint's architecture: a small Qwen3.5 text model and its one-layer MTP head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from windowed_mtp.reference.corpus import VOCAB_SIZE


def reference_config() -> Qwen3_5TextConfig:
    """Build the configuration: 3 Gated DeltaNet layers, 1 full-attention layer, one MTP layer, 3.8M parameters."""
    extras: dict[str, Any] = {  # fields of the public checkpoints that transformers keeps but does not know
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=480,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        **extras,
    )


def _project(attention: Qwen3_5Attention, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Give queries ``(B, heads, n, d)``, keys and values ``(B, kv_heads, n, d)``, output gate ``(B, n, heads * d)``."""
    heads = (*x.shape[:-1], -1, attention.head_dim)
    query, gate = attention.q_proj(x).view(*heads[:-1], 2 * attention.head_dim).chunk(2, dim=-1)
    key = attention.k_norm(attention.k_proj(x).view(heads)).transpose(1, 2)
    value = attention.v_proj(x).view(heads).transpose(1, 2)
    query, key = apply_rotary_pos_emb(attention.q_norm(query).transpose(1, 2), key, *rotary)
    return query, key, value, gate.flatten(2)


class MTPHead(nn.Module):
    """A multi-token-prediction head that shares the target's embedding and language-model head.

    Entry ``i`` holds token ``i+1`` and the target's hidden state ``i`` (after the target's final norm) at position
    ``i``, and predicts token ``i+2``. Deeper drafts put the head's own output (after its final norm) in the place of
    the target's hidden state. The tensors' names are those that public checkpoints carry behind the prefix ``mtp.``.

    Parameters
    ----------
    config : Qwen3_5TextConfig
        The target's configuration, with at least one full-attention layer.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, (config.layer_types or []).index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def unroll(self, embeddings: Tensor, hidden: Tensor, steps: int, last: int | None = None) -> list[Tensor]:
        """Draft from many positions of known texts at once, exactly as drafting one position at a time would.

        A draft that starts at base ``i`` reads, at its step ``s`` (from 1), token ``i+s``. Its queries see the entries
        up to ``i``, which hold the target's hidden states, and the entries of its own earlier steps, which hold the
        head's own. Steps of other bases are masked.

        Parameters
        ----------
        embeddings : Tensor, shape (B, T, size)
            Embeddings of the texts' tokens.
        hidden : Tensor, shape (B, T, size)
            The target's hidden states after its final norm.
        steps : int
            Number of draft steps, at least 1 and less than T.
        last : int, optional
            Draft only from the last so many of the ``T - steps`` bases (0 to T-steps-1); from all by default.

        Returns
        -------
        list of Tensor, each of shape (B, last, size)
            One a step: the head's hidden states, whose logits at step ``s`` predict token ``i+s+1`` of base ``i``.
        """
        layer: Any = self.layers[0]
        attention = layer.self_attn
        total = embeddings.shape[1] - steps
        last = total if last is None else last
        bases = torch.arange(total - last, total, device=hidden.device)
        mask = torch.arange(total, device=hidden.device) <= bases[:, None]
        own_step = torch.eye(last, dtype=torch.bool, device=hidden.device)
        keys, values, outputs = [], [], []
        first, hidden = 0, hidden[:, :total]
        for step in range(1, steps + 1):
            tokens = embeddings[:, first + step : total + step]
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(tokens), self.pre_fc_norm_hidden(hidden)], dim=-1))
            positions = (torch.arange(first, total, device=x.device) + step - 1).expand(3, 1, -1)  # as for M-RoPE
            query, key, value, gate = _project(attention, layer.input_layernorm(x), self.rotary(x, positions))
            keys.append(key)
            values.append(value)
            mixed = F.scaled_dot_product_attention(
                query[:, :, -last:],
                torch.cat(keys, dim=2).repeat_interleave(attention.num_key_value_groups, dim=1),
                torch.cat(values, dim=2).repeat_interleave(attention.num_key_value_groups, dim=1),
                attn_mask=mask,
            )
            x = x[:, -last:] + attention.o_proj(mixed.transpose(1, 2).flatten(2) * gate[:, -last:].sigmoid())
            hidden = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
            outputs.append(hidden)
            mask = torch.cat([mask, own_step], dim=1)
            first = total - last
        return outputs


def save_checkpoint(folder: Path, model: Qwen3_5ForCausalLM, head: MTPHead) -> None:
    """Write ``model.safetensors`` (target and head together, bfloat16), ``config.json`` and the generation config.

    Parameters
    ----------
    folder : Path
        Existing folder; files of these names are replaced.
    model : Qwen3_5ForCausalLM
        The target, with tied embeddings.
    head : MTPHead
        Its draft head.
    """
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    model.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id).save_pretrained(
        folder
    )


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Qwen3_5ForCausalLM, MTPHead]:
    """Load a checkpoint's target and head.

    Parameters
    ----------
    folder : Path
        A folder written by `save_checkpoint`.
    dtype : torch.dtype
        Data type of the parameters.

    Returns
    -------
    tuple of (Qwen3_5ForCausalLM, MTPHead)
        On the CPU, in evaluation mode.
    """
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    head = MTPHead(model.config)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)  # the rotary frequencies stay float32
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict({name.removeprefix("mtp."): t for name, t in tensors.items() if name.startswith("mtp.")})
    return model.eval(), head.eval()
