"""A head that can propose the hot tokens only, and reads no other rows of its output head."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windowed_mtp.engines.transformers.cache import DraftKV
from windowed_mtp.engines.transformers.heads.base import DraftHead
from windowed_mtp.errors import VocabularyError
from windowed_mtp.vocab import HotSet, left_out


class HotHead(DraftHead):
    """Another head, with its logits computed for the hot tokens alone and ``-inf`` for the rest.

    Each request has its own hot rows (``for_request``): gathered into one contiguous copy at its start, and again
    whenever the ranking changes. A hot set of the whole vocabulary copies nothing: the head's own logits are used as
    they are.

    Parameters
    ----------
    head : DraftHead
        The head; its output head must be a linear layer over the target's vocabulary.
    hot : HotSet
        Which tokens are hot.

    Raises
    ------
    VocabularyError
        If the head's rows cannot be picked, or the hot set does not fit its vocabulary.

    Warns
    -----
    UserWarning
        Once, if the ranking has tokens that the output head has no rows for: they are left out.
    """

    def __init__(self, head: DraftHead, hot: HotSet) -> None:
        self.head = head
        self.hot = hot
        self.num_layers = head.num_layers
        self._output = _linear(head.output_head())
        self._prompt: Sequence[int] = ()
        self._version: int | None = None
        self._hot = len(hot.ids(self._output.weight.shape[0]))
        text = left_out(hot.ranking, self._output.weight.shape[0])
        if text is not None:
            warnings.warn(text, stacklevel=2)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that a request copies."""
        if self._hot == self._output.weight.shape[0]:
            return 0
        parts = (part for part in (self._output.weight, self._output.bias) if part is not None)
        return sum(self._hot * part[0].numel() * part.element_size() for part in parts)

    def for_request(self, prompt: Sequence[int]) -> HotHead:
        """Return the same head with rows of its own, gathered for a prompt."""
        own = copy.copy(self)
        own._prompt = prompt
        own._gather()
        return own

    def follow(self, emitted: Sequence[int]) -> None:
        """Take tokens that the target emitted; where they change the ranking, the rows are gathered again."""
        self.hot.ranking.update(emitted)
        if self.hot.ranking.version != self._version:
            self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        weight, bias = self._output.weight, self._output.bias
        self._version = self.hot.ranking.version
        self._ids: Tensor | None = None
        self._rows: Tensor | None = None  # the old copy goes before the new one is made
        self._bias: Tensor | None = None
        ids = self.hot.ids(weight.shape[0], self._prompt)
        if len(ids) < weight.shape[0]:
            self._ids = torch.tensor(ids, dtype=torch.int64, device=weight.device)
            self._rows = weight.index_select(0, self._ids)
            self._bias = None if bias is None else bias.index_select(0, self._ids)

    def feature_layers(self) -> list[int] | None:
        """Target layers whose inputs are the features: the head's own."""
        return self.head.feature_layers()

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features into the hidden state of an entry, as the head does."""
        return self.head.fuse(features)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, kv: DraftKV
    ) -> tuple[Tensor, Tensor]:
        """Run one of the head's layers."""
        return self.head.forward(layer, tokens, hidden, positions, kv)

    def logits(self, layer: int, out: Tensor) -> Tensor:
        """Logits over the target's vocabulary, ``-inf`` where a token is not hot."""
        if self._version is None:
            self._gather()
        if self._ids is None or self._rows is None:
            return self.head.logits(layer, out)
        hot = F.linear(out, self._rows, self._bias)
        full = hot.new_full((*hot.shape[:-1], self._output.weight.shape[0]), float("-inf"))
        full[..., self._ids] = hot
        return full


def _linear(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear) and module.weight.is_floating_point() and module.weight.element_size() > 1:
        return module
    raise VocabularyError(
        f"the output head is {type(module).__name__}, whose rows cannot be picked (it is quantised or wrapped); "
        "leave hot_vocabulary out, or load the model with an ordinary output head."
    )
