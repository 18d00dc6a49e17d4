"""The MTP head of Qwen3.5, Qwen3.6 (dense and MoE) and Qwen3-Next: tensors ``mtp.*``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.heads.base import MTPHead, join, layer_config, norm_like, projection
from windowed_mtp.engines.transformers.loading import Checkpoint, fill, fuse_experts


class Qwen3_5Head(MTPHead):
    """``norm(layer(fc([norm_e(embedding), norm_h(hidden)])))``; the output after the norm is what is recycled.

    Each chained layer is a full-attention decoder layer of the target; the projection and the norms are shared.
    """

    model_types: ClassVar[tuple[str, ...]] = (
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
    )

    @classmethod
    def load(cls, target: PreTrainedModel, checkpoint: Checkpoint) -> Qwen3_5Head:
        """Build the head from the tensors ``mtp.*`` (also below ``model.`` or ``language_model.``)."""
        names = checkpoint.names(r"(?:model\.)?(?:language_model\.)?mtp\.(?P<name>.+)")
        if not names:
            raise checkpoint.headless("tensors named mtp.*")
        what = f"the MTP head of {checkpoint.name_or_path!r}"
        tensors = checkpoint.read(names.values())
        count = 1 + max((int(name.split(".")[1]) for name in names if name.startswith("layers.")), default=0)
        config = layer_config(
            target,
            layer_types=["full_attention"] * count,
            num_hidden_layers=count,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        )
        layer_class = type(target.get_decoder().layers[0])
        with torch.device("meta"):
            module = nn.ModuleDict(
                {
                    "fc": projection(target),
                    "pre_fc_norm_embedding": norm_like(target, config.rms_norm_eps),
                    "pre_fc_norm_hidden": norm_like(target, config.rms_norm_eps),
                    "layers": nn.ModuleList(layer_class(config, k) for k in range(count)),
                    "norm": norm_like(target, config.rms_norm_eps),
                }
            )
        fused = fuse_experts({name: tensors[full] for name, full in names.items()}, what)
        fill(module, fused, target, target.device, what)
        return cls(target, [module] * count)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run layer ``layer``; see the base class."""
        module = self.modules[layer]
        joined = join(module["pre_fc_norm_embedding"](self.embed(tokens)), module["pre_fc_norm_hidden"](hidden))
        out = module["norm"](self.block(module["layers"][layer], module["fc"](joined), positions, kv))
        return out, out
