"""What a V2 drafter's passes are given and give, seen from outside the plugin; and the poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from draft_passes import OFF, DraftPass
from engines import runner_of
from torch import Tensor
from vllm import LLM

from windowed_mtp import SinkWindow


@dataclass
class Given:
    """One pass of one layer: the rows as vLLM made them, and what reached the kernel."""

    source: DraftPass
    lens: Tensor
    table: Tensor
    own: bool
    """Whether the kernel reads vLLM's own lengths and table, not a copy."""


@dataclass
class Seen:
    """All passes of a run and what they proposed; a step is a list of the drafter's passes."""

    steps: list[list[Given]] = field(default_factory=list)
    target: list[Given] = field(default_factory=list)
    proposals: list[list[list[int]]] = field(default_factory=list)
    poisoned: int = 0


def builders(llm: LLM) -> dict[str, Any]:
    """Metadata builders of the draft's layers: of the first pass (the runner's) and of the others (the drafter's)."""
    runner = runner_of(llm)
    names = runner.speculator.draft_attn_layer_names
    made = {}
    for owner, holder in (("runner", runner), ("drafter", runner.speculator)):
        [made[owner]] = [
            group.get_metadata_builder()
            for groups in holder.attn_groups
            for group in groups
            if names & set(group.layer_names)
        ]
    return made


@contextmanager
def window_off(llm: LLM) -> Iterator[None]:
    """Take the window out of force for a while, in every builder that has it."""
    windowings = [builder.windowing for builder in builders(llm).values()]
    before = windowings[0].window
    try:
        for windowing in windowings:
            windowing.window = SinkWindow(before.sink, before.window, min_context=OFF)
        yield
    finally:
        for windowing in windowings:
            windowing.window = before


@contextmanager
def watch(llm: LLM, poison: SinkWindow | None = None) -> Iterator[Seen]:
    """Record every pass; with ``poison``, put NaN where its window excludes during a draft pass, and restore it."""
    seen, runner = Seen(), runner_of(llm)
    speculator, context = runner.speculator, runner.vllm_config.compilation_config.static_forward_context
    made: dict[str, Any] = {}
    [draft_name] = speculator.draft_attn_layer_names
    [target_name] = [
        name for name, layer in context.items() if name != draft_name and type(layer) is type(context[draft_name])
    ]
    size = int(context[draft_name].kv_cache.shape[2])

    def recording(builder: Any) -> None:
        original = builder.build

        def build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            made["draft"] = common_attn_metadata
            return original(common_prefix_len, common_attn_metadata, *args, **kwargs)

        builder.build = build

    def given(common: Any, meta: Any, index: int) -> Given:
        rows = meta.seq_lens.shape[0]
        source = DraftPass(
            index,
            common.seq_lens[:rows].tolist(),
            common.query_start_loc[: rows + 1].diff().tolist(),
            common.block_table_tensor[:rows].clone(),
        )
        theirs = getattr(common, "pointers", None) or (common.seq_lens.data_ptr(), common.block_table_tensor.data_ptr())
        own = theirs == (meta.seq_lens.data_ptr(), meta.block_table.data_ptr())
        return Given(source, meta.seq_lens.clone(), meta.block_table[:rows].clone(), own)

    def forward_of(original: Any, draft: bool) -> Any:
        def forward(layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, meta: Any, **kwargs: Any) -> Any:
            if meta is None or not made:
                return original(layer, query, key, value, kv_cache, meta, **kwargs)
            if not draft:
                seen.target.append(given(made["target"], meta, 0))
                return original(layer, query, key, value, kv_cache, meta, **kwargs)
            step = seen.steps[-1]
            entry = given(made["draft"], meta, len(step))
            step.append(entry)
            blocks = entry.source.excluded_blocks(poison, size) if poison is not None else []
            saved = kv_cache[blocks].clone()
            kv_cache[blocks] = float("nan")
            result = original(layer, query, key, value, kv_cache, meta, **kwargs)
            kv_cache[blocks] = saved
            seen.poisoned += len(blocks)
            return result

        return forward

    propose = speculator.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.steps.append([])
        result = propose(*args, **kwargs)
        seen.proposals.append(result.tolist())
        return result

    prepare, group = runner.model_state.prepare_attn, group_of(runner, target_name)

    def prepared(input_batch: Any, mode: Any, block_tables: Any, *args: Any, **kwargs: Any) -> Any:
        # Copies from before any builder runs, so that a change in place would be seen as well.
        table, starts = block_tables[group], input_batch.query_start_loc
        made["target"] = SimpleNamespace(
            seq_lens=input_batch.seq_lens.clone(),
            query_start_loc=starts.clone(),
            block_table_tensor=table.clone(),
            pointers=(input_batch.seq_lens.data_ptr(), table.data_ptr()),
        )
        return prepare(input_batch, mode, block_tables, *args, **kwargs)

    try:
        for builder in builders(llm).values():
            recording(builder)
        runner.model_state.prepare_attn = prepared
        speculator.propose = recorded
        for name in (draft_name, target_name):
            context[name].impl.forward = forward_of(context[name].impl.forward, name == draft_name)
        yield seen
    finally:
        for builder in builders(llm).values():
            del builder.build
        del runner.model_state.prepare_attn
        del speculator.propose
        for name in (draft_name, target_name):
            del context[name].impl.forward


def group_of(runner: Any, name: str) -> int:
    """Index of a layer's KV cache group."""
    groups = runner.kv_cache_config.kv_cache_groups
    return next(index for index, group in enumerate(groups) if name in group.layer_names)


def untouched(entry: Given) -> bool:
    """Whether a pass was given vLLM's own tensors, with what vLLM put there."""
    return entry.own and entry.lens.tolist() == entry.source.seq_lens and entry.table.equal(entry.source.table)


def as_windowed(entry: Given, window: SinkWindow, size: int) -> bool:
    """Whether each row reached the kernel with exactly the blocks that the window leaves."""
    for row, (length, blocks) in enumerate(zip(entry.lens.tolist(), entry.table, strict=True)):
        kept = entry.source.visible_positions(row, window, size)
        ids = [int(entry.source.table[row, position // size]) for position in kept]
        if length != len(kept) or [int(blocks[index // size]) for index in range(length)] != ids:
            return False
    return True


def dropped(entry: Given) -> int:
    """Keys that a pass was spared."""
    return int(torch.tensor(entry.source.seq_lens).sum() - entry.lens.sum())
