"""How the step-cost report writes times, ratios, settings and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from windowed_mtp.cost.summary import Cell, Place, ratio

NONE = "–"
WHERE = ["context", "γ", "batch", "cache", "devices"]
SHORT = {"attention_config.flash_attn_max_num_splits_for_cuda_graph": "splits", "hot_vocabulary.size": "hot rows"}
"""Settings that go by a shorter name in tables."""


def where(at: Place) -> list[str]:
    """A place's columns, by `WHERE`."""
    return [f"{at.context:,}", str(at.gamma), str(at.batch), at.kv_dtype, str(at.tensor_parallel)]


def prose(*paragraphs: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 120) for paragraph in paragraphs)


def ms(time: float | None) -> str:
    return NONE if time is None else f"{time:.2f}"


def with_draft(cell: Cell | None) -> str:
    """A step, its draft in brackets, and the acceptance length where one was measured."""
    if cell is None:
        return NONE
    length = "" if cell.acceptance_length is None else f", AL {cell.acceptance_length:.2f}"
    return f"{ms(cell.step_ms)} ({ms(cell.draft_ms)}){length}"


def break_even(cell: Cell | None, base: Cell | None) -> str:
    return NONE if cell is None or base is None else f"{cell.step_ms / base.step_ms:.2f}"


def ratio_of(slower: Cell | None, faster: Cell | None) -> str:
    found = None if slower is None or faster is None else ratio(slower, faster)
    return NONE if found is None else f"{found.median:.3f} ({found.least:.3f}–{found.largest:.3f}, {found.pairs})"


def setting(name: str, value: object) -> str:
    """One setting, such as ``splits 66``."""
    short = SHORT.get(name, name.removeprefix("attention_config."))
    return f"{short} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{short} {value}"


def settings(cell: Cell) -> str:
    """What differs from an engine as it comes, but the window."""
    return ", ".join(setting(name, value) for name, value in cell.point.settings.items()) or "stock"


def described(cell: Cell) -> str:
    """Kind of draft, window and settings."""
    if cell.windowed:
        kind = f"windowed {cell.point.sink} + {cell.point.window:,}"
    else:
        kind = "native" if cell.point.gamma else "no speculation"
    return kind if cell.stock else f"{kind}, {settings(cell)}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a leading column of `WHERE` that is the same everywhere becomes a line above it."""
    constant = [i for i in range(1, len(WHERE)) if len({row[i] for row in rows}) == 1]
    above = ", ".join(f"{heads[i]} {rows[0][i]}" for i in constant)
    kept = [i for i in range(len(heads)) if i not in constant]
    body = plain_table([heads[i] for i in kept], [[row[i] for i in kept] for row in rows])
    return f"Milliseconds; {above}.\n\n{body}" if above else f"Milliseconds.\n\n{body}"


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers lie to the right."""
    words = [any(row[i][:1].isalpha() or row[i][:1] == "`" for row in rows) for i in range(len(heads))]
    marks = ["---" if each else "---:" for each in words]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, marks, *rows])
