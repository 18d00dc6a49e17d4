"""The window in the V2 model runner: every draft pass has it, the target never does, and the output stays."""

import os
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

from engines import GAMMA, counters, engine, generate, runner_of, text_prompts
from v2_passes import as_windowed, builders, dropped, untouched, watch, window_off
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.config import PluginError

WINDOW = SinkWindow(4, 300)
SETTINGS = {"sink": WINDOW.sink, "window": WINDOW.window}
BLOCK = 384
LENGTHS = [200, 2 * BLOCK + WINDOW.window - 12, 3 * BLOCK + 5, 1700]
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 48}
TOKENS = 24


@pytest.fixture(scope="module")
def plain() -> SimpleNamespace:
    """What the engine gives without the plugin."""
    with engine(**OPTIONS) as llm:
        prompts = text_prompts(llm, LENGTHS)
        answers = [answer.tokens for answer in generate(llm, prompts, TOKENS)]
        return SimpleNamespace(
            prompts=prompts, answers=answers, accepted=counters(llm)["spec_decode_num_accepted_tokens"]
        )


@pytest.fixture(scope="module")
def llm(plain: SimpleNamespace) -> Iterator[Any]:
    with engine(window=SETTINGS, **OPTIONS) as made:
        yield made


def test_it_is_the_v2_runner_and_the_head_is_of_use(plain: SimpleNamespace, llm: Any):
    assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu.model_runner"
    assert plain.accepted > 2 * len(LENGTHS)


def test_the_draft_has_groups_of_its_own(llm: Any):
    runner = runner_of(llm)
    names = set(runner.speculator.draft_attn_layer_names)
    for holder in (runner, runner.speculator):
        mixed = [set(group.layer_names) for groups in holder.attn_groups for group in groups]
        assert names in mixed
        assert all(names == group or not names & group for group in mixed)
    made = builders(llm)
    assert made["runner"].runs_first_pass and not made["drafter"].runs_first_pass
    assert made["runner"].windowing.block_size == made["drafter"].windowing.block_size == BLOCK


def test_every_draft_pass_is_windowed_and_the_target_never_is(plain: SimpleNamespace, llm: Any):
    with watch(llm) as seen:
        answers = generate(llm, plain.prompts, TOKENS)
    assert [answer.tokens for answer in answers] == plain.answers
    assert seen.target and all(untouched(entry) for entry in seen.target)
    assert {len(step) for step in seen.steps} == {GAMMA}
    for index in range(GAMMA):
        passes = [step[index] for step in seen.steps]
        assert all(as_windowed(entry, WINDOW, BLOCK) for entry in passes)
        assert any(dropped(entry) for entry in passes)
    first = [entry for step in seen.steps for entry in step[:1]]
    assert any(len(set(entry.source.query_lens)) > 1 and dropped(entry) for entry in first)  # prefill beside decode


@pytest.mark.parametrize("arm", ["windowed", "off"])
def test_poisoned_blocks_are_not_read(plain: SimpleNamespace, llm: Any, arm: str):
    if arm == "windowed":
        with watch(llm) as clean:
            generate(llm, plain.prompts, TOKENS)
        with watch(llm, poison=WINDOW) as poisoned:
            answers = generate(llm, plain.prompts, TOKENS)
        assert poisoned.proposals == clean.proposals
    else:
        with window_off(llm):
            with watch(llm) as clean:
                generate(llm, plain.prompts, TOKENS)
            with watch(llm, poison=WINDOW) as poisoned:
                answers = generate(llm, plain.prompts, TOKENS)
        assert all(untouched(entry) for step in clean.steps for entry in step)
        assert poisoned.proposals != clean.proposals
    assert poisoned.poisoned > 0
    assert [answer.tokens for answer in answers] == plain.answers


def test_the_first_pass_alone_can_be_left_as_it_is(plain: SimpleNamespace):
    with engine(window={**SETTINGS, "window_first_pass": False}, **OPTIONS) as llm, watch(llm) as seen:
        answers = generate(llm, plain.prompts, TOKENS)
    assert [answer.tokens for answer in answers] == plain.answers
    for index in range(GAMMA):
        passes = [step[index] for step in seen.steps]
        if index == 0:
            assert all(untouched(entry) for entry in passes)
        else:
            assert all(as_windowed(entry, WINDOW, BLOCK) for entry in passes)
            assert any(dropped(entry) for entry in passes)


def test_the_fused_draft_loop_windows_each_of_its_passes(plain: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    def update(self: Any, metadata: Any) -> None:
        metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=metadata.seq_lens.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=metadata.seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=metadata.dynamic_causal,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    # The CPU's builder has no such update, so vLLM would build anew for each pass.
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "update_draft_decode_metadata", update)
    with engine(window=SETTINGS, **OPTIONS) as llm:
        assert runner_of(llm).speculator.supports_decode_metadata_update
        passes = builders(llm)["drafter"].windowing.passes
        with watch(llm, poison=WINDOW) as seen:
            answers = generate(llm, plain.prompts, TOKENS)
        assert builders(llm)["drafter"].windowing.passes - passes == len(seen.steps)  # one build a step
    assert [answer.tokens for answer in answers] == plain.answers
    assert {len(step) for step in seen.steps} == {GAMMA}
    assert all(as_windowed(entry, WINDOW, BLOCK) for step in seen.steps for entry in step)
    moved = [dropped(later) - dropped(earlier) for step in seen.steps for earlier, later in pairwise(step[1:])]
    assert BLOCK in moved  # a block left the window between two passes of one loop


def test_a_drafter_with_one_pass_only_refuses_to_leave_it_alone():
    drafter = {"method": "mtp", "num_speculative_tokens": 1}
    with (
        pytest.raises(PluginError, match=r"has no other pass, as it drafts one token a step; leave it out"),
        engine(window={**SETTINGS, "window_first_pass": False}, drafter=drafter, **OPTIONS),
    ):
        pass
