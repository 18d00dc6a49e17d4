"""Hot sets for tiny models, which have no tokenizer, and what a drafter proposes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import runner_of
from models import VOCAB
from vllm import LLM

from windowed_mtp.vocab import HotVocabulary
from windowed_mtp.vocab.file import TokenizerIdentity


def hot_file(folder: Path, ranked: Iterable[int], special: Iterable[int] = (), vocab: int = VOCAB) -> str:
    """Save a ranking of a tiny model's tokens, the first ones best; give the name of the file."""
    ids = list(ranked)
    counts = tuple(range(len(ids), 0, -1))
    identity = TokenizerIdentity(name="tiny", size=vocab, sha256="")
    path = folder / f"hot-{len(list(folder.iterdir()))}.json"
    HotVocabulary(tokenizer=identity, special=tuple(special), ranked=tuple(ids), counts=counts).save(path)
    return str(path)


@contextmanager
def proposals(llm: LLM) -> Iterator[list[Any]]:
    """Record what is proposed: of each step, the tokens of each row."""
    runner, seen = runner_of(llm), []
    drafter = getattr(runner, "drafter", None) or runner.speculator
    propose = drafter.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        seen.append(made.tolist())
        return made

    drafter.propose = recorded
    try:
        yield seen
    finally:
        del drafter.propose


def tokens_of(seen: list[Any]) -> set[int]:
    """Every token that was proposed."""
    return {token for step in seen for row in step for token in row}
