"""The report on a record that is made up: geometry ``Qwen3.6-35B-A3B`` for its floors, times invented."""

import importlib.util
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windowed_mtp.cost.families import read_geometry
from windowed_mtp.cost.record import Rates, StepPoint, StepRecord, StepRow, StepRun
from windowed_mtp.cost.summary import Floors, cells, median_rates, plain, ratio, speculating, sweep, usual
from windowed_mtp.engines.vllm.step_profile import KernelRow, StepProfile
from windowed_mtp.results import Provenance

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAME = "Qwen3.6-35B-A3B"
RATES = [Rates(copy_bytes_per_s=bandwidth, matrix_ops_per_s={"bf16": 7e14}) for bandwidth in (4.2e12, 4.4e12, 9e12)]
WINDOW = {"sink": 64, "window": 4032, "min_context": 0}
ARGUMENTS = ["bench", "MODEL", "--arm", "windowed={}", "--minutes", "4"]
TUNED = {"attention_config.flash_attn_max_num_splits_for_cuda_graph": 16}


def make_run(rates: Rates | None) -> StepRun:
    provenance = Provenance(
        package="0", python="3", torch="2", transformers="5", argv=("/somewhere/app.py", *ARGUMENTS),
        device="no device", threads=1, seed=0, commit=None, date=datetime(2026, 1, 2, tzinfo=UTC),
    )  # fmt: skip
    return StepRun(provenance=provenance, software={"vllm": "0"}, machine="made up", rates=rates)


def make_rows(arm: str, context: int, times: list[float], draft: float | None = None, **point: Any) -> list[StepRow]:
    gamma = {"gamma": 0 if arm == "none" else 6}
    window = WINDOW if arm == "windowed" else {}
    made = StepPoint(**{"geometry": NAME, "arm": arm, "context": context, **gamma, **window, **point})
    return [
        StepRow(
            point=made, repeat=repeat, steps=1, step_ms=time, draft_ms=draft, clock_mhz=1700 + repeat,
            temperature_c=40.0, date=datetime(2026, 1, 2, tzinfo=UTC),
        )
        for repeat, time in enumerate(times)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def record() -> StepRecord:
    rows = [
        *make_rows("none", 8192, [4.0, 4.0, 4.0]),
        *make_rows("native", 8192, [10.0, 12.0, 20.0], 2.4),
        *make_rows("windowed", 8192, [10.0, 10.0, 10.0], 2.3),
        *make_rows("none", 1_040_000, [10.0, 11.0, 12.0]),
        *make_rows("native", 1_040_000, [22.0, 22.0, 22.0], 6.4),
        *make_rows("windowed", 1_040_000, [20.0, 17.6, 16.0], 2.4),
        *make_rows("windowed", 1_040_000, [18.0], 2.5, window=16_384),
        *make_rows("none", 1_040_000, [8.0] * 3, settings=TUNED),
        *make_rows("native tuned", 1_040_000, [18.0] * 3, 6.0, settings=TUNED),
        *make_rows("windowed", 1_040_000, [16.0] * 3, 2.4, settings=TUNED),
        *make_rows("windowed", 1_040_000, [12.5] * 3, 1.2, settings={**TUNED, "hot_vocabulary.size": 32_768}),
        *make_rows("windowed", 1_040_000, [11.0], 1.2, settings={name: 48 for name in TUNED}),
        *make_rows("windowed", 8192, [33.0], 3.0, batch=4),
    ]
    runs = tuple(make_run(rates) for rates in [*RATES, None])
    return StepRecord(provenance=runs[0].provenance, settings={}, runs=runs, rows=tuple(rows))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("step_cost_report", BENCHMARKS / "step_cost_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_the_median_over_pairs(record: StepRecord):
    found = cells(record)
    native, windowed = found[1], found[2]
    assert ratio(native, windowed) == (1.2, 1.0, 2.0, 3)
    assert ratio(found[4], found[5]) == (22 / 17.6, 1.1, 22 / 16, 3)
    assert ratio(found[4], found[6]) == (22 / 18, 22 / 18, 22 / 18, 1)
    assert native.step_ms == 12.0 and native.draft_ms == 2.4 and native.verify_ms is None


def test_cells_are_compared_with_the_plain_step_of_their_own_engine(record: StepRecord):
    found = cells(record)
    base, tuned = found[3], found[7]
    assert plain(found, found[5].point) == base
    assert plain(found, found[8].point) == tuned and plain(found, found[10].point) == tuned
    assert plain(found, found[12].point) is None  # batch 4 has none
    other = found[8].point.model_copy(update={"settings": {"attention_config.other": 1}})
    assert plain(found, other) == base


def test_the_usual_window_and_the_sweep(record: StepRecord):
    here = next(there for at, there in speculating(cells(record)).items() if at.context == 1_040_000)
    assert usual(reversed(here)) == cells(record)[5]
    assert [cell.point.window for cell in sweep(reversed(here))] == [4032, 16_384]
    assert sweep(here[:2]) == []


def test_floors(record: StepRecord):
    rates = median_rates(record)
    assert rates is not None and rates.copy_bytes_per_s == 4.4e12
    found = cells(record)
    floors = Floors(rates, {NAME: read_geometry(BENCHMARKS / "geometries" / NAME)})
    # 38.1 GB to verify; drafts of 7.2 GB and of 1.9 GB with a head of 32,768 rows instead of 248,320
    assert floors.verify_ms(found[5]) == pytest.approx(38.15 / 4.4, rel=1e-3)
    assert floors.draft_ms(found[5]) == pytest.approx(7.199 / 4.4, rel=1e-3)
    assert floors.draft_ms(found[10]) == pytest.approx((7.199 - 6.103 + 6 * 32_768 * 4096e-9) / 4.4, rel=1e-3)
    native, windowed = floors.draft_ms(found[4]), floors.draft_ms(found[5])
    assert native is not None and windowed is not None and native > 2.5 * windowed
    for unknown in (Floors(None, floors.geometries), Floors(rates, {})):
        assert unknown.verify_ms(found[5]) is None and unknown.draft_ms(found[5]) is None
    no_fp8 = Floors(rates, {NAME: read_geometry(BENCHMARKS / "geometries" / "Qwen3.5-122B-A10B-FP8")})
    assert no_fp8.verify_ms(found[5]) is None


def test_the_page(report: ModuleType, record: StepRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record.save(tmp_path / "record.json")
    (tmp_path / "notes.md").write_text("## Why\n\nBecause.\n")
    page = tmp_path / "results.md"
    arguments = [str(tmp_path / "record.json"), "-o", str(page), "--notes", str(tmp_path / "notes.md")]
    assert report.main(arguments) == 0
    text = page.read_text()
    for line in (
        "| 8,192 | 4.00 | 12.00 (2.40) | 10.00 (2.30) | 1.200 (1.000–2.000, 3) | 3.00 → 2.50 |",
        "| 1,040,000 | 11.00 | 22.00 (6.40) | 17.60 (2.40) | 1.250 (1.100–1.375, 3) | 2.00 → 1.60 |",
        "| 8,192 | – | – | 33.00 (3.00) | – | – → – |",
        "| 1,040,000 | 64 + 16,384 | 18.00 | 2.500 | 1.222 (1.222–1.222, 1) |",
        "- multiprocessor clock: 1,700 to 1,702 MHz",
        "    windowed-mtp bench MODEL --arm 'windowed={}'",
        "- copy bandwidth: 4.40 TB/s, read plus written",
        "Because.",
        "Milliseconds; γ 6, batch 1, cache bf16, devices 1.",
        "Milliseconds; γ 6, batch 4, cache bf16, devices 1.",
        # splits 48 is fastest, but of one round only, so it is no arm of its own
        "| 1,040,000 | 18.00 (splits 16) | 16.00 (splits 16) | 1.125 (1.125–1.125, 3) "
        "| 12.50 (splits 16, hot rows 32,768) | 1.440 (1.440–1.440, 3) |",
        "| no speculation, splits 16 | – | 2.750 (2.750–2.750, 3) |",
        "| windowed 64 + 4,032, splits 16, hot rows 32,768 | – | 1.760 (1.760–1.760, 3) |",
        "| windowed 64 + 4,032, splits 16, hot rows 32,768 | – | 1.56 |",
        "| windowed 64 + 4,032 | 2.50 | 1.60 |",
        "| 1,040,000 | 6 | native | splits 16 | 22.00 (6.40) | 18.00 (6.00) | – | 1.222 (1.222–1.222, 3) |",
        "| 1,040,000 | 6 | windowed 64 + 4,032 | splits 48 | 17.60 (2.40) | 11.00 (1.20) | – "
        "| 1.818 (1.818–1.818, 1) |",
        "| 1,040,000 | windowed 64 + 4,032, splits 16 | hot rows 32,768 | 16.00 (2.40) | 12.50 (1.20) | – "
        "| 1.280 (1.280–1.280, 3) |",
        "| windowed 64 + 4,032 | 2.300 | 2.400 | 4.3 % |",
        "- γ 1, 2, 4, 8 (measured: 6)",
        "- batch 16 (measured: 1, 4)",
    ):
        assert line in text.splitlines(), line
    floored = [line for line in text.splitlines() if "| windowed 64 + 4,032 |" in line and " x |" in line]
    assert floored[-1] == "| 1,040,000 | 6 | windowed 64 + 4,032 | – | 8.67 | – | 2.40 | 1.64 | 1.47 x |"
    plain_steps = [line for line in text.splitlines() if "| 0 | no speculation" in line]
    assert [line.split(" | ")[2:4] for line in plain_steps] == [
        ["no speculation", "splits 16"],
        ["no speculation", "4.00"], ["no speculation", "11.00"], ["no speculation, splits 16", "8.00"],
    ]  # fmt: skip
    assert "random" in text and "/somewhere" not in text
    if importlib.util.find_spec("matplotlib") is None:
        assert "without figures" in capsys.readouterr().err
        pytest.skip("matplotlib is not installed: no figures were drawn")
    for kind in ("contexts", "arms", "windows"):
        assert f"(figures/{NAME}-{kind}.svg)" in text
        assert 1000 < (tmp_path / "figures" / f"{NAME}-{kind}.svg").stat().st_size < 100_000
    first = (tmp_path / "figures" / f"{NAME}-contexts.svg").read_bytes()
    assert report.main(arguments) == 0
    assert (tmp_path / "figures" / f"{NAME}-contexts.svg").read_bytes() == first and page.read_text() == text


def test_what_two_machines_took_is_not_put_together(report: ModuleType, record: StepRecord, tmp_path: Path):
    other = make_run(RATES[0]).model_copy(update={"machine": "another"})
    rows = [*make_rows("native", 8192, [30.0], 9.0), *make_rows("windowed", 8192, [20.0], 1.0)]
    rows = [row.model_copy(update={"run": 1, "repeat": 5}) for row in rows]
    both = record.model_copy(update={"runs": (record.runs[0], other), "rows": (*record.rows, *rows)})
    both.save(tmp_path / "record.json")
    page = tmp_path / "results.md"
    assert report.main([str(tmp_path / "record.json"), "-o", str(page)]) == 0
    first, second = page.read_text().split(", another\n")
    assert f"## {NAME}, made up\n" in first
    assert "1.200 (1.000–2.000, 3)" in first and "30.00" not in first
    assert "| 8,192 | – | 30.00 (9.00) | 20.00 (1.00) | 1.500 (1.500–1.500, 1) | – → – |" in second.splitlines()


def test_a_profile_gives_the_longest_kernels_of_each_half(report: ModuleType, record: StepRecord, tmp_path: Path):
    kernels = [
        KernelRow(half="verify", name="void x::flash::FlashAttnFwd<8>", grid=(2, 33), block=(), calls=10, us=6900.0)
    ]
    kernels += [KernelRow(half="draft", name=f"k{i}|", grid=(), block=(), calls=1, us=float(i)) for i in range(12)]
    kernels += [
        KernelRow(half="draft", name="nvjet_sm90_wide", grid=(), block=(), calls=6, us=600.0),
        KernelRow(half="draft", name="nvjet_sm90_narrow", grid=(), block=(), calls=60, us=700.0),
    ]
    given = {"context": 9, "gamma": 6, "batch": 1}
    native = StepProfile(provenance=record.provenance, settings={"arm": "native", **given}, rows=tuple(kernels[:1]))
    profile = StepProfile(
        provenance=record.provenance, settings={"arm": "hot", **given, "hot_vocabulary.size": 9}, rows=tuple(kernels)
    )
    record.save(tmp_path / "record.json")
    (tmp_path / "profiles").mkdir()
    profile.save(tmp_path / "profiles" / "a.json")
    native.save(tmp_path / "profiles" / "b.json")
    page = tmp_path / "page.md"
    asked = [str(tmp_path / "record.json"), "-o", str(page), "--profiles", str(tmp_path / "profiles")]
    assert report.main(asked) == 0
    lines = page.read_text().splitlines()
    for line in (
        "| draft | native | windowed, hot rows 9 |",
        "| output head | – | 600 (6) |",
        "| matrix products | – | 700 (60) |",
        "| norms, copies and other small ones | – | 66 (12) |",
        "| attention | 6,900 (10) | 6,900 (10) |",
        "| all kernels | – | 1,366 (78) |",
    ):
        assert line in lines, line
    kernel = ("| verify | `", "| draft | `", "| draft | 2 others", "| draft | all")
    found = [line for line in lines if line.startswith(kernel)]
    assert found[:2] == ["| verify | `FlashAttnFwd` | 2 x 33 | 10 | 6,900.0 |"] * 2  # one of each profile
    assert found[2:5] == [
        "| draft | `nvjet_sm90_narrow` | – | 60 | 700.0 |", "| draft | `nvjet_sm90_wide` | – | 6 | 600.0 |",
        "| draft | `k11/` | – | 1 | 11.0 |",
    ]  # fmt: skip
    assert found[-2:] == ["| draft | 2 others | – | 2 | 1.0 |", "| draft | all | – | 78 | 1,366.0 |"]


def test_kernels_names_without_their_template_arguments(report: ModuleType):
    name = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop<2> > > >"
    assert report.kernels.short(name) == "device_kernel FlashAttnFwdSm90"
    assert report.kernels.kind(name) == "attention"
    assert report.kernels.short("void vllm::moe::topkGating<8, 256>(float const*)") == "topkGating"
    assert report.kernels.kind("fused_moe_kernel") == report.kernels.kind("void vllm::moe::topkGating<8>()")


def test_arms_that_were_measured_both_ways(report: ModuleType, record: StepRecord):
    def in_run(rows: list[StepRow], run: int, repeat: int) -> list[StepRow]:
        return [row.model_copy(update={"run": run, "repeat": repeat}) for row in rows]

    rows = [
        *in_run(make_rows("native", 8192, [12.0]), 0, 0), *in_run(make_rows("windowed", 8192, [10.0]), 0, 0),
        *in_run(make_rows("native", 8192, [12.6]), 1, 1), *in_run(make_rows("windowed", 8192, [10.0]), 2, 1),
    ]  # fmt: skip
    made = report.Report(record.model_copy(update={"rows": tuple(rows)}), BENCHMARKS / "geometries")
    lines = made.processes(made.places).splitlines()
    assert lines[-3:] == [
        "| 8,192 | step, native | 12.00 (12.00–12.00, 1) | 12.60 (12.60–12.60, 1) | +5.0 % |",
        "| 8,192 | step, windowed 64 + 4,032 | 10.00 (10.00–10.00, 1) | 10.00 (10.00–10.00, 1) | +0.0 % |",
        "| 8,192 | native/windowed | 1.200 (1.200–1.200, 1) | 1.260 (1.260–1.260, 1) | +5.0 % |",
    ]
    whole = report.Report(record, BENCHMARKS / "geometries")
    assert whole.processes(whole.places) == ""


@pytest.mark.parametrize("wrong", ["missing.json", "other.json"])
def test_what_is_no_record_gives_one_sentence(wrong: str, tmp_path: Path):
    (tmp_path / "other.json").write_text("{}")
    command = [sys.executable, str(BENCHMARKS / "step_cost_report.py"), str(tmp_path / wrong)]
    done = subprocess.run([*command, "-o", str(tmp_path / "page.md")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "page.md").exists()
