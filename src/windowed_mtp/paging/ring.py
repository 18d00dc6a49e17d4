"""Where a position lives when a sequence keeps only its sinks and a circular window."""

from __future__ import annotations

from typing import overload

import torch

from windowed_mtp.errors import WindowError
from windowed_mtp.window import SinkWindow, whole_number


def ring_slots_per_sequence(window: SinkWindow, num_speculative_tokens: int) -> int:
    """Slots that one sequence owns: ``sink + window + num_speculative_tokens``.

    Parameters
    ----------
    window : SinkWindow
        What a query may read.
    num_speculative_tokens : int
        Number of draft tokens a step (γ), at least 1.

    Raises
    ------
    WindowError
        If ``num_speculative_tokens`` is not a whole number of at least 1, or if ``window.min_context`` is above
        ``sink + window``: below it a query would read keys that a ring no longer has.
    """
    return window.sink + _ring_length(window, num_speculative_tokens)


@overload
def ring_slot(row: int, position: int, *, window: SinkWindow, num_speculative_tokens: int) -> int: ...
@overload
def ring_slot(
    row: torch.Tensor, position: int | torch.Tensor, *, window: SinkWindow, num_speculative_tokens: int
) -> torch.Tensor: ...
@overload
def ring_slot(row: int, position: torch.Tensor, *, window: SinkWindow, num_speculative_tokens: int) -> torch.Tensor: ...
def ring_slot(
    row: int | torch.Tensor, position: int | torch.Tensor, *, window: SinkWindow, num_speculative_tokens: int
) -> int | torch.Tensor:
    """Slot of a position of a row: sinks first, then a circle of ``window + num_speculative_tokens`` slots.

    Parameters
    ----------
    row : int or torch.Tensor
        Index of the sequence, at least 0; a tensor of any integer dtype broadcasts against ``position``.
    position : int or torch.Tensor
        Index of the draft-KV entry in its sequence, at least 0; a tensor of any integer dtype broadcasts.
    window : SinkWindow
        What a query may read.
    num_speculative_tokens : int
        Number of draft tokens a step (γ), at least 1.

    Returns
    -------
    int or torch.Tensor
        ``row * slots + position`` for a sink, ``row * slots + sink + (position - sink) % (window + γ)`` for another
        entry, where ``slots`` is `ring_slots_per_sequence`. An int if both arguments are, else an int64 tensor.

    Raises
    ------
    WindowError
        If ``row`` or ``position`` is a negative int, no int, or a tensor that is not integer, and as
        `ring_slots_per_sequence`. The values of a tensor are not read, so negative ones are not seen.

    Notes
    -----
    Why ``window + γ`` is enough. A pass writes its ``q <= γ + 1`` entries before its queries read. With its first query
    at position ``p``, the newest entry is at most ``p + γ``, so the circle still holds the positions from
    ``p + γ - (window + γ) + 1 = p - window + 1`` on: the first query's window, and so each later one's. With one slot
    fewer, a pass of ``γ + 1`` entries overwrites the oldest key of its first query. A rollback that leaves ``p``
    entries, ``r`` fewer than were ever written, makes ``p`` the next first query's position. Overwritten is what lies
    ``window + γ`` or more before the newest entry, so at or before ``p + r - 1 - (window + γ)``: outside that query's
    window for every ``r <= γ + 1``.

    A longer pass (prefill) maps several of its own entries to one slot, and a parallel write leaves any of them there:
    it must write only the entries of `ring_kept`, and its queries must read the rest from the pass itself.
    """
    ring_length = _ring_length(window, num_speculative_tokens)
    base = _integer("row", row) * (window.sink + ring_length)
    position = _integer("position", position)
    circular = window.sink + (position - window.sink) % ring_length
    if isinstance(position, torch.Tensor):
        return base + torch.where(position < window.sink, position, circular)
    return base + (position if position < window.sink else circular)


def ring_kept(length: int, *, window: SinkWindow, num_speculative_tokens: int) -> list[int]:
    """Positions that a ring holds after a pass that ends at ``length`` entries.

    No two of them share a slot, so a pass that starts at position ``start`` may write those from ``start`` on in any
    order, however long it is.

    Parameters
    ----------
    length : int
        Number of draft-KV entries after the pass, at least 0.
    window : SinkWindow
        What a query may read.
    num_speculative_tokens : int
        Number of draft tokens a step (γ), at least 1.

    Returns
    -------
    list of int
        Sorted positions: the sinks and the last ``window + γ`` other entries.

    Raises
    ------
    WindowError
        If ``length`` is negative or not a whole number, and as `ring_slots_per_sequence`.
    """
    ring_length = _ring_length(window, num_speculative_tokens)
    length = whole_number("length", length, least=0)
    sinks = min(window.sink, length)
    return [*range(sinks), *range(max(sinks, length - ring_length), length)]


def _ring_length(window: SinkWindow, num_speculative_tokens: int) -> int:
    """Slots of the circular part: ``window + num_speculative_tokens``."""
    if window.min_context > window.span:
        raise WindowError(
            f"min_context is {window.min_context}, but a ring keeps only sink + window = {window.span} keys; "
            f"lower min_context or keep all keys."
        )
    return window.window + whole_number("num_speculative_tokens", num_speculative_tokens, least=1)


def _integer(name: str, value: int | torch.Tensor) -> int | torch.Tensor:
    """Return a non-negative int, or an integer tensor as int64."""
    if not isinstance(value, torch.Tensor):
        return whole_number(name, value, least=0)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise WindowError(f"{name} is a {value.dtype} tensor, but it must hold integers; convert it.")
    return value.long()
