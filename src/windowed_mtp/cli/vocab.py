"""`windowed-mtp vocab`: hot vocabularies, made from texts and looked at."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from windowed_mtp.cli.output import busy, output, progress
from windowed_mtp.errors import CheckpointError, VocabularyError

if TYPE_CHECKING:
    from windowed_mtp.vocab import HotVocabulary


def count(
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", show_default=False, help="UTF-8 text files to count.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", show_default=False, help="Folder or hub name of the model whose tokenizer counts."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="File to write the ranking to.")
    ],
) -> int:
    """Rank a tokenizer's tokens by how often they occur in texts.

    Take texts like those that the model will generate, in all of their languages. The file is good for this
    tokenizer alone, whatever the model, and for every size of a hot vocabulary.
    """
    from windowed_mtp.results import check_writable
    from windowed_mtp.vocab import HotVocabulary
    from windowed_mtp.vocab.count import count_tokens

    check_writable(out)
    sizes = [path.stat().st_size for path in texts]
    loaded = _tokenizer(tokenizer)
    counts: Counter[int] = Counter()
    with progress() as bar:
        task = bar.add_task("bytes", total=sum(sizes))
        for path in texts:
            counts += count_tokens(loaded, _read(path, lambda n: bar.advance(task, n)))
    if not counts:
        raise VocabularyError("the texts hold no tokens; pass files with text.")
    vocabulary = HotVocabulary.from_counts(counts, tokenizer=loaded)
    vocabulary.save(out)
    _describe(vocabulary)
    return 0


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A file that vocab count wrote.")],
) -> int:
    """Say what a hot vocabulary was made with, and how many of the counted tokens each size covers."""
    from windowed_mtp.vocab import HotVocabulary

    _describe(HotVocabulary.load(file))
    return 0


def _describe(vocabulary: HotVocabulary) -> None:
    identity = vocabulary.tokenizer
    output.say(
        f"tokenizer {identity.name}, {identity.size:,} tokens, {len(vocabulary.special)} of them special; "
        f"{sum(vocabulary.counts):,} tokens counted, {len(vocabulary.ranked):,} different ones"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("size", "counted tokens covered"):
        table.add_column(name, justify="right")
    for size in _sizes(identity.size, least=len(vocabulary.special)):
        table.add_row(f"{size:,}", f"{100 * vocabulary.coverage(size):.2f}%")
    output.show(table)


def _sizes(vocab_size: int, least: int) -> list[int]:
    """Powers of two from 128 on that hold the special tokens, and the whole vocabulary."""
    powers = (2**power for power in range(7, vocab_size.bit_length()))
    return [*(size for size in powers if least <= size < vocab_size), vocab_size]


def _read(path: Path, advance: Callable[[int], None]) -> Iterator[str]:
    from windowed_mtp.vocab.count import pieces

    with path.open(encoding="utf-8", newline="") as file:
        try:
            for piece in pieces(file):
                yield piece
                advance(len(piece.encode()))
        except UnicodeDecodeError:
            raise VocabularyError(f"{str(path)!r} is not UTF-8 text; convert it first.") from None


def _tokenizer(name: str) -> Any:
    """Load a tokenizer alone.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    with busy(f"Loading the tokenizer of {name}"):
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            return AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if name.startswith("~") else name)
        except (OSError, ValueError, ImportError, KeyError):
            raise CheckpointError(
                f"{name!r} has no tokenizer that can be loaded; pass the folder or hub name of a model."
            ) from None


COMMANDS: dict[str, Callable[..., int]] = {"count": count, "show": show}
