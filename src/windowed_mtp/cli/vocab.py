"""`windowed-mtp vocab`: hot vocabularies, made from texts and looked at."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from windowed_mtp.checkpoint import first_unreadable
from windowed_mtp.cli import options
from windowed_mtp.cli.load import load, read_text
from windowed_mtp.cli.output import busy, number, output, progress
from windowed_mtp.errors import CheckpointError, VocabularyError, WindowedMTPError

if TYPE_CHECKING:
    from windowed_mtp.results import Setting
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


def coverage(
    model: options.Model,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A file that vocab count wrote.")],
    texts: Annotated[
        list[Path] | None, typer.Argument(metavar="TEXT...", show_default=False, help="Text files to prompt with.")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", show_default=False, help="Size to measure, repeatable (default: from V/32 on by powers of 2)."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts from each text.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a prompt.")] = 384,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate from a prompt.")] = 128,
    depth: options.Depth = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", show_default=False, help="Draw tokens, above 0 (default: greedy).")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the draws.")] = 0,
    device: options.Device = None,
    dtype: options.DtypeOption = options.Dtype.auto,
    json: options.Json = None,
) -> int:
    """Say what a hot vocabulary costs in acceptance on a checkpoint, by size and by what ranks the tokens.

    Prompts are cut from the texts and decoded with and without a hot vocabulary. Coverage is the share of the whole
    head's proposals that are hot; AL is the acceptance length. The ranking is the file's, or the file's with the
    prompt's end always hot, or follows what is emitted (online, on top of the file's). Without TEXT the prompts are
    held-out code and prose of Python's standard library, and a German story.
    """
    if temperature is not None and temperature <= 0:
        raise WindowedMTPError(f"--temperature is {temperature:g}, but it must be above 0; leave it out for greedy.")
    draft = options.DraftOptions(depth=depth)

    from windowed_mtp.results import Provenance, check_writable
    from windowed_mtp.vocab import HotVocabulary

    if json is not None:
        check_writable(json)
    vocabulary = HotVocabulary.load(file)
    given = {path.name: read_text(path) for path in texts} if texts else _workloads()
    target, tokenizer = load(model, device, dtype)
    vocabulary.check_tokenizer(tokenizer)

    from windowed_mtp.probes.hot_vocabulary import RANKINGS, HotVocabularyResult, HotVocabularyRow, measure, prompts_of

    pieces = {name: prompts_of(text, tokenizer, prompts, prompt_tokens) for name, text in given.items()}
    vocab_size = target.get_output_embeddings().weight.shape[0]
    sizes = size or _sizes(vocab_size, least=max(vocab_size // 32, len(vocabulary.special)))[:-1]
    drafter = draft.build(target)
    provenance = Provenance.collect(str(target.device), None if temperature is None else seed)
    rows: list[HotVocabularyRow] = []
    interrupted = False
    try:
        with progress() as bar:
            task = bar.add_task("hot sets", total=len(pieces) * (1 + len(RANKINGS) * len(sizes)))
            for row in measure(
                drafter, vocabulary, pieces, sizes, new_tokens=max_new_tokens, temperature=temperature, seed=seed
            ):
                rows.append(row)
                bar.advance(task)
    except KeyboardInterrupt:
        interrupted = True
        output.print("Interrupted; the rows are those measured so far.")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("text", "ranking", "size", "coverage", "AL", "AL / whole head's"):
        table.add_column(name, justify="left" if name in ("text", "ranking") else "right")
    for row in rows:
        counts = f"{row.size:,}", f"{100 * row.coverage:.1f}%", number(row.acceptance_length, 2)
        table.add_row(row.text, row.ranking, *counts, number(row.relative_acceptance_length, 3))
    output.say(draft.describe(prompt_tokens + max_new_tokens - 1))
    output.show(table)
    if temperature is None:
        hot = [row.differing for row in rows if row.ranking in RANKINGS]
        output.say(f"greedy outputs that are not those of the whole head: {sum(hot)} of {len(hot) * prompts}")
    if json is not None:
        settings: dict[str, Setting] = {
            **draft.settings(), "model": model, "file": str(file), "prompts": prompts, "prompt_tokens": prompt_tokens,
            "max_new_tokens": max_new_tokens, "temperature": temperature,
            "dtype": str(target.dtype).removeprefix("torch."),
        }  # fmt: skip
        HotVocabularyResult(provenance=provenance, settings=settings, rows=tuple(rows)).save(json)
    return 130 if interrupted else 0


def _workloads() -> dict[str, str]:
    from windowed_mtp.workloads.prose import english, german
    from windowed_mtp.workloads.stdlib import documents

    code = "\n".join(text for _, text in documents("heldout"))
    return {"code": code, "English": "\n\n".join(english("heldout")), "German": "\n\n".join(german("heldout"))}


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
    """Powers of two from 64 on that hold the special tokens, and the whole vocabulary."""
    powers = (2**power for power in range(6, vocab_size.bit_length()))
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
        name = str(Path(name).expanduser()) if name.startswith("~") else name
        try:
            return AutoTokenizer.from_pretrained(name)
        except Exception:  # transformers passes on whatever the readers below it raise
            raise first_unreadable(Path(name), weights=False) or CheckpointError(
                f"{name!r} has no tokenizer that can be loaded; pass the folder or hub name of a model."
            ) from None


COMMANDS: dict[str, Callable[..., int]] = {"count": count, "show": show, "coverage": coverage}
