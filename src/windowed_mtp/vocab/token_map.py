"""Lists of a draft's tokens as other engines read them: token maps."""

from __future__ import annotations

import io
import json
from typing import Any

from windowed_mtp.errors import VocabularyError

_SAVED_BY_TORCH = (b"PK\x03\x04", b"\x80")
"""How files of ``torch.save`` begin: an archive, or in old ones a pickle."""


def is_token_map(content: bytes) -> bool:
    """Whether a file's content is what ``torch.save`` writes, or a JSON list."""
    return content.startswith(_SAVED_BY_TORCH) or content.lstrip().startswith(b"[")


def read_token_map(content: bytes, name: str) -> tuple[int, ...]:
    """Read a token map.

    Parameters
    ----------
    content : bytes
        A list or a tensor of whole numbers, saved by torch, or a JSON list of them; nothing in it is executed.
    name : str
        The file's name, for what is wrong with it.

    Returns
    -------
    tuple of int
        The ids in their order, each once.

    Raises
    ------
    VocabularyError
        If the content is something else, or there is no id, or a negative one.
    """
    ids = _from_torch(content, name) if content.startswith(_SAVED_BY_TORCH) else _from_json(content, name)
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise _malformed(name)
    return tuple(dict.fromkeys(ids))


def _from_torch(content: bytes, name: str) -> Any:
    import torch

    try:
        made = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return made.flatten().tolist() if isinstance(made, torch.Tensor) else made
    except Exception:  # whatever torch says of what it cannot read, which is of many types
        raise _malformed(name) from None


def _from_json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _malformed(name) from None


def _malformed(name: str) -> VocabularyError:
    return VocabularyError(
        f"{name!r} is no token map: it must be a list or tensor of token ids, saved by torch or as JSON; make a hot "
        "vocabulary with windowed-mtp vocab count."
    )
