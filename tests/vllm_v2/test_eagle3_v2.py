"""EAGLE-3 in the V2 model runner."""

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

from drafters import Drafter
from models import llama_with_eagle3
from v2_modes import check_mode, check_output, modes


@functools.cache
def checkpoints() -> tuple[str, str]:
    """A target and its drafter, which says at the top of its config which layers it takes: V2 looks nowhere else."""
    target, drafter = llama_with_eagle3()
    copy = shutil.copytree(drafter, Path(tempfile.mkdtemp(prefix="tiny-eagle3-")) / "drafter")
    config = json.loads((copy / "config.json").read_text())
    config.update(config.pop("eagle_config"))
    (copy / "config.json").write_text(json.dumps(config))
    return target, str(copy)


DRAFTER = Drafter("eagle3", checkpoints)


def test_output_and_prefix_hits_are_those_without_the_plugin(reference, windowed):
    check_output(DRAFTER, reference, windowed)


@pytest.mark.parametrize("mode", modes(DRAFTER))
def test_every_pass_has_just_its_window_and_no_other_does(reference, windowed, mode):
    check_mode(DRAFTER, reference, windowed, mode)
