"""Text that is no code, and that every machine has: English from docstrings, and German that comes with the package."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from windowed_mtp.workloads.stdlib import Split, documents

LEAST_CHARACTERS = 120
LEAST_LETTERS = 0.92


def english(split: Split, root: Path | None = None) -> Iterator[str]:
    """Yield the paragraphs of prose in the standard library's docstrings.

    Parameters
    ----------
    split : {"train", "heldout"}
        Which side of `stdlib.split_of` to take the files from.
    root : Path, optional
        Root of the library; the running interpreter's own by default.

    Yields
    ------
    str
        Paragraphs of at least 120 characters, of which at least 92 of 100 are letters or white space, on one line. A
        docstring that several files share may be on both sides.
    """
    for _, text in documents(split, root):
        for docstring in _docstrings(text):
            for paragraph in re.split(r"\n\s*\n", docstring):
                line = " ".join(paragraph.split())
                letters = sum(character.isalpha() or character == " " for character in line)
                if len(line) >= LEAST_CHARACTERS and letters >= LEAST_LETTERS * len(line):
                    yield line


def german(split: Split) -> Iterator[str]:
    """Yield the paragraphs of a story that was written for this package.

    Parameters
    ----------
    split : {"train", "heldout"}
        The first half of the paragraphs, or the second.

    Yields
    ------
    str
        Paragraphs, each on one line.
    """
    paragraphs = (Path(__file__).parent / "german.txt").read_text(encoding="utf-8").strip().split("\n\n")
    half = len(paragraphs) // 2
    yield from paragraphs[:half] if split == "train" else paragraphs[half:]


def _docstrings(text: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the library's own strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # some of the library's tests are not Python on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
