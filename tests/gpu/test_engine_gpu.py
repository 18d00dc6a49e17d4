"""The embedded engine on a GPU: the same promises as on the CPU, on the device."""

import copy
import functools

import pytest
import tiny
import torch
from checks import ARRANGEMENTS, DRAFTERS, override, prompt

from windowed_mtp import SinkWindow
from windowed_mtp.engines.transformers import WindowedMTP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@functools.cache
def on_gpu(family: str, dtype: torch.dtype):
    return copy.deepcopy(tiny.model(family)).to("cuda", dtype)


def generate(family: str, ids: torch.Tensor, dtype: torch.dtype = torch.float32, **kwargs) -> torch.Tensor:
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids), **kwargs}
    return on_gpu(family, dtype).generate(ids, max_new_tokens=24, **options)


@pytest.mark.parametrize("family", tiny.BUILDERS)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_greedy_equals_plain_greedy(family: str, kind: str, arrangement: str):
    ids = prompt(130).cuda()
    truth = generate(family, ids)
    keep, prefill = ARRANGEMENTS[arrangement]
    made = WindowedMTP.from_model(
        on_gpu(family, torch.float32),
        checkpoint=tiny.checkpoint(family),
        window=SinkWindow(4, 16),
        num_speculative_tokens=5,
        keep=keep,
        prefill=prefill,
        override=override(kind, truth),
        measure=True,
    )
    assert generate(family, ids, custom_generate=made).tolist() == truth.tolist()
    assert made.stats.draft_kv_bytes > 0


@pytest.mark.parametrize("family", tiny.BUILDERS)
def test_sampling_in_bf16_runs_without_a_device_error(family: str):
    made = WindowedMTP.from_model(
        on_gpu(family, torch.bfloat16),
        checkpoint=tiny.checkpoint(family),
        window=SinkWindow(4, 16),
        keep="ring",
        prefill="pruned",
    )
    output = generate(family, prompt(40).cuda(), torch.bfloat16, do_sample=True, custom_generate=made)
    assert output.shape == (1, 64)


def test_draft_attention_cost_does_not_grow_with_the_context():
    def peak(length: int) -> int:
        made = WindowedMTP.from_model(
            on_gpu("qwen3_5", torch.float32),
            checkpoint=tiny.checkpoint("qwen3_5"),
            window=SinkWindow(4, 16),
            keep="ring",
        )
        generate("qwen3_5", prompt(length).cuda(), custom_generate=made)
        return made.stats.draft_kv_bytes

    assert peak(200) == peak(900)
