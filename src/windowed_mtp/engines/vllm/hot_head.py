"""A draft head that looks at the hot rows of its output head only; the target still decides over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windowed_mtp.engines.vllm.config import HotVocabularyConfig, PluginConfig, PluginError
from windowed_mtp.engines.vllm.hot_quantised import QuantisedHotRows
from windowed_mtp.engines.vllm.hot_rows import HotLogits, HotRows, tensor_rank
from windowed_mtp.engines.vllm.hot_watch import HotWatch, take_off
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.vocab import HotVocabulary, left_out

METHODS = ("mtp", "eagle", "eagle3")
"""Drafters whose output head is the target's, or one like it."""

_HELD = "windowed_mtp_hot_logits"


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
    drafter = drafter_of(runner)
    model = getattr(drafter, "model", None)
    if held is None and model is not None:  # else a rank without a drafter; the window says so if there should be one
        held = _make(runner, model, config)
        setattr(runner, _HELD, held)
        for each in held:
            each.put_on()
        if held:
            HotWatch(runner, model, _rows_of(held)).put_on(runner)
        if held and _has_top_tokens(runner, drafter):
            drafter.use_local_argmax_reduction = True
            _say("info", "Hot vocabulary: greedy drafts choose among the hot logits (use_local_argmax_reduction).")
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
    vocab_size = min(each.org_vocab_size for each in (*processors, *heads))
    ids = _read(config, runner.vllm_config.model_config, vocab_size)
    if len(ids) == vocab_size:
        _say("info", f"Hot vocabulary: all {vocab_size} rows are hot, so the draft's output head stays as it is.")
        return []
    source = quantised_from(runner, heads)
    made = {
        pointer: HotRows(head, ids) if source is None else QuantisedHotRows(source, ids, runner.vllm_config)
        for pointer, head in {each.weight.data_ptr(): each for each in heads}.items()
    }
    copied = sum(each.num_bytes for each in made.values()) / 1e6
    _say(
        "info",
        f"Hot vocabulary: the draft's output head reads {len(ids)} of {vocab_size} rows, a copy of {copied:.3f} MB a "
        "rank.",
    )
    return [HotLogits(processor, {head: made[head.weight.data_ptr()] for head in heads}) for processor in processors]


def remove_hot_head(runner: Any) -> None:
    """Let a runner's drafter look at every row again."""
    held: list[HotLogits] = getattr(runner, _HELD, [])
    for each in held:
        each.take_off()
    if held:
        take_off(runner)
        configured = runner.vllm_config.speculative_config.use_local_argmax_reduction
        drafter_of(runner).use_local_argmax_reduction = configured
    if hasattr(runner, _HELD):
        delattr(runner, _HELD)


def refresh_hot_head(worker: Any, file: str | None = None) -> None:
    """Read the ranking anew, in a running engine; to be called on every rank, by vLLM's ``collective_rpc``.

    It reads the rows anew as well, which else happens by itself: see `HotWatch`.

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
    vocab_size = min(each.org_vocab_size for logits in installed for each in (logits.processor, *logits.rows))
    ids = _read(config, runner.vllm_config.model_config, vocab_size)
    for rows in _rows_of(installed):
        rows.take(ids)


def _rows_of(logits: Sequence[HotLogits]) -> list[HotRows]:
    return list({id(rows): rows for each in logits for rows in each.rows.values()}.values())


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
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

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
    if not all(map(_is_plain, heads)) and quantised_from(runner, heads) is None:
        return "it is quantised"
    if any(getattr(head, "bias", None) is not None for head in heads):
        return "it has a bias"
    return None


def quantised_from(runner: Any, heads: Sequence[Any]) -> Any:
    """Give the target's head that a draft's is a quantised copy of; ``None`` if it is none of vLLM's making.

    vLLM makes one where ``draft_lm_head_quantization`` is set (since 0.33), for all of the draft's layers.
    """
    wanted = getattr(runner.vllm_config.speculative_config, "draft_lm_head_quantization", None)
    plain = [head for head in output_heads(runner.model) if _is_plain(head) and getattr(head, "bias", None) is None]
    if wanted is None or len(heads) != 1 or _is_plain(heads[0]) or len(plain) != 1:
        return None
    return plain[0] if plain[0].org_vocab_size == heads[0].org_vocab_size else None


def _is_plain(head: Any) -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return isinstance(getattr(head, "quant_method", None), (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))


def _has_top_tokens(runner: Any, drafter: Any) -> bool:
    """Whether vLLM can take a greedy draft's token from `HotLogits.get_top_tokens`, which makes no full rows."""
    from vllm.model_executor.models import interfaces

    config = runner.vllm_config.speculative_config
    return (
        hasattr(interfaces, "LocalArgmaxMixin")  # not in older releases
        and isinstance(drafter.model, interfaces.LocalArgmaxMixin)
        and getattr(drafter, "acceptance_estimator", None) is None  # it wants the rows
        and not (hasattr(config, "use_multi_module_mtp") and config.use_multi_module_mtp())
    )


def drafter_of(runner: Any) -> Any:
    """Give a runner's drafter, V1's or V2's; ``None`` on a rank without one."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def _read(config: HotVocabularyConfig, model_config: Any, vocab_size: int) -> list[int]:
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        vocabulary = HotVocabulary.load(config.file)
        tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is not None:
            vocabulary = vocabulary.completed(tokenizer)
        ids, text = vocabulary.ids(config.size, vocab_size), left_out(vocabulary, vocab_size)
    except WindowedMTPError as error:
        raise PluginError(f'additional_config["windowed_mtp"]["hot_vocabulary"]: {error}') from None
    if text is not None:
        _say("warning", f"Hot vocabulary: {text}")
    return ids


def _say(level: str, text: str) -> None:
    """Log a line, on the first tensor-parallel rank of the stage that has the drafter."""
    from vllm.logger import init_logger

    if tensor_rank() == 0:
        getattr(init_logger("vllm.windowed_mtp"), level)("%s", text)
