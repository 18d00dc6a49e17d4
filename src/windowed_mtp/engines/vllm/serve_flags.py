"""The flags of ``vllm serve`` turned into vLLM's config, without weights and without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from windowed_mtp.checkpoint import first_unreadable
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.doctor_files import local_folder

_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Modules that hold the server's parser, or held it in an earlier vLLM."""


def serve_config(flags: Sequence[str]) -> Any:
    """Build the config of the engine that ``vllm serve`` would start.

    vLLM's own log lines are held back. On a machine without an accelerator vLLM takes the CPU.

    Parameters
    ----------
    flags : sequence of str
        A model and flags, as ``vllm serve`` takes them.

    Returns
    -------
    VllmConfig
        As the engine would get it.

    Raises
    ------
    PluginError
        If vLLM is not installed, or refuses the flags or the model.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    held_back = io.StringIO()
    with contextlib.redirect_stdout(held_back), contextlib.redirect_stderr(held_back):
        try:
            import vllm.platforms as platforms
        except ImportError:
            raise PluginError("vLLM is not installed here; install it first, or run this where it is.") from None
        if not platforms.current_platform.device_type:
            from vllm.platforms.cpu import CpuPlatform

            platforms._current_platform = CpuPlatform()
        from vllm.engine.arg_utils import AsyncEngineArgs

        arguments = _parsed(flags)
        try:
            return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        except Exception as error:  # vLLM passes on whatever the readers below it raise
            raise PluginError(_unreadable(arguments) or f"vLLM refuses these flags: {_reason(error)}.") from None


def _parsed(flags: Sequence[str]) -> argparse.Namespace:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise PluginError(f"vllm serve does not take this: {message.strip().partition(chr(10))[0].rstrip('.')}.")

    parser = _make_arg_parser()(Parser(prog="vllm serve", add_help=False))
    try:
        arguments = parser.parse_args(list(flags))
    except PluginError:
        raise
    except (ValueError, OSError) as error:
        raise PluginError(f"vllm serve does not take this: {_reason(error)}.") from None
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    name = arguments.model
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not os.path.exists(os.path.expanduser(name)):
        raise PluginError(f"there is no folder {name!r}; check the spelling, or pass a name on the hub.")
    return arguments


def _unreadable(arguments: argparse.Namespace) -> str | None:
    """Say which file of the target or the draft cannot be read, if one cannot."""
    speculative = arguments.speculative_config
    draft = speculative.get("model") if isinstance(speculative, dict) else None
    for name in (arguments.model, draft):
        folder = local_folder(os.path.expanduser(name)) if isinstance(name, str) else None
        error = None if folder is None else first_unreadable(folder)
        if error is not None:
            return str(error)
    return None


def _make_arg_parser() -> Any:
    for name in _PARSERS:
        try:
            return importlib.import_module(name).make_arg_parser
        except ModuleNotFoundError:
            continue
    raise PluginError("this vLLM keeps the parser of `vllm serve` where windowed-mtp does not know of it.")


def _reason(error: Exception) -> str:
    """Say an error's first sentence, without what pydantic puts around it."""
    details = getattr(error, "errors", None)
    text = str(details()[0]["msg"]) if callable(details) else str(error)
    first = text.removeprefix("Value error, ").strip().partition("\n")[0].partition(". ")[0]
    return (first or type(error).__name__).rstrip(".:")
