"""What ``doctor`` found: one cause and one remedy each, as a result that can be saved."""

from __future__ import annotations

from typing import Literal

from windowed_mtp.results import Record, RunResult

Level = Literal["ok", "warning", "problem"]


class Finding(Record):
    """One thing that was looked at.

    Attributes
    ----------
    check : str
        What was looked at, such as ``"head"``.
    level : str
        ``"ok"``; ``"warning"`` for what may cost speed; ``"problem"`` for what stops the engine, or leaves the window
        or the draft without effect.
    cause : str
        One sentence: what is so.
    remedy : str or None
        One sentence: what to do; ``None`` where all is well.
    """

    check: str
    level: Level
    cause: str
    remedy: str | None = None


class DoctorResult(RunResult):
    """Everything that one run of ``doctor`` found.

    Attributes
    ----------
    in_force : str or None
        What the log line at start-up would say, as far as it can be known before; ``None`` if no window would be.
    """

    kind: Literal["doctor"] = "doctor"
    in_force: str | None
    rows: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing found is a problem."""
        return all(row.level != "problem" for row in self.rows)
