"""What a drafter's passes are given and give, seen from outside the plugin; and the poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from engines import runner_of
from torch import Tensor
from vllm import LLM

from windowed_mtp import SinkWindow

OFF = 2**30
"""A ``min_context`` that no sequence reaches."""


@dataclass
class DraftPass:
    """One pass of one draft layer: the rows as vLLM made them, before any window."""

    draft_index: int
    seq_lens: list[int]
    query_lens: list[int]
    table: Tensor
    keys_read: int = 0
    query: Tensor | None = None
    output: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Length and number of queries of each row."""
        return list(zip(self.seq_lens, self.query_lens, strict=True))

    def first_key(self, row: int, window: SinkWindow) -> int:
        """First position after the sinks that some query of a row may read, by the definition."""
        engaged = self.seq_lens[row] >= window.min_context
        return max(0, self.seq_lens[row] - self.query_lens[row] + 1 - window.window) if engaged else 0

    def visible_positions(self, row: int, window: SinkWindow, block_size: int) -> list[int]:
        """Positions of a row in blocks that hold a sink or a key of the first query's window or later."""
        first = self.first_key(row, window)
        blocks = {p // block_size for p in range(self.seq_lens[row]) if p < window.sink or p >= first}
        return [p for p in range(self.seq_lens[row]) if p // block_size in blocks]

    def dropped_blocks(self, row: int, window: SinkWindow, block_size: int) -> int:
        """Number of a row's blocks that none of its queries may read."""
        kept = {p // block_size for p in self.visible_positions(row, window, block_size)}
        return -(-self.seq_lens[row] // block_size) - len(kept)

    def owned_blocks(self, block_size: int) -> set[int]:
        """Blocks that hold these rows."""
        rows = zip(self.table.tolist(), self.seq_lens, strict=True)
        return {ids[p // block_size] for ids, length in rows for p in range(0, length, block_size)}

    def excluded_blocks(self, window: SinkWindow, block_size: int) -> list[int]:
        """Blocks that these rows own and none of them may read."""
        read = {
            ids[p // block_size]
            for row, ids in enumerate(self.table.tolist())
            for p in self.visible_positions(row, window, block_size)
        }
        return sorted(self.owned_blocks(block_size) - read)


@dataclass
class Seen:
    """All passes of a run and what they proposed."""

    passes: list[DraftPass] = field(default_factory=list)
    proposals: list[list[list[int]]] = field(default_factory=list)
    poisoned: int = 0

    @property
    def keys_read(self) -> int:
        """Draft keys that all passes read, by the lengths that reached the kernel."""
        return sum(each.keys_read for each in self.passes)


def draft_builder(llm: LLM) -> Any:
    """The metadata builder of the draft's attention layers."""
    [group] = runner_of(llm).drafter.draft_attn_groups
    return group.get_metadata_builder()


def draft_layers(llm: LLM) -> dict[str, Any]:
    """The draft's attention layers by name."""
    runner = runner_of(llm)
    context = runner.vllm_config.compilation_config.static_forward_context
    return {name: context[name] for name in sorted(runner.drafter._draft_attn_layer_names)}


def block_size(llm: LLM) -> int:
    """Block size of the draft's attention kernel."""
    return int(next(iter(draft_layers(llm).values())).kv_cache.shape[-2])


@contextmanager
def window_as(llm: LLM, window: SinkWindow) -> Iterator[None]:
    """Put another window in force for a while, in the builder that has it."""
    windowing = draft_builder(llm).windowing
    before, windowing.window = windowing.window, window
    try:
        yield
    finally:
        windowing.window = before


@contextmanager
def watch(
    llm: LLM, poison: SinkWindow | None = None, observe: Callable[[DraftPass], None] | None = None
) -> Iterator[Seen]:
    """Record every draft pass.

    With ``poison``, what its window excludes is NaN during a pass, and restored; what a draft without a window made of
    the NaN and wrote itself is taken out at the end. ``observe`` is called right after a pass, with its tensors: the
    keys and values are valid until the next one.
    """
    seen, drafter, builder = Seen(), runner_of(llm).drafter, draft_builder(llm)
    layers, size = list(draft_layers(llm).values()), block_size(llm)
    build, propose = builder.build_for_drafting, drafter.propose
    kernels = [(layer, "forward_impl") if _latent(layer) else (layer.impl, "forward") for layer in layers]
    shadows = [_Shadow(layer, size) for layer in layers] if observe else []
    current: list[DraftPass] = []
    used: set[int] = set()

    def build_for_drafting(common_attn_metadata: Any, draft_index: int) -> Any:
        common, rows = common_attn_metadata, common_attn_metadata.seq_lens.shape[0]
        lens, starts = common.seq_lens.tolist(), common.query_start_loc[: rows + 1]
        current[:] = [DraftPass(draft_index, lens, starts.diff().tolist(), common.block_table_tensor[:rows].clone())]
        return build(common_attn_metadata=common, draft_index=draft_index)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        seen.proposals.append(made.tolist())
        return made

    def forward_of(index: int, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            query, _, _, kv_cache, meta = args[-5:]
            if meta is None or not current:
                return original(*args, **kwargs)
            made = current[0]
            used.update(made.owned_blocks(size))
            blocks = made.excluded_blocks(poison, size) if poison is not None else []
            saved = kv_cache[blocks].clone()
            kv_cache[blocks] = float("nan")
            result = original(*args, **kwargs)
            kv_cache[blocks] = saved
            seen.poisoned += len(blocks)
            made.keys_read += _keys_read(meta)
            if observe:
                shadow = shadows[index]
                observe(replace(made, query=query, output=kwargs["output"], keys=shadow.keys, values=shadow.values))
            if index == len(layers) - 1:
                seen.passes.append(made)
            return result

        return forward

    try:
        builder.build_for_drafting, drafter.propose = build_for_drafting, recorded
        for index, (holder, name) in enumerate(kernels):
            setattr(holder, name, forward_of(index, getattr(holder, name)))
        yield seen
    finally:
        del builder.build_for_drafting, drafter.propose
        for holder, name in kernels:
            delattr(holder, name)
        for layer in layers if poison is not None else ():
            layer.kv_cache[sorted(used)] = layer.kv_cache[sorted(used)].nan_to_num(0.0)
        for shadow in shadows:
            shadow.remove()


def _latent(layer: Any) -> bool:
    return bool(layer.attn_backend.is_mla())


def _keys_read(meta: Any) -> int:
    """Sum of the lengths of a pass's rows, as its kernels are given them."""
    if hasattr(meta, "seq_lens"):
        return int(meta.seq_lens.sum())
    decoded = 0 if meta.decode is None else int(meta.decode.seq_lens.sum())
    if meta.prefill is None:
        return decoded
    context = meta.prefill.chunked_context
    chunks = [] if context is None else context.chunks
    return decoded + int(meta.prefill.query_lens_cpu.sum()) + sum(chunk.num_context_tokens for chunk in chunks)


class _Shadow:
    """What a layer caches by slot, in the order that it was computed in, whatever the kernel's own layout.

    These are keys and values; with latent attention they are the latent vectors and the keys' rotary parts.
    """

    def __init__(self, layer: Any, size: int) -> None:
        self.slots, self.first = layer.kv_cache.shape[0] * size, 0 if _latent(layer) else 1
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.impl, original = layer.impl, layer.impl.do_kv_cache_update

        def update(*args: Any) -> None:
            key, value, _, slot_mapping = args[self.first : self.first + 4]
            used = slot_mapping >= 0
            self.keys = self._written(self.keys, key[: len(used)][used], slot_mapping[used])
            self.values = self._written(self.values, value[: len(used)][used], slot_mapping[used])
            original(*args)

        self.impl.do_kv_cache_update = update

    def _written(self, shadow: Tensor | None, new: Tensor, slots: Tensor) -> Tensor:
        if shadow is None:
            shadow = torch.full((self.slots, *new.shape[1:]), float("nan"))
        shadow[slots] = new.float()
        return shadow

    def remove(self) -> None:
        del self.impl.do_kv_cache_update
