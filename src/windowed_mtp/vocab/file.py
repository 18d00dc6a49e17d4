"""A ranking of token ids in a file, which is good for the tokenizer that it was made with and for no other."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from windowed_mtp.errors import VocabularyError
from windowed_mtp.files import write_atomically
from windowed_mtp.results import Record
from windowed_mtp.vocab.ids import hot_ids
from windowed_mtp.vocab.token_map import is_token_map, read_token_map


class TokenizerIdentity(Record):
    """Which tokenizer gave ids their meaning.

    Attributes
    ----------
    name : str
        Folder or hub name, for people; two names may stand for one tokenizer.
    size : int
        Number of ids: the largest one, plus 1.
    sha256 : str
        Hash over every token with its id, and over which ids are special; empty for a token map, which does not say.
    """

    name: str
    size: int = Field(ge=1)
    sha256: str

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Identify a tokenizer of transformers."""
        vocabulary = sorted((number, str(token)) for token, number in tokenizer.get_vocab().items())
        if not vocabulary:
            raise VocabularyError("the tokenizer has no tokens; pass the folder or hub name of a model's tokenizer.")
        content = json.dumps([vocabulary, special_ids(tokenizer)])
        return cls(
            name=str(getattr(tokenizer, "name_or_path", "")),
            size=vocabulary[-1][0] + 1,
            sha256=hashlib.sha256(content.encode()).hexdigest(),
        )


class HotVocabulary(Record):
    """Token ids by how often they occur, with the tokenizer that they belong to.

    Attributes
    ----------
    tokenizer : TokenizerIdentity
        The tokenizer.
    special : tuple of int
        Ids of its special tokens, ascending.
    byte_tokens : tuple of int or None
        Ids of its tokens of a single byte, ascending; ``None`` in a file that does not say: see `completed`.
    ranked : tuple of int
        Ids that were counted, the most frequent first; of equally frequent ones the lowest first.
    counts : tuple of int
        How often each of them occurred.

    Raises
    ------
    VocabularyError
        From `load` and `from_counts`, if an id is out of range or there twice.
    """

    schema_version: Literal[1] = 1
    kind: Literal["hot vocabulary"] = "hot vocabulary"
    tokenizer: TokenizerIdentity
    special: tuple[int, ...]
    byte_tokens: tuple[int, ...] | None = None
    ranked: tuple[int, ...]
    counts: tuple[int, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        bytes_ = self.byte_tokens or ()
        for name, ids in (("special", self.special), ("byte_tokens", bytes_), ("ranked", self.ranked)):
            if len(set(ids)) < len(ids):
                raise ValueError(f"{name} has a token twice")
            if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.size:
                raise ValueError(
                    f"{name} has a token outside of the tokenizer's {self.tokenizer.size}: {min(ids)} to {max(ids)}"
                )
        if len(self.counts) != len(self.ranked):
            raise ValueError(f"there are {len(self.ranked)} ranked tokens, but {len(self.counts)} counts")
        if any(a < b for a, b in zip(self.counts, (*self.counts[1:], 1), strict=False)):
            raise ValueError("counts must be above 0 and must not grow")
        return self

    @property
    def always(self) -> frozenset[int]:
        """Ids that are in whatever their rank: special tokens, and those of a single byte, of which any text is."""
        return frozenset((*self.special, *(self.byte_tokens or ())))

    @property
    def version(self) -> int:
        """Always 0: a file does not change."""
        return 0

    @classmethod
    def from_counts(cls, counts: Mapping[int, int], *, tokenizer: Any) -> Self:
        """Rank ids by their counts.

        Parameters
        ----------
        counts : mapping of int to int
            How often each id occurred; ids with a count of 0 are not ranked.
        tokenizer : PreTrainedTokenizerBase
            The tokenizer that gave the ids.

        Raises
        ------
        VocabularyError
            If an id is not one of the tokenizer's, or a count is negative.
        """
        found = sorted(((int(n), int(token)) for token, n in counts.items() if n), key=lambda pair: (-pair[0], pair[1]))
        try:
            return cls(
                tokenizer=TokenizerIdentity.of(tokenizer),
                special=tuple(special_ids(tokenizer)),
                byte_tokens=tuple(byte_ids(tokenizer)),
                ranked=tuple(token for _, token in found),
                counts=tuple(n for n, _ in found),
            )
        except ValidationError as error:
            raise VocabularyError(f"the counts make no hot vocabulary: {_first(error)}; count again.") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file: a ranking of ``windowed-mtp vocab count``, or a token map.

        A token map is what others call a list of a draft's tokens, the most frequent first: saved by torch, as a list
        or tensor of ids (SGLang's ``--speculative-token-map``, FR-Spec), or a JSON list. It says neither counts nor
        which tokenizer it is for, so special tokens are known only once it is `completed`.

        Raises
        ------
        VocabularyError
            If it cannot be read, or holds neither a hot vocabulary of this version nor a token map.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise VocabularyError(f"cannot read {str(path)!r}: {error.strerror or error}; check the name.") from None
        if is_token_map(content):
            ids = read_token_map(content, str(path))
            unknown = TokenizerIdentity(name="", size=max(ids) + 1, sha256="")
            return cls(tokenizer=unknown, special=(), ranked=ids, counts=(1,) * len(ids))
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise VocabularyError(
                f"{str(path)!r} is no hot vocabulary: it is not text; make one with windowed-mtp vocab count."
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise VocabularyError(
                f"{str(path)!r} is no hot vocabulary of this version: {_first(error)}; "
                "make one with windowed-mtp vocab count."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file; one of that name is replaced whole or, on any failure, left as it was.

        Raises
        ------
        VocabularyError
            If it cannot be written.
        """
        try:
            write_atomically(path, self.model_dump_json() + "\n")
        except OSError as error:
            raise VocabularyError(
                f"cannot write {str(path)!r}: {error.strerror or error}; check the name and its permissions."
            ) from None

    @property
    def is_token_map(self) -> bool:
        """Whether it was read from a token map, and not yet `completed`."""
        return not self.tokenizer.sha256

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that ids mean the same to a tokenizer, as far as the file says: a token map does not.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase or TokenizerIdentity
            The tokenizer in use.

        Raises
        ------
        VocabularyError
            If it is another one than this was made with.
        """
        other = tokenizer if isinstance(tokenizer, TokenizerIdentity) else TokenizerIdentity.of(tokenizer)
        if not self.is_token_map and other.sha256 != self.tokenizer.sha256:
            raise VocabularyError(
                f"the hot vocabulary was made with the tokenizer of {self.tokenizer.name!r} "
                f"({self.tokenizer.size} tokens), but the one in use is {other.name!r} ({other.size} tokens): "
                "make another with windowed-mtp vocab count."
            )

    def completed(self, tokenizer: Any) -> Self:
        """Check that ids mean the same to a tokenizer, and take from it what the file does not say.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase
            The tokenizer in use.

        Raises
        ------
        VocabularyError
            If it is another one than this was made with.
        """
        self.check_tokenizer(tokenizer)
        found: dict[str, Any] = {}
        if self.is_token_map:
            found = {"tokenizer": TokenizerIdentity.of(tokenizer), "special": tuple(special_ids(tokenizer))}
        if self.byte_tokens is None:
            found["byte_tokens"] = tuple(byte_ids(tokenizer))
        return self.model_copy(update=found)

    def ids(self, size: int, vocab_size: int, *, always: Iterable[int] = ()) -> list[int]:
        """Give the hot ids of a size: see `hot_ids`.

        Parameters
        ----------
        size : int
            Number of ids, 1 to ``vocab_size``.
        vocab_size : int
            Rows V of the output head, which may be more than the tokenizer has, or fewer.
        always : iterable of int
            Ids that are in beside the special tokens and those of a single byte.

        Returns
        -------
        list of int
            ``size`` different ids, ascending.

        Raises
        ------
        VocabularyError
            If the size is out of range, an id is negative, or the ids that are always in are more than the size.
        """
        return hot_ids(size, vocab_size, self.ranked, always=(*self.always, *always))

    def beyond(self, vocab_size: int) -> int:
        """Count its tokens that an output head of so many rows does not have: they are never hot."""
        return sum(token >= vocab_size for token in self.always.union(self.ranked))

    def update(self, ids: Iterable[int]) -> bool:
        """Leave the ranking as it is, whatever the target emitted; always False."""
        return False

    def coverage(self, size: int) -> float:
        """Share of the counted tokens that the hot ids of a size include; NaN where nothing was counted."""
        hot = set(hot_ids(size, max(size, self.tokenizer.size), self.ranked, always=self.always))
        total = sum(self.counts)
        covered = sum(n for token, n in zip(self.ranked, self.counts, strict=True) if token in hot)
        return covered / total if total else float("nan")


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of a tokenizer's special tokens, ascending: those with a role, and those marked special."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(marked | set(tokenizer.all_special_ids))


def byte_ids(tokenizer: Any) -> list[int]:
    """Ids of a tokenizer's tokens of a single byte, ascending: what any text can be written with.

    Tokenizers that fall back to bytes call them ``<0x00>`` to ``<0xFF>``. Byte-level ones stand for each byte by a
    letter: a printable one of Latin-1 by itself, and the others, in their order, by those from U+0100 on (as first in
    GPT-2's). A letter is known to stand for a byte if the tokenizer reads that of a line feed as one.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A tokenizer of transformers.
    """
    vocabulary = tokenizer.get_vocab()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if not any(name in vocabulary for name in names):
        names = _byte_letters()
        if names[10] not in vocabulary or tokenizer.convert_tokens_to_string([names[10]]) != "\n":
            return []
    return sorted(vocabulary[name] for name in names if name in vocabulary)


def _byte_letters() -> list[str]:
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
