"""The record of measured decode steps: rows are added as they are measured, none twice, by as many runs as it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, field_validator, model_validator

from windowed_mtp.errors import ResultError
from windowed_mtp.results import Provenance, Record, RunResult, Setting, check_writable

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
CacheFill = Literal["random keys", "real prefill"]


class Rates(Record):
    """What the machine reached in a measurement of its own, beside which a step's time is put.

    Attributes
    ----------
    copy_bytes_per_s : float
        Bytes read plus bytes written in a second by a copy on the device that is much larger than its caches.
    matrix_ops_per_s : dict of str to float
        Operations (two for each multiply-add) in a second of a large matrix product, by type: ``"bf16"``, ``"fp8"``.
    """

    copy_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    matrix_ops_per_s: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]


class StepRun(Record):
    """One run that added rows.

    Attributes
    ----------
    provenance : Provenance
        Where its numbers come from.
    software : dict of str to str
        Versions besides those in ``provenance``, such as ``{"vllm": "0.32.0", "cuda": "13.0", "driver": "..."}``.
    machine : str
        The machine in words, such as ``"1 x NVIDIA H200, 16 cores"``.
    rates : Rates or None
        Copy bandwidth and matrix rates measured in this run, if it measured them.
    """

    provenance: Provenance
    software: dict[str, str]
    machine: str
    rates: Rates | None = None


class StepPoint(Record):
    """What a row measures; with a repeat's number it is the row's key.

    Attributes
    ----------
    geometry : str
        Name of the model's geometry, a folder of ``benchmarks/geometries``.
    arm : str
        ``"none"`` (no speculation), ``"native"`` (the engine's own draft), ``"windowed"``, or a name for any other
        setting of the plugin.
    context : int
        Tokens in the cache of each sequence when the timed steps begin.
    gamma : int
        Draft tokens a step (``num_speculative_tokens``); 0 without speculation, and only then.
    batch : int
        Sequences decoded together.
    kv_dtype : str
        Type of the cached keys and values, such as ``"bf16"`` or ``"fp8"``.
    sink, window, min_context : int or None
        The window as asked for, before it is rounded to blocks; all ``None`` where there is none.
    tensor_parallel : int
        Devices that share each layer.
    settings : dict of str to str, bool, int, float or None
        Engine and plugin settings other than the engine's defaults; empty for an engine as it comes.
    cache_fill : {"random keys", "real prefill"}
        Whether the cached keys were filled at random, or by a prefill with real weights.
    """

    geometry: str
    arm: str
    context: int = Field(ge=1)
    gamma: int = Field(ge=0)
    batch: int = Field(default=1, ge=1)
    kv_dtype: str = "bf16"
    sink: int | None = Field(default=None, ge=0)
    window: int | None = Field(default=None, ge=1)
    min_context: int | None = Field(default=None, ge=0)
    tensor_parallel: int = Field(default=1, ge=1)
    settings: dict[str, Setting] = Field(default_factory=dict)
    cache_fill: CacheFill = "random keys"

    @field_validator("settings")
    @classmethod
    def _sort(cls, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        return dict(sorted(settings.items()))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.arm == "none") != (self.gamma == 0):
            raise ValueError(
                f"arm {self.arm!r} with gamma {self.gamma}: no speculation means gamma 0, and only it does"
            )
        given = {value is not None for value in (self.sink, self.window, self.min_context)}
        if len(given) == 2:
            raise ValueError("sink, window and min_context are given together or not at all")
        if self.arm in ("none", "native") and True in given:
            raise ValueError(f"arm {self.arm!r} has no window")
        if self.arm == "windowed" and False in given:
            raise ValueError("arm 'windowed' needs sink, window and min_context")
        return self


class StepRow(Record):
    """One measurement of one point: one start of the engine, after warm-up.

    Attributes
    ----------
    point : StepPoint
        What was measured.
    repeat : int
        Number of the alternated round that it belongs to; rows of different arms and equal repeat make a pair.
    steps : int
        Decode steps timed.
    step_ms : float
        Median wall time of a decode step in milliseconds, over all timed steps.
    step_ms_parts : tuple of float
        The same over equal successive parts of the timed steps, which shows a drift.
    draft_ms, verify_ms : float or None
        Median device time of the draft's passes together, and of the target's forward pass, by events on the device;
        ``None`` where it was not measured. ``draft_ms`` is ``None`` without speculation.
    memory_bytes : int or None
        Device memory in use after the timed steps, of one device.
    clock_mhz, temperature_c : float or None
        Clock of the multiprocessors and temperature of the device right after the timed steps.
    acceptance_length : float or None
        Tokens emitted a step; ``None`` with random weights, where it says nothing.
    date : datetime
        When the measurement ended, in UTC.
    run : int
        Index of its run in the record; set by the log.
    """

    point: StepPoint
    repeat: int = Field(ge=0)
    steps: int = Field(ge=1)
    step_ms: Milliseconds
    step_ms_parts: tuple[Milliseconds, ...] = ()
    draft_ms: Milliseconds | None = None
    verify_ms: Milliseconds | None = None
    memory_bytes: int | None = Field(default=None, ge=0)
    clock_mhz: float | None = Field(default=None, ge=0)
    temperature_c: float | None = None
    acceptance_length: float | None = Field(default=None, ge=1)
    date: AwareDatetime
    run: int = Field(default=0, ge=0)

    @property
    def key(self) -> tuple[str, int]:
        """What no other row of a record has: the point as JSON, and the repeat."""
        return self.point.model_dump_json(), self.repeat


class StepRecord(RunResult):
    """Measured decode steps.

    Attributes
    ----------
    provenance : Provenance
        The run that began the record.
    runs : tuple of StepRun
        All runs that added rows, in order.
    rows : tuple of StepRow
        The measurements, in order.
    """

    kind: Literal["step cost"] = "step cost"
    runs: tuple[StepRun, ...] = Field(min_length=1)
    rows: tuple[StepRow, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if any(row.run >= len(self.runs) for row in self.rows):
            raise ValueError("a row names a run that the record does not hold")
        if len({row.key for row in self.rows}) < len(self.rows):
            raise ValueError("a point and repeat were recorded twice")
        return self


class StepLog:
    """A record on disk that grows by one row at a time.

    Every change reads the file again and replaces it whole, so that a run that is cut short loses nothing, and several
    processes may add to one record in turn (not at once).

    Parameters
    ----------
    path : str or os.PathLike
        The record; made with its first row if there is none.
    run : StepRun
        The run that adds rows. One that differs from an earlier run in nothing but its date counts as that run.

    Raises
    ------
    ResultError
        If the file is no record of this kind and version, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], run: StepRun) -> None:
        check_writable(path)
        self.path, self.run = Path(path), run
        self._read()

    def has(self, point: StepPoint, repeat: int) -> bool:
        """Whether a point was measured in a repeat already, by this run or an earlier one."""
        record = self._read()
        key = (point.model_dump_json(), repeat)
        return record is not None and any(row.key == key for row in record.rows)

    def append(self, row: StepRow) -> None:
        """Add a row and save the record.

        Raises
        ------
        ResultError
            If its point and repeat are in the record already, or the file cannot be written.
        """
        record = self._read()
        runs = () if record is None else record.runs
        rows = () if record is None else record.rows
        if any(row.key == other.key for other in rows):
            raise ResultError(
                f"{str(self.path)!r} holds repeat {row.repeat} of {row.point.arm!r} at {row.point.context} tokens "
                "already; ask has() before measuring."
            )
        index = next((i for i, run in enumerate(runs) if _undated(run) == _undated(self.run)), len(runs))
        if index == len(runs):
            runs = (*runs, self.run)
        rows = (*rows, row.model_copy(update={"run": index}))
        StepRecord(provenance=runs[0].provenance, settings={}, runs=runs, rows=rows).save(self.path)

    def _read(self) -> StepRecord | None:
        return StepRecord.load(self.path) if self.path.exists() else None


def _undated(run: StepRun) -> StepRun:
    date = run.provenance.date.replace(year=1970, month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    return run.model_copy(update={"provenance": run.provenance.model_copy(update={"date": date})})
