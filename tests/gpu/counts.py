"""What an engine did, counted from outside the plugin: graphs, padding, windowed passes, proposals; and the poison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from engines import runner_of
from vllm import LLM
from vllm.config import CUDAGraphMode

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.windowing import Windowing


@dataclass
class Counts:
    """What happened while an engine ran.

    Attributes
    ----------
    full : int
        Batches of the target in a full CUDA graph.
    sizes : Counter
        Their numbers of requests.
    padded : int
        Those of them with rows, or tokens, that no request has.
    captured : set of str
        Managers that have full graphs (V2): the target's, and those of the drafter's passes.
    replays : Counter
        Replays of full graphs, by the manager's name.
    passes : int
        Batches that the plugin was given.
    padded_passes : int
        Those of them with rows without a query.
    dropped : int
        Keys that these were spared, in all.
    dropped_in_loop : int
        Keys that a drafter's last pass was spared, as its captured graph left the lengths.
    """

    full: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    padded: int = 0
    captured: set[str] = field(default_factory=set)
    replays: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    padded_passes: int = 0
    dropped: int = 0
    dropped_in_loop: int = 0


@contextmanager
def counting(llm: LLM) -> Iterator[Counts]:
    """Count what an engine does, whichever runner it has."""
    counts, runner = Counts(), runner_of(llm)
    window = Windowing.__call__

    def windowed(self: Windowing, common: Any) -> Any:
        made = window(self, common)
        counts.passes += 1
        counts.padded_passes += int((common.query_start_loc_cpu.diff() == 0).any())
        counts.dropped += int((common.seq_lens - made.seq_lens).sum())
        return made

    watch = _v2 if hasattr(runner, "speculator") else _v1
    with patch.object(Windowing, "__call__", windowed), watch(runner, counts):
        yield counts


@contextmanager
def _v1(runner: Any, counts: Counts) -> Iterator[None]:
    dispatcher = runner.cudagraph_dispatcher
    dispatch = dispatcher.dispatch

    def dispatched(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        mode, batch = dispatch(num_tokens, *args, **kwargs)
        if mode == CUDAGraphMode.FULL:
            counts.full += 1
            counts.padded += int(batch.num_tokens > num_tokens)
            counts.replays["target"] += 1
            counts.sizes[runner.input_batch.num_reqs] += 1
        return mode, batch

    dispatcher.dispatch = dispatched
    try:
        yield
    finally:
        del dispatcher.dispatch


@contextmanager
def _v2(runner: Any, counts: Counts) -> Iterator[None]:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculator, state = runner.speculator, runner.model_state
    prepare, propose = state.prepare_attn, speculator.propose
    managers = {
        name: manager
        for owner in (runner, speculator)
        for name, manager in vars(owner).items()
        if isinstance(manager, CudaGraphManager)
    }

    def prepared(batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if mode == CUDAGraphMode.FULL:
            counts.full += 1
            counts.sizes[batch.num_reqs] += 1
            counts.padded += int(batch.num_reqs_after_padding > batch.num_reqs)
        return prepare(batch, mode, *args, **kwargs)

    def proposed(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        for windowing in windowings(speculator):
            if windowing._pass is not None:
                counts.dropped_in_loop += int((windowing._pass.lens - windowing._pass.out_lens).sum())
        return made

    def replaying(name: str, replay: Any) -> Any:
        def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
            counts.replays[name] += 1
            return replay(*args, **kwargs)

        return run_fullgraph

    state.prepare_attn, speculator.propose = prepared, proposed
    for name, manager in managers.items():
        counts.captured |= {name} if manager.graphs else set()
        manager.run_fullgraph = replaying(name, manager.run_fullgraph)
    try:
        yield
    finally:
        del state.prepare_attn, speculator.propose
        for manager in managers.values():
            del manager.run_fullgraph


def windowings(owner: Any) -> list[Windowing]:
    """What windows the batches of a runner, or of its drafter."""
    return [
        builder.windowing
        for groups in owner.attn_groups
        for group in groups
        for builder in group.metadata_builders
        if hasattr(builder, "windowing")
    ]


@dataclass
class Proposals:
    """What a V2 drafter proposed, step by step, and how many blocks were NaN while it did."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    poisoned: int = 0


@contextmanager
def proposals(llm: LLM, poison: SinkWindow | None = None) -> Iterator[Proposals]:
    """Record proposals of the V2 runner; with ``poison``, what no pass of a step may read is NaN while it drafts."""
    seen, runner = Proposals(), runner_of(llm)
    speculator = runner.speculator
    propose, blocks = speculator.propose, runner.kv_cache_config.num_blocks
    context, groups = runner.compilation_config.static_forward_context, runner.kv_cache_config.kv_cache_groups
    caches = [context[name].kv_cache for name in sorted(speculator.draft_attn_layer_names)]
    [group] = {
        index
        for index, each in enumerate(groups)
        for name in each.layer_names
        if name in speculator.draft_attn_layer_names
    }
    size = windowings(runner)[0].block_size
    axes = [next(axis for axis, count in enumerate(cache.shape) if count == blocks) for cache in caches]
    assert all(size in cache.shape[axis + 1 :] for cache, axis in zip(caches, axes, strict=True))

    def proposed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        excluded = _excluded(runner, batch, group, size, poison) if poison is not None else []
        chosen = torch.tensor(excluded, dtype=torch.long, device=caches[0].device)
        saved = [cache.index_select(axis, chosen) for cache, axis in zip(caches, axes, strict=True)]
        for cache, axis in zip(caches, axes, strict=True):
            cache.index_fill_(axis, chosen, float("nan"))
        made = propose(batch, *args, **kwargs)
        for cache, axis, kept in zip(caches, axes, saved, strict=True):
            cache.index_copy_(axis, chosen, kept)
        sampled = args[4] > 0  # what is drafted for a prompt that is not through yet depends on an earlier request
        seen.tokens.append(made[sampled].tolist())
        seen.poisoned += len(excluded)
        return made

    speculator.propose = proposed
    try:
        yield seen
    finally:
        del speculator.propose


def _excluded(runner: Any, batch: Any, group: int, size: int, window: SinkWindow) -> list[int]:
    """Blocks that rows of a batch own, and that none of its rows may read."""
    rows = batch.num_reqs
    table = runner.block_tables.input_block_tables[group][:rows].tolist()
    lens, counts = batch.seq_lens[:rows].tolist(), batch.query_start_loc[: rows + 1].diff().tolist()
    left: set[int] = set()
    read: set[int] = set()
    for ids, length, count in zip(table, lens, counts, strict=True):
        first = max(0, length - count + 1 - window.window) // size
        sinks = -(-window.sink // size)
        left.update(ids[sinks:first])
        read.update(ids[:sinks], ids[max(first, sinks) : -(-length // size)])
    return sorted(left - read)
