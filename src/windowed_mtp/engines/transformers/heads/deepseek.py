"""The MTP layers of DeepSeek-V3 and GLM-4.5: decoder layers numbered on from the target's own."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.heads.base import MTPHead, join, layer_config, norm_like, projection
from windowed_mtp.engines.transformers.loading import Checkpoint, fill, fuse_experts

SHARED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""Copies of the target's own tensors, which a layer of the checkpoint may hold."""


class DeepseekHead(MTPHead):
    """``shared_head.norm(layer(eh_proj([enorm(embedding), hnorm(hidden)])))``; the output after the norm is recycled.

    Each chained layer is an MoE decoder layer of the target, with its own projection and norms.
    """

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "glm4_moe")

    @classmethod
    def load(cls, target: PreTrainedModel, checkpoint: Checkpoint) -> DeepseekHead:
        """Build the head from the tensors ``layers.{n}.*`` with n from the target's number of layers on."""
        first = target.config.get_text_config().num_hidden_layers
        found = checkpoint.names(r"(?:language_model\.)?model\.(?:language_model\.)?(?P<name>layers\.\d+\..+)")
        names = {name: full for name, full in found.items() if int(name.split(".")[1]) >= first}
        if not names:
            raise checkpoint.headless(f"layer after the model's {first} (model.layers.{first}.*)")
        what = f"the MTP head of {checkpoint.name_or_path!r}"
        count = 1 + max(int(name.split(".")[1]) for name in names) - first
        config = layer_config(
            target, num_hidden_layers=count, first_k_dense_replace=0, mlp_layer_types=["sparse"] * count
        )
        layer_class = type(target.get_decoder().layers[0])
        with torch.device("meta"):
            layers = [layer_class(config, k) for k in range(count)]
            for layer in layers:
                layer.enorm = norm_like(target, config.rms_norm_eps)
                layer.hnorm = norm_like(target, config.rms_norm_eps)
                layer.eh_proj = projection(target)
                layer.shared_head = nn.ModuleDict({"norm": norm_like(target, config.rms_norm_eps)})
            module = nn.ModuleDict({"layers": nn.ModuleDict({str(first + k): layer for k, layer in enumerate(layers)})})
        own = {name: full for name, full in names.items() if not name.endswith(SHARED)}
        tensors = checkpoint.read(own.values())
        fused = fuse_experts({name: tensors[full] for name, full in own.items()}, what)
        fill(module, fused, target, target.device, what)
        return cls(target, layers)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run layer ``layer``; see the base class."""
        module = self.modules[layer]
        joined = join(module.enorm(self.embed(tokens)), module.hnorm(hidden))
        out = module.shared_head["norm"](self.block(module, module.eh_proj(joined), positions, kv))
        return out, out
