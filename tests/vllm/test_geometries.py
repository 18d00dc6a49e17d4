"""vLLM takes every geometry of the benchmarks, with its draft head, at 1,040,000 tokens and more."""

from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

import engines  # noqa: F401 (so that classes of models are looked at in this process)
from vllm.engine.arg_utils import EngineArgs

from windowed_mtp.cost.families import read_geometry

GEOMETRIES = Path(__file__).parents[2] / "benchmarks" / "geometries"
FOLDERS = sorted(path.parent for path in GEOMETRIES.glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_engine_config_is_made(folder: Path):
    arguments = EngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1_044_096, enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 6},
    )  # fmt: skip
    config = arguments.create_engine_config()
    model, drafted = config.model_config, config.speculative_config
    assert drafted is not None and drafted.method == "mtp" and drafted.draft_model_config.max_model_len == 1_044_096
    assert model.max_model_len == 1_044_096 and not model.uses_mrope and not drafted.draft_model_config.uses_mrope
    geometry = read_geometry(folder)
    attention = geometry.target.attention[0]
    assert model.get_vocab_size() == geometry.vocabulary and model.get_hidden_size() == geometry.hidden
    assert model.hf_text_config.num_attention_heads == attention.heads
    if model.use_mla:
        assert model.get_head_size() == attention.cache_size
    else:
        assert (model.get_total_num_kv_heads(), 2 * model.get_head_size()) == (
            attention.cache_heads, attention.cache_size,
        )  # fmt: skip
