"""Medians, ratios of alternated pairs and floors, from a record of measured decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windowed_mtp.cost.floor import floor_ms
from windowed_mtp.cost.geometry import Geometry
from windowed_mtp.cost.record import Rates, StepPoint, StepRecord, StepRow
from windowed_mtp.cost.work import Work, draft_work, verify_work
from windowed_mtp.window import SinkWindow


class Ratio(NamedTuple):
    """A ratio over pairs: its median, least and largest value, and how many pairs there were."""

    median: float
    least: float
    largest: float
    pairs: int


@dataclass(frozen=True)
class Cell:
    """All repeats of one point.

    Attributes
    ----------
    point : StepPoint
        What was measured.
    rows : tuple of StepRow
        Its rows, one a repeat.
    """

    point: StepPoint
    rows: tuple[StepRow, ...]

    @property
    def step_ms(self) -> float:
        """Median over the repeats of a step's time, in milliseconds."""
        return statistics.median(row.step_ms for row in self.rows)

    @property
    def draft_ms(self) -> float | None:
        """The same of the draft's share; ``None`` where no repeat has it."""
        return _median(row.draft_ms for row in self.rows)

    @property
    def verify_ms(self) -> float | None:
        """The same of the target's pass; ``None`` where no repeat has it."""
        return _median(row.verify_ms for row in self.rows)

    @property
    def acceptance_length(self) -> float | None:
        """The same of the tokens emitted a step; ``None`` where weights were random."""
        return _median(row.acceptance_length for row in self.rows)

    @property
    def windowed(self) -> bool:
        """Whether the draft has a window."""
        return self.point.window is not None

    @property
    def stock(self) -> bool:
        """Whether every setting but the window is the engine's default."""
        return not self.point.settings


class Place(NamedTuple):
    """What cells must share to be compared: all of a point but the arm, the window and the settings."""

    geometry: str
    tensor_parallel: int
    kv_dtype: str
    cache_fill: str
    batch: int
    gamma: int
    context: int


MAIN = {"tensor_parallel": 1, "kv_dtype": "bf16", "batch": 1, "gamma": 6}
"""The places of the main grid: the arrangement of the paper (arXiv 2607.21535)."""


def on_main_grid(at: Place) -> bool:
    """Whether a place belongs to the main grid."""
    return all(getattr(at, name) == value for name, value in MAIN.items())


def place(point: StepPoint, gamma: int | None = None) -> Place:
    """Where a point stands; with ``gamma``, where it would with another number of draft tokens."""
    return Place(
        point.geometry, point.tensor_parallel, point.kv_dtype, point.cache_fill, point.batch,
        point.gamma if gamma is None else gamma, point.context,
    )  # fmt: skip


def cells(record: StepRecord) -> list[Cell]:
    """Gather a record's rows by point, in the order in which the points first occur."""
    rows: dict[str, list[StepRow]] = {}
    for row in record.rows:
        rows.setdefault(row.key[0], []).append(row)
    return [Cell(found[0].point, tuple(found)) for found in rows.values()]


def speculating(found: Sequence[Cell]) -> dict[Place, list[Cell]]:
    """Gather cells with a draft by place, sorted."""
    places: dict[Place, list[Cell]] = {}
    for cell in found:
        if cell.point.gamma:
            places.setdefault(place(cell.point), []).append(cell)
    return dict(sorted(places.items()))


def plain(found: Sequence[Cell], point: StepPoint) -> Cell | None:
    """Find the cell without speculation to put beside a point.

    The one with the point's own attention settings if it was measured, else the one of the engine as it comes.
    """
    engine = {name: value for name, value in point.settings.items() if name.startswith("attention_config.")}
    there = [cell for cell in found if not cell.point.gamma and place(cell.point) == place(point, gamma=0)]
    for settings in (engine, {}):
        for cell in there:
            if cell.point.settings == settings:
                return cell
    return None


def usual(found: Iterable[Cell]) -> Cell | None:
    """Find the windowed cell of an engine as it comes, with the default window if it was measured."""
    windowed = [cell for cell in found if cell.stock and cell.windowed]
    default = SinkWindow()
    ours = [cell for cell in windowed if (cell.point.sink, cell.point.window) == (default.sink, default.window)]
    return next(iter(ours or windowed), None)


def native(found: Iterable[Cell]) -> Cell | None:
    """Find the cell of an engine as it comes, with its own draft."""
    return fastest(cell for cell in found if cell.stock and not cell.windowed)


def sweep(found: Iterable[Cell]) -> list[Cell]:
    """Windowed cells of an engine as it comes, by window, if there are at least two."""
    swept = [cell for cell in found if cell.stock and cell.windowed]
    swept.sort(key=lambda cell: (cell.point.window or 0, cell.point.sink or 0))
    return swept if len(swept) > 1 else []


def fastest(found: Iterable[Cell]) -> Cell | None:
    """Find the cell with the least median step time; ``None`` of none."""
    return min(found, key=lambda cell: cell.step_ms, default=None)


def ratio(slower: Cell, faster: Cell) -> Ratio | None:
    """Divide the step times of two cells repeat by repeat; ``None`` if they share no repeat."""
    times = {row.repeat: row.step_ms for row in faster.rows}
    found = [row.step_ms / times[row.repeat] for row in slower.rows if row.repeat in times]
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def median_rates(record: StepRecord) -> Rates | None:
    """Median of the rates that a record's runs measured; ``None`` if none did."""
    measured = [run.rates for run in record.runs if run.rates is not None]
    if not measured:
        return None
    names = {name for rates in measured for name in rates.matrix_ops_per_s}
    return Rates(
        copy_bytes_per_s=statistics.median(rates.copy_bytes_per_s for rates in measured),
        matrix_ops_per_s={
            name: statistics.median(r.matrix_ops_per_s[name] for r in measured if name in r.matrix_ops_per_s)
            for name in sorted(names)
        },
    )


@dataclass(frozen=True)
class Floors:
    """What cells take at least on the machine of a record; see `verify_work`, `draft_work` and `floor_ms`.

    Attributes
    ----------
    rates : Rates or None
        What the machine reached.
    geometries : dict of str to Geometry
        The geometries that are known, by name.
    """

    rates: Rates | None
    geometries: dict[str, Geometry]

    def verify_ms(self, cell: Cell) -> float | None:
        """Milliseconds of the target's pass; ``None`` where geometry or rates are not known."""
        point = cell.point
        return self._floor(
            point,
            lambda geometry: verify_work(
                geometry, point.context, point.gamma, point.batch,
                kv_dtype=point.kv_dtype, tensor_parallel=point.tensor_parallel,
            ),
        )  # fmt: skip

    def draft_ms(self, cell: Cell) -> float | None:
        """Milliseconds of the draft's passes; ``None`` where geometry or rates are not known.

        The window counts as asked for, before an engine rounds it to blocks; of a hot vocabulary (setting
        ``hot_vocabulary.size``) only its rows of the output head count.
        """
        point, window = cell.point, None
        if point.sink is not None and point.window is not None and point.min_context is not None:
            window = SinkWindow(point.sink, point.window, point.min_context)
        rows = point.settings.get("hot_vocabulary.size")
        return self._floor(
            point,
            lambda geometry: draft_work(
                geometry, point.context, point.gamma, point.batch, window=window,
                head_rows=rows if isinstance(rows, int) else None,
                kv_dtype=point.kv_dtype, tensor_parallel=point.tensor_parallel,
            ),
        )  # fmt: skip

    def _floor(self, point: StepPoint, work: Callable[[Geometry], list[Work]]) -> float | None:
        geometry = self.geometries.get(point.geometry)
        if geometry is None or self.rates is None:
            return None
        parts = work(geometry)
        known = all(part.operands in self.rates.matrix_ops_per_s for part in parts)
        return floor_ms(parts, self.rates) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
