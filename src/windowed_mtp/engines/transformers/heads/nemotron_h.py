"""The MTP head of Nemotron-H: tensors ``mtp.layers.*``, a pattern of attention and MoE blocks for each step."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.heads.base import MTPHead, join, layer_config, norm_like, projection
from windowed_mtp.engines.transformers.loading import Checkpoint, fill, fuse_experts
from windowed_mtp.errors import CheckpointError

BLOCK_TYPES = ("full_attention", "moe", "mlp")


class NemotronHHead(MTPHead):
    """``final_layernorm(blocks(eh_proj([enorm(embedding), hnorm(hidden)])))``; the output after the norm is recycled.

    A chained layer is one step: the blocks of the config's MTP pattern, the first with the projection and its norms,
    the last with the final norm. Attention has no rotary embedding.
    """

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)

    @classmethod
    def load(cls, target: PreTrainedModel, checkpoint: Checkpoint) -> NemotronHHead:
        """Build the head from the tensors ``mtp.layers.*``, whatever the prefix of the target's part of the model."""
        names = checkpoint.names(r"(?:language_model\.)?(?:model\.|backbone\.)?mtp\.(?P<name>layers\.\d+\..+)")
        if not names:
            raise checkpoint.headless("tensors named mtp.layers.*")
        what = f"the MTP head of {checkpoint.name_or_path!r}"
        pattern = target.config.get_text_config().mtp_layers_block_type
        if pattern.count("full_attention") != 1 or not set(pattern) <= set(BLOCK_TYPES):
            raise CheckpointError(
                f"{what} repeats the blocks {', '.join(pattern)}, but this version needs exactly one attention block "
                "and else only moe or mlp blocks."
            )
        steps = 1 + max(int(name.split(".")[1]) for name in names) // len(pattern)
        config = layer_config(target, layers_block_type=pattern * steps)
        block_class = type(target.get_decoder().layers[0])
        with torch.device("meta"):
            blocks = nn.ModuleList(block_class(config, i) for i in range(len(pattern) * steps))
            modules = [blocks[i : i + len(pattern)] for i in range(0, len(blocks), len(pattern))]
            for step in modules:
                step[0].enorm = norm_like(target, config.layer_norm_epsilon)
                step[0].hnorm = norm_like(target, config.layer_norm_epsilon)
                step[0].eh_proj = projection(target)
                step[-1].final_layernorm = norm_like(target, config.layer_norm_epsilon)
        tensors = checkpoint.read(names.values())
        fused = fuse_experts({name: tensors[full] for name, full in names.items()}, what)
        fill(nn.ModuleDict({"layers": blocks}), fused, target, target.device, what)
        return cls(target, modules)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run step ``layer``; see the base class."""
        blocks = self.modules[layer]
        hidden = blocks[0].eh_proj(join(blocks[0].enorm(self.embed(tokens)), blocks[0].hnorm(hidden)))
        for block in blocks:
            hidden = self.block(block, hidden, positions, kv) if block.block_type == "full_attention" else block(hidden)
        out = blocks[-1].final_layernorm(hidden)
        return out, out
