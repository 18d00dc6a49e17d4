"""Figures of the step-cost report: step and draft by context, beside their floors, and the draft by window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "windowed-mtp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
from matplotlib import pyplot as plt  # noqa: E402
from step_cost_format import described  # noqa: E402

from windowed_mtp.cost.summary import (  # noqa: E402
    Cell,
    Floors,
    native,
    on_main_grid,
    plain,
    speculating,
    sweep,
    usual,
)

COLOURS = {"no speculation": "#777777", "native": "#c44e52", "windowed": "#1f6fb4"}
PARTS = {"verify": "#8fb3d1", "draft": "#e0a458", "rest": "#cccccc"}


def draw_figures(found: Sequence[Cell], floors: Floors, folder: Path, suffix: str = "") -> list[tuple[str, str]]:
    """Draw each geometry's figures for the main grid; ``suffix`` follows its name in the file names.

    Returns
    -------
    list of (str, str)
        Title and file name of each.
    """
    drawn = []
    main = {at: there for at, there in speculating(found).items() if on_main_grid(at)}
    for name in dict.fromkeys(at.geometry for at in main):
        here = {at.context: there for at, there in main.items() if at.geometry == name}
        stem = folder / f"{name}{suffix}"
        lines: dict[str, list[Cell]] = {arm: [] for arm in COLOURS}
        for there in here.values():
            arms = (plain(found, there[0].point), native(there), usual(there))
            for arm, cell in zip(COLOURS, arms, strict=True):
                lines[arm] += [cell] if cell else []
        if len(here) > 1:
            drawn.append(_by_context(floors, name, lines, stem))
        longest = here[max(here)]
        if len(longest) > 1:
            drawn.append(_by_arm(floors, name, plain(found, longest[0].point), longest, stem))
        swept = {context: sweep(there) for context, there in here.items() if sweep(there)}
        if swept:
            drawn.append(_by_window(name, swept, stem))
    return drawn


def _by_context(floors: Floors, name: str, lines: dict[str, list[Cell]], stem: Path) -> tuple[str, str]:
    figure, (steps, drafts) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for arm, found in lines.items():
        style: dict[str, Any] = {"color": COLOURS[arm], "marker": "o", "markersize": 3}
        steps.plot([cell.point.context for cell in found], [cell.step_ms for cell in found], label=arm, **style)
        shares = [(cell.point.context, cell.draft_ms, floors.draft_ms(cell)) for cell in found]
        shares = [share for share in shares if share[1] is not None]
        if not shares or arm == "no speculation":
            continue
        contexts, times, least = zip(*shares, strict=True)
        drafts.plot(contexts, times, label=arm, **style)
        if None not in least:
            drafts.plot(contexts, least, label=f"{arm}, floor", color=COLOURS[arm], linestyle=":")
    for axes, what in ((steps, "step"), (drafts, "draft's share")):
        axes.set(xlabel="tokens in the cache, thousands", ylabel="milliseconds", title=what)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:,.0f}")
        _finish(axes)
    return _save(figure, stem, "contexts", f"{name}: step and draft by context")


def _by_arm(floors: Floors, name: str, base: Cell | None, found: Sequence[Cell], stem: Path) -> tuple[str, str]:
    """Bars of one context: verify, draft and the rest of a step of every arm measured in the most rounds."""
    most = max(len(cell.rows) for cell in found)
    bars = [cell for cell in found if len(cell.rows) >= min(3, most)]
    bars = [*([base] if base else []), *sorted(bars, key=lambda cell: -cell.step_ms)]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * len(bars)), layout="constrained")
    for line, cell in enumerate(bars):
        draft = cell.draft_ms or 0.0
        verify = cell.verify_ms if cell.verify_ms is not None else cell.step_ms - draft
        parts = {"verify": verify, "draft": draft, "rest": max(cell.step_ms - verify - draft, 0.0)}
        start = 0.0
        for part, time in parts.items():
            axes.barh(line, time, 0.6, left=start, color=PARTS[part], label=None if line else part)
            limit = {"verify": floors.verify_ms, "draft": floors.draft_ms}.get(part)
            least = limit(cell) if limit is not None and time else None
            if least is not None:
                at = [start + least] * 2
                axes.plot(at, [line - 0.3, line + 0.3], color="black", linewidth=1, label=None if line else "its floor")
            start += time
        axes.text(start, line, f" {cell.step_ms:.2f}", va="center")
    axes.set_yticks(range(len(bars)), [described(cell) for cell in bars])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title=f"a step at {found[0].point.context:,} tokens")
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.legend(frameon=False, loc="lower right")
    return _save(figure, stem, "arms", f"{name}: parts of a step by arm")


def _by_window(name: str, swept: dict[int, list[Cell]], stem: Path) -> tuple[str, str]:
    figure, axes = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
    for style, (context, found) in zip(cycle(("o-", "s--", "^:")), swept.items(), strict=False):
        timed = [(cell.point.window, cell.draft_ms) for cell in found if cell.draft_ms is not None]
        axes.plot(*zip(*timed, strict=True), style, markersize=4, fillstyle="none", label=f"{context:,} tokens")
    axes.set(xlabel="window, tokens", ylabel="milliseconds", title="draft's share", xscale="log")
    windows = sorted({cell.point.window for found in swept.values() for cell in found if cell.point.window})
    axes.set_xticks(windows, [f"{window:,}" for window in windows], rotation=45)
    axes.minorticks_off()
    _finish(axes)
    return _save(figure, stem, "windows", f"{name}: draft by window")


def _finish(axes: Any) -> None:
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.legend(frameon=False)


def _save(figure: Any, stem: Path, kind: str, title: str) -> tuple[str, str]:
    path = stem.with_name(f"{stem.name}-{kind}.svg")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return title, path.name
