"""How often each token id occurs in texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

PIECE = 1 << 20
"""Characters of a piece of text that is tokenised at once."""


def count_tokens(tokenizer: Any, texts: Iterable[str]) -> Counter[int]:
    """Count the tokens of texts.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A tokenizer of transformers.
    texts : iterable of str
        The texts; no special tokens are added to them.

    Returns
    -------
    Counter of int
        Occurrences by token id.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return counts


def pieces(file: TextIO, characters: int = PIECE) -> Iterator[str]:
    """Yield a text file in pieces, so that a long one is never in memory whole.

    Parameters
    ----------
    file : TextIO
        An open text file.
    characters : int
        Length from which a piece ends with its line; a longer line is cut.

    Yields
    ------
    str
        Consecutive pieces of the text.
    """
    while piece := file.read(characters):
        yield piece + file.readline(characters)
