"""The set of draft-KV entries that a windowed draft query reads, as closed forms."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from windowed_mtp.errors import WindowError


def whole_number(name: str, value: int, *, least: int) -> int:
    """Check a setting that must be a whole number.

    Parameters
    ----------
    name : str
        What to call it in an error.
    value : int
        An int, or anything that stands for one (a numpy integer).
    least : int
        Smallest value allowed.

    Returns
    -------
    int
        ``value`` as an int.

    Raises
    ------
    WindowError
        If it is not a whole number, or below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise WindowError(f"{name} is {value!r}, but it must be a whole number; pass an integer.") from None
    if number < least:
        raise WindowError(f"{name} is {number}, but it must be at least {least}; pass a larger value.")
    return number


@dataclass(frozen=True)
class SinkWindow:
    """Attention sinks plus a recent window: what a draft query may read.

    A query whose own entry is the last of ``length`` draft-KV entries reads
    ``{0 .. sink-1} ∪ {length-window .. length-1}``. Where that is everything (``length <= sink + window``), or where
    ``length < min_context``, it reads all entries, exactly as without a window.

    Parameters
    ----------
    sink : int
        Number of entries kept at the start of the sequence (attention sinks), at least 0.
    window : int
        Number of most recent entries kept, the query's own included, at least 1.
    min_context : int
        Number of draft-KV entries below which the window is inert, at least 0.

    Raises
    ------
    WindowError
        If a value is out of its range or not an integer.

    Notes
    -----
    The defaults are the operating point of Windowed-MTP (arXiv 2607.21535): sink 64, window 4032.
    """

    sink: int = 64
    window: int = 4032
    min_context: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("window", 1), ("min_context", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))

    @property
    def span(self) -> int:
        """Largest number of entries that an engaged query reads: ``sink + window``."""
        return self.sink + self.window

    def engages(self, length: int) -> bool:
        """Whether the query at ``length`` entries reads less than everything.

        Parameters
        ----------
        length : int
            Number of draft-KV entries up to and including the query's own.
        """
        return length > self.span and length >= self.min_context

    def tail_start(self, length: int, query_len: int = 1) -> int:
        """First position after the sinks that a pass reads; ``min(sink, length)`` when nothing is dropped.

        Parameters
        ----------
        length : int
            Number of draft-KV entries up to and including the pass's last query.
        query_len : int
            Number of queries in the pass; the bound is the one of its first query.
        """
        if not self.engages(length):
            return min(self.sink, length)
        return max(self.sink, length - query_len + 1 - self.window)

    def positions(self, length: int, query_len: int = 1) -> list[int]:
        """Positions that the last query of a pass may read, sorted.

        With ``query_len == 1`` this is the definition of the window. A longer pass that keeps one set of keys for all
        of its queries takes the bound of its first query, so its last query may read up to ``query_len - 1`` more.

        Parameters
        ----------
        length : int
            Number of draft-KV entries up to and including the pass's last query.
        query_len : int
            Number of queries in the pass, at least 1 and at most ``length``.

        Returns
        -------
        list of int
            Sorted positions, each in ``[0, length)``.

        Raises
        ------
        WindowError
            If ``length`` is negative or ``query_len`` is not in ``[1, max(1, length)]``.
        """
        if length < 0 or not 1 <= query_len <= max(1, length):
            raise WindowError(
                f"a pass of {query_len} queries cannot end at {length} entries; pass 1 <= query_len <= length."
            )
        return [*range(min(self.sink, length)), *range(self.tail_start(length, query_len), length)]

    def num_keys(self, length: int) -> int:
        """Count the entries that the query at ``length`` entries reads: ``len(positions(length))``.

        Parameters
        ----------
        length : int
            Number of draft-KV entries up to and including the query's own.
        """
        return self.span if self.engages(length) else length
