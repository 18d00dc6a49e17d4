"""What a query finds: through a compacted block table, and in a ring after writes, wrap-around and rollback."""

from collections.abc import Callable
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowed_mtp.paging import (
    compact_block_table,
    dropped_blocks,
    may_drop,
    ring_kept,
    ring_slot,
    ring_slots_per_sequence,
    windowed_length,
    windowed_length_bound,
)
from windowed_mtp.window import SinkWindow

WINDOWS = st.builds(SinkWindow, sink=st.integers(0, 20), window=st.integers(1, 30), min_context=st.integers(0, 90))
RING_WINDOWS = st.builds(SinkWindow, sink=st.integers(0, 4), window=st.integers(1, 9))
TOKENS = st.integers(1, 6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A block size and the (entries, queries) of each row, padding included."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    lens = draw(st.lists(st.integers(0, 120), min_size=1, max_size=8))
    return block_size, [(s, draw(st.integers(min(s, 1), min(s, 9)))) for s in lens]


@settings(max_examples=200, deadline=None)
@given(WINDOWS, batches(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_query_finds_its_window_and_little_else(
    window: SinkWindow, batch: tuple[int, list[tuple[int, int]]], spare: int, random
):
    block_size, rows = batch
    num_columns = -(-max(s for s, _ in rows) // block_size) + spare
    ids = list(range(1, len(rows) * num_columns + 1))  # block 0 holds nothing: reading it is a KeyError
    random.shuffle(ids)
    table = torch.tensor(ids, dtype=torch.int32).reshape(len(rows), num_columns)
    first_position = {block: i % num_columns * block_size for i, block in enumerate(ids)}
    lens, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))

    new_table, new_lens = compact_block_table(table, lens, queries, block_size=block_size, window=window)

    for row, (s, q) in enumerate(rows):
        blocks, length = new_table[row].tolist(), int(new_lens[row])
        assert set(blocks) <= {0, *table[row].tolist()}
        cells = [first_position[blocks[i // block_size]] + i % block_size for i in range(length)]
        per_query = SinkWindow(window.sink, window.window) if s >= window.min_context else SinkWindow(0, s + 1)
        for query in range(q):
            own = s - q + query
            read = cells[: length - (q - 1 - query)]  # bottom-right aligned causal mask
            asked = per_query.positions(own + 1)
            assert read[-1] == own
            assert read == sorted(set(read))
            assert set(asked) <= set(read)
            assert len(read) - len(asked) <= q - 1 + 2 * (block_size - 1)
        if length == s:
            assert blocks == table[row].tolist()


@settings(max_examples=200, deadline=None)
@given(WINDOWS, batches())
def test_lengths_on_the_host_are_those_of_the_table(window: SinkWindow, batch: tuple[int, list[tuple[int, int]]]):
    block_size, rows = batch
    table = torch.zeros(len(rows), -(-max(s for s, _ in rows) // block_size), dtype=torch.int32)
    lens, queries = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    _, new_lens = compact_block_table(table, lens, queries, block_size=block_size, window=window)
    policy = {"block_size": block_size, "window": window}
    assert new_lens.tolist() == [windowed_length(s, q, **policy) for s, q in rows]


@settings(max_examples=200, deadline=None)
@given(WINDOWS, st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 120), st.integers(1, 9))
def test_bounds_hold_for_every_shorter_row(window: SinkWindow, block_size: int, length: int, query_len: int):
    policy = {"block_size": block_size, "window": window}
    passes = [(s, q) for s in range(1, length + 1) for q in range(1, min(s, query_len) + 1)]
    longest = max(windowed_length(s, q, **policy) for s, q in passes)
    bound = windowed_length_bound(length, query_len, **policy)
    assert longest <= bound <= longest + block_size + query_len
    assert may_drop(length, **policy) == any(dropped_blocks(s, q, **policy) for s, q in passes)


class Ring:
    """Slots of one sequence, each holding the position written last; reads report what is missing."""

    def __init__(self, window: SinkWindow, slot_of: Callable[[int], int]):
        self.window, self.slot_of = window, slot_of
        self.slots: dict[int, int] = {}
        self.length = self.newest = 0

    def write(self, positions: list[int]) -> None:
        for position in positions:
            self.slots[self.slot_of(position)] = position
        self.length = positions[-1] + 1
        self.newest = max(self.newest, self.length)

    def missing(self, num_queries: int) -> list[tuple[int, int]]:
        """(query, key) for each key that one of the last queries asks for and does not find."""
        return [
            (own, key)
            for own in range(self.length - num_queries, self.length)
            for key in self.window.positions(own + 1)
            if self.slots.get(self.slot_of(key)) != key
        ]


@settings(max_examples=150, deadline=None)
@given(RING_WINDOWS, TOKENS, st.integers(0, 3), st.data())
def test_a_ring_serves_every_pass(window: SinkWindow, tokens: int, row: int, data: st.DataObject):
    options = {"window": window, "num_speculative_tokens": tokens}
    ring = Ring(window, partial(ring_slot, row, **options))
    owned = ring_slots_per_sequence(window, tokens)
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        if data.draw(st.booleans(), label="prefill"):
            end = ring.length + data.draw(st.integers(tokens + 2, 50), label="prompt")
            ring.write([p for p in ring_kept(end, **options) if p >= ring.length])
        else:
            queries = data.draw(st.integers(1, tokens + 1), label="queries")
            ring.write(list(range(ring.length, ring.length + queries)))
            assert ring.missing(queries) == []
        least = max(0, ring.newest - tokens)
        ring.length = data.draw(st.integers(least, ring.length), label="length after rollback")
    assert all(row * owned <= slot < (row + 1) * owned for slot in ring.slots)


@settings(deadline=None)
@given(RING_WINDOWS, TOKENS, st.integers(1, 60))
def test_one_slot_fewer_loses_the_oldest_key_of_a_full_pass(window: SinkWindow, tokens: int, beyond: int):
    def short(position: int) -> int:
        if position < window.sink:
            return position
        return window.sink + (position - window.sink) % (window.window + tokens - 1)

    start = window.span + beyond
    full_pass = list(range(start, start + tokens + 1))
    for slot_of in (short, partial(ring_slot, 0, window=window, num_speculative_tokens=tokens)):
        ring = Ring(window, slot_of)
        ring.write(list(range(start)))
        ring.write(full_pass)
        assert ring.missing(tokens + 1) == ([(start, start - window.window + 1)] if slot_of is short else [])


@settings(deadline=None)
@given(RING_WINDOWS, TOKENS, st.integers(0, 60))
def test_what_stays_has_a_slot_each(window: SinkWindow, tokens: int, length: int):
    options = {"window": window, "num_speculative_tokens": tokens}
    kept = ring_kept(length, **options)
    held = {ring_slot(0, p, **options): p for p in range(length)}  # what writing one by one would leave
    assert {ring_slot(0, p, **options): p for p in kept} == held
    assert len(kept) == len(held) == min(length, ring_slots_per_sequence(window, tokens))
