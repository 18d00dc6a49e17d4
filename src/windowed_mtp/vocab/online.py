"""A ranking that follows what a target emits, in bounded memory."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterable
from typing import Any

from windowed_mtp.errors import VocabularyError
from windowed_mtp.vocab.file import HotVocabulary
from windowed_mtp.vocab.ids import hot_ids


class OnlineCounts:
    """Counts emitted ids; the ranking is made anew every ``interval`` of them, and stays the same in between.

    Several threads may count at once.

    A refresh ranks by the counts, multiplies them by ``decay``, and forgets the lowest beyond ``capacity``. The same
    ids in the same order give the same rankings.

    Parameters
    ----------
    base : HotVocabulary, optional
        What ranks the ids that have not been emitted; without it the lowest ids come first.
    always : iterable of int
        Ids that are in whatever their rank, beside those of ``base``: special tokens, and those of a single byte.
    interval : int
        Emitted ids from one refresh to the next, at least 1.
    capacity : int
        Ids whose counts outlive a refresh, at least 1; up to ``interval`` more are held between two refreshes.
    decay : float
        Share of a count that outlives a refresh, above 0 and at most 1.

    Attributes
    ----------
    version : int
        Number of refreshes so far.

    Raises
    ------
    VocabularyError
        If an option is out of its range.
    """

    def __init__(
        self,
        base: HotVocabulary | None = None,
        *,
        always: Iterable[int] = (),
        interval: int = 4096,
        capacity: int = 32768,
        decay: float = 0.9,
    ) -> None:
        for name, value in (("interval", interval), ("capacity", capacity)):
            if not isinstance(value, int) or value < 1:
                raise VocabularyError(f"{name} is {value!r}, but it must be a whole number of at least 1.")
        if not 0 < decay <= 1:
            raise VocabularyError(f"decay is {decay!r}, but it must be above 0 and at most 1.")
        self.base = base
        self.always = frozenset(always).union(base.always if base else ())
        self.interval = interval
        self.capacity = capacity
        self.decay = decay
        self.version = 0
        self._counts: dict[int, float] = {}
        self._ranked: list[int] = []
        self._since = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __len__(self) -> int:
        """Return how many ids have a count."""
        return len(self._counts)

    def update(self, ids: Iterable[int]) -> bool:
        """Count emitted ids; whether the ranking was made anew.

        Parameters
        ----------
        ids : iterable of int
            Ids in the order in which they were emitted.

        Raises
        ------
        VocabularyError
            If an id is negative.
        """
        with self._lock:
            before = self.version
            for token in map(operator.index, ids):
                if token < 0:
                    raise VocabularyError(f"token {token} cannot be counted: ids begin with 0.")
                self._counts[token] = self._counts.get(token, 0.0) + 1.0
                self._since += 1
                if self._since == self.interval:
                    self._refresh()
            return self.version != before

    def ids(self, size: int, vocab_size: int, *, always: Iterable[int] = ()) -> list[int]:
        """Give the hot ids of a size, by the counts of the last refresh; see `HotVocabulary.ids`."""
        ranked = [*self._ranked, *(self.base.ranked if self.base else ())]
        return hot_ids(size, vocab_size, ranked, always=(*self.always, *always))

    def beyond(self, vocab_size: int) -> int:
        """Count the tokens, always in or of the base, that an output head of so many rows does not have."""
        return sum(token >= vocab_size for token in self.always.union(self.base.ranked if self.base else ()))

    def _refresh(self) -> None:
        self._ranked = sorted(self._counts, key=lambda token: (-self._counts[token], token))[: self.capacity]
        self._counts = {token: self._counts[token] * self.decay for token in self._ranked}
        self._since = 0
        self.version += 1
