"""Greedy output with the window equals output without it and without speculation; fewer draft keys are read."""

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import watch
from engines import GAMMA, counters, engine, generate, runner_of, same_up_to_near_ties, text_prompts

WINDOW = {"sink": 4, "window": 300}
BLOCK = 384
LENGTHS = [BLOCK - 1, BLOCK, 1060, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK, 5 * BLOCK - 2, 2000, 3000]


@pytest.fixture(scope="module")
def runs():
    made = {}
    with engine(drafter={}) as llm:
        prompts = text_prompts(llm, LENGTHS)
        made["target"] = generate(llm, prompts, logprobs=2), None, {}
    for name, window in (("unwindowed", None), ("windowed", WINDOW)):
        with engine(window=window) as llm:
            before = counters(llm)
            with watch(llm) as seen:
                answers = generate(llm, prompts)
            after = counters(llm)
            made[name] = answers, seen, {"before": before, "after": after, "runner": type(runner_of(llm)).__module__}
    return made


@pytest.mark.parametrize("name", ["unwindowed", "windowed"])
def test_greedy_output_is_the_targets(runs, name):
    ties = same_up_to_near_ties(runs["target"][0], runs[name][0])
    print(name, "left at a near tie:", ties)
    assert ties <= len(LENGTHS) // 2


def test_fewer_keys_are_read_and_acceptance_is_reported(runs):
    reads = {name: runs[name][1].keys_read / len(runs[name][1].passes) for name in ("unwindowed", "windowed")}
    assert reads["windowed"] < 0.8 * reads["unwindowed"]
    for name in reads:
        _, seen, facts = runs[name]
        assert facts["runner"] == "vllm.v1.worker.cpu_model_runner"
        assert {len(row) for step in seen.proposals for row in step} == {GAMMA}
        drafts, accepted = (
            facts["after"][f"spec_decode_num_{what}"] - facts["before"].get(f"spec_decode_num_{what}", 0)
            for what in ("drafts", "accepted_tokens")
        )
        print(name, "keys a pass:", reads[name], "acceptance length:", 1 + accepted / drafts)
        assert 0.1 < accepted / drafts < GAMMA
        assert len(facts["after"]["spec_decode_num_accepted_tokens_per_pos"]) >= GAMMA
