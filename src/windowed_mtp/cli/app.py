"""The application, and how its errors reach the user: one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from windowed_mtp import __version__
from windowed_mtp.cli import vocab
from windowed_mtp.cli.bench import bench
from windowed_mtp.cli.demo import demo
from windowed_mtp.cli.doctor import doctor
from windowed_mtp.cli.generate import generate
from windowed_mtp.cli.output import errors
from windowed_mtp.cli.verify import verify_lossless
from windowed_mtp.errors import WindowedMTPError

BAD_INPUT, INTERRUPTED = 2, 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "generate": generate,
    "verify-lossless": verify_lossless,
    "bench": bench,
}


def _add(group: typer.Typer, commands: Mapping[str, Callable[..., int]], **settings: Any) -> None:
    """Add commands to a group, each with its docstring as its help."""
    for name, command in commands.items():
        paragraphs = (command.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        group.command(name, help=text, context_settings=dict(settings))(command)


_add(app, COMMANDS)
_add(app, {"doctor": doctor}, ignore_unknown_options=True, help_option_names=["--help"])  # it hands flags on
vocab_app = typer.Typer(rich_markup_mode="rich")
_add(vocab_app, vocab.COMMANDS)
app.add_typer(vocab_app, name="vocab", help="Hot vocabularies: the tokens that a draft may propose.")


def _show_version(value: bool) -> None:
    if value:
        print(f"windowed-mtp {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding whose draft reads only attention sinks and a recent window.

    The target model still reads everything and decides every token, so the output does not change.

    To begin with, try [bold]windowed-mtp demo[/bold], which needs no download.
    """
    if context.invoked_subcommand is None:
        context.get_help()  # prints it
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own by default.

    Returns
    -------
    int
        Exit code: 0, 1 where outputs differ that must not, 2 for bad input, 130 after Ctrl-C.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"windowed_mtp\.")
        warnings.showwarning = lambda message, *_, **__: _say("Warning", "yellow", str(message))
        try:
            return app(args=argv, prog_name="windowed-mtp", standalone_mode=False) or 0
        except WindowedMTPError as error:
            return _fail(str(error))
        except OSError as error:
            where = f" {error.filename!r}" if error.filename else ""
            return _fail(f"cannot use{where}: {error.strerror or error}; check the name and its permissions.")
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except Exception as error:
            return _fail(_explain(error))


def _explain(error: Exception) -> str:
    """Turn an error of the parser, or of a full device, into a sentence; raise any other again."""
    if hasattr(error, "format_message"):  # whichever class the installed typer raises for a misused option
        return f"{error.format_message().strip().rstrip('.')}; see --help."
    if type(error).__name__ == "OutOfMemoryError":
        return "the device ran out of memory; shorten the prompt, use a smaller dtype, or pass --device cpu."
    raise error


def _fail(message: str) -> int:
    _say("Error", "bold red", message)
    return BAD_INPUT


def _say(label: str, style: str, message: str) -> None:
    errors.say(Text.assemble((f"{label}:", style), " ", message))


if __name__ == "__main__":
    sys.exit(main())
