"""Hot rows where vLLM quantises a draft's copy of the target's output head (``draft_lm_head_quantization``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from windowed_mtp.engines.vllm.hot_rows import HotRows

_MULTIPLE = 64
"""What vLLM pads the rows of its heads to, and its kernels for quantised rows are made for."""


class QuantisedHotRows(HotRows):
    """Hot rows of the target's head, quantised as vLLM quantises the draft's copy of it, by vLLM's own function.

    With fp8 they are the rows of that copy, as each row has its own scale; with nvfp4 one scale is that of the hot rows
    instead of the whole head's.

    Parameters
    ----------
    head : ParallelLMHead
        The target's head, in full precision.
    ids : sequence of int
        Hot token ids, ascending.
    vllm_config : VllmConfig
        The engine's, with what to quantise to.
    """

    def __init__(self, head: Any, ids: Sequence[int], vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.copy: Any = None
        super().__init__(head, ids, _MULTIPLE)
        self.quant_method = _Copy(self)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds beside the head itself and vLLM's copy of it."""
        return self.ids.nbytes + sum(each.nbytes for each in self._tensors(self.copy).values())

    def _room(self) -> Tensor:
        return self.head.weight.new_empty(0)

    def _fill(self, weight: Tensor) -> None:
        """Quantise the rows into the tensors that there are; the full-precision ones are only held meanwhile."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        share = self.head.weight.new_zeros(self.share, self.head.weight.shape[1])
        super()._fill(share)
        with set_current_vllm_config(self.vllm_config), torch.device(share.device):
            plain = ParallelLMHead(
                self.share, share.shape[1], params_dtype=share.dtype, padding_size=_MULTIPLE, disable_tp=True
            )
            plain.weight = torch.nn.Parameter(share, requires_grad=False)
            made = quantized_lm_head_copy(plain, self.vllm_config.speculative_config.draft_lm_head_quantization)
        plain.weight = torch.nn.Parameter(share.new_empty(0), requires_grad=False)  # vLLM keeps the module
        if self.copy is None:
            self.copy = made
            return
        kept = self._tensors(self.copy)
        for name, tensor in self._tensors(made).items():
            kept[name].copy_(tensor)

    @staticmethod
    def _tensors(copy: Any) -> dict[str, Tensor]:
        return {**dict(copy.named_parameters(recurse=False)), **dict(copy.named_buffers(recurse=False))}


class _Copy:
    """Applies the quantised rows in the place of a head's method."""

    def __init__(self, rows: QuantisedHotRows) -> None:
        self.rows = rows

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits ``[rows, share]``."""
        copy = self.rows.copy
        made: Tensor = copy.quant_method.apply(copy, x, bias)
        return made
