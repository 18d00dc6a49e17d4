"""Statistics in the V2 model runner, where the number of draft tokens follows the batch and requests are preempted."""

import os
from collections import Counter

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("another model runner is set up in this process", allow_module_level=True)

from drafters import EAGLE
from engines import counters, runner_of
from models import random_prompts
from v2_passes import draft_layers, watch
from vllm import SamplingParams, TokensPrompt

from windowed_mtp.engines.vllm.statistics import keys_of
from windowed_mtp.engines.vllm.steps import collect

LENGTHS = {"num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 2, 1), (3, 3, 0), (4, 4, 2)]}
OPTIONS = {"max_model_len": 512, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 24}


def test_drafts_are_those_that_the_scheduler_reports():
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_prompts([150, 160, 170, 180])]
    sampling = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (40, 33, 21, 28)]
    with EAGLE.running(
        {"sink": 4, "window": 64}, settings=LENGTHS, **{**OPTIONS, "enable_prefix_caching": False}
    ) as llm:
        assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu.model_runner"
        kept = []
        with watch(llm) as seen, collect(llm, bounds=(180,)) as statistics:
            add = statistics.add
            statistics.add = lambda steps, report: kept.append((list(steps), report)) or add(steps, report)
            llm.generate(prompts, sampling, use_tqdm=False)
        theirs, layers, plan = counters(llm), len(draft_layers(llm)), statistics.plan
    total = statistics.total
    print(statistics.table(), theirs["num_preemptions"])
    assert theirs["num_preemptions"] > 0
    assert {report.longest for _, report in kept} == {0, 1, 2, 3}
    emitted = sum(step.emitted - 1 for steps, report in kept for step in steps if report.drafts)
    assert total.accepted_tokens > emitted  # a request stopped inside a draft
    for ours, name in (
        (total.drafts, "drafts"),
        (total.draft_tokens, "draft_tokens"),
        (total.accepted_tokens, "accepted_tokens"),
        (total.accepted_per_position, "accepted_tokens_per_pos"),
    ):
        assert ours == theirs[f"spec_decode_num_{name}"], name

    rows = Counter(row for step in seen.steps for entry in step[::layers] for row in entry.source.rows)
    counted = Counter(
        row
        for steps, report in kept
        for step, *_ in keys_of(plan, steps, report)
        for row in plan.passes(step, plan.drafted(report))
    )
    assert total.keyed_drafts == total.drafts
    assert counted <= rows
    after_prefill = sum(step.emitted_before == 0 for steps, report in kept if report.drafts for step in steps)
    assert counted.total() == total.draft_tokens - after_prefill
