"""The plugin's statistics against what really happened: the drafter's passes, and vLLM's own counters."""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import block_size, draft_layers, watch
from drafters import DFLASH, DRAFT_MODEL, EAGLE, EAGLE3
from engines import GAMMA, counters, engine, generate, text_prompts
from models import random_prompts
from ngram import plugin_log
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.output_processor import OutputProcessor

from windowed_mtp.engines.acceptance import by_position
from windowed_mtp.engines.vllm.stat_logger import PREFIX, WindowStatLogger
from windowed_mtp.engines.vllm.statistics import DraftPlan, keys_of
from windowed_mtp.engines.vllm.steps import collect, uninstall
from windowed_mtp.reference import checkpoint_path

WINDOW = {"sink": 4, "window": 300}
TOKENS = 32
OURS = PREFIX.removeprefix("vllm:")


def iterations_kept(statistics):
    """What each iteration of the engine had, kept while it is counted."""
    kept, add = [], statistics.add

    def keep(steps, report):
        kept.append((list(steps), report))
        add(steps, report)

    statistics.add = keep
    return kept


def same_as_vllms(total, theirs):
    """Check counts of drafts and tokens against vLLM's own counters."""
    for ours, name in (
        (total.drafts, "drafts"),
        (total.draft_tokens, "draft_tokens"),
        (total.accepted_tokens, "accepted_tokens"),
        (total.accepted_per_position, "accepted_tokens_per_pos"),
    ):
        assert ours == theirs[f"spec_decode_num_{name}"], name


@pytest.fixture(scope="module")
def llm():
    with engine(window=WINDOW) as made:
        yield made


@pytest.fixture
def statistics_logger(llm):
    """A server's logger beside vLLM's own."""
    manager = llm.llm_engine.logger_manager
    made = WindowStatLogger(llm.llm_engine.vllm_config, [0])
    made.log_engine_initialized()
    manager.stat_loggers.append(made)
    yield made
    manager.stat_loggers.remove(made)
    uninstall()


def drafted(llm):
    return counters(llm).get("spec_decode_num_drafts", 0)


@pytest.mark.parametrize("length", [200, 700, 1537, 2500])
def test_keys_read_are_those_of_the_kernel(llm, length):
    before = drafted(llm)
    with watch(llm) as seen, collect(llm) as statistics:
        generate(llm, text_prompts(llm, [length]), TOKENS)
    # The first pass is prefill, and nobody verifies the last draft.
    made = seen.passes[1:-GAMMA]
    total = statistics.total
    assert total.keys_read == sum(each.keys_read for each in made)
    assert total.keys_full == sum(sum(each.seq_lens) for each in made)
    assert (total.keys_read < total.keys_full) == (total.windowed_drafts > 0) == (length > 1000)
    assert total.drafts == total.keyed_drafts == drafted(llm) - before > 5
    assert 0 <= total.drafts + total.accepted_tokens - (TOKENS - 1) <= GAMMA  # the last draft may be cut


def test_rows_of_a_batch_are_those_of_its_steps(llm):
    plan = DraftPlan.read(llm.llm_engine.vllm_config)
    assert plan.block_size == block_size(llm) == 384
    prompts = text_prompts(llm, [300, 1200, 1900])
    with watch(llm) as seen, collect(llm, bounds=(1000, 1800)) as statistics:
        kept = iterations_kept(statistics)
        generate(llm, prompts, TOKENS)
    rows = Counter(row for each in seen.passes for row in each.rows)
    counted = rows_counted(plan, kept)
    assert counted <= rows
    assert rows.total() - counted.total() == len(prompts) * (1 + GAMMA)
    # Requests that stop at once cannot be told apart: the rest of each bucket's drafts is its own.
    assert statistics.total.drafts == sum(bucket.drafts for bucket in (*statistics.buckets, statistics.elsewhere))
    assert statistics.total.drafts == sum(bucket.keyed_drafts for bucket in statistics.buckets)
    assert all(bucket.keyed_drafts - 1 <= bucket.drafts <= bucket.keyed_drafts for bucket in statistics.buckets)
    assert [bucket.windowed_drafts > 0 for bucket in statistics.buckets] == [False, True, True]
    assert len(statistics.table().splitlines()) == 5 + (statistics.elsewhere.drafts > 0)


def rows_counted(plan, kept):
    """Rows of the passes of all drafts whose keys were counted."""
    return Counter(
        row
        for steps, report in kept
        for step, *_ in keys_of(plan, steps, report)
        for row in plan.passes(step, plan.drafted(report))
    )


def test_a_servers_logger_counts_the_same(llm, statistics_logger):
    before = counters(llm)
    with plugin_log() as lines, collect(llm) as statistics:
        generate(llm, text_prompts(llm, [300, 1700]), TOKENS)
        statistics_logger.log()
        statistics_logger.log()
    after = counters_by_label(llm)
    total = statistics.total
    for name, want in (
        ("draft_keys_read", total.keys_read),
        ("draft_keys_full", total.keys_full),
        ("draft_keys_drafts", total.drafts),
        ("drafts:true", total.windowed_drafts),
        ("drafts:false", total.drafts - total.windowed_drafts),
    ):
        assert after[name] == want > 0
    for name, ours in (
        ("drafts", total.drafts),
        ("draft_tokens", total.draft_tokens),
        ("accepted_tokens", total.accepted_tokens),
    ):
        parts = [after[f"{name}:{windowed}"] for windowed in ("true", "false", "unknown")]
        assert sum(parts) == ours == counters(llm)[f"spec_decode_num_{name}"] - before[f"spec_decode_num_{name}"]
    for position in range(GAMMA):
        for name, counts in (("accepted", total.accepted_per_position), ("tested", total.tested_per_position)):
            parts = (after[f"{name}_tokens_per_pos:{windowed}:{position}"] for windowed in ("true", "false", "unknown"))
            assert sum(parts) == counts[position]
    (level, line), (_, keys) = [each for each in lines if "metrics" in each[1]]
    assert level == "INFO"
    assert f"Mean acceptance length: {total.acceptance_length:.2f}," in line
    assert f"unconditional: {by_position(total.unconditional_acceptance, 3)}, " in line
    assert f"conditional: {by_position(total.conditional_acceptance, 3)}, " in line
    assert f"Draft keys read: {total.keys_read} of {total.keys_full}" in keys


def counters_by_label(llm):
    """Our counters, by name and the values of their own labels."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            labels = [metric.labels[name] for name in ("windowed", "position") if name in metric.labels]
            assert {"model_name", "engine"} <= set(metric.labels)
            found[":".join([metric.name.removeprefix(PREFIX), *labels])] = metric.value
    return found


def test_an_engine_that_is_not_configured_is_left_alone(llm):
    own = OutputProcessor.process_outputs
    config = SimpleNamespace(additional_config={}, model_config=None)
    logger = WindowStatLogger(config, [0])
    logger.log_engine_initialized()
    logger.record(None, None)
    logger.log()
    assert OutputProcessor.process_outputs is own
    assert not hasattr(own, "__wrapped__")
    assert not logger.counters


@pytest.mark.parametrize("drafter", [DRAFT_MODEL, DFLASH], ids=lambda drafter: drafter.method)
def test_keys_of_other_drafters(drafter):
    with drafter.running({"sink": 4, "window": 64}) as llm:
        with watch(llm) as seen, collect(llm) as statistics:
            generate(llm, random_prompts([500]), TOKENS)
        layers = len(draft_layers(llm))
    made = seen.passes[:-1] if drafter.parallel else seen.passes[1:-GAMMA]
    total = statistics.total
    assert layers * total.keys_read == sum(each.keys_read for each in made)
    assert total.keys_full == sum(sum(each.seq_lens) for each in made)
    assert total.windowed_drafts == total.drafts > 5


def test_preempted_requests():
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 41, "enable_prefix_caching": False}
    with EAGLE3.running({"sink": 4, "window": 64}, **options) as llm:
        with collect(llm) as statistics:
            generate(llm, random_prompts([280, 290, 300, 310]), 96)
        theirs = counters(llm)
    print(statistics.table(), theirs["num_preemptions"])
    assert theirs["num_preemptions"] > 0
    same_as_vllms(statistics.total, theirs)


LENGTHS = {"num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 2, 1), (3, 3, 0), (4, 4, 2)]}


def test_drafts_whose_length_follows_the_batch():
    options = {"max_model_len": 512, "enable_prefix_caching": False, "max_num_batched_tokens": 128}
    with EAGLE.running({"sink": 4, "window": 64}, settings=LENGTHS, **options) as llm:
        plan = DraftPlan.read(llm.llm_engine.vllm_config)
        assert not plan.fixed and plan.not_counted is None
        with watch(llm) as seen, collect(llm, bounds=(256,)) as statistics:
            kept = iterations_kept(statistics)
            reasons = stopping(llm, random_prompts([40, 300, 200, 410]))
        theirs = counters(llm)
    total = statistics.total
    print(statistics.table())
    lengths = [report.longest for _, report in kept if report.drafts]
    assert set(lengths) == {1, 2, 3}
    assert any(not report.drafts and len(steps) == 3 and steps[0].may_draft for steps, report in kept)
    assert reasons == {"length", "stop"}
    same_as_vllms(total, theirs)
    assert total.accepted_tokens > sum(
        step.emitted - 1 for steps, report in kept for step in steps if report.drafts
    )  # a request stopped inside a draft
    # Every pass that was counted was run, with so many keys: the others are prefill or were never verified.
    rows = Counter(row for each in seen.passes for row in each.rows)
    counted = rows_counted(plan, kept)
    assert counted <= rows
    after_prefill = sum(step.emitted_before == 0 for steps, report in kept if report.drafts for step in steps)
    assert counted.total() == total.draft_tokens - after_prefill
    assert total.keyed_drafts == total.drafts and total.uneven_drafts == 0
    assert total.keys_read < total.keys_full


def stopping(llm, prompts):
    """Generate until a token that some drafts hold, or for several lengths; the reasons for which requests ended."""
    first = generate(llm, prompts[:1], 40)[0].tokens
    sampling = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=21, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=47, stop_token_ids=[first[-1]]),
    ]
    given = [TokensPrompt(prompt_token_ids=prompts[index]) for index in (1, 2, 3, 0)]
    made = llm.generate(given, sampling, use_tqdm=False)
    return {each.outputs[0].finish_reason for each in made}


def test_drafts_that_are_cut_and_requests_that_the_front_end_ends():
    options = {"max_model_len": 512, "skip_tokenizer_init": False, "tokenizer": str(checkpoint_path())}
    prompts = random_prompts([60, 503, 90])
    given = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    with EAGLE.running({"sink": 4, "window": 64}, **options) as llm:
        with collect(llm, bounds=(256,)) as statistics:
            kept = iterations_kept(statistics)
            word = llm.get_tokenizer().decode(generate(llm, prompts[2:], 12)[0].tokens)[-4:]
            grammar = StructuredOutputsParams(regex="(ab|cd|[0-9]){4,40}")
            sampling = [
                SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=grammar),
                SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
                SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=[word]),
            ]
            made = llm.generate(given, sampling, use_tqdm=False)
            generate(llm, prompts[2:], 4)
        theirs, total = counters(llm), statistics.total
    print(statistics.table())
    assert made[2].outputs[0].stop_reason == word
    assert len(made[1].outputs[0].token_ids) == 512 - 503  # the model's length
    assert total.draft_tokens < GAMMA * total.drafts and total.uneven_drafts > 0
    assert any(report.drafts < sum(step.may_draft for step in steps) for steps, report in kept)  # cut to nothing
    same_as_vllms(total, theirs)
