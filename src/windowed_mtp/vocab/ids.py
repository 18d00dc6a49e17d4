"""Which ids are hot: a set of an exact size, from a ranking."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windowed_mtp.errors import VocabularyError


class Ranking(Protocol):
    """Something that names the hot ids for a size: a file, or counts that grow while an engine runs."""

    @property
    def always(self) -> Collection[int]:
        """Ids that are in whatever their rank: special tokens, and those of a single byte."""

    @property
    def version(self) -> int:
        """Grows by one whenever `ids` may give something else than before."""

    def beyond(self, vocab_size: int) -> int:
        """Count its ids that an output head of so many rows does not have."""

    def ids(self, size: int, vocab_size: int, *, always: Iterable[int] = ()) -> list[int]:
        """Give exactly ``size`` ids, ascending."""

    def update(self, ids: Iterable[int]) -> bool:
        """Take ids that the target emitted; whether `version` grew."""


@dataclass(frozen=True)
class HotSet:
    """How many tokens a draft may propose, and which.

    Parameters
    ----------
    ranking : Ranking
        A `HotVocabulary`, or `OnlineCounts`.
    size : int
        Number of tokens, with the special ones and those of a single byte.
    prompt_tail : int
        Number of tokens at the prompt's end that are in, whatever their rank.

    Raises
    ------
    VocabularyError
        If a number is out of its range, or what is always in and the prompt's end may be more than the size.
    """

    ranking: Ranking
    size: int
    prompt_tail: int = 0

    def __post_init__(self) -> None:
        check_size(self.size)
        if not isinstance(self.prompt_tail, int) or self.prompt_tail < 0:
            raise VocabularyError(f"prompt_tail is {self.prompt_tail!r}, but it must be a whole number of at least 0.")
        always = len(self.ranking.always)
        if self.size < always + self.prompt_tail:
            of_prompt = f" and {self.prompt_tail} of the prompt" if self.prompt_tail else ""
            or_less = ", or a smaller prompt_tail" if self.prompt_tail else ""
            raise VocabularyError(
                f"a hot vocabulary of {self.size} cannot hold {always} special and single-byte tokens{of_prompt}; "
                f"ask for at least {always + self.prompt_tail}{or_less}."
            )

    def ids(self, vocab_size: int, prompt: Sequence[int] = ()) -> list[int]:
        """Give the hot ids for a request.

        Parameters
        ----------
        vocab_size : int
            Rows V of the output head.
        prompt : sequence of int
            The request's prompt.

        Returns
        -------
        list of int
            ``size`` different ids, ascending.

        Raises
        ------
        VocabularyError
            If the size is above ``vocab_size``, or an id is negative.
        """
        tail = prompt[-self.prompt_tail :] if self.prompt_tail else ()
        return self.ranking.ids(self.size, vocab_size, always=tail)


def hot_ids(
    size: int,
    vocab_size: int,
    ranked: Iterable[int] = (),
    *,
    always: Iterable[int] = (),
) -> list[int]:
    """Choose the hot ids: those that are always in, the best ranked, then the lowest ids.

    Ids of ``vocab_size`` and above, which the output head has no rows for, are left out.

    Parameters
    ----------
    size : int
        Number of ids, 1 to ``vocab_size``.
    vocab_size : int
        Rows V of the output head.
    ranked : iterable of int
        Ids, the most frequent first.
    always : iterable of int
        Ids that are in whatever their rank; repetitions count once.

    Returns
    -------
    list of int
        ``size`` different ids, ascending; all of ``0 .. V-1`` for a size of V.

    Raises
    ------
    VocabularyError
        If the size is out of range, an id is negative, or the ids that are always in are more than the size.
    """
    size = check_size(size, vocab_size)
    ranked = _within(ranked, vocab_size)
    hot = set(_within(always, vocab_size))
    if len(hot) > size:
        raise VocabularyError(
            f"a hot vocabulary of {size} cannot hold the {len(hot)} tokens that are always in it; ask for a larger one."
        )
    for token in itertools.chain(ranked, range(vocab_size)):
        if len(hot) == size:
            break
        hot.add(token)
    return sorted(hot)


def check_size(size: int, vocab_size: int | None = None) -> int:
    """Check the size of a hot vocabulary, and return it as an int.

    Raises
    ------
    VocabularyError
        If it is not a whole number from 1 to ``vocab_size``, or of at least 1 where that is not given.
    """
    try:
        number = operator.index(size)
    except TypeError:
        raise VocabularyError(
            f"the hot vocabulary's size is {size!r}, but it must be a whole number; pass an integer."
        ) from None
    if number < 1 and vocab_size is None:
        raise VocabularyError(f"the hot vocabulary's size is {number}, but it must be at least 1; pass a larger one.")
    if vocab_size is not None and not 1 <= number <= vocab_size:
        raise VocabularyError(
            f"the hot vocabulary's size is {number}, but it must be from 1 to the model's {vocab_size} tokens."
        )
    return number


def left_out(ranking: Ranking, vocab_size: int) -> str | None:
    """Say that a model's output head lacks some of a ranking's tokens; ``None`` if it has them all.

    Parameters
    ----------
    ranking : Ranking
        What is hot.
    vocab_size : int
        Rows V of the output head.
    """
    beyond = ranking.beyond(vocab_size)
    if not beyond:
        return None
    return (
        f"tokens from {vocab_size} on are left out of the hot vocabulary ({beyond} of them), as the model's output "
        f"head has {vocab_size} rows."
    )


def _within(ids: Iterable[int], vocab_size: int) -> list[int]:
    made = list(map(operator.index, ids))
    if made and min(made) < 0:
        raise VocabularyError(f"the hot vocabulary has token {min(made)}, but ids begin with 0; make it anew.")
    return [token for token in made if token < vocab_size]
