"""Write docs/results.md and its figures from a record of measured decode steps (see windowed-mtp bench)."""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import step_cost_kernels as kernels
from step_cost_format import (
    NONE,
    SHORT,
    WHERE,
    break_even,
    described,
    ms,
    plain_table,
    prose,
    ratio_of,
    setting,
    settings,
    table,
    where,
    with_draft,
)

from windowed_mtp.cost.families import read_geometry
from windowed_mtp.cost.record import StepPoint, StepRecord, StepRun
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
from windowed_mtp.engines.vllm.step_profile import StepProfile
from windowed_mtp.errors import WindowedMTPError
from windowed_mtp.files import write_atomically

ROUNDS = 3
"""Rounds that a cell needs to be compared as an arm of its own, if any cell has as many."""
HOT = "hot_vocabulary.size"
WANTED = {"gamma": (1, 2, 4, 8), "batch": (4, 16), "kv_dtype": ("fp8",), "tensor_parallel": (2,)}
"""What is worth measuring beside the main grid, by a point's field."""
Lines = dict[str, dict[int, str]]
"""Texts by an arm's line and by context."""


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
        self.record, self.geometries, self.cells = record, geometries, cells(record)
        self.places = speculating(self.cells)
        self.folders = sorted(path.name for path in geometries.iterdir() if path.is_dir())
        names = dict.fromkeys(cell.point.geometry for cell in self.cells)
        known = {name: read_geometry(geometries / name) for name in names if name in self.folders}
        self.floors = Floors(median_rates(record), known)
        most = max(len(cell.rows) for cell in self.cells)
        self.least_rows = min(ROUNDS, most)

    def text(self, command: str, notes: str, figures: Path, profiles: Sequence[StepProfile]) -> str:
        """The whole document, with figures in a folder; what two machines took is not put together."""
        blocks = ["# Results: the cost of a decode step", self.preface()]
        parts = by_machine(self.record)
        for number, part in enumerate(parts, start=1):
            report = Report(part, self.geometries)
            drawn = draw(report.cells, report.floors, figures, f"-{number}" if number > 1 else "")
            blocks += report.tables(f", {part.runs[0].machine}" if len(parts) > 1 else "", drawn)
        if profiles:
            blocks += ["## Where the time goes", kernels.described(profiles)]
            blocks += [kernels.kinds_table(profiles, half) for half in ("draft", "verify")]
            blocks += [kernels.longest(profile) for profile in profiles]
        if notes:
            blocks.append(notes.strip())
        blocks += ["## What was not measured", self.not_measured(), "## How it was measured", self.measured(command)]
        return "\n\n".join(blocks) + "\n"

    def tables(self, where_measured: str, figures: Sequence[tuple[str, str]]) -> list[str]:
        """What one machine took, geometry by geometry; ``where_measured`` ends the headings."""
        blocks = []
        for name in dict.fromkeys(at.geometry for at in self.places):
            here = {at: found for at, found in self.places.items() if at.geometry == name}
            main = {at: found for at, found in here.items() if on_main_grid(at)}
            rest = {at: found for at, found in here.items() if at not in main}
            blocks.append(f"## {name}{where_measured}")
            if main:
                blocks += ["### Windowing alone, batch 1, γ 6, bf16 cache", self.same_settings(main)]
            if rest:
                blocks += ["### Other γ, batch sizes, cache types and devices", self.same_settings(rest)]
            blocks += [f"![{title}]({path})" for title, path in figures if title.startswith(f"{name}: ")]
            whole = {at: [cell for cell in found if len(cell.rows) >= self.least_rows] for at, found in here.items()}
            whole = {at: sorted(found, key=_order) for at, found in whole.items() if found}
            sections: dict[str, str] = {
                "Every arm against stock native": self.against_stock(whole),
                "Best native against best windowed": self.best(whole),
                **{f"What {setting(*one)} alone gives": self.effect(here, *one) for one in _settings_of(whole)},
                "The draft's share by context": self.shares(whole),
                "Windows": self.windows(here),
                "Beside the floor": self.beside_floors(whole),
                "One process for all arms against a process each": self.processes(here),
            }
            for title, section in sections.items():
                blocks += [f"### {title}", section] if section else []
        return blocks

    def preface(self) -> str:
        text = [
            "Times are medians over repeats, each of which is a median over its timed steps. Arms alternate, and a "
            "ratio is the median over the pairs of equal repeat; in brackets its least and largest value and the "
            "number of pairs. Break-even AL is the step's time over that of a plain decode step: with fewer tokens a "
            "step, speculation loses. The draft's share is its time on the device, in brackets after a step.",
        ]
        names = {name for cell in self.cells for name in cell.point.settings}
        short = [f"*{SHORT[name]}* is `{name}`" for name in SHORT if name in names]
        if short:
            text.append(f"In the tables {' and '.join(short)}; *stock* is an engine as it comes.")
        if any(cell.point.cache_fill == "random keys" for cell in self.cells):
            text.append(
                "Weights are random at the model's true shapes, and the cached keys were filled at random instead of "
                "prefilled: the cost of a step does not depend on them. The acceptance length (AL) does, so none is "
                "given, and neither are tokens a second: a window or hot rows that lower AL give back a part of what "
                "these tables show. Random routing spreads tokens over more experts than a trained router may."
            )
        if any(cell.point.cache_fill == "real prefill" for cell in self.cells):
            text.append("Where an acceptance length (AL) is given, a real checkpoint decoded after a real prefill.")
        return prose(*text)

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
                *where(at), ms(base.step_ms if base else None), with_draft(native), with_draft(windowed),
                ratio_of(native, windowed), f"{break_even(native, base)} → {break_even(windowed, base)}",
            ])  # fmt: skip
        heads = [*WHERE, "no speculation", "native (draft)", "windowed (draft)", "native/windowed", "break-even AL"]
        return table(heads, rows)

    def against_stock(self, places: dict[Place, list[Cell]]) -> str:
        """Stock native over every other arm, and each arm's break-even AL, at each context."""
        ratios: Lines = {}
        even: Lines = {}
        for at, found in places.items():
            stock = own_draft(found)
            for base in [each for each in map(self._plain, found) if each is not None]:
                ratios.setdefault(_line(at, base), {})[at.context] = ratio_of(stock, base)
            for cell in found:
                if cell is not stock:
                    ratios.setdefault(_line(at, cell), {})[at.context] = ratio_of(stock, cell)
                even.setdefault(_line(at, cell), {})[at.context] = break_even(cell, self._plain(cell))
        if len(ratios) < 2:
            return ""
        blocks = [_matrix("stock native over", ratios)]
        if any(value != NONE for line in even.values() for value in line.values()):
            blocks.append(prose("Break-even AL of each arm, over the plain step of the same attention settings:"))
            blocks.append(_matrix("break-even AL", even))
        return "\n\n".join(blocks)

    def best(self, places: dict[Place, list[Cell]]) -> str:
        """The best native arm against the best windowed arms without and with hot rows."""
        rows = []
        for at, found in places.items():
            native = fastest(cell for cell in found if not cell.windowed)
            all_rows = fastest(cell for cell in found if cell.windowed and HOT not in cell.point.settings)
            hot = fastest(cell for cell in found if cell.windowed and HOT in cell.point.settings)
            if native is not None and not all(cell.stock for cell in found):
                rows.append([
                    *where(at), _named(native), _named(all_rows), ratio_of(native, all_rows), _named(hot),
                    ratio_of(native, hot),
                ])  # fmt: skip
        heads = ["best native", "best windowed, all rows", "native/this", "best windowed, hot rows", "native/this"]
        return table([*WHERE, *heads], rows) if rows else ""

    def _plain(self, cell: Cell) -> Cell | None:
        return plain(self.cells, cell.point)

    def effect(self, places: dict[Place, list[Cell]], name: str, value: object) -> str:
        """Steps of cells that differ in one setting; values of it that were measured in fewer rounds follow."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for at, found in places.items():
            there = [cell for cell in self.cells if not cell.point.gamma and _place_of(cell.point, at)]
            for cell in sorted([*there, *found], key=lambda cell: (len(cell.rows) < self.least_rows, *_order(cell))):
                if name not in cell.point.settings:
                    continue
                base = next((other for other in [*there, *found] if _without(cell.point, name) == _bare(other)), None)
                if base is None or (cell.point.settings[name] != value and len(cell.rows) >= self.least_rows):
                    continue
                line = [
                    *where(at if cell.point.gamma else at._replace(gamma=0)), described(base),
                    setting(name, cell.point.settings[name]), with_draft(base), with_draft(cell),
                    _pair(base.verify_ms, cell.verify_ms), ratio_of(base, cell),
                ]  # fmt: skip
                rows[tuple(line)] = rows.pop(tuple(line), line)  # a plain step comes with every γ, and is kept once
        heads = [*WHERE, "arm", "with", "without it (draft)", "with it (draft)", "verify", "without/with"]
        return table(heads, list(rows.values())) if rows else ""

    def shares(self, places: dict[Place, list[Cell]]) -> str:
        """The draft's share at each context, and how far apart its largest and least values are."""
        lines: dict[str, dict[int, float]] = {}
        for at, found in places.items():
            for cell in found:
                if cell.draft_ms is not None:
                    lines.setdefault(_line(at, cell), {})[at.context] = cell.draft_ms
        lines = {line: times for line, times in lines.items() if len(times) > 1}
        if not lines:
            return ""
        spread = {
            line: f"{100 * (max(times.values()) / min(times.values()) - 1):.1f} %" for line, times in lines.items()
        }
        shown = {line: {context: _ms3(time) for context, time in times.items()} for line, times in lines.items()}
        return "Milliseconds of the draft's passes together.\n\n" + _matrix(
            "draft", shown, "largest over least", spread
        )

    def windows(self, places: dict[Place, list[Cell]]) -> str:
        """Step and draft by window, where several were measured with the engine otherwise as it comes."""
        rows = []
        for at, found in places.items():
            swept = sweep(found)
            native = own_draft(found)
            for cell in swept:
                window = f"{cell.point.sink} + {cell.point.window:,}"
                rows.append([*where(at), window, ms(cell.step_ms), _ms3(cell.draft_ms), ratio_of(native, cell)])
        return table([*WHERE, "sink + window", "step", "draft", "native/this"], rows) if rows else ""

    def beside_floors(self, places: dict[Place, list[Cell]]) -> str:
        """Measured times beside the floors, verify and draft apart."""
        rows: list[list[str]] = []
        for at, found in places.items():
            bases = [self._plain(cell) for cell in found]
            for base in {id(base): base for base in bases if base is not None}.values():
                line = [*where(at._replace(gamma=0)), described(base), *self._beside(base, "verify"), *[NONE] * 3]
                rows += [line] if line not in rows else []
            for cell in found:
                rows.append([*where(at), described(cell), *self._beside(cell, "verify"), *self._beside(cell, "draft")])
        heads = [*WHERE, "arm", "verify", "floor", "of floor", "draft", "floor", "of floor"]
        return table(heads, rows) if rows else ""

    def _beside(self, cell: Cell, half: str) -> list[str]:
        time = cell.verify_ms if half == "verify" else cell.draft_ms
        if half == "verify" and time is None and not cell.point.gamma:
            time = cell.step_ms
        floor = self.floors.verify_ms(cell) if half == "verify" else self.floors.draft_ms(cell)
        return [ms(time), ms(floor), NONE if time is None or floor is None else f"{time / floor:.2f} x"]

    def processes(self, places: dict[Place, list[Cell]]) -> str:
        """Cells that were measured both ways: arms changed in a running engine, and an engine for each arm."""
        points: dict[int, set[str]] = {}
        for row in self.record.rows:
            points.setdefault(row.run, set()).add(str(_bare(Cell(row.point, ()))))
        rows = []
        for at, found in places.items():
            split = {}
            for cell in found:
                shared = tuple(row for row in cell.rows if len(points[row.run]) > 1)
                own = tuple(row for row in cell.rows if len(points[row.run]) == 1)
                if shared and own:
                    split[cell.windowed] = Cell(cell.point, shared), Cell(cell.point, own)
            for one, each in split.values():
                off = 100 * (each.step_ms / one.step_ms - 1)
                rows.append([*where(at), f"step, {described(one)}", _spread(one), _spread(each), f"{off:+.1f} %"])
            if len(split) == 2:
                native, windowed = split[False], split[True]
                ratios = [ratio(native[i], windowed[i]) for i in range(2)]
                if ratios[0] and ratios[1]:
                    off = 100 * (ratios[1].median / ratios[0].median - 1)
                    both = (ratio_of(native[i], windowed[i]) for i in range(2))
                    rows.append([*where(at), "native/windowed", *both, f"{off:+.1f} %"])
        heads = [*WHERE, "", "one process", "a process each", "difference"]
        return table(heads, rows) if rows else ""

    def not_measured(self) -> str:
        """What of the wanted points the record lacks."""
        names = {"gamma": "γ", "batch": "batch", "kv_dtype": "KV cache", "tensor_parallel": "tensor-parallel devices"}
        lines = []
        for field, wanted in WANTED.items():
            have = {getattr(cell.point, field) for cell in self.cells}
            lacking = [str(value) for value in wanted if value not in have]
            had = sorted(value for value in have if value)
            if lacking:
                lines.append(f"- {names[field]} {', '.join(lacking)} (measured: {', '.join(map(str, had))})")
        others = [name for name in self.folders if name not in {cell.point.geometry for cell in self.cells}]
        if others:
            lines.append(f"- the geometries {', '.join(others)}, which lie ready in benchmarks/geometries")
        if all(cell.point.cache_fill == "random keys" for cell in self.cells):
            lines.append("- acceptance, and so tokens a second, at these contexts: that needs the models' real weights")
        return "\n".join(lines) if lines else "Nothing of what was planned."

    def measured(self, command: str) -> str:
        runs = self.record.runs
        lines = [f"{_dates(runs)}. Every row, with its date, clock and temperature, is in the record.", ""]
        memory = [row.memory_bytes / 2**30 for row in self.record.rows if row.memory_bytes is not None]
        facts = {
            "machine": _distinct(runs, lambda run: run.machine),
            "device": _distinct(runs, lambda run: run.provenance.device),
            "software": _software(runs),
            "commit": _distinct(runs, lambda run: run.provenance.commit or "not recorded: run from a copy without git"),
            "multiprocessor clock": _range((row.clock_mhz for row in self.record.rows), "MHz"),
            "temperature": _range((row.temperature_c for row in self.record.rows), "°C"),
            "device memory in use": [f"{min(memory):.1f} to {max(memory):.1f} GiB"] if memory else ["not read"],
            "rows": [f"{len(self.record.rows)} in {len(runs)} run{'s' * (len(runs) != 1)}"],
        }
        lines += [prose(f"- {name}: {'; '.join(values)}").replace("\n", "\n  ") for name, values in facts.items()]
        rates = self.floors.rates
        if rates is not None:
            matrix = ", ".join(f"{name} {rate / 1e12:,.0f} T/s" for name, rate in rates.matrix_ops_per_s.items())
            lines += [
                f"- copy bandwidth: {rates.copy_bytes_per_s / 1e12:.2f} TB/s, read plus written",
                f"- operations of matrix products: {matrix}",
                "",
                prose(
                    "A floor is the larger of two times: all bytes that must move over the copy bandwidth, and all "
                    "operations over the matrix rate. Bytes are the weights read once a pass (of the routed experts as "
                    "many as even routing is expected to touch), the cached keys and values read once, and recurrent "
                    "states read and written; activations and the traffic between devices are left out. The draft's "
                    "first pass covers γ + 1 tokens, the others one. Where a type's matrix rate was not measured there "
                    "is no floor. Reading alone can be a little faster than copying, so a single kernel may beat it."
                ),
            ]
        lines += [
            "",
            "Commands of the runs (`--minutes` ends one early and is left out; rounds go on by the same command):",
            "",
        ]
        for line in _distinct(runs, lambda run: _command(run.provenance.argv)):
            lines += [f"    {part}" for part in line.split("\n")]
        return "\n".join([*lines, "", "This page:", "", f"    {command}"])


def _order(cell: Cell) -> tuple[bool, bool, bool, bool]:
    """Plain, native, windowed, with hot rows; each first as the engine comes."""
    hot = HOT in cell.point.settings
    return cell.point.gamma > 0, cell.windowed, hot, len(cell.point.settings) > hot


def _settings_of(places: dict[Place, list[Cell]]) -> list[tuple[str, object]]:
    return list(
        dict.fromkeys(one for found in places.values() for cell in found for one in cell.point.settings.items())
    )


def _line(at: Place, cell: Cell) -> str:
    """Name of an arm's line; off the main grid with its place."""
    more = [] if on_main_grid(at) else [f"{head} {value}" for head, value in zip(WHERE[1:], where(at)[1:], strict=True)]
    return ", ".join([described(cell), *more])


def _matrix(head: str, lines: Lines, last: str = "", values: dict[str, str] | None = None) -> str:
    """A table with a line for each arm and a column for each context."""
    contexts = sorted({context for each in lines.values() for context in each})
    rows = [
        [line, *(each.get(context, NONE) for context in contexts), *([values[line]] if values else [])]
        for line, each in lines.items()
    ]
    return plain_table([head, *(f"{context:,}" for context in contexts), *([last] if values else [])], rows)


def _named(cell: Cell | None) -> str:
    return NONE if cell is None else f"{ms(cell.step_ms)} ({settings(cell)})"


def _place_of(point: StepPoint, at: Place) -> bool:
    fields = ("geometry", "tensor_parallel", "kv_dtype", "cache_fill", "batch", "context")
    return all(getattr(point, field) == getattr(at, field) for field in fields)


def _bare(cell: Cell) -> tuple[object, ...]:
    point = cell.point
    return point.gamma, point.sink, point.window, point.min_context, tuple(point.settings.items())


def _without(point: StepPoint, name: str) -> tuple[object, ...]:
    left = {key: value for key, value in point.settings.items() if key != name}
    return _bare(Cell(point.model_copy(update={"settings": left}), ()))


def _pair(before: float | None, after: float | None) -> str:
    return NONE if before is None or after is None else f"{before:.2f} → {after:.2f}"


def _ms3(time: float | None) -> str:
    return NONE if time is None else f"{time:.3f}"


def _spread(cell: Cell) -> str:
    times = [row.step_ms for row in cell.rows]
    return f"{statistics.median(times):.2f} ({min(times):.2f}–{max(times):.2f}, {len(times)})"


def _distinct(runs: Iterable[StepRun], of: Callable[[StepRun], str]) -> list[str]:
    return list(dict.fromkeys(of(run) for run in runs))


def _software(runs: Sequence[StepRun]) -> list[str]:
    """Each piece of software with its version, or its versions."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        own = {"python": run.provenance.python, "torch": run.provenance.torch, "windowed-mtp": run.provenance.package}
        for name, version in {**run.software, **own}.items():
            found.setdefault(name.replace("_", " "), {})[version] = None
    return [", ".join(f"{name} {' or '.join(versions)}" for name, versions in found.items())]


def _command(argv: Sequence[str]) -> str:
    """A run's command line for a shell, its options on lines of their own where it is long."""
    words = list(argv[argv.index("bench") :]) if "bench" in argv else [Path(argv[0]).name, *argv[1:]] if argv else []
    if "--minutes" in words:
        del words[words.index("--minutes") : words.index("--minutes") + 2]
    lines = ["windowed-mtp" if "bench" in argv else ""]
    for option in _options(words):
        if len(lines[-1]) + len(option) > 100:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {option}".lstrip() if len(lines) == 1 else f"{lines[-1]} {option}"
    return " \\\n".join(lines)


def _options(words: Sequence[str]) -> Iterator[str]:
    """Words with those that belong to an option joined to it, quoted for a shell."""
    joined: list[str] = []
    for word in words:
        if word.startswith("-") and joined:
            yield shlex.join(joined)
            joined = []
        joined.append(word)
    if joined:
        yield shlex.join(joined)


def _dates(runs: Sequence[StepRun]) -> str:
    days = sorted({run.provenance.date.date().isoformat() for run in runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _range(values: Iterable[float | None], unit: str) -> list[str]:
    found = sorted({round(value) for value in values if value is not None})
    if not found:
        return ["not read"]
    return [f"{found[0]:,} {unit}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,} {unit}"]


def read_profiles(folder: Path | None) -> list[StepProfile]:
    """Profiles of a folder: native before windowed, and what has fewer settings first."""
    if folder is None:
        return []
    found = [StepProfile.load(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda profile: ("native" not in str(profile.settings["arm"]), len(profile.settings)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("record", type=Path, help="record of windowed-mtp bench")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results.md"), help="page to write")
    parser.add_argument("--geometries", type=Path, default=Path(__file__).parent / "geometries", help="their folder")
    parser.add_argument("--profiles", type=Path, help="folder of the arms' profiles")
    parser.add_argument("--notes", type=Path, help="Markdown to put in front of the section on the measurement")
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    try:
        record, profiles = StepRecord.load(given.record), read_profiles(given.profiles)
        notes = given.notes.read_text(encoding="utf-8") if given.notes else ""
        figures = given.output.parent / "figures"
        command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *arguments])
        text = Report(record, given.geometries).text(command, notes, figures, profiles)
        write_atomically(given.output, text)
    except WindowedMTPError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot use {error.filename!r}: {error.strerror}; check the name.", file=sys.stderr)
        return 2
    return 0


def by_machine(record: StepRecord) -> list[StepRecord]:
    """Split a record by the machines of its runs, in the order in which they occur."""
    parts = []
    for machine in dict.fromkeys(run.machine for run in record.runs):
        runs = [index for index, run in enumerate(record.runs) if run.machine == machine]
        rows = (row.model_copy(update={"run": runs.index(row.run)}) for row in record.rows if row.run in runs)
        chosen = {"runs": tuple(record.runs[index] for index in runs), "rows": tuple(rows)}
        parts.append(record.model_copy(update=chosen))
    return parts


def draw(found: Sequence[Cell], floors: Floors, folder: Path, suffix: str) -> list[tuple[str, str]]:
    """Draw the figures, if matplotlib is there; gives title and path relative to the page."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("matplotlib is not installed: the page is written without figures.", file=sys.stderr)
        return []
    from step_cost_figures import draw_figures

    folder.mkdir(parents=True, exist_ok=True)
    return [(title, f"{folder.name}/{name}") for title, name in draw_figures(found, floors, folder, suffix)]


if __name__ == "__main__":
    sys.exit(main())
