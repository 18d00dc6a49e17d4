"""The plugin's statistics against what really happened: the drafter's passes, and vLLM's own counters."""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from draft_passes import block_size, draft_layers, watch
from drafters import DFLASH, DRAFT_MODEL, EAGLE3
from engines import GAMMA, counters, engine, generate, text_prompts
from models import random_prompts
from ngram import plugin_log
from vllm.v1.engine.output_processor import OutputProcessor

from windowed_mtp.engines.vllm.stat_logger import PREFIX, WindowStatLogger
from windowed_mtp.engines.vllm.statistics import DraftPlan
from windowed_mtp.engines.vllm.steps import collect, uninstall

WINDOW = {"sink": 4, "window": 300}
TOKENS = 32
OURS = PREFIX.removeprefix("vllm:")


def steps_kept(statistics):
    """The steps themselves, kept while they are counted."""
    steps, add = [], statistics.add

    def keep(step):
        steps.append(step)
        add(step)

    statistics.add = keep
    return steps


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
    assert (total.keys_read < total.keys_full) == (total.windowed_steps > 0) == (length > 1000)
    assert total.steps == drafted(llm) - before > 5
    assert total.emitted == TOKENS - 1


def test_rows_of_a_batch_are_those_of_its_steps(llm):
    plan = DraftPlan.read(llm.llm_engine.vllm_config)
    assert plan.block_size == block_size(llm) == 384
    prompts = text_prompts(llm, [300, 1200, 1900])
    with watch(llm) as seen, collect(llm, bounds=(1000, 1800)) as statistics:
        steps = steps_kept(statistics)
        generate(llm, prompts, TOKENS)
    rows = Counter(row for each in seen.passes for row in each.rows)
    counted = Counter(row for step in steps for row in plan.passes(step))
    assert counted <= rows
    assert rows.total() - counted.total() == len(prompts) * (1 + GAMMA)
    assert [bucket.emitted for bucket in statistics.buckets] == [TOKENS - 1] * 3
    assert [bucket.windowed_steps > 0 for bucket in statistics.buckets] == [False, True, True]
    assert len(statistics.table().splitlines()) == 5


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
        ("drafts:true", total.windowed_steps),
        ("drafts:false", total.steps - total.windowed_steps),
    ):
        assert after[name] == want > 0
    assert after["accepted_tokens:true"] + after["accepted_tokens:false"] == sum(total.accepted_per_position)
    for position, accepted in enumerate(total.accepted_per_position):
        both = (after[f"accepted_tokens_per_pos:{windowed}:{position}"] for windowed in ("true", "false"))
        assert sum(both) == accepted
    assert total.steps == drafted(llm) - before["spec_decode_num_drafts"]
    [(level, line)] = [each for each in lines if "metrics" in each[1]]
    assert level == "INFO"
    assert f"Mean acceptance length: {total.acceptance_length:.2f}," in line
    assert f"Draft keys read: {total.keys_read} of {total.keys_full}" in line


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
    own = OutputProcessor._update_stats_from_output
    config = SimpleNamespace(additional_config={}, model_config=None)
    logger = WindowStatLogger(config, [0])
    logger.log_engine_initialized()
    logger.record(None, None)
    logger.log()
    assert OutputProcessor._update_stats_from_output is own
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
    assert total.windowed_steps == total.steps > 5


def test_preempted_requests_and_vllms_own_counts():
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 41, "enable_prefix_caching": False}
    with EAGLE3.running({"sink": 4, "window": 64}, **options) as llm:
        with collect(llm) as statistics:
            generate(llm, random_prompts([280, 290, 300, 310]), 96)
        theirs = counters(llm)
    print(statistics.table(), theirs["num_preemptions"], theirs["spec_decode_num_accepted_tokens"])
    total = statistics.total
    assert theirs["num_preemptions"] > 0
    assert total.steps == theirs["spec_decode_num_drafts"]
    for ours, own in zip(total.accepted_per_position, theirs["spec_decode_num_accepted_tokens_per_pos"], strict=True):
        assert own - 4 <= ours <= own  # a request's last step may be cut
