"""Loading a model and reading prompts, with one sentence for whatever is wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from windowed_mtp.checkpoint import first_unreadable
from windowed_mtp.cli.output import busy
from windowed_mtp.errors import CheckpointError, WindowedMTPError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")


def load(name: str, device: str | None, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str
        Folder or hub name.
    device : str or None
        Torch device; ``None`` for the first GPU if there is one.
    dtype : str
        ``"auto"`` or the name of a torch dtype.

    Raises
    ------
    CheckpointError
        If there is no such checkpoint, or it cannot be loaded whole.
    WindowedMTPError
        If there is no such device.
    """
    name = _folder(name)
    with busy(f"Loading {name}"):
        import torch
        from transformers import AutoModelForCausalLM

        _quieten()
        target_device = _device(device)
        tokenizer = _tokenizer(name)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        load_model: Any = AutoModelForCausalLM.from_pretrained
        model, info = _guarded(name, lambda: load_model(name, dtype=kind, output_loading_info=True))
        if info["missing_keys"]:
            raise CheckpointError(
                f"{name!r} lacks {len(info['missing_keys'])} of the model's weights, such as "
                f"{min(info['missing_keys'])}; use a complete checkpoint."
            )
        return model.to(target_device).eval(), tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone.

    Raises
    ------
    CheckpointError
        If there is no such checkpoint, or it has no tokenizer.
    """
    name = _folder(name)
    with busy(f"Loading the tokenizer of {name}"):
        _quieten()
        return _tokenizer(name)


def _folder(name: str) -> str:
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise CheckpointError(f"there is no folder {name!r}; check the spelling, or pass a name on the hub.")
    return str(Path(name).expanduser()) if looks_like_path else name


def _quieten() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _device(device: str | None) -> Any:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise WindowedMTPError(
            f"there is no device {device!r} here; pass --device cpu, or cuda on a GPU machine."
        ) from None
    return torch.device(device)


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoConfig, AutoTokenizer

    _guarded(name, lambda: AutoConfig.from_pretrained(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception:  # whatever the readers below transformers raise, as in _guarded
        tokenizer = None
    # Without files of its own, a checkpoint may get its family's tokenizer with no more than special tokens.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise first_unreadable(Path(name), weights=False) or CheckpointError(
            f"{name!r} has no tokenizer that can be loaded; save the model's tokenizer beside it."
        ) from None
    return tokenizer


def _guarded(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # transformers passes on whatever the readers below it raise
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".:") or type(error).__name__
        raise first_unreadable(Path(name)) or CheckpointError(
            f"cannot load {name!r}: {reason}; pass the folder or hub name of a model."
        ) from None


def read_text(path: Path) -> str:
    """Read a text file.

    Raises
    ------
    WindowedMTPError
        If it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise WindowedMTPError(f"cannot read {str(path)!r}: {error.strerror or error}; check the name.") from None
    except UnicodeDecodeError:
        raise WindowedMTPError(f"{str(path)!r} is not UTF-8 text; convert it first.") from None


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Take the prompt from the option, a file or standard input.

    Raises
    ------
    WindowedMTPError
        If there is none, or more than one, or it is empty.
    """
    if prompt is not None and file is not None:
        raise WindowedMTPError("--prompt and --file both give a prompt; leave one of them out.")
    if prompt is None and file is None and sys.stdin.isatty():
        raise WindowedMTPError("there is no prompt; pass --prompt or --file, or pipe text to standard input.")
    text = prompt if prompt is not None else read_text(file) if file is not None else sys.stdin.read()
    if not text:
        raise WindowedMTPError("the prompt is empty; pass some text.")
    return text


def read_prompts(path: Path) -> list[str]:
    """Read a file of prompts: one a line, or in a ``.jsonl`` file one JSON object with a ``prompt`` a line.

    Raises
    ------
    WindowedMTPError
        If it cannot be read, a line is not such an object, or there are no prompts.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), start=1) if line.strip()]
    if not lines:
        raise WindowedMTPError(f"{str(path)!r} holds no prompts; write one a line.")
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise WindowedMTPError(
                f'line {number} of {str(path)!r} is not an object with a prompt; write it as {{"prompt": "..."}}.'
            )
        prompts.append(prompt)
    return prompts


def encode(tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel) -> Any:
    """Token ids of a text on the model's device, ``[1, n]`` int64.

    Raises
    ------
    WindowedMTPError
        If the text has no tokens.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids.long()
    if ids.shape[1] == 0:
        raise WindowedMTPError("the prompt has no tokens; pass some text.")
    return ids.to(model.device)
