"""Which of vLLM's functions moved, told from their sources; without vLLM."""

import json
import zipfile
from pathlib import Path

import pytest

from windowed_mtp.engines.vllm import fingerprint as module
from windowed_mtp.engines.vllm.fingerprint import (
    SEAM,
    FingerprintError,
    fingerprint,
    known,
    main,
    moved,
    nearest,
    of_wheel,
    what_moved,
)
from windowed_mtp.engines.vllm.symbols import RUN, V2, release

RUNNER = f"{V2}:GPUModelRunner"
SOURCE = '''
class GPUModelRunner:
    """A runner."""
    rows: int = 3

    def load_model(self, path: str, *more) -> None:
        """Load."""
        self.model = path  # loaded
        return [each for each in more]

    def prepare_attn(self, batch):
        return batch
'''
SAME = """
import os
class GPUModelRunner:
    def prepare_attn(self, batch: dict):
        return (batch)
    rows = 3
    def load_model(self, path, *more: int):
        self.model = path

        return [
            each for each in more
        ]
"""
AR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.propose"


def of(source: str, of_module: str = V2) -> dict[str, str]:
    return fingerprint({of_module: source}.get)


def test_layout_comments_docstrings_and_annotations_do_not_count():
    assert set(of(SOURCE)) == {f"{RUNNER}.load_model", f"{RUNNER}.prepare_attn"}
    assert of(SOURCE) == of(SAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [("self.model = path", "self.model = more"), ("*more)", "*more, at=0)"), ("path: str", "path: str = ''")],
)
def test_code_counts_in_the_function_that_has_it(old: str, new: str):
    assert old in SOURCE
    assert moved(of(SOURCE.replace(old, new)), of(SOURCE)) == [f"{RUNNER}.load_model"]


def test_a_classs_fields_count_without_their_methods():
    common = "vllm.v1.attention.backend"
    source = (
        "class CommonAttentionMetadata:\n    lens: int\n    rows: int = 0\n    def replace(self):\n        return 1\n"
    )
    name = f"{common}:CommonAttentionMetadata"
    assert moved(of(source.replace("lens", "lengths"), common), of(source, common)) == [name]
    assert moved(of(source.replace("1", "2"), common), of(source, common)) == [f"{name}.replace"]


def test_what_is_gone_moved_and_what_was_renamed_did_not():
    assert moved({}, of(SOURCE)) == [f"{RUNNER}.load_model", f"{RUNNER}.prepare_attn"]
    body = "class {}:\n    def propose(self):\n        return 1\n"
    before = of(body.format("AutoRegressiveSpeculator"), "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator")
    now = of(body.format("TargetDependentARSpeculator"), AR.partition(":")[0])
    assert before == now and set(now) == {AR}


def test_every_release_of_the_range_is_stored():
    stored = known()
    assert list(stored) == sorted(stored, key=release)
    assert {release(each)[:2] for each in stored} == {(0, minor) for minor in range(25, 34)}
    assert {each for each, _, _ in RUN} <= set(stored)
    for version in ("0.32.0", "0.33.0"):
        assert set(stored[version]) == set(SEAM)
    assert set(json.loads(module.STORED.read_text())) == set(SEAM)
    assert len(set(SEAM)) == len(SEAM)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.34.0", "0.33.0"),
        ("0.33.0", "0.33.0"),
        ("0.33.1rc2+cpu", "0.33.0"),
        ("0.27.3", "0.27.1"),
        ("0.1.0", "0.25.0"),
    ],
)
def test_the_nearest_release(version: str, found: str):
    assert nearest(version, list(known())) == found


def test_what_moved_is_named_with_its_runner():
    newest = known()["0.33.0"]
    assert what_moved("0.34.0", newest) is None
    gone = {name: digest for name, digest in newest.items() if name != AR}
    said = what_moved("0.34.0", {**gone, f"{RUNNER}.load_model": "0", SEAM[0]: "1"})
    assert said == (
        f"3 of {len(SEAM)} functions that the window rests on differ from vLLM 0.33.0's: V1 "
        "GPUModelRunner.initialize_kv_cache, V2 GPUModelRunner.load_model, TargetDependentARSpeculator.propose"
    )
    assert "differ from vLLM 0.32.0's" in str(what_moved("0.33.0", newest, since="0.32.0"))


def wheel(folder: Path, version: str, source: str = SOURCE) -> Path:
    path = folder / f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(V2.replace(".", "/") + ".py", source)
    return path


def test_wheels_are_read_compared_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(module, "STORED", tmp_path / "fingerprints.json")
    wheels = [wheel(tmp_path, "0.98.0"), wheel(tmp_path, "0.99.0", SOURCE.replace("= path", "= more"))]
    assert of_wheel(wheels[0]) == ("0.98.0", of(SOURCE))
    assert main(["--write", *map(str, reversed(wheels))]) == 0
    assert known() == {"0.98.0": of(SOURCE), "0.99.0": of_wheel(wheels[1])[1]}
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        f"vLLM 0.99.0: 1 of {len(SEAM)} functions that the window rests on differ from vLLM 0.98.0's: "
        "V2 GPUModelRunner.load_model"
    )
    before = module.STORED.read_text()
    assert main([str(wheels[1])]) == 0 and module.STORED.read_text() == before


def test_what_is_no_wheel_of_vllms_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "vllm-0.99.0.whl"
    text.write_text("no archive")
    other = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as made:
        made.writestr("other/__init__.py", "")
    for path, match in (
        (text, "not a wheel"),
        (other, "none of vLLM's modules"),
        (tmp_path / "gone.whl", "not a wheel"),
    ):
        with pytest.raises(FingerprintError, match=match):
            of_wheel(path)
        assert main([str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
