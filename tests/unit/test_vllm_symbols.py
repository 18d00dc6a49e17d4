"""The table of what the plugin rests on in vLLM, and what is said where an entry is missing; without vLLM."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from windowed_mtp.engines.vllm import doctor
from windowed_mtp.engines.vllm.fingerprint import SEAM, known
from windowed_mtp.engines.vllm.symbols import (
    RUN,
    TABLE,
    V1,
    V2,
    Symbol,
    missing,
    not_run,
    release,
    release_line,
    unknown_version,
)


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.32.0+cpu", "0.33.0", "0.33.2rc1", "0.30.1.dev7+gabc"])
def test_known_versions(version: str):
    assert unknown_version(version) is None


@pytest.mark.parametrize("version", ["0.24.9", "0.34.0", "1.0.0", "dev", ""])
def test_other_versions_are_named_together_with_those_that_are_known(version: str):
    assert f"this is vLLM {version}, " in str(unknown_version(version))
    assert "knows 0.25 to 0.33" in str(unknown_version(version))


@dataclass
class Batch:
    """Fields with and without a default."""

    lengths: int
    bound: int = 0


class Runner:
    def start(self, caches: int, *, profiling: bool = False) -> None:
        def inner() -> None:
            self.nested = 1

        self.groups = [inner]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    made: Any = ModuleType("known_module")
    made.Batch, made.Runner = Batch, Runner
    monkeypatch.setitem(sys.modules, "known_module", made)
    return "known_module"


@pytest.mark.parametrize(
    ("name", "options", "lacking"),
    [
        ("Batch.lengths", {}, None),
        ("Batch.bound", {}, None),
        ("Batch.slots", {}, "known_module.Batch.slots"),
        ("Builder", {}, "known_module.Builder"),
        ("Builder.build", {}, "known_module.Builder.build"),
        ("Runner.start", {"parameters": ("caches", "profiling")}, None),
        ("Runner.start", {"parameters": ("caches", "memory")}, "known_module.Runner.start(memory=...)"),
        ("Runner", {"sets": ("groups", "nested")}, None),
        ("Runner", {"sets": ("groups", "drafter")}, "known_module.Runner().drafter"),
        ("Runner.stop", {"runner": V1}, "known_module.Runner.stop"),
        ("Runner.stop", {"runner": V2}, None),
        ("Runner.stop", {"since": (0, 32)}, "known_module.Runner.stop"),
        ("Runner.stop", {"since": (0, 33)}, None),
    ],
)
def test_what_is_missing_is_named(module: str, name: str, options: dict[str, Any], lacking: str | None):
    assert missing(V1, "0.32.0", (Symbol(module, name, **options),)) == lacking


def test_a_module_that_is_missing_is_named():
    assert (
        missing(V1, "0.32.0", (Symbol("no_such_module.at_all", "Class.member"),))
        == "no_such_module.at_all.Class.member"
    )


def test_the_table_names_each_thing_once_and_serves_both_runners():
    assert len({(each.module, each.name) for each in TABLE}) == len(TABLE)
    assert {each.runner for each in TABLE} == {None, V1, V2}
    assert release_line("0.32.0+cpu") == (0, 32)


def test_versions_that_were_run_are_told_from_those_that_were_read():
    assert all(unknown_version(version) is None for version, _, _ in RUN)
    for way in (("0.32.0", "V1", "CPU"), ("0.32.0+cpu", "V2", "CPU"), ("0.32.0", "V2", "CUDA")):
        assert not_run(*way) is None
    assert not_run("0.32.0", "V1", "XPU") == (
        "the plugin was run with vLLM 0.32.0, but never with V1 on XPU "
        "(only V1 on CPU, V2 on CPU, V1 on CUDA, V2 on CUDA)"
    )
    assert not_run("0.31.0", "V2", "CUDA") == (
        "the plugin was never run with vLLM 0.31.0: its source was read only (it was run with 0.32.0)"
    )
    assert release("0.33.2rc1") == (0, 33, 2) and release("dev") == ()


@pytest.mark.parametrize(
    ("version", "device", "levels"),
    [
        ("0.32.0", "CUDA", ["ok"]),
        ("0.30.0", "CUDA", ["warning"]),
        ("0.32.0", "XPU", ["warning"]),
        ("0.35.0", "CUDA", ["problem"]),
    ],
)
@pytest.mark.parametrize("v2", [True, False])
def test_doctor_tells_them_apart(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str, v2: bool, levels: list[str]
):
    monkeypatch.setattr(doctor, "missing", lambda *args: None)
    monkeypatch.setattr(doctor, "installed", lambda: known().get(version, known()["0.33.0"]))
    config = SimpleNamespace(use_v2_model_runner=v2)
    assert [each.level for each in doctor.version_findings(config, version, device)] == levels


def test_doctor_names_the_functions_of_another_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "missing", lambda *args: None)
    monkeypatch.setattr(doctor, "installed", lambda: known()["0.32.0"] | {SEAM[1]: "another"})
    config = SimpleNamespace(use_v2_model_runner=True)
    version, sources = doctor.version_findings(config, "0.32.0", "CUDA")
    assert (version.level, sources.level) == ("ok", "warning")
    assert sources.cause.endswith("differ from vLLM 0.32.0's: V1 GPUModelRunner.load_model")
