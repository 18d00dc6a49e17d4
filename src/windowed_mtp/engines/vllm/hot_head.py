"""A draft head that looks at the hot rows of its output head only; the target still decides over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from windowed_mtp.engines.vllm.config import HotVocabularyConfig, PluginError
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.vocab import HotVocabulary

METHODS = ("mtp", "eagle", "eagle3")
"""Drafters whose output head is the target's, or one like it."""

_HELD = "windowed_mtp_hot_logits"


class HotRows:
    """The hot rows of an output head, in buffers with fixed addresses.

    Under tensor parallelism each rank keeps an equal share of the hot rows, whatever shard they came from; the last
    rank fills up with repetitions of the last one.

    Parameters
    ----------
    head : VocabParallelEmbedding
        The output head, sharded by vocabulary under tensor parallelism.
    ids : sequence of int
        Hot token ids, ascending; their number is fixed from here on.

    Attributes
    ----------
    ids : torch.Tensor
        ``[H]`` int64, the hot ids in the order of the gathered logits; H is their number, rounded up to the ranks'.
    weight : torch.Tensor
        ``[H / ranks, hidden]``, this rank's hot rows.
    """

    def __init__(self, head: Any, ids: Sequence[int]) -> None:
        self.head = head
        self.tp_size = head.tp_size
        share = -(-len(ids) // self.tp_size)
        device = head.weight.device
        self.size = len(ids)
        self.ids = torch.empty(share * self.tp_size, dtype=torch.int64, device=device)
        self.weight = torch.empty(share, head.weight.shape[1], dtype=head.weight.dtype, device=device)
        self.quant_method = _plain_method()
        self.refresh(ids)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds beside the head itself."""
        return self.weight.nbytes + self.ids.nbytes

    @torch.inference_mode()
    def refresh(self, ids: Sequence[int]) -> None:
        """Take other hot ids, or the same rows of weights that have changed; a captured graph follows.

        Raises
        ------
        PluginError
            If their number is another than before.
        """
        if len(ids) != self.size:
            raise PluginError(f"{len(ids)} hot ids cannot take the place of {self.size}; pass as many.")
        padded = [*ids, *[ids[-1]] * (self.ids.shape[0] - len(ids))]
        self.ids.copy_(torch.tensor(padded, dtype=torch.int64))
        if self.tp_size == 1:
            torch.index_select(self.head.weight, 0, self.ids, out=self.weight)
            return
        from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce

        shard = self.head.shard_indices
        mine = (self.ids >= shard.org_vocab_start_index) & (self.ids < shard.org_vocab_end_index)
        rows = self.head.weight.new_zeros(self.ids.shape[0], self.weight.shape[1])
        rows[mine] = self.head.weight[self.ids[mine] - shard.org_vocab_start_index]
        rows = tensor_model_parallel_all_reduce(rows)  # one rank has each row, the others zeros
        share, rank = self.weight.shape[0], get_tensor_model_parallel_rank()
        self.weight.copy_(rows[rank * share : (rank + 1) * share])


class HotLogits:
    """Stands in for a draft model's ``LogitsProcessor``: logits over hot rows, in their places of a full row.

    Parameters
    ----------
    processor : LogitsProcessor
        The draft model's own.
    rows : iterable of HotRows
        The hot rows of the heads that it may be called with.
    """

    def __init__(self, processor: Any, rows: Iterable[HotRows]) -> None:
        self.processor = processor
        self.rows = {each.head.weight.data_ptr(): each for each in rows}
        self.own = processor.forward, processor.get_top_tokens

    def put_on(self) -> None:
        """Take the processor's place."""
        self.processor.forward, self.processor.get_top_tokens = self.forward, self.get_top_tokens

    def take_off(self) -> None:
        """Give the processor its place back."""
        del self.processor.forward, self.processor.get_top_tokens

    def forward(
        self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Logits ``[rows, vocabulary]``, minus infinity outside of the hot set."""
        rows = self.rows.get(lm_head.weight.data_ptr())
        if rows is None or embedding_bias is not None:
            return self.own[0](lm_head, hidden_states, embedding_bias, *args, **kwargs)
        hot = self._hot(rows, hidden_states)
        full = hot.new_full((*hot.shape[:-1], self.processor.org_vocab_size), float("-inf"))
        return full.index_copy_(-1, rows.ids, hot)

    def get_top_tokens(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        """Ids ``[rows]`` of the largest logits."""
        rows = self.rows.get(lm_head.weight.data_ptr())
        if rows is None or embedding_bias is not None:
            return self.own[1](lm_head, hidden_states, embedding_bias)
        return rows.ids[self._hot(rows, hidden_states).argmax(dim=-1)]

    def _hot(self, rows: HotRows, hidden_states: Tensor) -> Tensor:
        processor = self.processor
        logits = processor._apply_head(rows, hidden_states, None)
        if rows.tp_size > 1:
            from vllm.distributed import tensor_model_parallel_all_gather

            logits = tensor_model_parallel_all_gather(logits)
        if processor.soft_cap is not None:
            logits = torch.tanh(logits / processor.soft_cap) * processor.soft_cap
        return logits * processor.scale if processor.scale != 1.0 else logits


def install_hot_head(runner: Any, config: HotVocabularyConfig) -> list[HotLogits]:
    """Give a runner's drafter the hot rows of its output head, once its weights are loaded; what is there stays.

    Parameters
    ----------
    runner : GPUModelRunner
        V1's or V2's, after ``load_model``.
    config : HotVocabularyConfig
        Size and file.

    Returns
    -------
    list of HotLogits
        What was put in place; empty where the head is left alone, with its reason in the log.

    Raises
    ------
    PluginError
        If the file cannot be used for this model.
    """
    from vllm.logger import init_logger
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if getattr(runner, _HELD, None):
        return list(getattr(runner, _HELD))
    logger = init_logger("vllm.windowed_mtp")
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    if model is None:
        return []  # a rank without a drafter; the window says so where there should be one
    targets = {id(module) for module in runner.model.modules()}
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    heads = {head.weight.data_ptr(): head for head in model.modules() if isinstance(head, ParallelLMHead)}
    reason = why_not(runner, model, [id(each) in targets for each in processors], list(heads.values()))
    if reason is not None:
        logger.warning_once("Hot vocabulary: the draft's output head is left alone, as %s.", reason)
        return []
    vocab_size = processors[0].org_vocab_size
    ids = _read(config, runner.vllm_config.model_config, vocab_size)
    if len(ids) == vocab_size:
        logger.info_once("Hot vocabulary: all %d rows are hot, so the draft's output head stays as it is.", vocab_size)
        return []
    rows = [HotRows(head, ids) for head in heads.values()]
    installed = [HotLogits(processor, rows) for processor in processors]
    for each in installed:
        each.put_on()
    setattr(runner, _HELD, installed)
    logger.info_once(
        "Hot vocabulary: the draft's output head reads %d of %d rows, a copy of %.1f MB a rank.",
        len(ids),
        vocab_size,
        sum(each.num_bytes for each in rows) / 1e6,
    )
    return installed


def remove_hot_head(runner: Any) -> None:
    """Let a runner's drafter look at every row again."""
    for each in getattr(runner, _HELD, ()):
        each.take_off()
    setattr(runner, _HELD, [])


def why_not(runner: Any, model: Any, shared: Sequence[bool], heads: Sequence[Any]) -> str | None:
    """Say why a draft's output head cannot do with fewer rows; ``None`` if it can.

    Parameters
    ----------
    runner : GPUModelRunner
        The runner.
    model : torch.nn.Module
        The draft model.
    shared : sequence of bool
        For each of its logits processors, whether the target uses it too.
    heads : sequence of ParallelLMHead
        Its output heads.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = runner.vllm_config.speculative_config.method
    if method not in METHODS:
        return f"only {', '.join(METHODS)} drafters can have one, not {method}"
    if getattr(model, "draft_id_to_target_id", None) is not None:
        return "it has a vocabulary of its own"
    if not heads or not shared:
        return "it has no output head that vLLM's LogitsProcessor applies"
    if any(shared):
        return "the target uses its logits processor too"
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not all(isinstance(head.quant_method, plain) for head in heads):
        return "it is quantised"
    return None


def _read(config: HotVocabularyConfig, model_config: Any, vocab_size: int) -> list[int]:
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        vocabulary = HotVocabulary.load(config.file)
        tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is not None:
            vocabulary.check_tokenizer(tokenizer)
        return vocabulary.ids(config.size, vocab_size)
    except WindowedMTPError as error:
        raise PluginError(f'additional_config["windowed_mtp"]["hot_vocabulary"]: {error}') from None


def _plain_method() -> Any:
    """Make a method for rows as they are; vLLM's own may look for weights packed for the whole head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Plain(UnquantizedEmbeddingMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    return Plain()
