"""The interface of a draft head, and what all heads built from a target's own decoder layers share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.compat import cache_argument
from windowed_mtp.engines.transformers.loading import Checkpoint
from windowed_mtp.errors import VocabularyError


class DraftHead(ABC):
    """A draft head of one or more chained layers.

    Entry i of layer k (from 0) holds token ``i + 1 + k`` and a hidden state: the target's feature i for the first
    layer, the layer before's output i for a later one. Its output predicts token ``i + 2 + k``.

    Attributes
    ----------
    num_layers : int
        Number of chained layers M; a deeper draft repeats the last one on its own output.
    """

    num_layers: int

    def feature_layers(self) -> list[int] | None:
        """Target layers whose inputs are the features; ``None`` for the target's final hidden state."""
        return None

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features into the hidden state of an entry.

        Parameters
        ----------
        features : Tensor
            ``[1, n, H]`` final hidden states, or ``[1, n, k·H]`` inputs of ``feature_layers``, concatenated.

        Returns
        -------
        Tensor
            ``[1, n, H]``.
        """
        return features

    def for_request(self, prompt: Sequence[int]) -> DraftHead:
        """Return what drafts for one request: itself, unless the head keeps something for each.

        Parameters
        ----------
        prompt : sequence of int
            The request's prompt.
        """
        return self

    def follow(self, emitted: Sequence[int]) -> None:  # noqa: B027 (most heads follow nothing)
        """Take tokens that the target emitted in the request."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a request holds, beside its KV."""
        return 0

    @abstractmethod
    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run one layer over a pass of entries, adding them to its KV.

        Parameters
        ----------
        layer : int
            Layer k, from 0.
        tokens : Tensor
            ``[1, q]`` int64.
        hidden : Tensor
            ``[1, q, H]``.
        positions : Tensor
            ``[1, q]`` int64 positions of the entries.
        kv : DraftKV
            The layer's KV.

        Returns
        -------
        out, recycled : Tensor
            ``[1, q, H]`` each: what ``logits`` takes, and what the next entry or layer takes as hidden state.
        """

    def output_head(self) -> nn.Module:
        """Return the module that gives the logits, with one row for each token of the target's vocabulary.

        Raises
        ------
        VocabularyError
            If the head has no such module.
        """
        raise VocabularyError(
            f"{type(self).__name__} has no output head over the model's vocabulary to pick rows from; "
            "leave hot_vocabulary out."
        )

    @abstractmethod
    def logits(self, layer: int, out: Tensor) -> Tensor:
        """Logits over the target's vocabulary.

        Parameters
        ----------
        layer : int
            Layer k, from 0.
        out : Tensor
            ``[..., H]`` as ``forward`` returned it.

        Returns
        -------
        Tensor
            ``[..., V]``.
        """


class MTPHead(DraftHead):
    """A built-in head: decoder layers of the target's own kind, sharing its embedding, rotary and output head.

    Subclasses say which model types they serve, how to find their tensors, and how a layer is put together.
    """

    model_types: ClassVar[tuple[str, ...]]

    def __init__(self, target: PreTrainedModel, modules: list[Any]) -> None:
        decoder = target.get_decoder()
        self.modules = modules
        self.num_layers = len(modules)
        self.embed = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.rotary = getattr(decoder, "rotary_emb", None)
        self.cache_argument = cache_argument(decoder.layers[0])  # the draft's blocks are of the same class

    @classmethod
    @abstractmethod
    def load(cls, target: PreTrainedModel, checkpoint: Checkpoint) -> MTPHead:
        """Build the head of ``target`` from its checkpoint.

        Raises
        ------
        CheckpointError
            If the checkpoint has no head, or one that does not fit.
        """

    def block(self, block: nn.Module, hidden: Tensor, positions: Tensor, kv: DraftKV) -> Tensor:
        """Run one decoder layer of the target's kind on the draft's KV; ``[1, q, H]`` in and out."""
        kwargs: dict[str, Any] = {
            "attention_mask": kv.mask(hidden.shape[1], hidden.device),
            "position_ids": positions,
            self.cache_argument: kv,
        }
        if self.rotary is not None:
            # Multimodal rotary embeddings take a position for each of time, height and width; text has the same three.
            by_axis = positions.expand(3, 1, -1) if hasattr(self.rotary, "mrope_section") else positions
            kwargs["position_embeddings"] = self.rotary(hidden, position_ids=by_axis)
        out = block(hidden, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def output_head(self) -> nn.Module:
        """Return the target's own output head."""
        return self.lm_head

    def logits(self, layer: int, out: Tensor) -> Tensor:
        """Return the logits of the target's own output head."""
        return self.lm_head(out)


def layer_config(target: PreTrainedModel, **changes: Any) -> Any:
    """Copy the target's text config for its draft layers, with SDPA attention and the given fields changed."""
    config = copy.deepcopy(target.config.get_text_config())
    config._attn_implementation = "sdpa"
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def norm_like(target: PreTrainedModel, eps: float) -> nn.Module:
    """Make a norm over the hidden size, of the class of the target's final norm, on the current default device."""
    decoder = target.get_decoder()
    norm = getattr(decoder, "norm", None) or decoder.norm_f
    return type(norm)(target.config.get_text_config().hidden_size, eps=eps)


def projection(target: PreTrainedModel) -> nn.Linear:
    """Make the ``[2·hidden -> hidden]`` projection that joins embedding and hidden state."""
    hidden = target.config.get_text_config().hidden_size
    return nn.Linear(2 * hidden, hidden, bias=False)


def join(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate on the feature axis."""
    return torch.cat([first, second], dim=-1)
