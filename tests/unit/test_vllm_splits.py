"""When the doctor recommends more splits of attention; with a device and a config that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from windowed_mtp.engines.vllm.doctor_blocks import Blocks
from windowed_mtp.engines.vllm.doctor_splits import AttentionDevice, splits_findings
from windowed_mtp.engines.vllm.findings import Finding

H200 = AttentionDevice(flash_attention=3, multiprocessors=132)


def found(
    sequences: int = 1, kv_heads: int = 2, devices: int = 1, splits: int = 32, length: int = 1_048_576,
    full_graphs: bool = True, backend: str = "FLASH_ATTN", device: AttentionDevice | None = H200,
) -> list[Finding]:  # fmt: skip
    model = SimpleNamespace(
        max_model_len=length,
        get_num_kv_heads=lambda parallel: max(1, kv_heads // parallel.tensor_parallel_size),
    )
    config: Any = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=devices),
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full_graphs)),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=splits),
    )
    return list(splits_findings(config, Blocks(backend, 1104, 1104), device))


@pytest.mark.parametrize(
    ("given", "work", "recommended"),
    [
        ({}, "1 sequence x 2 KV heads x 32 splits = 64 tiles of work for 132 multiprocessors", 66),
        ({"sequences": 2}, "2 sequences x 2 KV heads x 32 splits = 128 tiles", 66),
        ({"kv_heads": 4}, "1 sequence x 4 KV heads x 32 splits = 128 tiles", 33),
        ({"kv_heads": 8, "devices": 8}, "1 sequence x 1 KV head x 32 splits = 32 tiles", 132),
        ({"kv_heads": 3, "device": AttentionDevice(3, 131)}, "= 96 tiles of work for 131", 44),
    ],
)
def test_idle_multiprocessors(given: dict[str, Any], work: str, recommended: int):
    [finding] = found(**given)
    assert finding.level == "warning" and work in finding.cause
    assert finding.remedy is not None
    assert f"'{{\"flash_attn_max_num_splits_for_cuda_graph\": {recommended}}}'" in finding.remedy
    with_it = {**given, "splits": recommended}
    assert found(**with_it) == []


@pytest.mark.parametrize(
    "given",
    [
        {"sequences": 3},
        {"kv_heads": 8},
        {"device": None},
        {"device": AttentionDevice(flash_attention=2, multiprocessors=132)},
        {"device": AttentionDevice(flash_attention=3, multiprocessors=64)},
        {"full_graphs": False},
        {"backend": "FLASHINFER"},
        {"backend": "FLASH_ATTN_MLA"},
        {"length": 8192},
        {"splits": 64, "sequences": 2},
        {"splits": 0},
    ],
)
def test_nothing_to_recommend(given: dict[str, Any]):
    assert found(**given) == []
