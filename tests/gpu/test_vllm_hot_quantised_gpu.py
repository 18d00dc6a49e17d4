"""Hot rows with vLLM's ``draft_lm_head_quantization`` (0.33 and later) inside captured graphs."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed")
pytest.importorskip(
    "vllm.model_executor.layers.quantization.online.lm_head", reason="this vLLM quantises no draft's head"
)

from test_vllm_gpu import engine, generate, near, prompts, proposals, runner_of, target  # noqa: F401

from windowed_mtp.engines.vllm.hot_quantised import QuantisedHotRows
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_hot_rows_are_quantised_as_the_head_is(
    prompts: list[list[int]],  # noqa: F811
    target: list[Any],  # noqa: F811
    tmp_path: Any,
    quantization: str,
):
    from transformers import AutoTokenizer

    counts: dict[int, int] = {}
    for token in (token for ids in prompts for token in ids):
        counts[token] = counts.get(token, 0) + 1
    file = HotVocabulary.from_counts(counts, tokenizer=AutoTokenizer.from_pretrained(checkpoint_path()))
    file.save(tmp_path / "hot.json")
    window = {"sink": 4, "window": 300, "hot_vocabulary": {"size": 512, "file": str(tmp_path / "hot.json")}}
    with engine(window, drafting={"draft_lm_head_quantization": quantization}) as llm:
        runner = runner_of(llm)
        [rows] = set(runner.windowed_mtp_hot_logits[0].rows.values())
        assert isinstance(rows, QuantisedHotRows)
        assert rows.copy.weight.dtype not in (torch.bfloat16, torch.float16)
        with proposals(runner) as seen:
            near(target, generate(llm, prompts))
        proposed = {token for step in seen.tokens for row in step for token in row}
        assert proposed <= set(rows.ids.tolist()) and len(proposed) > 20
        addresses = [each.data_ptr() for each in rows._tensors(rows.copy).values()]
        llm.collective_rpc("reload_weights")
        with proposals(runner) as again:
            near(target, generate(llm, prompts))
        assert again.tokens == seen.tokens
        assert addresses == [each.data_ptr() for each in rows._tensors(rows.copy).values()]
