"""vLLM's sleep mode on a GPU: hot rows and the window's buffers hold what they held, in the graphs that were captured.

A file of its own, to be run in a process of its own: ``pytest tests/gpu/test_vllm_sleep_gpu.py``. vLLM's allocator for
it serves one engine a process.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm.version", reason="vllm is not installed")

from test_vllm_gpu import builders, engine, generate, near, proposals, runner_of

from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary
from windowed_mtp.workloads.stdlib import heldout_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 512


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(checkpoint_path())(heldout_text(40_000, 0)).input_ids
    return [ids[start : start + length] for start, length in ((0, 200), (300, 1500), (2000, 3000))]


@pytest.fixture(scope="module")
def target(prompts: list[list[int]]) -> list[Any]:
    with engine(None, speculate=False) as llm:
        return generate(llm, prompts, logprobs=2)


@pytest.fixture(scope="module")
def sleeper(prompts: list[list[int]], target: list[Any], tmp_path_factory: Any) -> Any:
    from transformers import AutoTokenizer

    file = str(tmp_path_factory.mktemp("hot") / "hot.json")
    counts: dict[int, int] = {}
    for token in (token for ids in prompts for token in ids):
        counts[token] = counts.get(token, 0) + 1
    HotVocabulary.from_counts(counts, tokenizer=AutoTokenizer.from_pretrained(checkpoint_path())).save(file)
    window = {"sink": 4, "window": 300, "hot_vocabulary": {"size": SIZE, "file": file}}
    options = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"], "disable_log_stats": False}
    with engine(window, **options) as llm:
        yield llm


def allocation(tensor: torch.Tensor) -> Any:
    """What vLLM's allocator knows of a tensor's memory; ``None`` if it comes from elsewhere."""
    from vllm.device_allocator.cumem import CuMemAllocator

    for start, data in CuMemAllocator.get_instance().pointer_to_data.items():
        if start <= tensor.data_ptr() < start + data.handle[1]:
            return data
    return None


def acceptance(llm: Any) -> tuple[int, int]:
    """Drafts and accepted tokens so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


def run(llm: Any, prompts: list[list[int]], target: list[Any]) -> Any:
    """What is proposed, and drafts and accepted tokens, over outputs that are the target's."""
    before = acceptance(llm)
    with proposals(runner_of(llm)) as seen:
        near(target, generate(llm, prompts))
    after = acceptance(llm)
    return seen.tokens, after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize(("level", "parts"), [(1, False), (2, False), (2, True)])
def test_sleep_and_wake(prompts: list[list[int]], target: list[Any], sleeper: Any, level: int, parts: bool):
    """Woken at once, or in parts as a trainer does: memory of the weights, new weights, then memory of the cache."""
    runner = runner_of(sleeper)
    assert runner.speculator.decode_cudagraph_manager.graphs
    first = run(sleeper, prompts, target)
    assert len({token for step in first[0] for row in step for token in row}) > 20 and first[2] > 0
    [rows] = set(runner.windowed_mtp_hot_logits[0].rows.values())
    hot = {"ids": rows.ids, "weight": rows.weight}
    window = {
        f"{index} {name}": tensor
        for index, builder in enumerate(builders(runner))
        for name, tensor in vars(builder.windowing).items()
        if isinstance(tensor, torch.Tensor)
    }
    assert window
    kept = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in {**hot, **window}.items()}

    sleeper.sleep(level)
    for tensor in hot.values():
        assert allocation(tensor).tag == "weights" and allocation(tensor).is_asleep
        assert (allocation(tensor).cpu_backup_tensor is None) == (level == 2)  # given up
    for tensor in window.values():
        data = allocation(tensor)
        assert data is None or data.tag in ("runtime", "cudagraph")  # what every level keeps
    sleeper.wake_up(["weights"] if parts else None)
    if level == 2:
        sleeper.collective_rpc("reload_weights")
    if parts:
        sleeper.wake_up(["kv_cache"])
    for name, tensor in window.items():
        assert tensor.equal(kept[name][1]), name

    assert run(sleeper, prompts, target) == first
    for name, tensor in hot.items():
        assert tensor.data_ptr() == kept[name][0] and tensor.equal(kept[name][1]), name


def test_new_weights_without_sleep(prompts: list[list[int]], target: list[Any], sleeper: Any):
    first = run(sleeper, prompts, target)
    [rows] = set(runner_of(sleeper).windowed_mtp_hot_logits[0].rows.values())
    weight = rows.weight.clone()
    rows.weight.zero_()
    assert run(sleeper, prompts, target)[0] != first[0]  # the captured graphs do read them
    sleeper.collective_rpc("reload_weights")
    assert run(sleeper, prompts, target) == first
    assert rows.weight.equal(weight)
