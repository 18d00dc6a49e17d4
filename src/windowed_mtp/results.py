"""The one result schema: what was measured, with which settings, and where the numbers come from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from windowed_mtp import __version__
from windowed_mtp.errors import ResultError
from windowed_mtp.files import write_atomically

Setting = str | bool | int | float | None


class Record(BaseModel):
    """Base of everything in a result file: frozen, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Provenance(Record):
    """Where a number comes from.

    Attributes
    ----------
    package, python, torch, transformers : str
        Versions.
    argv : tuple of str
        The command line.
    device : str
        Name of the device that ran the model.
    threads : int
        Number of threads that torch uses on the CPU.
    seed : int or None
        Seed of everything random; ``None`` where nothing is.
    commit : str or None
        Git commit, with ``-dirty`` behind it where files differ from it, if the package runs from a checkout.
    date : datetime
        When the run began, in UTC.
    """

    package: str
    python: str
    torch: str
    transformers: str
    argv: tuple[str, ...]
    device: str
    threads: int
    seed: int | None
    commit: str | None
    date: AwareDatetime

    @classmethod
    def collect(cls, device: str = "cpu", seed: int | None = None, argv: Sequence[str] | None = None) -> Provenance:
        """Describe the running process.

        Parameters
        ----------
        device : str
            The torch device that runs the model, such as ``"cpu"`` or ``"cuda:0"``.
        seed : int, optional
            Seed of the run.
        argv : sequence of str, optional
            The command line; the process's own by default.
        """
        import torch  # here, so that result files can be read without it

        return cls(
            package=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=metadata.version("transformers"),
            argv=tuple(sys.argv if argv is None else argv),
            device=torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu_name(),
            threads=torch.get_num_threads(),
            seed=seed,
            commit=_commit(),
            date=datetime.now(UTC),
        )


class RunResult(Record):
    """What one run measured; each kind of run has a subclass that narrows ``kind`` and ``rows``.

    Attributes
    ----------
    schema_version : int
        Version of this schema; a file of another version is refused.
    kind : str
        Which kind of run.
    provenance : Provenance
        Where the numbers come from.
    settings : dict of str to str, bool, int, float or None
        What the run was asked to do.
    rows : tuple of Record
        The measurements.
    """

    schema_version: Literal[1] = 1
    kind: str
    provenance: Provenance
    settings: dict[str, Setting]
    rows: tuple[Record, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON; a file of that name is replaced whole or, on any failure, left as it was.

        Raises
        ------
        ResultError
            If the file cannot be written.
        """
        try:
            write_atomically(path, self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise ResultError(_cannot("write", path, error)) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a result of this kind.

        Raises
        ------
        ResultError
            If the file cannot be read, or holds no result of this kind and schema version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ResultError(_cannot("read", path, error)) from None
        except UnicodeDecodeError:
            raise ResultError(
                f"{str(path)!r} is not a result file: it is not text; pass a file saved as JSON."
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise ResultError(
                f"{str(path)!r} is not a {cls.__name__} file of this version: {place}: {first['msg']}; "
                "make it again with the same command."
            ) from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check, before a long run, that a result can be saved under a name.

    Raises
    ------
    ResultError
        If the name is a folder, or its folder is missing or cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise ResultError(f"{str(path)!r} is a folder; pass the name of a file to write.")
    if not path.parent.is_dir():
        raise ResultError(f"the folder of {str(path)!r} does not exist; make it first, or pass another name.")
    if not os.access(path.parent, os.W_OK):
        raise ResultError(f"the folder of {str(path)!r} cannot be written to; pass another name.")


def _cannot(what: str, path: str | os.PathLike[str], error: OSError) -> str:
    return f"cannot {what} {str(path)!r}: {error.strerror or error}; check the name and its permissions."


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
