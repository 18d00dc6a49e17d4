"""An MTP head with multi-head latent attention, as in DeepSeek-V3: equality, and the poison check in every mode."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from drafters import LATENT_MTP
from modes import check_mode, check_output, modes


def test_output_and_prefix_hits_are_those_without_the_plugin():
    check_output(LATENT_MTP)


@pytest.mark.parametrize("mode", modes(LATENT_MTP))
def test_excluded_keys_are_not_read(mode):
    check_mode(LATENT_MTP, mode)
