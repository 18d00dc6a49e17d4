"""Mutation checks: each planted mistake is caught by the checks that are meant to catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from checks import Case, check_greedy, check_proposals, check_reference
from property import test_paging_properties as paging_properties

import windowed_mtp.engines.transformers.cache as cache
import windowed_mtp.paging.blocks as blocks
import windowed_mtp.paging.ring as ring
from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers.cache import DraftKV, KeepAll, Ring
from windowed_mtp.engines.transformers.draft import DraftState
from windowed_mtp.engines.transformers.target import Target

Patch = pytest.MonkeyPatch

# A rollback after every step, recurrent state and, for the ring, wrap-around.
ALL = Case("qwen3_5", prompt=60, depth=3, drafter="alternating", arrangement="all")
PRUNED = Case("qwen3_5", prompt=120, depth=3, drafter="right", arrangement="pruned", new_tokens=8)
RING = Case("qwen3_5", prompt=60, depth=3, drafter="alternating", arrangement="ring")


def reference(case: Case) -> Callable[[], Any]:
    return partial(check_reference, case)


def greedy(case: Case) -> Callable[[], Any]:
    return partial(check_greedy, case)


BLOCKS = paging_properties.test_every_query_finds_its_window_and_little_else
SLOTS = paging_properties.test_a_ring_serves_every_pass
FULL_PASS = paging_properties.test_one_slot_fewer_loses_the_oldest_key_of_a_full_pass


def shift_tail(by: int) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        tail_start = SinkWindow.tail_start
        patch.setattr(
            SinkWindow, "tail_start", lambda self, length, query_len=1: tail_start(self, length, query_len) + by
        )

    return mutate


def no_sink(patch: Patch) -> None:
    reads = DraftKV.reads
    patch.setattr(DraftKV, "reads", lambda self: (0, reads(self)[1]))


def mask_one_key(by: int) -> Callable[[Patch], None]:
    """The mask of passes with several queries is off by one, while the keys read are right."""

    def mutate(patch: Patch) -> None:
        def mask(self: DraftKV, query_len: int, device: torch.device) -> torch.Tensor | None:
            window, length = self.window, self.length
            right = original(self, query_len, device)
            if right is None or window is None or not window.engages(length + 1):
                return right
            self.window = SinkWindow(window.sink, window.window + by)
            sinks, start = window.sink, window.tail_start(length + 1)
            keys = torch.cat([torch.arange(sinks), torch.arange(start, length + query_len)])
            last = torch.arange(length, length + query_len)[:, None]
            wrong = (keys <= last) & ((keys > last - window.window - by) | (keys < sinks))
            self.window = window
            return wrong[None, None]

        original = DraftKV.mask
        patch.setattr(DraftKV, "mask", mask)

    return mutate


def ring_one_slot_short(patch: Patch) -> None:
    length = ring._ring_length
    patch.setattr(ring, "_ring_length", lambda window, tokens: length(window, tokens) - 1)


def no_draft_crop(patch: Patch) -> None:
    patch.setattr(DraftKV, "crop", lambda self, length: None)


def no_target_crop(patch: Patch) -> None:
    patch.setattr("transformers.cache_utils.DynamicLayer.crop", lambda self, tokens: None)


def no_state_restore(patch: Patch) -> None:
    keep = Target.keep

    def without(self: Target, kept: int, ran: int) -> None:
        self._saved, self._calls = [], []
        keep(self, kept, ran)

    patch.setattr(Target, "keep", without)


def no_rerun_after_restore(patch: Patch) -> None:
    keep = Target.keep

    def without(self: Target, kept: int, ran: int) -> None:
        self._calls = []
        keep(self, kept, ran)

    patch.setattr(Target, "keep", without)


def no_eviction_on_long_writes(patch: Patch) -> None:
    store = Ring._store

    def keep_old(self: Ring, keys: torch.Tensor, values: torch.Tensor, sinks: int, start: int) -> Any:
        if keys.shape[2] > 1 and self._slots:
            before = [slots.clone() for slots in self._slots]
            read = store(self, keys, values, sinks, start)
            full = self.length >= self.window.span
            self._slots = before if full else self._slots
            return read
        return store(self, keys, values, sinks, start)

    patch.setattr(Ring, "_store", keep_old)


def slots_out_of_range(patch: Patch) -> None:
    slot = ring.ring_slot
    for module in (ring, cache, paging_properties):
        patch.setattr(module, "ring_slot", lambda row, position, **kw: slot(row, position, **kw) + kw["window"].span)


def block_columns_out_of_range(patch: Patch) -> None:
    compact = blocks.compact_block_table

    def off(table: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        new, lens = compact(table, *args, **kwargs)
        return new.roll(1, dims=1), lens

    patch.setattr(paging_properties, "compact_block_table", off)


def block_bound(by: int) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        compact = blocks.compact_block_table

        def off(table: torch.Tensor, lens: torch.Tensor, queries: torch.Tensor, *, block_size: int, window: SinkWindow):
            moved = SinkWindow(window.sink, max(1, window.window + by), window.min_context)
            return compact(table, lens, queries, block_size=block_size, window=moved)

        patch.setattr(paging_properties, "compact_block_table", off)

    return mutate


def prune_one_more(patch: Patch) -> None:
    needed = DraftState._needed

    def late(self: DraftState, layer: int, start: int, end: int, known: int) -> list[tuple[int, int]]:
        # All slots of the ring are filled, γ more than the last query reads; the next query reads one less.
        ranges = needed(self, layer, start, end, known)
        spare = self.num_speculative_tokens + self.num_layers
        return [*ranges[:-1], (ranges[-1][0] + spare + 1, ranges[-1][1])] if len(ranges) > 1 else ranges

    patch.setattr(DraftState, "_needed", late)


def features_one_token_late(patch: Patch) -> None:
    observe = DraftState.observe
    patch.setattr(DraftState, "observe", lambda self, features: observe(self, features.roll(1, dims=1)))


def another_hidden_state_recycled(patch: Patch) -> None:
    run = DraftState._run

    def flipped(self: DraftState, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, recycled = run(self, *args)
        return out, recycled.flip(-1)

    patch.setattr(DraftState, "_run", flipped)


def tokens_not_shifted(patch: Patch) -> None:
    run = DraftState._run

    def late(self: DraftState, layer: int, start: int, tokens: torch.Tensor, hidden: torch.Tensor) -> Any:
        return run(self, layer, start, tokens.roll(1, dims=1), hidden)

    patch.setattr(DraftState, "_run", late)


def buffer_not_grown(patch: Patch) -> None:
    patch.setattr(
        KeepAll,
        "_grow",
        lambda self, capacity, keys, values: setattr(
            self, "_buffers", [t.new_zeros(*t.shape[:2], capacity, t.shape[3]) for t in (keys, values)]
        ),
    )


MUTANTS: dict[str, tuple[Callable[[Patch], None], Callable[[], Any]]] = {
    "window one key short": (shift_tail(1), reference(ALL)),
    "window one key long": (shift_tail(-1), reference(ALL)),
    "window one key short in the ring": (shift_tail(1), reference(RING)),
    "window one key long in the mask": (mask_one_key(1), reference(ALL)),
    "window one key short in the mask": (mask_one_key(-1), reference(ALL)),
    "window one key short in the block table": (block_bound(-1), BLOCKS),
    "window one key long in the block table": (block_bound(1), BLOCKS),
    "no sink": (no_sink, reference(ALL)),
    "no sink in the ring": (no_sink, reference(RING)),
    "one ring slot short at q = γ + 1": (ring_one_slot_short, FULL_PASS),
    "no crop of the draft": (no_draft_crop, reference(ALL)),
    "no crop of the draft's ring": (no_draft_crop, reference(RING)),
    "a pruned prefill one entry short": (prune_one_more, partial(check_reference, PRUNED, sighted=False)),
    "a pruned prefill one entry short, chained": (
        prune_one_more,
        partial(check_reference, replace(PRUNED, family="qwen3_5-chained"), sighted=False),
    ),
    "the target's features one token late": (features_one_token_late, reference(ALL)),
    "each entry the token before": (tokens_not_shifted, reference(ALL)),
    "another hidden state recycled, chained": (
        another_hidden_state_recycled,
        reference(replace(ALL, family="qwen3_5-chained")),
    ),
    "another hidden state recycled": (another_hidden_state_recycled, partial(check_proposals, ALL)),
    "no crop of the target": (no_target_crop, greedy(ALL)),
    "no state restore": (no_state_restore, greedy(ALL)),
    "no state restore, Mamba2": (no_state_restore, greedy(Case("nemotron_h", drafter="alternating"))),
    "no run of the accepted tokens after a restore": (no_rerun_after_restore, greedy(ALL)),
    "a ring that does not evict on multi-token writes": (no_eviction_on_long_writes, reference(RING)),
    "a slot out of range": (slots_out_of_range, reference(RING)),
    "a slot out of its sequence's range": (slots_out_of_range, SLOTS),
    "a block column out of range": (block_columns_out_of_range, BLOCKS),
    "a buffer that loses its keys when it grows": (buffer_not_grown, reference(Case("qwen3_5", prompt=900))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    mutate, check = MUTANTS[name]
    check()  # without the mistake it passes
    mutate(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ExceptionGroup)):
        check()
