"""DFlash, which drafts all of its tokens in one pass, not causal: equality, and the poison check in every mode."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from drafters import DFLASH
from modes import check_mode, check_output, modes


def test_output_and_prefix_hits_are_those_without_the_plugin():
    check_output(DFLASH)


@pytest.mark.parametrize("mode", modes(DFLASH))
def test_excluded_keys_are_not_read(mode):
    check_mode(DFLASH, mode)
