"""Whether vLLM will find and read a checkpoint's files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from windowed_mtp.checkpoint import INDEX, SINGLE, Inventory, first_unreadable, tensor_names
from windowed_mtp.engines.vllm.findings import Finding
from windowed_mtp.errors import CheckpointFileError


def look_at_files(model: str, revision: str | None, load_config: Any) -> tuple[Inventory | None, list[Finding]]:
    """Take the inventory of a checkpoint as vLLM will read it.

    Parameters
    ----------
    model : str
        Folder or hub name.
    revision : str or None
        Commit or branch on the hub; the main one without it.
    load_config : LoadConfig
        How vLLM is to load it.

    Returns
    -------
    inventory : Inventory or None
        ``None`` if the checkpoint is not on this machine, or cannot be read.
    findings : list of Finding
        What is wrong with its files; empty if nothing is.
    """
    if load_config.load_format == "dummy":
        return None, []
    folder = local_folder(model, revision, load_config.download_dir)
    if folder is None:
        return None, []
    try:
        unreadable = first_unreadable(folder, weights=False)  # of these vLLM passes over some in silence
        if unreadable is not None:
            raise unreadable
        inventory = Inventory.read(folder, prefix_in(folder, load_config.load_format))
    except CheckpointFileError as error:
        return None, [Finding(check="files", level="problem", cause=error.cause, remedy=error.remedy)]
    return inventory, list(file_findings(inventory, is_folder=Path(model).is_dir()))


def local_folder(model: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """Folder of a checkpoint on this machine, the hub's cache included; ``None`` if it is not here.

    Parameters
    ----------
    model : str
        Folder or hub name.
    revision, download_dir : str or None
        Commit or branch, and the cache's folder, where they are not the default ones.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in (INDEX, SINGLE):
        try:
            found = try_to_load_from_cache(model, name, cache_dir=download_dir, revision=revision)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def prefix_in(folder: Path, load_format: str) -> str:
    """Say what the names of the files that vLLM chooses begin with, as `Inventory.read` takes it.

    With the load format ``"auto"``, files of Mistral's format come before all others.
    """
    mistral = load_format == "mistral" or (load_format == "auto" and any(folder.glob("consolidated*.safetensors")))
    return "consolidated" if mistral else "model"


def file_findings(inventory: Inventory, is_folder: bool) -> Iterator[Finding]:
    """Compare a checkpoint's index with its files.

    Parameters
    ----------
    inventory : Inventory
        The checkpoint's.
    is_folder : bool
        Whether vLLM was given a folder; what the hub's cache lacks, vLLM downloads.
    """
    if inventory.absent and is_folder:
        yield Finding(
            check="files", level="problem",
            cause=f"the index names {_several(inventory.absent)}, but the folder does not hold "
            f"{'it' if len(inventory.absent) == 1 else 'them'}, so the engine would not start",
            remedy="fetch what is missing",
        )  # fmt: skip
    if inventory.unheld:
        yield Finding(
            check="files", level="warning",
            cause=f"the index names {_several(inventory.unheld)}, but no file holds "
            f"{'it' if len(inventory.unheld) == 1 else 'them'}",
            remedy="use a complete checkpoint, or correct its index",
        )  # fmt: skip
    for file in inventory.unlisted:
        more = _more_in(inventory, file)
        holds = f", though it holds {_several(more)}" if more else ""
        yield Finding(
            check="files", level="warning" if more else "ok",
            cause=f"{file} is not in the index, so vLLM does not read it{holds}",
            remedy=f"if {file} belongs to the checkpoint, add its tensors to the index" if more else None,
        )  # fmt: skip


def _more_in(inventory: Inventory, unlisted: str) -> list[str]:
    """Tensors of a file that is not read, and of no file that is."""
    try:
        return [name for name in tensor_names(inventory.folder / unlisted) if name not in inventory.file_of]
    except CheckpointFileError:
        return []


def _several(names: Collection[str]) -> str:
    first, *others = names
    return f"{first} and {len(others):,} more" if others else first
