"""Write docs/results.md and its figures from a record of measured decode steps (see windowed-mtp bench)."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from windowed_mtp.cost.families import read_geometry
from windowed_mtp.cost.record import StepRecord, StepRun
from windowed_mtp.cost.summary import (
    Cell,
    Floors,
    Place,
    cells,
    fastest,
    median_rates,
    on_main_grid,
    plain,
    ratio,
    speculating,
    sweep,
    usual,
)
from windowed_mtp.cost.summary import native as own_draft
from windowed_mtp.engines.vllm.step_profile import KernelRow, StepProfile
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.files import write_atomically

NONE = "–"


class Report:
    """The text of a report.

    Parameters
    ----------
    record : StepRecord
        What was measured.
    geometries : Path
        Folder of the geometries that the record names, for the floors.
    """

    def __init__(self, record: StepRecord, geometries: Path) -> None:
        self.record, self.cells = record, cells(record)
        self.places = speculating(self.cells)
        names = dict.fromkeys(cell.point.geometry for cell in self.cells)
        known = {name: read_geometry(geometries / name) for name in names if (geometries / name).is_dir()}
        self.floors = Floors(median_rates(record), known)

    def text(
        self, command: str, notes: str, figures: Sequence[tuple[str, str]], profiles: Sequence[StepProfile]
    ) -> str:
        """The whole document."""
        blocks = ["# Results: the cost of a decode step", self.preface()]
        for name in dict.fromkeys(at.geometry for at in self.places):
            here = {at: found for at, found in self.places.items() if at.geometry == name}
            main = {at: found for at, found in here.items() if on_main_grid(at)}
            rest = {at: found for at, found in here.items() if at not in main}
            blocks.append(f"## {name}")
            if main:
                blocks += ["### Windowing alone, batch 1, γ 6, bf16 cache", self.same_settings(main)]
            if rest:
                blocks += ["### Other γ, batch sizes, cache types and devices", self.same_settings(rest)]
            blocks += ["### Beside the floor", self.beside_floors(here)]
            tuned = self.tuned(here)
            if tuned:
                blocks += ["### The two comparisons", tuned]
            sweep = self.windows(here)
            if sweep:
                blocks += ["### Windows", sweep]
            blocks += [f"![{title}]({path})" for title, path in figures if path.rsplit("/", 1)[-1].startswith(name)]
        if profiles:
            blocks += ["## Where the time goes", *(_profile(profile) for profile in profiles)]
        if notes:
            blocks.append(notes.strip())
        blocks += ["## How it was measured", self.measured(command)]
        return "\n\n".join(blocks) + "\n"

    def preface(self) -> str:
        text = [
            "Times are medians over repeats, each of which is a median over its timed steps. Arms alternate, and a "
            "ratio is the median over the pairs of equal repeat, with its range and the number of pairs behind it. "
            "Break-even AL is the step's time over that of a plain decode step: with fewer tokens a step, speculation "
            "loses. The draft's share is its time on the device.",
        ]
        if any(cell.point.cache_fill == "random keys" for cell in self.cells):
            text.append(
                "Weights are random at the model's true shapes, and the cached keys were filled at random instead of "
                "prefilled: the cost of a step does not depend on them. The acceptance length does, so none is given, "
                "and neither are tokens a second. Random routing spreads tokens over more experts than a trained "
                "router may."
            )
        if any(cell.point.cache_fill == "real prefill" for cell in self.cells):
            text.append("Where an acceptance length (AL) is given, a real checkpoint decoded after a real prefill.")
        return _prose(*text)

    def same_settings(self, places: dict[Place, list[Cell]]) -> str:
        """Native against windowed, the engine otherwise as it comes."""
        rows = []
        for at, found in places.items():
            native = own_draft(found)
            windowed = usual(found)
            if native is None and windowed is None:
                continue
            some = native or windowed
            assert some is not None
            base = plain(self.cells, some.point)
            rows.append([
                *_where(at), _ms(base.step_ms if base else None), _with_draft(native), _with_draft(windowed),
                _ratio(native, windowed), f"{_even(native, base)} → {_even(windowed, base)}",
            ])  # fmt: skip
        heads = [*_WHERE, "no speculation", "native (draft)", "windowed (draft)", "native/windowed", "break-even AL"]
        return _table(heads, rows)

    def beside_floors(self, places: dict[Place, list[Cell]]) -> str:
        """Measured times beside the floors, verify and draft apart."""
        rows, bases = [], []
        for at, found in places.items():
            for cell in sorted(found, key=lambda cell: (cell.windowed, not cell.stock)):
                base = plain(self.cells, cell.point)
                if base is not None and base not in bases:
                    bases.append(base)
                    rows.append(
                        [*_where(at._replace(gamma=0)), _described(base), *self._beside(base, "verify"), *[NONE] * 3]
                    )
                name = _described(cell)
                rows.append([*_where(at), name, *self._beside(cell, "verify"), *self._beside(cell, "draft")])
        heads = [*_WHERE, "arm", "verify", "floor", "of floor", "draft", "floor", "of floor"]
        return _table(heads, rows)

    def tuned(self, places: dict[Place, list[Cell]]) -> str:
        """Stock native, and the best native, against the best windowed arm."""
        rows = []
        for at, found in places.items():
            if all(cell.stock for cell in found):
                continue
            stock = own_draft(found)
            native = fastest(cell for cell in found if not cell.windowed)
            windowed = fastest(cell for cell in found if cell.windowed)
            rows.append([
                *_where(at), _ms(stock.step_ms if stock else None),
                f"{_ms(native.step_ms)} ({_settings(native)})" if native else NONE,
                f"{_ms(windowed.step_ms)} ({_described(windowed)})" if windowed else NONE,
                _ratio(stock, windowed), _ratio(native, windowed),
                _even(windowed, plain(self.cells, windowed.point) if windowed else None),
            ])  # fmt: skip
        heads = [
            *_WHERE, "stock native", "best native", "best windowed", "stock native/best windowed",
            "best native/best windowed", "break-even AL, best windowed",
        ]  # fmt: skip
        return _table(heads, rows) if rows else ""

    def windows(self, places: dict[Place, list[Cell]]) -> str:
        """Step and draft by window, where several were measured with the engine otherwise as it comes."""
        rows = []
        for at, found in places.items():
            swept = sweep(found)
            native = own_draft(found)
            for cell in swept:
                window = f"{cell.point.sink} + {cell.point.window:,}"
                rows.append([*_where(at), window, _ms(cell.step_ms), _ms(cell.draft_ms), _ratio(native, cell)])
        return _table([*_WHERE, "sink + window", "step", "draft", "native/this"], rows) if rows else ""

    def measured(self, command: str) -> str:
        runs = self.record.runs
        lines = [f"{_dates(runs)}. Every row, with its date, clock and temperature, is in the record.", ""]
        facts = {
            "machine": _distinct(runs, lambda run: run.machine),
            "device": _distinct(runs, lambda run: run.provenance.device),
            "software": _distinct(runs, _software),
            "commit": _distinct(runs, lambda run: run.provenance.commit or "not in a checkout"),
            "multiprocessor clock": _range((row.clock_mhz for row in self.record.rows), "MHz"),
            "temperature": _range((row.temperature_c for row in self.record.rows), "°C"),
            "rows": [f"{len(self.record.rows)} in {len(runs)} run{'s' * (len(runs) != 1)}"],
        }
        lines += [f"- {name}: {'; '.join(values)}" for name, values in facts.items()]
        rates = self.floors.rates
        if rates is not None:
            matrix = ", ".join(f"{name} {rate / 1e12:,.0f} T/s" for name, rate in rates.matrix_ops_per_s.items())
            lines += [
                f"- copy bandwidth: {rates.copy_bytes_per_s / 1e12:.2f} TB/s, read plus written",
                f"- operations of matrix products: {matrix}",
                "",
                _prose(
                    "A floor is the larger of two times: all bytes that must move over the copy bandwidth, and all "
                    "operations over the matrix rate. Bytes are the weights read once a pass (of the routed experts as "
                    "many as even routing is expected to touch), the cached keys and values read once, and recurrent "
                    "states read and written; activations and the traffic between devices are left out. The draft's "
                    "first pass covers γ + 1 tokens, the others one. Where a type's matrix rate was not measured there "
                    "is no floor."
                ),
            ]
        lines += ["", "Commands of the runs:", ""]
        lines += [f"    {line}" for line in _distinct(runs, lambda run: " ".join(_quiet(run.provenance.argv)))]
        return "\n".join([*lines, "", "This page:", "", f"    {command}"])

    def _beside(self, cell: Cell, half: str) -> list[str]:
        time = cell.verify_ms if half == "verify" else cell.draft_ms
        if half == "verify" and time is None and not cell.point.gamma:
            time = cell.step_ms
        floor = self.floors.verify_ms(cell) if half == "verify" else self.floors.draft_ms(cell)
        return [_ms(time), _ms(floor), NONE if time is None or floor is None else f"{time / floor:.2f} x"]


_WHERE = ["context", "γ", "batch", "cache", "devices"]


def _where(at: Place) -> list[str]:
    return [f"{at.context:,}", str(at.gamma), str(at.batch), at.kv_dtype, str(at.tensor_parallel)]


def _profile(profile: StepProfile, most: int = 10) -> str:
    """The longest kernels of each half of a step, and the sum of the others."""
    about = ", ".join(f"{name} {value}" for name, value in profile.settings.items())
    lines = ["| half | kernel | grid | launches a step | µs a step |", "| --- | --- | --- | ---: | ---: |"]
    for half in ("verify", "draft"):
        rows = [row for row in profile.rows if row.half == half]
        rows.sort(key=lambda row: -row.us)
        for row in rows[:most]:
            grid = " x ".join(map(str, row.grid)) or NONE
            lines.append(f"| {half} | `{_short(row)}` | {grid} | {row.calls:g} | {row.us:,.0f} |")
        others = rows[most:]
        if others:
            calls, time = sum(row.calls for row in others), sum(row.us for row in others)
            lines.append(f"| {half} | {len(others)} others | {NONE} | {calls:g} | {time:,.0f} |")
        if rows:
            lines.append(f"| {half} | all | {NONE} | {sum(r.calls for r in rows):g} | {sum(r.us for r in rows):,.0f} |")
    return f"Profile: {about}. Profiling itself adds time between kernels, not to them.\n\n" + "\n".join(lines)


def _short(row: KernelRow) -> str:
    """A kernel's name without its template arguments' tail, fit for a table cell."""
    name = row.name.replace("|", "/").replace("`", "'")
    return name if len(name) <= 80 else f"{name[:79]}…"


def _prose(*paragraphs: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 120) for paragraph in paragraphs)


def _ms(time: float | None) -> str:
    return NONE if time is None else f"{time:.2f}"


def _with_draft(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    length = "" if cell.acceptance_length is None else f", AL {cell.acceptance_length:.2f}"
    return f"{_ms(cell.step_ms)} ({_ms(cell.draft_ms)}){length}"


def _even(cell: Cell | None, base: Cell | None) -> str:
    return NONE if cell is None or base is None else f"{cell.step_ms / base.step_ms:.2f}"


def _ratio(slower: Cell | None, faster: Cell | None) -> str:
    found = None if slower is None or faster is None else ratio(slower, faster)
    return NONE if found is None else f"{found.median:.3f} ({found.least:.3f}–{found.largest:.3f}, {found.pairs})"


def _settings(cell: Cell) -> str:
    named = (f"{name.removeprefix('attention_config.')} {value}" for name, value in cell.point.settings.items())
    return ", ".join(named) or "stock"


def _described(cell: Cell) -> str:
    parts = [f"{cell.point.sink} + {cell.point.window:,}"] if cell.windowed and cell.point.window else []
    return ", ".join([cell.point.arm, *parts, *([] if cell.stock else [_settings(cell)])])


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; a leading column of `_WHERE` that is the same everywhere becomes a line above it."""
    constant = [i for i in range(1, len(_WHERE)) if len({row[i] for row in rows}) == 1]
    above = ", ".join(f"{heads[i]} {rows[0][i]}" for i in constant)
    kept = [i for i in range(len(heads)) if i not in constant]
    lines = [[heads[i] for i in kept], ["---:" if i < len(_WHERE) else "---" for i in kept]]
    lines += [[row[i] for i in kept] for row in rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Milliseconds; {above}.\n\n{body}" if above else f"Milliseconds.\n\n{body}"


def _distinct(runs: Iterable[StepRun], of: Callable[[StepRun], str]) -> list[str]:
    return list(dict.fromkeys(of(run) for run in runs))


def _software(run: StepRun) -> str:
    own = {"python": run.provenance.python, "torch": run.provenance.torch, "windowed-mtp": run.provenance.package}
    return ", ".join(f"{name} {version}" for name, version in {**run.software, **own}.items())


def _quiet(argv: tuple[str, ...]) -> list[str]:
    """A command line without the folder that its program lies in."""
    return [Path(argv[0]).name, *argv[1:]] if argv else []


def _dates(runs: Sequence[StepRun]) -> str:
    days = sorted({run.provenance.date.date().isoformat() for run in runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _range(values: Iterable[float | None], unit: str) -> list[str]:
    found = [value for value in values if value is not None]
    return [f"{min(found):,.0f} to {max(found):,.0f} {unit}"] if found else ["not read"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("record", type=Path, help="record of windowed-mtp bench")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results.md"), help="page to write")
    parser.add_argument("--geometries", type=Path, default=Path(__file__).parent / "geometries", help="their folder")
    parser.add_argument("--profile", type=Path, action="append", default=[], help="profile of an arm; may be repeated")
    parser.add_argument("--notes", type=Path, help="Markdown to put in front of the section on the measurement")
    given = parser.parse_args(arguments)
    try:
        report = Report(StepRecord.load(given.record), given.geometries)
        profiles = [StepProfile.load(path) for path in given.profile]
        notes = given.notes.read_text(encoding="utf-8") if given.notes else ""
        figures = draw(report, given.output.parent / "figures")
        command = f"python benchmarks/{Path(__file__).name} {given.record.name} -o {given.output.name}"
        write_atomically(given.output, report.text(command, notes, figures, profiles))
    except WindowedMTPError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot use {error.filename!r}: {error.strerror}; check the name.", file=sys.stderr)
        return 2
    return 0


def draw(report: Report, folder: Path) -> list[tuple[str, str]]:
    """Draw the figures, if matplotlib is there; gives title and path relative to the page."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("matplotlib is not installed: the page is written without figures.", file=sys.stderr)
        return []
    from step_cost_figures import draw_figures

    folder.mkdir(parents=True, exist_ok=True)
    return [(title, f"{folder.name}/{name}") for title, name in draw_figures(report.cells, report.floors, folder)]


if __name__ == "__main__":
    sys.exit(main())
