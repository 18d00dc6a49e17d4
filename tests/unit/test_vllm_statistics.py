"""The plugin's statistics without vLLM: the settings they are read from, the steps, and the table."""

from types import SimpleNamespace
from typing import Any

import pytest

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.statistics import ContextStatistics, DraftPlan, Step
from windowed_mtp.engines.vllm.steps import StepReader, collect

PLAN = DraftPlan(SinkWindow(4, 300), 3, block_size=64)


def settings(given: dict[str, Any] | None = None, speculative: dict[str, Any] | None = None, **cache: Any) -> Any:
    drafter = {"method": "mtp", "num_speculative_tokens": 3, **(speculative or {})}
    return SimpleNamespace(
        additional_config={} if given is None else {"windowed_mtp": given},
        speculative_config=SimpleNamespace(use_multi_module_mtp=lambda: False, **drafter),
        cache_config=SimpleNamespace(**{"block_size": 64, **cache}),
    )


def test_a_plan_is_what_the_engine_was_asked_for():
    assert DraftPlan.read(settings({"sink": 4, "window": 300})) == PLAN
    assert DraftPlan.read(settings()).window is None
    other = DraftPlan.read(
        settings(
            {"sink": 4, "window": 300, "window_first_pass": False},
            {"disable_padded_drafter_batch": True},
            effective_attention_block_size=384,
        )
    )
    assert other == DraftPlan(SinkWindow(4, 300), 3, block_size=384, window_first_pass=False, padded=False)


@pytest.mark.parametrize(
    ("speculative", "slots", "one_pass"),
    [
        ({"method": "eagle3"}, 0, False),
        ({"method": "draft_model"}, 1, False),
        ({"method": "eagle3", "parallel_drafting": True}, 2, True),
        ({"method": "draft_model", "parallel_drafting": True}, 3, True),
        ({"method": "dflash", "parallel_drafting": True}, 0, True),
    ],
)
def test_a_drafters_passes(speculative: dict[str, Any], slots: int, one_pass: bool):
    plan = DraftPlan.read(settings({}, speculative))
    assert (plan.slots, plan.one_pass, plan.own_queries) == (slots, one_pass, speculative["method"] == "dflash")


@pytest.mark.parametrize(
    ("plan", "passes"),
    [
        (DraftPlan(None, 3), [(102, 4), (101, 1), (102, 1)]),
        (DraftPlan(None, 3, padded=False), [(100, 2), (101, 1), (102, 1)]),
        (DraftPlan(None, 3, slots=1), [(103, 5), (102, 1), (103, 1)]),
        (DraftPlan(None, 3, slots=2, one_pass=True), [(104, 6)]),
        (DraftPlan(None, 3, one_pass=True, own_queries=True), [(104, 4)]),
    ],
)
def test_rows_of_passes(plan: DraftPlan, passes: list[tuple[int, int]]):
    # 101 tokens, the last of which the target has not read; 2 of the 4 that were verified are rejected.
    assert plan.passes(Step(context=101, emitted_before=2, emitted=1)) == passes


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (settings({"strict": False}), "not told whether the window is in force"),
        (settings({}, {"method": "ngram"}), r"this drafter \(ngram\) are not known"),
        (settings({}, {"num_speculative_tokens_per_batch_size": {1: 3}}), "changes from step to step"),
    ],
)
def test_what_cannot_be_known_is_not_counted(config: Any, match: str):
    with pytest.raises(PluginError, match=match) as caught:
        DraftPlan.read(config)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_several_modules_are_not_counted():
    config = settings({})
    config.use_v2_model_runner, config.speculative_config.use_multi_module_mtp = True, lambda: True
    with pytest.raises(PluginError, match="several modules"):
        DraftPlan.read(config)


class Request:
    """A request as a front end has it: its prompt's length, and what was put out so far."""

    def __init__(self, prompt: int) -> None:
        self.prompt_len, self.out, self.is_prefilling = prompt, 0, True
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.out)

    def put(self, reader: StepReader, tokens: int, *events: str) -> Step | None:
        happened = [SimpleNamespace(type=SimpleNamespace(name=name)) for name in events] or None
        step = reader(self, SimpleNamespace(new_token_ids=[0] * tokens, events=happened))
        self.out, self.is_prefilling = self.out + tokens, False
        return step


def test_steps_follow_a_request():
    reader, one, other = StepReader(), Request(100), Request(7)
    assert one.put(reader, 1, "QUEUED", "SCHEDULED") is None
    assert one.put(reader, 3) == Step(context=101, emitted_before=0, emitted=3)
    assert other.put(reader, 1) is None
    assert one.put(reader, 4) == Step(context=104, emitted_before=3, emitted=4)
    assert other.put(reader, 2) == Step(context=8, emitted_before=0, emitted=2)
    assert one.put(reader, 1, "PREEMPTED", "SCHEDULED") is None
    assert one.put(reader, 2) == Step(context=109, emitted_before=0, emitted=2)
    assert one.put(reader, 0) is None
    assert one.put(reader, 1) == Step(context=111, emitted_before=2, emitted=1)


def test_a_request_seen_from_its_middle_begins_with_its_second_step():
    reader, request = StepReader(), Request(100)
    request.is_prefilling, request.out = False, 5
    assert request.put(reader, 2) is None
    assert request.put(reader, 1) == Step(context=107, emitted_before=2, emitted=1)


def test_pooling_has_no_steps():
    pooled = SimpleNamespace(detokenizer=None)
    assert StepReader()(pooled, SimpleNamespace(new_token_ids=[1], events=None)) is None


def test_counts_by_context_and_their_table():
    statistics = ContextStatistics(DraftPlan(SinkWindow(4, 300), 3), bounds=(300, 600, 2000))
    for step in (Step(100, 0, 2), Step(102, 2, 1), Step(600, 0, 4)):
        statistics.add(step)
    short, _, longer, _ = statistics.buckets
    assert (short.steps, short.windowed_steps, short.emitted) == (2, 0, 3)
    assert (short.accepted_per_position, short.acceptance) == ([1, 0, 0], [0.5, 0, 0])
    assert short.keys_read == short.keys_full == (100 + 101) + (103 + 102 + 103)
    assert (longer.steps, longer.windowed_steps, longer.acceptance_length) == (1, 1, 4)
    assert (longer.keys_read, longer.keys_full) == (2 * 304, 600 + 601)
    assert statistics.total.steps == 3 and statistics.total.keys_full == short.keys_full + longer.keys_full
    assert statistics.table().splitlines() == [
        "context      steps  windowed    AL  accepted by position  keys/step   full    read",
        "< 300            2         0  1.50        0.50 0.00 0.00        254    254  100.0%",
        "600 - 1,999      1         1  4.00        1.00 1.00 1.00        608  1,201   50.6%",
        "all              3         1  2.33        0.67 0.33 0.33        372    570   65.3%",
    ]


def test_bounds_must_increase():
    with pytest.raises(PluginError, match="must increase"):
        ContextStatistics(PLAN, (5, 5))


def test_an_unknown_front_end_is_refused():
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=settings({}), output_processor=SimpleNamespace(_other=1))
    )
    with pytest.raises(PluginError, match="OutputProcessor has no _update_stats_from_output"), collect(llm):
        pass


def test_collecting_leaves_nothing_behind():
    calls: list[Any] = []

    class Processor:
        def _update_stats_from_output(self, *args: Any) -> None:
            calls.append(args)

    processor = Processor()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=settings({}), output_processor=processor))
    request = Request(400)
    with collect(llm), collect(llm) as statistics:
        for tokens in (1, 2):
            output = SimpleNamespace(new_token_ids=[0] * tokens, events=None)
            processor._update_stats_from_output(request, output, 0.0, None)
            request.out, request.is_prefilling = request.out + tokens, False
    assert not vars(processor)
    assert [len(args) for args in calls] == [4, 4]
    assert statistics.total.steps == 1 and statistics.total.emitted == 2
