"""Which tensors a checkpoint holds, and in which of its files: one answer for every engine, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windowed_mtp.errors import CheckpointFileError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
"""Files of one JSON object each, which say what a checkpoint's tensors and tokens are."""
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint in safetensors, by its index and the headers of its files.

    The index says which files belong to the checkpoint, and the files say which tensors they hold: an index may leave
    tensors out, and both vLLM and transformers read each of its files whole. Without an index every file belongs to it.
    Of two tensors of one name the one in the later file counts, as in vLLM.

    Attributes
    ----------
    folder : Path
        Where the files are.
    files : tuple of str
        Those that belong to the checkpoint and are there, in the order in which vLLM reads them; empty if there are no
        safetensors files.
    absent : tuple of str
        Those that the index names and that are not there.
    unlisted : tuple of str
        Safetensors files in the folder that the index does not name: nobody reads them.
    file_of : dict of str to str
        File of each tensor. What an absent file holds is taken from the index.
    unheld : tuple of str
        Tensors that the index names, and that none of its files holds.
    """

    folder: Path
    files: tuple[str, ...]
    absent: tuple[str, ...]
    unlisted: tuple[str, ...]
    file_of: dict[str, str]
    unheld: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, prefix: str = "model") -> Inventory:
        """Read a folder's index and the headers of its files.

        Parameters
        ----------
        folder : Path
            On this machine.
        prefix : str
            What the index's name begins with; with another than ``"model"`` only files of that prefix count, as with
            the ``consolidated*.safetensors`` of Mistral's format.

        Raises
        ------
        CheckpointFileError
            If the index or one of the files cannot be read, or is not what its name says.
        """
        pattern = "*.safetensors" if prefix == "model" else f"{prefix}*.safetensors"
        here = {path.name for path in folder.glob(pattern)}
        index = folder / f"{prefix}.safetensors.index.json"
        listed = read_index(index) if _exists(index) else None
        named = here if listed is None else set(listed.values())
        files = tuple(sorted(named & here, key=_in_order))
        absent = tuple(sorted(named - here, key=_in_order))
        file_of = {} if listed is None else {name: file for name, file in listed.items() if file in absent}
        for file in files:
            file_of.update(dict.fromkeys(tensor_names(folder / file), file))
        unheld = tuple(name for name in listed or () if name not in file_of)
        return cls(folder, files, absent, tuple(sorted(here - named, key=_in_order)), file_of, unheld)

    def dtypes(self, names: Iterable[str]) -> dict[str, str]:
        """Dtypes of tensors as safetensors writes them, such as ``"BF16"``; those in absent files are left out.

        Raises
        ------
        CheckpointFileError
            If a file cannot be read.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        found = {}
        for file in by_file.keys() - set(self.absent):
            with opened(self.folder / file, "np") as tensors:
                found.update({name: str(tensors.get_slice(name).get_dtype()) for name in by_file[file]})
        return found


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, from its header.

    Raises
    ------
    CheckpointFileError
        If it cannot be read, or is not such a file.
    """
    with opened(file, "np") as tensors:
        return list(tensors.keys())


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file; ``framework`` is what its tensors are read as, ``"pt"`` or ``"np"``.

    Raises
    ------
    CheckpointFileError
        If it cannot be read, or is not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(file, f"is damaged or no safetensors file ({_first_line(error)})") from None


def read_index(file: Path) -> dict[str, str]:
    """Read the file of each tensor, as a checkpoint's index gives it.

    Raises
    ------
    CheckpointFileError
        If it cannot be read, or is no index.
    """
    listed = read_object(file).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise _unreadable(file, "is no index: its weight_map does not name a file for each tensor")
    return listed


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, as every ``.json`` that describes a checkpoint does.

    Raises
    ------
    CheckpointFileError
        If it cannot be read, or holds something else.
    """
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, f"is damaged or no JSON ({_first_line(error)})") from None
    if not isinstance(read, dict):
        raise _unreadable(file, "holds JSON, but no object")
    return read


def first_unreadable(folder: Path, weights: bool = True) -> CheckpointFileError | None:
    """Look for a file that explains why a checkpoint could not be loaded.

    Parameters
    ----------
    folder : Path
        The checkpoint's.
    weights : bool
        Whether to look at the files of its tensors too.

    Returns
    -------
    CheckpointFileError or None
        ``None`` if each of them can be read, or is not there at all.
    """
    try:
        for name in DESCRIPTIONS:
            if _exists(folder / name):
                read_object(folder / name)
        if weights and not Inventory.read(folder).files:
            for file in sorted(folder.glob("*.bin")):
                _check_content(file)
    except CheckpointFileError as error:
        return error
    return None


def _exists(file: Path) -> bool:
    return file.exists() or file.is_symlink()


def _unreadable(file: Path, otherwise: str) -> CheckpointFileError:
    """Say in the user's words what is wrong with a file; ``otherwise`` if nothing simpler is."""
    try:
        _check_content(file)
    except CheckpointFileError as error:
        return error
    return CheckpointFileError(f"{str(file)!r} {otherwise}", "fetch it again")


def _check_content(file: Path) -> None:
    """Refuse what is no file, holds nothing, or only says where the file is."""
    what, remedy = None, "fetch it again"
    if file.is_dir():
        what, remedy = "is a folder, not a file", "put the file in its place"
    elif not file.exists():
        what = "is missing"
    else:
        try:
            with file.open("rb") as opened_file:
                start = opened_file.read(len(_LFS))
        except OSError as error:
            what, remedy = f"cannot be read ({error.strerror or error})", "check its permissions and its disk"
        else:
            if not start:
                what = "is empty"
            elif start == _LFS:
                what, remedy = "is only a pointer of git LFS", "fetch the file itself (git lfs pull, or hf download)"
    if what is not None:
        raise CheckpointFileError(f"{str(file)!r} {what}", remedy)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__


def _in_order(file: str) -> list[str | int]:
    """Sort key under which shard 10 comes after shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file)]
