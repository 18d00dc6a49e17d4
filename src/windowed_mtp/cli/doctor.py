"""`windowed-mtp doctor`: what an engine would do with its window, and what is wrong with its draft."""

from __future__ import annotations

import urllib.error
import urllib.request
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from windowed_mtp.cli import options
from windowed_mtp.cli.load import read_text
from windowed_mtp.cli.output import busy, output
from windowed_mtp.errors import WindowedMTPError

if TYPE_CHECKING:
    from windowed_mtp.engines.vllm.findings import DoctorResult, Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class Engine(StrEnum):
    """Serving engines that can be looked at."""

    vllm = "vllm"


def doctor(
    context: typer.Context,
    flags: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", show_default=False, help="The model, then the flags that vllm serve would get with it."
        ),
    ],
    engine: Annotated[Engine, typer.Option(help="The serving engine that the flags are for.")] = Engine.vllm,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE", show_default=False, help="The /metrics of a running server: also judge AL."),
    ] = None,
    json: options.Json = None,
) -> int:
    """Say what a window would do in a serving engine, before it is started, and find silent failures.

    It takes the model and the flags of vllm serve, builds vLLM's own config from them, and looks at the checkpoint's
    files. The model is not loaded, and no GPU is needed. For example:

    [bold]windowed-mtp doctor MODEL --speculative-config '{"method": "mtp", "num_speculative_tokens": 6}'
    --additional-config '{"windowed_mtp": {"sink": 64, "window": 4032}}'[/bold]

    Exit code 1 if there is a problem: something that stops the engine, or that leaves the window or the draft without
    effect.
    """
    if "-h" in flags:
        context.get_help()  # prints it
        return 0
    from windowed_mtp.engines.vllm.doctor import diagnose
    from windowed_mtp.results import check_writable

    if json is not None:
        check_writable(json)
    text = None if metrics is None else _read_metrics(metrics)
    with busy(f"Asking {engine} about {flags[0]}"):
        result = diagnose(flags, text)
    _show(result)
    if json is not None:
        result.save(json)
    return 0 if result.passed else 1


def _read_metrics(source: str) -> str:
    if not source.startswith(("http://", "https://")):
        return read_text(Path(source))
    try:
        with urllib.request.urlopen(source, timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise WindowedMTPError(f"cannot read {source}: {reason}; check that the server runs and the address.") from None


def _show(result: DoctorResult) -> None:
    if result.in_force is None:
        output.say("In force: no window.")
    else:
        output.say(f"In force, as far as it is known before the start: {result.in_force}")
        output.say(
            "Backend and block size are those of this machine; the log line at start-up has the last word.", style="dim"
        )
    if output.is_terminal:
        output.print(_table(result))
    else:
        for row in result.rows:
            output.say(Text(f"{row.level:8} {row.check:13} ").append(_sentence(row)))
    counts = {level: sum(row.level == level for row in result.rows) for level in ("problem", "warning")}
    words = [f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count]
    output.print(" and ".join(words) or "nothing is wrong", style="bold" if result.passed else "bold red")


def _table(result: DoctorResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for wraps in (False, False, True):
        table.add_column(no_wrap=not wraps)
    for row in result.rows:
        table.add_row(Text(row.level, style=_STYLES[row.level]), row.check, _sentence(row))
    return table


def _sentence(finding: Finding) -> Text:
    text = Text(finding.cause[:1].upper() + finding.cause[1:] + ".")
    if finding.remedy is not None:
        text.append(f" Remedy: {finding.remedy}.", style="dim")
    return text
