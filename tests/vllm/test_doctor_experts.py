"""Whether vLLM has tuned settings for a model's experts, asked as if this machine had another card."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from models_mtp import EXPERT, EXPERTS, glm4_moe
from vllm import envs
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.platforms import current_platform

from windowed_mtp.engines.vllm.doctor_experts import TunedExperts, experts_findings, experts_of_a_rank, tuned_experts
from windowed_mtp.engines.vllm.serve_flags import serve_config
from windowed_mtp.reference import checkpoint_path


@pytest.fixture(scope="module")
def config() -> Any:
    return serve_config([glm4_moe(), "--dtype", "bfloat16", "--max-model-len", "512", "--skip-tokenizer-init"])


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that this machine has another card."""

    def card(name: str, major: int = 9) -> None:
        kind = type(current_platform)
        fused_moe.get_device_name_as_file_name.cache_clear()
        monkeypatch.setattr(kind, "is_cuda", lambda self: True)
        monkeypatch.setattr(kind, "get_device_capability", lambda *_, **__: SimpleNamespace(major=major, minor=0))
        monkeypatch.setattr(kind, "get_device_name", lambda *_, **__: name)

    yield card
    fused_moe.get_device_name_as_file_name.cache_clear()


def of_width(config: Any, experts: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config.model_config), "get_num_experts", lambda self: experts)
    monkeypatch.setattr(config.model_config.hf_text_config, "moe_intermediate_size", width)


@pytest.mark.parametrize(
    ("card", "experts", "width", "here"),
    [
        ("NVIDIA H200", 256, 512, False),
        ("NVIDIA H200 NVL", 256, 512, False),
        ("NVIDIA H100 80GB HBM3", 256, 512, True),
        ("NVIDIA H20", 256, 512, True),
        ("NVIDIA H100 80GB HBM3", 255, 512, False),
    ],
)
def test_it_looks_where_vllm_looks(
    card: str, experts: int, width: int, here: bool, config: Any, on: Any, monkeypatch: pytest.MonkeyPatch
):
    on(card)
    of_width(config, experts, width, monkeypatch)
    found = tuned_experts(config)
    assert found is not None and found.here == here
    fused_moe.get_moe_configs.cache_clear()
    assert (fused_moe.get_moe_configs(experts, width, None) is not None) == here
    fused_moe.get_moe_configs.cache_clear()
    assert [each.level for each in experts_findings(found)] == ([] if here else ["warning"])


def test_a_card_whose_settings_can_be_lent(config: Any, on: Any, monkeypatch: pytest.MonkeyPatch):
    on("NVIDIA H200")
    of_width(config, 256, 512, monkeypatch)
    found = tuned_experts(config)
    assert found is not None
    assert found.others[0] == "E=256,N=512,device_name=NVIDIA_H100_80GB_HBM3.json"
    assert all(",dtype=" not in other and "N=512," in other for other in found.others)
    [finding] = experts_findings(found)
    assert "E=256,N=512,device_name=NVIDIA_H200.json" in finding.cause
    assert finding.remedy is not None and finding.remedy.startswith(f"copy {found.others[0]}, which")
    assert "about one per cent" in finding.remedy


def test_a_folder_of_the_users(config: Any, on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on("NVIDIA H200")
    missing = tuned_experts(config)
    assert (
        missing is not None and not missing.here and f"E={EXPERTS},N={EXPERT},device_name=NVIDIA_H200" in missing.file
    )
    (tmp_path / missing.file).write_text(json.dumps({"1": {}}))
    monkeypatch.setattr(envs, "VLLM_TUNED_CONFIG_FOLDER", str(tmp_path), raising=False)
    found = tuned_experts(config)
    assert found is not None and found.here


def test_where_there_is_nothing_to_say(config: Any, on: Any, monkeypatch: pytest.MonkeyPatch):
    dense = serve_config([str(checkpoint_path()), "--dtype", "bfloat16", "--max-model-len", "512"])
    assert tuned_experts(config) is None  # this machine has no such card
    on("NVIDIA H200")
    assert tuned_experts(dense) is None
    assert tuned_experts(config) is not None
    with monkeypatch.context() as patch:
        patch.setattr(config, "quant_config", object())
        assert tuned_experts(config) is None
    with monkeypatch.context() as patch:
        patch.setattr(config.kernel_config, "moe_backend", "flashinfer_cutlass")
        assert tuned_experts(config) is None
    on("NVIDIA B200", major=10)
    assert tuned_experts(config) is None
    assert list(experts_findings(None)) == []


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({}, (8, 64)),
        ({"tensor_parallel_size": 4}, (8, 16)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, (8, 16)),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, (2, 64)),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_eplb": True}, (3, 64)),
    ],
)
def test_what_one_rank_holds(given: dict[str, Any], shape: tuple[int, int]):
    defaults = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    eplb = {"enable_eplb": False, "eplb_config": SimpleNamespace(num_redundant_experts=4)}
    text = SimpleNamespace(to_dict=lambda: {"moe_intermediate_size": 64})
    model = SimpleNamespace(get_num_experts=lambda: 8, hf_text_config=text)
    made: Any = SimpleNamespace(parallel_config=SimpleNamespace(**defaults, **eplb), model_config=model)
    vars(made.parallel_config).update(given)
    assert experts_of_a_rank(made) == shape


def test_no_file_to_lend():
    [finding] = experts_findings(TunedExperts("E=3,N=5,device_name=NVIDIA_H200.json", here=False, others=()))
    assert finding.remedy is not None and finding.remedy.startswith("make one with vLLM's benchmarks")
