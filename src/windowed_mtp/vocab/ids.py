"""Which ids are hot: a set of an exact size, from a ranking."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Protocol

from windowed_mtp.errors import VocabularyError


class Ranking(Protocol):
    """Something that names the hot ids for a size: a file, or counts that grow while an engine runs."""

    @property
    def version(self) -> int:
        """Grows by one whenever `ids` may give something else than before."""

    def ids(self, size: int, vocab_size: int, *, always: Iterable[int] = ()) -> list[int]:
        """Give exactly ``size`` ids, ascending."""


def hot_ids(
    size: int,
    vocab_size: int,
    ranked: Iterable[int] = (),
    *,
    special: Iterable[int] = (),
    always: Iterable[int] = (),
) -> list[int]:
    """Choose the hot ids: the special tokens, what the caller insists on, the best ranked, then the lowest ids.

    Parameters
    ----------
    size : int
        Number of ids, 1 to ``vocab_size``.
    vocab_size : int
        Rows V of the output head.
    ranked : iterable of int
        Ids, the most frequent first.
    special : iterable of int
        Ids of the special tokens, which are always in.
    always : iterable of int
        Other ids that are always in, such as those at a prompt's end; repetitions count once.

    Returns
    -------
    list of int
        ``size`` different ids, ascending; all of ``0 .. V-1`` for a size of V.

    Raises
    ------
    VocabularyError
        If the size or an id is out of range, or the ids that are always in are more than the size.
    """
    size = check_size(size, vocab_size)
    ranked = list(ranked)
    hot = set(map(operator.index, itertools.chain(special, always)))
    check_ids(itertools.chain(hot, ranked), vocab_size)
    if len(hot) > size:
        raise VocabularyError(
            f"a hot vocabulary of {size} cannot hold the {len(hot)} tokens that are always in it; ask for a larger one."
        )
    for token in itertools.chain(ranked, range(vocab_size)):
        if len(hot) == size:
            break
        hot.add(token)
    return sorted(hot)


def check_size(size: int, vocab_size: int) -> int:
    """Check the size of a hot vocabulary, and return it as an int.

    Raises
    ------
    VocabularyError
        If it is not a whole number from 1 to ``vocab_size``.
    """
    try:
        number = operator.index(size)
    except TypeError:
        raise VocabularyError(
            f"the hot vocabulary's size is {size!r}, but it must be a whole number; pass an integer."
        ) from None
    if not 1 <= number <= vocab_size:
        raise VocabularyError(
            f"the hot vocabulary's size is {number}, but it must be from 1 to the model's {vocab_size} tokens."
        )
    return number


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Check that ids belong to a vocabulary.

    Raises
    ------
    VocabularyError
        Naming the first id that is below 0, or not below ``vocab_size``.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise VocabularyError(
                f"the hot vocabulary has token {token}, but the model's {vocab_size} tokens are 0 to {vocab_size - 1}; "
                "make it with the model's own tokenizer."
            )
