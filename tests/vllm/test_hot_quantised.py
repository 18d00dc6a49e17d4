"""Hot rows of a draft's head that vLLM quantises, by vLLM's own function and kernels (0.33 and later; fp8 on a CPU)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
pytest.importorskip(
    "vllm.model_executor.layers.quantization.online.lm_head", reason="this vLLM quantises no draft's head"
)

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.online.lm_head import quantized_lm_head_copy
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from windowed_mtp.engines.vllm.hot_head import quantised_from, why_not
from windowed_mtp.engines.vllm.hot_quantised import QuantisedHotRows
from windowed_mtp.engines.vllm.hot_rows import HotLogits
from windowed_mtp.reference import checkpoint_path

VOCAB, HIDDEN = 1000, 256
IDS = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:90].tolist())
CLOSE = {"atol": 0.02, "rtol": 0.02}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: Any) -> Any:
    """A target's head, the draft's quantised copy of it, a logits processor, and a config that asks for the copy."""
    config = VllmConfig(model_config=ModelConfig(model=str(checkpoint_path()), dtype="bfloat16"))
    with set_current_vllm_config(config):
        rendezvous: Path = tmp_path_factory.mktemp("gloo") / "store"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
        head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.bfloat16)
        head.weight.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
        copy = quantized_lm_head_copy(head, "fp8")
        processor = LogitsProcessor(VOCAB)
        config.speculative_config = SimpleNamespace(draft_lm_head_quantization="fp8", method="mtp")
        yield head, copy, processor, config
    cleanup_dist_env_and_memory()


def test_hot_logits_are_those_of_the_quantised_copy_and_follow_new_weights(heads: Any):
    head, copy, processor, config = heads
    rows = QuantisedHotRows(head, IDS, config)
    logits = HotLogits(processor, {copy: rows})
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    addresses = [each.data_ptr() for each in rows._tensors(rows.copy).values()]
    quantised = rows._tensors(rows.copy)["weight"]
    assert quantised.dtype == torch.float8_e4m3fn
    assert rows.num_bytes == 128 * (HIDDEN + 4) + 90 * 8  # rows with a scale each, and ids
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[IDS] = False
    for sign in (1, -1):
        full = processor(copy, hidden)
        made = logits.forward(copy, hidden)
        assert made.shape == full.shape and torch.isneginf(made[:, outside]).all()
        torch.testing.assert_close(made[:, IDS], sign * full[:, IDS], **CLOSE)
        assert logits.get_top_tokens(copy, hidden).equal(made.argmax(-1))
        with torch.no_grad():
            head.weight.neg_()
        assert rows.outdated
        rows.refresh()
        assert not rows.outdated
    assert addresses == [each.data_ptr() for each in rows._tensors(rows.copy).values()]
    rows.take([*range(90)])
    torch.testing.assert_close(logits.forward(copy, hidden)[:, :90], processor(copy, hidden)[:, :90], **CLOSE)


def test_the_source_is_the_targets_head(heads: Any):
    head, copy, _, config = heads

    class Model(torch.nn.Module):
        def __init__(self, lm_head: Any) -> None:
            super().__init__()
            self.lm_head = lm_head

    runner = SimpleNamespace(model=Model(head), vllm_config=config)
    assert quantised_from(runner, [copy]) is head
    assert why_not(runner, Model(copy), [False], [copy]) is None
    other = SimpleNamespace(model=Model(copy), vllm_config=config)  # as if a checkpoint's head were quantised
    assert quantised_from(other, [copy]) is None
    assert why_not(other, Model(copy), [False], [copy]) == "it is quantised"
