"""The arithmetic of a windowed row as plain integers, for bounds on the host and for counting keys."""

from __future__ import annotations

from windowed_mtp.window import SinkWindow


def dropped_blocks(length: int, query_len: int, *, block_size: int, window: SinkWindow) -> int:
    """Blocks that a pass leaves out of one row, as `compact_block_table` does.

    Parameters
    ----------
    length : int
        Entries of the row, this pass's queries included.
    query_len : int
        Queries of the row in this pass.
    block_size : int
        Entries a block, at least 1.
    window : SinkWindow
        What a query may read.
    """
    if length < window.min_context:
        return 0
    first_block = (length - query_len + 1 - window.window) // block_size
    return max(0, first_block - sink_blocks(block_size, window))


def windowed_length(length: int, query_len: int, *, block_size: int, window: SinkWindow) -> int:
    """Keys of one row that a pass reads, both ends rounded outward to blocks.

    Parameters
    ----------
    length, query_len, block_size, window
        As for `dropped_blocks`.
    """
    return length - dropped_blocks(length, query_len, block_size=block_size, window=window) * block_size


def windowed_length_bound(length: int, query_len: int, *, block_size: int, window: SinkWindow) -> int:
    """Largest windowed length of any row with at most ``length`` entries and ``query_len`` queries.

    The windowed length is a sawtooth in the length, so the bound is not the windowed length of the bound.

    Parameters
    ----------
    length, query_len, block_size, window
        As for `dropped_blocks`, the first two as upper bounds.
    """
    most = sink_blocks(block_size, window) * block_size + window.window + query_len - 1 + block_size - 1
    return min(length, max(most, window.min_context - 1))


def sink_blocks(block_size: int, window: SinkWindow) -> int:
    """Blocks that hold the sinks: ``ceil(sink / block_size)``."""
    return -(-window.sink // block_size)


def may_drop(length: int, *, block_size: int, window: SinkWindow) -> bool:
    """Whether some pass over a row of at most ``length`` entries drops a block.

    Parameters
    ----------
    length : int
        Upper bound of the row's entries, this pass's queries included.
    block_size : int
        Entries a block, at least 1.
    window : SinkWindow
        What a query may read.
    """
    return dropped_blocks(length, 1, block_size=block_size, window=window) > 0
