"""An EAGLE-3 drafter (arXiv 2503.01840): one Llama layer on features from three depths of the target."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.engines.transformers.heads.base import DraftHead, join
from windowed_mtp.engines.transformers.heads.eagle3_config import Eagle3Config
from windowed_mtp.engines.transformers.loading import Checkpoint, fill
from windowed_mtp.errors import CheckpointError, VocabularyError


class Eagle3Head(DraftHead):
    """``norm(layer([norm_e(embedding), norm_h(hidden)]))``, where the target's features give the first ``hidden``.

    The layer's attention takes both halves, its residual stream the hidden state alone. The output before the final
    norm is what is recycled. The output head covers a draft vocabulary, a subset of the target's.

    Parameters
    ----------
    target : PreTrainedModel
        The target.
    config : Eagle3Config
        The drafter's config.
    layers : list of int
        Target layers whose inputs are the features, ascending.
    module : nn.ModuleDict
        The drafter's weights, by their published names; without an embedding or output head of its own it uses the
        target's.
    token_ids : Tensor or None
        The target's id of each draft id, ``[draft_vocab_size]`` int64; ``None`` where the vocabularies are one.
    """

    num_layers = 1

    def __init__(
        self,
        target: PreTrainedModel,
        config: Eagle3Config,
        layers: list[int],
        module: nn.ModuleDict,
        token_ids: Tensor | None,
    ) -> None:
        self.config = config
        self.layers = layers
        self.module: Any = module
        self.token_ids = token_ids
        self.vocab_size = target.get_output_embeddings().weight.shape[0]
        self.embed = module["embed_tokens"] if "embed_tokens" in module else target.get_input_embeddings()
        self.lm_head = module["lm_head"] if "lm_head" in module else target.get_output_embeddings()
        self.rotary = LlamaRotaryEmbedding(config.layer).to(target.device)
        self.cache_argument = cache_argument(module.get_submodule("midlayer.self_attn"))

    @classmethod
    def load(cls, target: PreTrainedModel, name: str) -> Eagle3Head:
        """Build the head from a drafter's checkpoint.

        Parameters
        ----------
        target : PreTrainedModel
            A transformers causal language model.
        name : str
            Folder or hub name of the drafter.

        Raises
        ------
        CheckpointError
            If there is no drafter, or it is of a variant that is not supported, or it does not fit the target.

        Warns
        -----
        UserWarning
            If the drafter was made for fewer positions than the target.
        """
        config = Eagle3Config.load(name)
        what = f"the EAGLE-3 drafter {name!r}"
        target_config = target.config.get_text_config()
        if config.target_hidden_size != target_config.hidden_size:
            raise CheckpointError(
                f"{what} takes features of size {config.target_hidden_size}, but the model's are "
                f"{target_config.hidden_size}; use a drafter that was trained for this model."
            )
        tensors = _read(name)
        offsets = tensors.pop("d2t", None)
        vocab_size = target.get_output_embeddings().weight.shape[0]
        if offsets is None and config.draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{what} has {config.draft_vocab_size} tokens, the model {vocab_size}, but no tensor d2t says which; "
                "use a drafter that was trained for this model."
            )
        layers = feature_layers(config, len(target.get_decoder().layers))
        shares = config.layer.hidden_size == target_config.hidden_size
        with torch.device("meta"):
            module = _build(
                config,
                len(layers),
                own_embedding="embed_tokens.weight" in tensors or not shares,
                own_lm_head="lm_head.weight" in tensors or not shares or config.draft_vocab_size != vocab_size,
            )
        if "embed_tokens" in module and config.layer.vocab_size < vocab_size:
            raise CheckpointError(
                f"{what} embeds {config.layer.vocab_size} tokens, but the model has {vocab_size}; "
                "use a drafter that was trained for this model."
            )
        ids = None if offsets is None else _token_ids(offsets, config.draft_vocab_size, vocab_size, what)
        fill(module, tensors, target, target.device, what)
        limit = getattr(target_config, "max_position_embeddings", 0)
        if config.layer.max_position_embeddings < limit:
            warnings.warn(
                f"{what} was made for {config.layer.max_position_embeddings} positions, the model for {limit}: "
                "expect fewer accepted tokens in longer contexts.",
                stacklevel=2,
            )
        return cls(target, config, layers, module, None if ids is None else ids.to(target.device))

    def feature_layers(self) -> list[int]:
        """Target layers whose inputs are fused, ascending."""
        return self.layers

    def fuse(self, features: Tensor) -> Tensor:
        """Project the concatenated features to the drafter's hidden size."""
        return self.module["fc"](features)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; see the base class."""
        block = self.module["midlayer"]
        normed = block["hidden_norm"](hidden)
        residual = normed if self.config.norm_before_residual else hidden
        attended, _ = block["self_attn"](
            join(block["input_layernorm"](self.embed(tokens)), normed),
            position_embeddings=self.rotary(hidden, position_ids=positions),
            attention_mask=kv.mask(hidden.shape[1], hidden.device),
            **{self.cache_argument: kv},
        )
        residual = residual + attended
        recycled = residual + block["mlp"](block["post_attention_layernorm"](residual))
        out = self.module["norm"](recycled)
        return out, out if self.config.norm_output else recycled

    def output_head(self) -> nn.Module:
        """Return the drafter's output head, if it covers the target's vocabulary."""
        if self.token_ids is None:
            return self.lm_head
        raise VocabularyError(
            f"the EAGLE-3 drafter has a vocabulary of its own ({len(self.token_ids)} of the model's {self.vocab_size} "
            "tokens), which a hot vocabulary cannot cut further; leave hot_vocabulary out."
        )

    def logits(self, layer: int, out: Tensor) -> Tensor:
        """Logits over the target's vocabulary, ``-inf`` where a token is not in the draft's."""
        logits = self.lm_head(out)
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        full[..., self.token_ids] = logits
        return full


def feature_layers(config: Eagle3Config, num_layers: int) -> list[int]:
    """Target layers whose inputs a drafter takes: those of its config, else the third, the middle and the third last.

    Parameters
    ----------
    config : Eagle3Config
        The drafter's config.
    num_layers : int
        Layers N of the target.

    Returns
    -------
    list of int
        Ascending, each in ``[0, N)``; ``[2, N // 2, N - 3]`` by default.

    Raises
    ------
    CheckpointError
        If the target has no such layers.
    """
    ids = list(config.feature_layers or (2, num_layers // 2, num_layers - 3))
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < num_layers:
        raise CheckpointError(
            f"an EAGLE-3 drafter that takes the inputs of layers {ids} does not fit a model of {num_layers} layers; "
            "use one whose eagle_aux_hidden_state_layer_ids name layers of this model."
        )
    return ids


def _read(name: str) -> dict[str, Tensor]:
    """Tensors by their first published names, without those that say nothing new."""
    checkpoint = Checkpoint(
        name,
        without="convert its pytorch_model.bin to model.safetensors, or use a drafter that is published so",
    )
    names = checkpoint.names(r"(?:model\.)?(?P<name>(?!t2d$).+(?<!rotary_emb\.inv_freq))")
    tensors = checkpoint.read(names.values())
    return {short.replace("layers.0.", "midlayer.", 1): tensors[full] for short, full in names.items()}


def _build(config: Eagle3Config, features: int, own_embedding: bool, own_lm_head: bool) -> nn.ModuleDict:
    """Make the drafter's modules, named as its tensors are, on the current default device."""
    layer = config.layer
    attention = LlamaAttention(layer, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = getattr(attention, name).out_features
        setattr(attention, name, nn.Linear(2 * layer.hidden_size, rows, bias=layer.attention_bias))
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    block = {name: LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps) for name in norms}
    modules: dict[str, nn.Module] = {
        "fc": nn.Linear(features * config.target_hidden_size, layer.hidden_size, bias=False),
        "midlayer": nn.ModuleDict({**block, "self_attn": attention, "mlp": LlamaMLP(layer)}),
        "norm": LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps),
    }
    if own_embedding:
        modules["embed_tokens"] = nn.Embedding(layer.vocab_size, layer.hidden_size)
    if own_lm_head:
        modules["lm_head"] = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
    return nn.ModuleDict(modules)


def _token_ids(offsets: Tensor, draft_vocab_size: int, vocab_size: int, what: str) -> Tensor:
    """Turn ``d2t`` (what to add to each draft id, ``[draft_vocab_size]``) into the target's ids, int64."""
    if offsets.shape == (draft_vocab_size,):
        ids = torch.arange(draft_vocab_size) + offsets.long()
        if 0 <= int(ids.min()) <= int(ids.max()) < vocab_size and ids.unique().numel() == draft_vocab_size:
            return ids
    raise CheckpointError(
        f"{what} has a tensor d2t that does not map its {draft_vocab_size} tokens to different ones of the model's "
        f"{vocab_size}; use a drafter that was trained for this model."
    )
