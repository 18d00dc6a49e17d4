"""EAGLE on a full-attention target: equality, and the poison check in every mode."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from drafters import EAGLE
from modes import check_mode, check_output, modes


def test_output_and_prefix_hits_are_those_without_the_plugin():
    check_output(EAGLE)


@pytest.mark.parametrize("mode", modes(EAGLE))
def test_excluded_keys_are_not_read(mode):
    check_mode(EAGLE, mode)
