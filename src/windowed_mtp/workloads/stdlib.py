"""Long real text that every machine has: the sources of the running interpreter's standard library.

The library is split into a train and a held-out part by a hash of each file's path relative to the library's root, so
a file is on the same side on every machine and in every Python version. The bundled reference checkpoint is trained on
the train part and measured on the held-out part.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from windowed_mtp.errors import WindowedMTPError

Split = Literal["train", "heldout"]
HELDOUT_PERCENT = 5


def split_of(name: str) -> Split:
    """Side of the split that a file belongs to.

    Parameters
    ----------
    name : str
        Path relative to the library's root with forward slashes, such as ``"json/decoder.py"``.

    Returns
    -------
    {"train", "heldout"}
        ``"heldout"`` for about 5 of 100 names.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % 100 < HELDOUT_PERCENT else "train"


def documents(split: Split, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield the library's source files of one side of the split, in the order of their names.

    Parameters
    ----------
    split : {"train", "heldout"}
        Which side to yield.
    root : Path, optional
        Root of the library; the running interpreter's own by default.

    Yields
    ------
    tuple of (str, str)
        The relative name and the text. Installed packages, files that are not UTF-8, and files that hold nothing but
        white space are left out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        if split_of(name) != split or "site-packages/" in name or "dist-packages/" in name:
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield name, text


def heldout_text(characters: int, seed: int = 0) -> str:
    """Real held-out text of a given length: whole files in order of their names, the last one cut off.

    Parameters
    ----------
    characters : int
        Length of the text; a token of the bundled checkpoint's tokenizer is about 3 characters.
    seed : int
        Chooses the file to start with; after the last file the text goes on with the first.

    Returns
    -------
    str
        Text of exactly ``characters`` characters, the same for the same interpreter and seed.

    Raises
    ------
    WindowedMTPError
        If the held-out files together are shorter than that.
    """
    files = [text for _, text in documents("heldout")]
    available = sum(len(text) + 1 for text in files)
    if not 0 < characters <= available:
        raise WindowedMTPError(
            f"{characters} characters of held-out text were asked for, but this interpreter's standard library has "
            f"{available}; ask for 1 to {available}."
        )
    first = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big") % len(files)
    return "\n".join(files[first:] + files[:first])[:characters]
