import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from windowed_mtp.cost.record import Rates, StepLog, StepRecord, StepRow, StepRun
from windowed_mtp.errors import ResultError
from windowed_mtp.results import Provenance

WINDOW = {"sink": 64, "window": 4032, "min_context": 0}


def make_run(argv: str = "bench", day: int = 1, **changes: Any) -> StepRun:
    provenance = Provenance(
        package="0", python="3", torch="2", transformers="5", argv=(argv,), device="none", threads=1, seed=None,
        commit=None, date=datetime(2026, 1, day, tzinfo=UTC),
    )  # fmt: skip
    return StepRun(provenance=provenance, software={"vllm": "0"}, machine="synthetic", **changes)


def make_row(arm: str = "windowed", repeat: int = 0, **point: Any) -> StepRow:
    window = WINDOW if arm == "windowed" else {}
    gamma = 0 if arm == "none" else 6
    point = {"geometry": "synthetic", "arm": arm, "context": 8192, "gamma": gamma, **window, **point}
    return StepRow(point=point, repeat=repeat, steps=5, step_ms=2.0, date=datetime(2026, 1, 1, tzinfo=UTC))


def test_rows_are_kept_in_order_and_known_to_a_later_run(tmp_path: Path):
    path = tmp_path / "record.json"
    log = StepLog(path, make_run())
    rows = [make_row(), make_row(repeat=1), make_row("native"), make_row("none")]
    assert not log.has(rows[0].point, 0) and not path.exists()
    for row in rows[:2]:
        log.append(row)
    later = StepLog(path, make_run("bench again", rates=Rates(copy_bytes_per_s=1e12, matrix_ops_per_s={"bf16": 1e15})))
    assert later.has(rows[0].point, 0) and later.has(rows[0].point, 1)
    assert not later.has(rows[0].point, 2) and not later.has(rows[2].point, 0)
    for row in rows[2:]:
        later.append(row)
    record = StepRecord.load(path)
    assert [row.key for row in record.rows] == [row.key for row in rows]
    assert [row.run for row in record.rows] == [0, 0, 1, 1]
    assert record.runs == (log.run, later.run) and record.provenance == log.run.provenance


def test_processes_of_one_run_that_take_turns_lose_nothing(tmp_path: Path):
    path = tmp_path / "record.json"
    first, second = StepLog(path, make_run()), StepLog(path, make_run(day=2))
    for repeat in range(2):
        first.append(make_row("native", repeat))
        second.append(make_row("windowed", repeat))
    record = StepRecord.load(path)
    assert len(record.rows) == 4
    assert record.runs == (first.run,)  # they differ in nothing but the date


def test_nothing_is_recorded_twice(tmp_path: Path):
    log = StepLog(tmp_path / "record.json", make_run())
    log.append(make_row(settings={"a": 1, "b": True}))
    same = make_row(settings={"b": True, "a": 1})
    assert log.has(same.point, 0)
    before = log.path.read_text()
    with pytest.raises(ResultError, match="already"):
        log.append(same)
    assert log.path.read_text() == before


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": "other"}, {"context": 9000}, {"gamma": 2}, {"batch": 4}, {"kv_dtype": "fp8"}, {"sink": 0},
        {"window": 512}, {"min_context": 9}, {"tensor_parallel": 2}, {"settings": {"a": 1}},
        {"cache_fill": "real prefill"},
    ],
)  # fmt: skip
def test_points_that_differ_are_measured_apart(change: dict[str, Any], tmp_path: Path):
    log = StepLog(tmp_path / "record.json", make_run())
    log.append(make_row())
    changed = make_row(**change)
    assert not log.has(changed.point, 0)
    log.append(changed)
    assert log.has(changed.point, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"arm": "none", "gamma": 6}, {"arm": "native", "gamma": 0}, {"arm": "native", **WINDOW},
        {"arm": "windowed", "window": None}, {"arm": "other", "sink": 3}, {"arm": "other", "typo": 1},
        {"arm": "windowed", "sink": None, "window": None, "min_context": None},
    ],
)  # fmt: skip
def test_points_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        make_row(**wrong)


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(time: float):
    row = make_row().model_dump()
    with pytest.raises(ValidationError):
        StepRow(**{**row, "step_ms": time})


def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path):
    log = StepLog(tmp_path / "record.json", make_run())
    log.append(make_row())
    data = json.loads(log.path.read_text())
    for change in ({"rows": data["rows"] * 2}, {"rows": [{**data["rows"][0], "run": 1}]}, {"kind": "timing"}):
        log.path.write_text(json.dumps({**data, **change}))
        with pytest.raises(ResultError):
            StepLog(log.path, make_run())


def test_a_record_that_cannot_be_written_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ResultError):
        StepLog(tmp_path / "missing" / "record.json", make_run())


def test_the_record_is_read_without_heavy_imports():
    code = "import sys, windowed_mtp.cost.record; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
