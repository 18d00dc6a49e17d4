"""EAGLE-3 in the V2 model runner."""

import os

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

from drafters import Drafter
from eagle3_checkpoints import llama_with_eagle3
from v2_modes import check_mode, check_output, modes

DRAFTER = Drafter("eagle3", llama_with_eagle3)


def test_output_and_prefix_hits_are_those_without_the_plugin(reference, windowed):
    check_output(DRAFTER, reference, windowed)


@pytest.mark.parametrize("mode", modes(DRAFTER))
def test_every_pass_has_just_its_window_and_no_other_does(reference, windowed, mode):
    check_mode(DRAFTER, reference, windowed, mode)
