import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from windowed_mtp import __version__, results
from windowed_mtp.errors import ResultError, WindowedMTPError
from windowed_mtp.results import Provenance, Record, RunResult, check_writable


class Row(Record):
    name: str
    milliseconds: float | None


class Timing(RunResult):
    kind: Literal["timing"] = "timing"
    rows: tuple[Row, ...]


@pytest.fixture
def timing() -> Timing:
    provenance = Provenance.collect(seed=3, argv=["windowed-mtp", "demo"])
    rows = (Row(name="a", milliseconds=1.5), Row(name="b", milliseconds=None))
    return Timing(provenance=provenance, settings={"window": 8, "eagle3": None, "ratio": 0.5, "on": True}, rows=rows)


def test_what_is_saved_is_what_is_loaded(timing: Timing, tmp_path: Path):
    timing.save(tmp_path / "out.json")
    assert Timing.load(tmp_path / "out.json") == timing
    assert os.listdir(tmp_path) == ["out.json"]
    assert json.loads((tmp_path / "out.json").read_text())["schema_version"] == 1


def test_provenance_describes_the_process(timing: Timing):
    provenance = timing.provenance
    assert provenance.package == __version__
    assert provenance.python == ".".join(map(str, sys.version_info[:3]))
    assert provenance.argv == ("windowed-mtp", "demo")
    assert provenance.seed == 3 and provenance.threads >= 1 and provenance.device
    assert provenance.date.utcoffset() == timedelta(0)
    assert Provenance.collect().argv == tuple(sys.argv)


def test_the_commit_is_given_in_a_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = tmp_path / "src" / "windowed_mtp" / "results.py"
    monkeypatch.setattr(results, "__file__", str(source))
    assert Provenance.collect().commit is None
    source.parent.mkdir(parents=True)
    source.write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert Provenance.collect().commit == commit
    source.write_text("changed")
    assert Provenance.collect().commit == commit + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert Provenance.collect().commit is None


def test_a_result_is_frozen_and_has_no_unknown_fields(timing: Timing):
    with pytest.raises(ValidationError):
        timing.kind = "other"  # type: ignore[assignment]
    with pytest.raises(ValidationError):
        Row(name="a", milliseconds=1.0, seconds=2.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"kind": "decode"}, "kind"),
        ({"rows": [{"name": "a"}]}, "rows.0.milliseconds"),
        ({"extra": 1}, "extra"),
        ({"provenance": None}, "provenance"),
    ],
)
def test_a_file_of_another_shape_is_refused(timing: Timing, tmp_path: Path, change: dict[str, object], names: str):
    path = tmp_path / "out.json"
    path.write_text(json.dumps({**json.loads(timing.model_dump_json()), **change}))
    with pytest.raises(ResultError, match=names) as error:
        Timing.load(path)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", None], ids=["empty", "cut", "list", "binary", "none"]
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "out.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultError) as error:
        Timing.load(path)
    assert isinstance(error.value, WindowedMTPError)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_failed_save_leaves_the_old_file(timing: Timing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "replace", full)
    with pytest.raises(ResultError, match="No space left"):
        timing.save(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


def test_a_saved_file_has_the_usual_permissions(timing: Timing, tmp_path: Path):
    timing.save(tmp_path / "out.json")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_name_that_cannot_be_written_is_refused_early(timing: Timing, tmp_path: Path):
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ResultError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(ResultError, match="does not exist"):
        check_writable(tmp_path / "missing" / "out.json")
    with pytest.raises(ResultError, match="cannot write"):
        timing.save(tmp_path / "missing" / "out.json")


def test_reading_results_needs_no_torch():
    code = "import sys, windowed_mtp.results; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
