"""What a V2 drafter's passes are given and give, seen from outside the plugin; and the poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
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
    """All passes of a run and what they proposed; a step is a list of the drafter's passes, of each layer in turn."""

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
def window_as(llm: LLM, window: SinkWindow) -> Iterator[None]:
    """Put another window in force for a while, in every builder that has one."""
    windowings = [builder.windowing for builder in builders(llm).values()]
    before = windowings[0].window
    try:
        for windowing in windowings:
            windowing.window = window
        yield
    finally:
        for windowing in windowings:
            windowing.window = before


def window_off(llm: LLM) -> AbstractContextManager[None]:
    """Take the window out of force for a while."""
    return window_as(llm, replace(builders(llm)["drafter"].windowing.window, min_context=OFF))


@contextmanager
def watch(llm: LLM, poison: SinkWindow | None = None) -> Iterator[Seen]:
    """Record every pass.

    With ``poison``, what its window excludes is NaN during a draft pass, and restored; what a draft without a window
    made of the NaN and wrote itself is taken out at the end.
    """
    seen, runner = Seen(), runner_of(llm)
    speculator = runner.speculator
    draft, target = draft_layers(llm), target_layers(llm)
    size = block_size(llm)
    made: dict[str, Any] = {}
    used: set[int] = set()

    def recording(builder: Any) -> None:
        original = builder.build

        def build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            made["draft"] = common_attn_metadata
            return original(common_prefix_len, common_attn_metadata, *args, **kwargs)

        builder.build = build

    def given(common: Any, meta: Any, index: int) -> Given:
        lens, table, addresses = rows_of(meta)
        rows = lens.shape[0]
        source = DraftPass(
            index,
            common.seq_lens[:rows].tolist(),
            common.query_start_loc[: rows + 1].diff().tolist(),
            common.block_table_tensor[:rows].clone(),
        )
        theirs = getattr(common, "pointers", None) or pointers(common.seq_lens, common.block_table_tensor)
        return Given(source, lens, table, addresses <= theirs)

    def target_forward(original: Any, group: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if made and args[-1] is not None:
                seen.target.append(given(made["target"][group], args[-1], 0))
            return original(*args, **kwargs)

        return forward

    def draft_forward(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kv_cache, meta = args[-2:]
            if not made or meta is None:
                return original(*args, **kwargs)
            step = seen.steps[-1]
            entry = given(made["draft"], meta, len(step) // len(draft))
            step.append(entry)
            used.update(entry.source.owned_blocks(size))
            blocks = entry.source.excluded_blocks(poison, size) if poison is not None else []
            saved = kv_cache[blocks].clone()
            kv_cache[blocks] = float("nan")
            result = original(*args, **kwargs)
            kv_cache[blocks] = saved
            seen.poisoned += len(blocks)
            return result

        return forward

    propose = speculator.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.steps.append([])
        result = propose(*args, **kwargs)
        # A row whose prompt is not through yet is drafted for as well, from whatever token an earlier request left.
        sampled = args[5] > 0
        seen.proposals.append(result[sampled].tolist())
        return result

    prepare = runner.model_state.prepare_attn

    def prepared(input_batch: Any, mode: Any, block_tables: Any, *args: Any, **kwargs: Any) -> Any:
        # Copies from before any builder runs, so that a change in place would be seen as well.
        made["target"] = [
            SimpleNamespace(
                seq_lens=input_batch.seq_lens.clone(),
                query_start_loc=input_batch.query_start_loc.clone(),
                block_table_tensor=table.clone(),
                pointers=pointers(input_batch.seq_lens, table),
            )
            for table in block_tables
        ]
        return prepare(input_batch, mode, block_tables, *args, **kwargs)

    kernels = {name: kernel(layer) for name, layer in {**draft, **target}.items()}
    try:
        for builder in builders(llm).values():
            recording(builder)
        runner.model_state.prepare_attn = prepared
        speculator.propose = recorded
        for name, (holder, method) in kernels.items():
            original = getattr(holder, method)
            wrapped = draft_forward(original) if name in draft else target_forward(original, group_of(runner, name))
            setattr(holder, method, wrapped)
        yield seen
    finally:
        for builder in builders(llm).values():
            del builder.build
        del runner.model_state.prepare_attn
        del speculator.propose
        for holder, method in kernels.values():
            delattr(holder, method)
        for layer in draft.values() if poison is not None else ():
            layer.kv_cache[sorted(used)] = layer.kv_cache[sorted(used)].nan_to_num(0.0)


def draft_layers(llm: LLM) -> dict[str, Any]:
    """The draft's attention layers by name."""
    runner = runner_of(llm)
    context = runner.vllm_config.compilation_config.static_forward_context
    return {name: context[name] for name in sorted(runner.speculator.draft_attn_layer_names)}


def target_layers(llm: LLM) -> dict[str, Any]:
    """The target's attention layers of the draft's kind, by name."""
    draft, context = draft_layers(llm), runner_of(llm).vllm_config.compilation_config.static_forward_context
    kinds = {type(layer) for layer in draft.values()}
    return {name: layer for name, layer in context.items() if name not in draft and type(layer) in kinds}


def block_size(llm: LLM) -> int:
    """Block size of the draft's attention kernel."""
    return int(next(iter(draft_layers(llm).values())).kv_cache.shape[-2])


def kernel(layer: Any) -> tuple[Any, str]:
    """Where the method of a layer lives that is given its cache and metadata as the last positional arguments."""
    return (layer, "forward_impl") if layer.attn_backend.is_mla() else (layer.impl, "forward")


def pointers(lens: Tensor, table: Tensor) -> set[int]:
    """Addresses of a batch's lengths and block table."""
    return {lens.data_ptr(), table.data_ptr()}


def rows_of(meta: Any) -> tuple[Tensor, Tensor, set[int]]:
    """Lengths and block table of a batch as its kernel is given them, and where it reads them from the device."""
    if hasattr(meta, "block_table"):
        lens, table = meta.seq_lens, meta.block_table[: meta.seq_lens.shape[0]]
        return lens.clone(), table.clone(), pointers(lens, table)
    # Latent attention splits a batch: rows of one query first, and the others, with their lengths on the host.
    lens, tables, addresses = [], [], set()
    if meta.decode is not None:
        lens.append(meta.decode.seq_lens)
        tables.append(meta.decode.block_table)
        addresses |= pointers(lens[0], tables[0])
    if meta.prefill is not None:
        context = meta.prefill.chunked_context
        before = 0 if context is None else torch.tensor(context.context_lens_list, dtype=torch.int32)
        lens.append(meta.prefill.query_lens_cpu + before)
        tables.append(meta.prefill.block_table[: len(lens[-1])])
        addresses |= set() if meta.decode is not None else {tables[0].data_ptr()}
    return torch.cat(lens), torch.cat(tables), addresses


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
