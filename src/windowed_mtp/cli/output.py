"""What all commands print with, and how they print the numbers of a decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from windowed_mtp.engines.acceptance import by_position

if TYPE_CHECKING:
    from windowed_mtp.probes.decode import DecodeRow


_WIDE = 400  # columns that a table may take in a file or pipe


class _Console(Console):
    """Breaks long lines between words on a terminal, and leaves them whole in a file or pipe."""

    def say(self, text: str | Text, style: str | None = None) -> None:
        self.print(text, style=style, soft_wrap=not self.is_terminal)

    def show(self, table: Table) -> None:
        if not self.is_terminal:
            self.width = _WIDE
        self.print(table)


output = _Console(highlight=False)
errors = _Console(stderr=True, highlight=False)


@contextmanager
def busy(message: str) -> Iterator[None]:
    """Show a spinner on the terminal while something takes long."""
    if errors.is_terminal:
        with errors.status(message):
            yield
    else:
        yield


def progress() -> Progress:
    """Make a progress bar with the time that remains; it vanishes when done, and shows on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def number(value: float | None, digits: int = 1) -> str:
    """Format a number with thousands separators; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def size(num_bytes: int) -> str:
    """Format a number of bytes; a dash for none at all."""
    if not num_bytes:
        return "-"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def decode_table(rows: Iterable[DecodeRow]) -> Table:
    """Make a table with one column an arm."""
    rows = list(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.arm, justify="right")
    lines = {
        "ms/step": [number(row.ms_per_step, 2) for row in rows],
        "AL, tokens a step": [number(row.acceptance_length, 2) for row in rows],
        "tokens/s": [number(row.tokens_per_second) for row in rows],
        "draft ms/step": [number(row.draft_ms_per_step, 2) for row in rows],
        "draft keys read a step": [number(row.draft_keys_per_step, 0) for row in rows],
        "draft KV": [size(row.draft_kv_bytes) for row in rows],
        "draft prefill ms": [number(row.draft_prefill_ms if row.draft_kv_bytes else None) for row in rows],
        "unconditional acceptance": [by_position(row.unconditional_acceptance) or "-" for row in rows],
        "conditional acceptance": [by_position(row.conditional_acceptance) or "-" for row in rows],
    }
    for name, values in lines.items():
        if set(values) != {"-"}:
            table.add_row(name, *values)
    return table
