"""Where a step's time goes: kernels of the target's and of the draft's half, from torch's profiler, in a worker."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from windowed_mtp.results import Record, RunResult


class KernelRow(Record):
    """One kernel of one half of a step, with one launch shape.

    Attributes
    ----------
    half : {"verify", "draft"}
        Which half launched it.
    name : str
        The kernel's name.
    grid, block : tuple of int
        Thread blocks, and threads of each.
    calls : float
        Launches a step.
    us : float
        Microseconds a step, all launches together.
    """

    half: Literal["verify", "draft"]
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    calls: float
    us: float


class StepProfile(RunResult):
    """Kernels of a step, the longest first; ``settings`` says which arm and context."""

    kind: Literal["step profile"] = "step profile"
    rows: tuple[KernelRow, ...]


def begin(worker: Any) -> None:
    """Start the profiler."""
    import torch

    drafter = getattr(worker.model_runner, "speculator", None)
    if drafter is not None:
        propose = drafter.propose

        def noted(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function("draft"):
                return propose(*args, **kwargs)

        drafter.propose, worker.profiled_propose = noted, propose
    worker.step_profiler = torch.profiler.profile()
    worker.step_profiler.start()


def end(worker: Any, steps: int) -> list[dict[str, Any]]:
    """Stop the profiler and give the rows, as dictionaries, for ``steps`` profiled steps."""
    worker.step_profiler.stop()
    if hasattr(worker, "profiled_propose"):
        worker.model_runner.speculator.propose = worker.profiled_propose
        del worker.profiled_propose
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        worker.step_profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    del worker.step_profiler
    return [row.model_dump() for row in kernel_rows(events, steps)]


def kernel_rows(events: list[dict[str, Any]], steps: int) -> list[KernelRow]:
    """Sum a trace's kernels by half, name and launch shape, the longest first.

    Parameters
    ----------
    events : list of dict
        ``traceEvents`` of a Chrome trace by torch's profiler. A kernel belongs to the draft if what launched it, which
        may be a whole graph, was called within a ``draft`` annotation.
    steps : int
        Steps that the trace covers.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    drafts = [
        (event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("name") == "draft" and event.get("cat") == "user_annotation"
    ]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in timed:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        given = event.get("args", {})
        at = launched.get(given.get("correlation"), float("nan"))
        half = "draft" if any(first <= at <= last for first, last in drafts) else "verify"
        entry = sums[half, event["name"], tuple(given.get("grid", ())), tuple(given.get("block", ()))]
        entry[0] += 1 / steps
        entry[1] += event["dur"] / steps
    rows = [
        KernelRow(half=half, name=name, grid=grid, block=block, calls=calls, us=us)
        for (half, name, grid, block), (calls, us) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.us)
