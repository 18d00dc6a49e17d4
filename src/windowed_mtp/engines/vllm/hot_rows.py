"""Hot rows of an output head, and logits over them alone, in the place of vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from windowed_mtp.engines.vllm.config import PluginError


class HotRows:
    """The hot rows of an output head, in buffers with fixed addresses; a head itself to a ``LogitsProcessor``.

    Under tensor parallelism each rank keeps an equal share of the hot rows, whatever shard they came from; the last
    ranks fill up with zeros.

    Parameters
    ----------
    head : VocabParallelEmbedding
        The output head, sharded by vocabulary under tensor parallelism.
    ids : sequence of int
        Hot token ids, ascending; their number H is fixed from here on.
    multiple : int
        What the rows of a rank are a multiple of, zeros included.

    Attributes
    ----------
    ids : torch.Tensor
        ``[H]`` int64, the hot ids.
    share : int
        Number of rows of a rank, with those that are zeros.
    weight : torch.Tensor
        ``[share, hidden]``, this rank's hot rows, ``ceil(H / ranks)`` rounded up to ``multiple``.
    shard_indices : namespace
        Which places of the hot ids these rows have, in the words of a head's own.
    """

    def __init__(self, head: Any, ids: Sequence[int], multiple: int = 1) -> None:
        self.head = head
        self.tp_size = head.tp_size
        self._hot = list(ids)  # on the host, where no sleep mode takes them
        self._read: tuple[Any, ...] = ()
        self.rank = tensor_rank() if self.tp_size > 1 else 0
        share, device = -(-len(ids) // (self.tp_size * multiple)) * multiple, head.weight.device
        start = self.rank * share
        self.ids = torch.empty(len(ids), dtype=torch.int64, device=device)
        self.share = share
        self.weight = self._room()
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=start, num_org_vocab_padding=min(share, max(0, start + share - len(ids)))
        )
        self.quant_method = _plain_method()
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds beside the head itself."""
        return self.weight.nbytes + self.ids.nbytes

    @property
    def outdated(self) -> bool:
        """Whether the head's weights are known to be others than these rows were read from.

        Torch does not count what is written into a tensor's ``data``. With several ranks always false: they would
        have to agree, as reading the rows is a collective operation.
        """
        return self.tp_size == 1 and _mark(self.head.weight) != self._read

    def take(self, ids: Sequence[int]) -> None:
        """Take other hot ids; a captured graph follows. Under tensor parallelism every rank has to call it.

        Raises
        ------
        PluginError
            If their number is another than before.
        """
        if len(ids) != self.ids.shape[0]:
            raise PluginError(f"{len(ids)} hot ids cannot take the place of {self.ids.shape[0]}; pass as many.")
        self._hot = list(ids)
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Read the rows anew, and write the ids anew: other weights, or memory that was given up in between.

        Under tensor parallelism every rank has to call it.
        """
        self.ids.copy_(torch.tensor(self._hot, dtype=torch.int64))
        self._read = _mark(self.head.weight)
        self._fill(self.weight)

    def _room(self) -> Tensor:
        return self.head.weight.new_zeros(self.share, self.head.weight.shape[1])

    def _fill(self, weight: Tensor) -> None:
        """Write this rank's hot rows to the first rows of ``weight``, which has zeros in the others."""
        if self.tp_size == 1:
            torch.index_select(self.head.weight, 0, self.ids, out=weight[: self.ids.shape[0]])
            return
        from vllm.distributed import tensor_model_parallel_all_reduce

        shard = self.head.shard_indices
        mine = (self.ids >= shard.org_vocab_start_index) & (self.ids < shard.org_vocab_end_index)
        rows = self.head.weight.new_zeros(self.ids.shape[0], weight.shape[1])
        rows[mine] = self.head.weight[self.ids[mine] - shard.org_vocab_start_index]
        rows = tensor_model_parallel_all_reduce(rows)  # one rank has each row, the others zeros
        share = rows[self.rank * weight.shape[0] :][: weight.shape[0]]
        weight[: share.shape[0]] = share


class HotLogits:
    """Stands in for a draft model's ``LogitsProcessor``: logits over hot rows, in their places of a full row.

    Elsewhere they are minus infinity, as vLLM's own are where a draft has a smaller vocabulary: its samplers take that
    for a probability of zero.

    Parameters
    ----------
    processor : LogitsProcessor
        The draft model's own.
    rows : mapping of torch.nn.Module to HotRows
        The hot rows of each head that it may be called with.
    """

    def __init__(self, processor: Any, rows: Mapping[Any, HotRows]) -> None:
        self.processor = processor
        self.rows = rows
        self.own = processor.forward, processor.get_top_tokens

    def put_on(self) -> None:
        """Take the processor's place."""
        self.processor.forward, self.processor.get_top_tokens = self.forward, self.get_top_tokens

    def take_off(self) -> None:
        """Give the processor its place back."""
        del self.processor.forward, self.processor.get_top_tokens

    def forward(self, lm_head: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits ``[rows, vocabulary]``, minus infinity outside of the hot set; of another head, what vLLM makes."""
        rows = self.rows.get(lm_head)
        if rows is None or args or kwargs:
            return self.own[0](lm_head, hidden_states, *args, **kwargs)
        hot = self.own[0](rows, hidden_states)[..., : rows.ids.shape[0]]
        full = hot.new_full((*hot.shape[:-1], self.processor.org_vocab_size), float("-inf"))
        return full.index_copy_(-1, rows.ids, hot)

    def get_top_tokens(self, lm_head: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Ids ``[rows]`` int64 of the largest logits."""
        rows = self.rows.get(lm_head)
        if rows is None or args or kwargs:
            return self.own[1](lm_head, hidden_states, *args, **kwargs)
        if rows.tp_size > 1:
            return rows.ids[self.own[1](rows, hidden_states)]
        hot = self.own[0](rows, hidden_states)[..., : rows.ids.shape[0]]
        return rows.ids[hot.argmax(-1)]  # vLLM's takes the maximum too, which is slower


def _mark(weight: Tensor) -> tuple[Any, ...]:
    """Which tensor this is, and how often it has been written."""
    return id(weight), weight.data_ptr(), None if weight.is_inference() else weight._version


def tensor_rank() -> int:
    """Rank among the tensor-parallel devices of a stage."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _plain_method() -> Any:
    """Make a method for rows as they are; vLLM's own may look for weights packed for the whole head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Plain(UnquantizedEmbeddingMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    return Plain()
