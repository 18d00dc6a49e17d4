"""An MTP head with full attention and experts, as in GLM-4.5: equality, and the poison check in every mode."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from drafters import FULL_MTP
from modes import check_mode, check_output, modes


def test_output_and_prefix_hits_are_those_without_the_plugin():
    check_output(FULL_MTP)


@pytest.mark.parametrize("mode", modes(FULL_MTP))
def test_excluded_keys_are_not_read(mode):
    check_mode(FULL_MTP, mode)
