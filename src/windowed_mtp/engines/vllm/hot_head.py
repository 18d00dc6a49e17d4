"""A draft head that looks at the hot rows of its output head only; the target still decides over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from windowed_mtp.engines.vllm.config import HotVocabularyConfig, PluginConfig, PluginError
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.vocab import HotVocabulary

METHODS = ("mtp", "eagle", "eagle3")
"""Drafters whose output head is the target's, or one like it."""

_HELD = "windowed_mtp_hot_logits"


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

    Attributes
    ----------
    ids : torch.Tensor
        ``[H]`` int64, the hot ids.
    weight : torch.Tensor
        ``[ceil(H / ranks), hidden]``, this rank's hot rows.
    shard_indices : namespace
        Which places of the hot ids these rows have, in the words of a head's own.
    """

    def __init__(self, head: Any, ids: Sequence[int]) -> None:
        self.head = head
        self.tp_size = head.tp_size
        self.rank = _tensor_rank() if self.tp_size > 1 else 0
        share, device = -(-len(ids) // self.tp_size), head.weight.device
        start = self.rank * share
        self.ids = torch.empty(len(ids), dtype=torch.int64, device=device)
        self.weight = torch.zeros(share, head.weight.shape[1], dtype=head.weight.dtype, device=device)
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=start, num_org_vocab_padding=min(share, max(0, start + share - len(ids)))
        )
        self.quant_method = _plain_method()
        self.refresh(ids)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds beside the head itself."""
        return self.weight.nbytes + self.ids.nbytes

    @torch.inference_mode()
    def refresh(self, ids: Sequence[int]) -> None:
        """Take other hot ids, or the same rows of weights that have changed; a captured graph follows.

        Under tensor parallelism every rank has to call it.

        Raises
        ------
        PluginError
            If their number is another than before.
        """
        if len(ids) != self.ids.shape[0]:
            raise PluginError(f"{len(ids)} hot ids cannot take the place of {self.ids.shape[0]}; pass as many.")
        self.ids.copy_(torch.tensor(ids, dtype=torch.int64))
        if self.tp_size == 1:
            torch.index_select(self.head.weight, 0, self.ids, out=self.weight)
            return
        from vllm.distributed import tensor_model_parallel_all_reduce

        shard = self.head.shard_indices
        mine = (self.ids >= shard.org_vocab_start_index) & (self.ids < shard.org_vocab_end_index)
        rows = self.head.weight.new_zeros(self.ids.shape[0], self.weight.shape[1])
        rows[mine] = self.head.weight[self.ids[mine] - shard.org_vocab_start_index]
        rows = tensor_model_parallel_all_reduce(rows)  # one rank has each row, the others zeros
        share = rows[self.rank * self.weight.shape[0] :][: self.weight.shape[0]]
        self.weight[: share.shape[0]] = share


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
        """Ids ``[rows]`` of the largest logits."""
        rows = self.rows.get(lm_head)
        if rows is None or args or kwargs:
            return self.own[1](lm_head, hidden_states, *args, **kwargs)
        return rows.ids[self.own[1](rows, hidden_states)]


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
    held: list[HotLogits] | None = getattr(runner, _HELD, None)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    if held is None and model is not None:  # else a rank without a drafter; the window says so if there should be one
        held = _make(runner, model, config)
        setattr(runner, _HELD, held)
        for each in held:
            each.put_on()
    return held or []


def _make(runner: Any, model: Any, config: HotVocabularyConfig) -> list[HotLogits]:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    targets = {id(module) for module in runner.model.modules()}
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    heads = output_heads(model)
    reason = why_not(runner, model, [id(each) in targets for each in processors], heads)
    if reason is not None:
        _say("warning", f"Hot vocabulary: the draft's output head is left alone, as {reason}.")
        return []
    vocab_size = processors[0].org_vocab_size
    ids = _read(config, runner.vllm_config.model_config, vocab_size)
    if len(ids) == vocab_size:
        _say("info", f"Hot vocabulary: all {vocab_size} rows are hot, so the draft's output head stays as it is.")
        return []
    made = {pointer: HotRows(head, ids) for pointer, head in {each.weight.data_ptr(): each for each in heads}.items()}
    copied = sum(each.num_bytes for each in made.values()) / 1e6
    _say(
        "info",
        f"Hot vocabulary: the draft's output head reads {len(ids)} of {vocab_size} rows, a copy of {copied:.3f} MB a "
        "rank.",
    )
    return [HotLogits(processor, {head: made[head.weight.data_ptr()] for head in heads}) for processor in processors]


def remove_hot_head(runner: Any) -> None:
    """Let a runner's drafter look at every row again."""
    for each in getattr(runner, _HELD, ()):
        each.take_off()
    if hasattr(runner, _HELD):
        delattr(runner, _HELD)


def refresh_hot_head(worker: Any, file: str | None = None) -> None:
    """Read the ranking anew, in a running engine; to be called on every rank, by vLLM's ``collective_rpc``.

    It is needed as well once an engine's weights have been replaced, as the hot rows are a copy of them.

    Parameters
    ----------
    worker : Worker
        What ``collective_rpc`` passes.
    file : str, optional
        A ranking to go on with; the one of the settings by default.

    Raises
    ------
    PluginError
        If no hot rows are in force, or the file cannot be used for this model; nothing has changed then.
    """
    runner = worker.model_runner
    installed: list[HotLogits] = getattr(runner, _HELD, [])
    settings = PluginConfig.read(runner.vllm_config.additional_config)
    config = None if settings is None else settings.hot_vocabulary
    if config is None or not installed:
        raise PluginError("no hot rows are in force, so there are none to refresh; the log says why.")
    if file is not None:
        config = replace(config, file=file)
    ids = _read(config, runner.vllm_config.model_config, installed[0].processor.org_vocab_size)
    for rows in {id(each): each for each in installed[0].rows.values()}.values():
        rows.refresh(ids)


def output_heads(model: Any) -> list[Any]:
    """Every module of a draft model that is an output head, by its class, or by its name where it is an embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        named = name.rpartition(".")[2] in ("lm_head", "head") and hasattr(module, "weight")
        if named or isinstance(module, ParallelLMHead):
            found[id(module)] = module
    return list(found.values())


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
    heads : sequence of torch.nn.Module
        Its output heads.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    method = runner.vllm_config.speculative_config.method
    if method not in METHODS:
        return f"only {', '.join(METHODS)} drafters can have one, not {method}"
    if getattr(model, "draft_id_to_target_id", None) is not None:
        return "it has a vocabulary of its own"
    if getattr(model, "masked_embedding", None) is not None:
        return "it looks at few rows already, by their centroids"
    if not heads or not shared:
        return "it has no output head that vLLM's LogitsProcessor applies"
    if any(shared):
        return "the target uses its logits processor too"
    if not all(isinstance(head, VocabParallelEmbedding) for head in heads):
        return f"it is a {type(heads[0]).__name__}"
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if not all(isinstance(head.quant_method, plain) for head in heads):
        return "it is quantised"
    if any(getattr(head, "bias", None) is not None for head in heads):
        return "it has a bias"
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


def _tensor_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _say(level: str, text: str) -> None:
    """Log a line, on the first tensor-parallel rank of the stage that has the drafter."""
    from vllm.logger import init_logger

    if _tensor_rank() == 0:
        getattr(init_logger("vllm.windowed_mtp"), level)("%s", text)
