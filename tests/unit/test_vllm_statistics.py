"""The plugin's statistics without vLLM: settings, steps, how a report is shared out, and the table."""

from types import SimpleNamespace
from typing import Any

import pytest

from windowed_mtp import SinkWindow
from windowed_mtp.engines.vllm.config import PluginError
from windowed_mtp.engines.vllm.statistics import (
    ContextStatistics,
    DraftPlan,
    DraftStatistics,
    Report,
    Step,
    drafted_in,
    keys_of,
    sees_all,
    shares,
)
from windowed_mtp.engines.vllm.steps import StepReader, collect

PLAN = DraftPlan(SinkWindow(4, 300), 3, block_size=64)


def settings(given: dict[str, Any] | None = None, speculative: dict[str, Any] | None = None, **cache: Any) -> Any:
    drafter = {"method": "mtp", "num_speculative_tokens": 3, **(speculative or {})}
    return SimpleNamespace(
        additional_config={} if given is None else {"windowed_mtp": given},
        speculative_config=SimpleNamespace(use_multi_module_mtp=lambda: False, **drafter),
        cache_config=SimpleNamespace(**{"block_size": 64, **cache}),
    )


def report(*drafts: tuple[int, int]) -> Report:
    """Of drafts with so many tokens each, and so many of them accepted."""
    drafted, accepted = ([sum(each[which] > index for each in drafts) for index in range(3)] for which in (0, 1))
    return Report(len(drafts), tuple(drafted), tuple(accepted))


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


def test_passes_of_drafts_of_another_length():
    plan = DraftPlan(None, 3)
    assert plan.passes(Step(101, 2, 1, drafted_before=1), drafted=2) == [(100, 2), (101, 1)]
    assert plan.passes(Step(101, 1, 1, drafted_before=0), drafted=1) == [(100, 1)]
    assert plan.passes(Step(101, 0, 1), drafted=3) == [(101, 1), (102, 1)]


TABLE = {"num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 4, 1)]}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (settings({"strict": False}), "not told whether the window is in force"),
        (settings({}, {"method": "ngram"}), "this drafter (ngram) are not known"),
        (settings({}, {"method": "dflash", **TABLE}), "parallel drafter are not known"),
    ],
)
def test_keys_that_cannot_be_known_are_not_counted_and_acceptance_is(config: Any, match: str):
    statistics = ContextStatistics(DraftPlan.read(config), bounds=(300,))
    assert match in statistics.plan.not_counted
    statistics.add([Step(100, 0, 2)], report((3, 1)))
    assert (statistics.total.drafts, statistics.total.accepted_tokens) == (1, 1)
    assert statistics.total.keyed_drafts == statistics.total.keys_full == 0
    head, *_, note = statistics.table().splitlines()
    assert "keys" not in head and "windowed" not in head
    assert note == f"Draft keys are not counted: {statistics.plan.not_counted}."


def test_several_modules_have_acceptance_without_keys():
    config = settings({})
    config.use_v2_model_runner, config.speculative_config.use_multi_module_mtp = True, lambda: True
    assert "several modules" in DraftPlan.read(config).not_counted


def test_several_api_servers():
    config = settings({}, TABLE)
    assert sees_all(config) and DraftPlan.read(config).not_counted is None
    config.parallel_config = SimpleNamespace(_api_process_count=2)
    assert not sees_all(config)
    assert "API server" in DraftPlan.read(config).not_counted


def test_an_engine_without_a_drafter_has_nothing_to_count():
    config = settings({})
    config.speculative_config = None
    with pytest.raises(PluginError, match="no speculative_config; set one"):
        DraftPlan.read(config)


class Request:
    """A request as a front end has it: its prompt's length, and what was put out so far."""

    def __init__(self, prompt: int) -> None:
        self.prompt_len, self.out, self.is_prefilling = prompt, 0, True
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.out)

    def put(self, reader: StepReader, tokens: int, *events: str, computed: int | None = None) -> list[Step]:
        made = reader({"a": self}, [output(tokens, *events, computed=computed)])
        self.out, self.is_prefilling = self.out + tokens, False
        return made


def output(tokens: int, *events: str, computed: int | None = None, name: str = "a", end: str | None = None) -> Any:
    happened = [SimpleNamespace(type=SimpleNamespace(name=name)) for name in events] or None
    prefill = None if computed is None else SimpleNamespace(num_computed_tokens=computed)
    return SimpleNamespace(
        request_id=name, new_token_ids=[0] * tokens, events=happened, prefill_stats=prefill, finish_reason=end
    )


def test_steps_follow_a_request():
    reader, one, other = StepReader(), Request(100), Request(7)
    prefill = {"emitted_before": None, "may_draft": False}
    known = {"drafted_before": 0}
    assert one.put(reader, 1, "QUEUED", "SCHEDULED", computed=100) == [Step(context=100, emitted=1, **prefill)]
    assert one.put(reader, 3) == [Step(context=101, emitted_before=0, emitted=3, **known)]
    assert other.put(reader, 1, computed=7) == [Step(context=7, emitted=1, **prefill)]
    assert one.put(reader, 4) == [Step(context=104, emitted_before=3, emitted=4, **known)]
    assert other.put(reader, 2) == [Step(context=8, emitted_before=0, emitted=2, **known)]
    assert one.put(reader, 1, "PREEMPTED", "SCHEDULED", computed=108) == [Step(context=108, emitted=1, **prefill)]
    assert one.put(reader, 2) == [Step(context=109, emitted_before=0, emitted=2, **known)]
    assert one.put(reader, 0) == []
    assert one.put(reader, 1) == [Step(context=111, emitted_before=2, emitted=1, **known)]


def test_a_prefill_of_one_token_may_be_padded_to_a_draft():
    reader = StepReader()
    [step] = Request(100).put(reader, 1, computed=1)
    assert step.may_draft and step.emitted_before is None
    assert not list(keys_of(PLAN, [step], report((3, 0))))  # nothing was drafted for it


def test_a_request_seen_from_its_middle_has_no_keys_before_its_second_step():
    reader, request = StepReader(), Request(100)
    request.is_prefilling, request.out = False, 5
    assert request.put(reader, 2) == [Step(context=105, emitted_before=None, emitted=2)]
    assert request.put(reader, 1) == [Step(context=107, emitted_before=2, emitted=1, drafted_before=0)]


def test_a_request_that_the_front_end_dropped_still_has_its_draft():
    assert StepReader()({}, [output(2, name="gone")]) == [Step(None, None, 2)]
    statistics = ContextStatistics(PLAN, bounds=(300,))
    statistics.add([Step(None, None, 2), Step(100, 1, 3, 3)], report((3, 1), (3, 2)))
    assert statistics.total.drafts == 2 and statistics.total.accepted_per_position == [2, 1, 0]
    assert statistics.buckets[0].accepted_per_position == [1, 1, 0]
    assert statistics.elsewhere.accepted_per_position == [1, 0, 0]
    assert statistics.total.keyed_drafts == 1
    assert statistics.table().endswith("Draft keys are known of 1 of 2 drafts.")


def test_pooling_has_no_steps():
    assert StepReader()({"a": SimpleNamespace(detokenizer=None)}, [output(1)]) == []


def test_what_a_step_verified_is_known_to_the_next():
    reader, request = StepReader(), Request(100)
    plan = DraftPlan(None, 3, fixed=False)
    request.put(reader, 1, computed=100)
    seen = []
    for tokens, reported in ((1, report((2, 0))), (1, report()), (2, report((3, 1))), (1, report((1, 0)))):
        steps = request.put(reader, tokens)
        seen += [
            (step.drafted_before, plan.passes(step, reported.longest)) for step, *_ in keys_of(plan, steps, reported)
        ]
    assert seen == [
        (0, [(101, 1)]),
        (0, [(102, 1), (103, 1), (104, 1)]),
        (3, [(106, 4)]),
    ]


def test_drafts_that_the_scheduler_does_not_report_are_not_counted():
    steps = [Step(100, 1, 1), Step(700, 0, 1, may_draft=False), Step(200, 1, 1)]
    assert drafted_in(steps, report()) == [False, False, False]
    assert drafted_in(steps, report((3, 0), (3, 0))) == [True, False, True]
    assert drafted_in(steps, report((3, 0))) == [None, False, None]
    assert drafted_in([Step(100, 1, 2), *steps[1:]], report((3, 1))) == [True, False, None]
    assert drafted_in(steps, report((3, 0), (3, 0)), complete=False) == [None, False, None]


def in_hundreds(step: Step) -> int | None:
    return None if step.context is None else step.context // 100


def test_a_report_is_shared_out_by_what_was_emitted():
    steps = [Step(100, 1, 3), Step(150, 1, 1), Step(250, 1, 2), Step(270, 0, 1, may_draft=False)]
    drafts = report((2, 2), (2, 0), (2, 1))
    assert dict(shares(steps, drafts, in_hundreds)) == {1: report((2, 2), (2, 0)), 2: report((2, 1))}
    assert list(shares(steps, report(), in_hundreds)) == []
    assert list(shares(steps, drafts, in_hundreds, complete=False)) == [(None, drafts)]


def test_what_a_stopped_request_does_not_emit_is_still_its_own():
    steps = [Step(100, 1, 3), Step(250, 1, 2, finished=True)]
    assert list(shares(steps, report((3, 2), (3, 3)), in_hundreds)) == [(1, report((3, 2))), (2, report((3, 3)))]


def test_requests_that_stop_at_once_in_two_parts_cannot_be_told_apart():
    steps = [Step(100, 1, 1, finished=True), Step(250, 1, 2, finished=True), Step(300, 1, 1)]
    drafts = report((3, 1), (3, 3), (3, 0))
    assert list(shares(steps, drafts, in_hundreds)) == [(3, report((3, 0))), (None, report((3, 1), (3, 3)))]
    together = [Step(100, 1, 1, finished=True), Step(150, 1, 2, finished=True)]
    assert list(shares(together, report((3, 1), (3, 3)), in_hundreds)) == [(1, report((3, 1), (3, 3)))]


def test_drafts_of_several_lengths():
    drafts = report((3, 1), (1, 1), (3, 3))
    assert not drafts.even and drafts.longest == 3
    # Two drafts had a second token, after an accepted first one; three is what the positions alone would say.
    assert drafts.tested == (3, 2, 1)
    together = [Step(100, 1, 2), Step(110, 1, 2), Step(120, 1, 4)]
    assert list(shares(together, drafts, in_hundreds)) == [(1, drafts)]
    apart = [Step(100, 1, 2), Step(210, 1, 2), Step(320, 1, 4)]
    assert list(shares(apart, drafts, in_hundreds)) == [(None, drafts)]
    counts = DraftStatistics()
    counts.add(drafts)
    counts.add(report((3, 0)))
    assert (counts.drafts, counts.uneven_drafts, counts.draft_tokens, counts.accepted_tokens) == (4, 3, 10, 5)
    statistics = ContextStatistics(PLAN, bounds=(300,))
    statistics.add(together, drafts)
    assert "3 drafts were verified beside some of another length" in statistics.table()


def test_the_two_acceptances():
    counts = DraftStatistics()
    for drafts in (report((3, 3), (3, 1)), report((1, 1)), report((1, 0)), report((3, 0))):
        counts.add(drafts)
    assert counts.unconditional_acceptance == [3 / 5, 1 / 5, 1 / 5]
    assert counts.conditional_acceptance == [3 / 5, 1 / 2, 1]
    assert counts.acceptance_length == 1 + sum(counts.unconditional_acceptance) == 2


def test_counts_by_context_and_their_table():
    statistics = ContextStatistics(DraftPlan(SinkWindow(4, 300), 3), bounds=(300, 600, 2000))
    statistics.add([Step(100, 0, 2), Step(600, 0, 4)], report((3, 1), (3, 3)))
    statistics.add([Step(102, 2, 1), Step(604, 4, 1, may_draft=False)], report((3, 0)))
    short, _, longer, _ = statistics.buckets
    assert (short.drafts, short.windowed_drafts, short.draft_tokens) == (2, 0, 6)
    assert (short.accepted_per_position, short.unconditional_acceptance) == ([1, 0, 0], [0.5, 0, 0])
    assert short.keys_read == short.keys_full == (100 + 101) + (103 + 102 + 103)
    assert (longer.drafts, longer.windowed_drafts, longer.acceptance_length) == (1, 1, 4)
    assert (longer.keys_read, longer.keys_full) == (2 * 304, 600 + 601)
    assert statistics.total.drafts == 3 and statistics.total.keys_full == short.keys_full + longer.keys_full
    head, *rows = statistics.table().splitlines()
    names = "context      drafts    AL  unconditional acceptance  conditional acceptance  windowed  keys/draft   full"
    assert head == f"{names}    read"
    assert [" ".join(row.split()) for row in rows] == [
        "< 300 2 1.50 0.50 0.00 0.00 0.50 0.00 - 0 254 254 100.0%",
        "600 - 1,999 1 4.00 1.00 1.00 1.00 1.00 1.00 1.00 1 608 1,201 50.6%",
        "all 3 2.33 0.67 0.33 0.33 0.67 0.50 1.00 1 372 570 65.3%",
    ]
    assert {len(row) for row in rows} == {len(head)}


def test_bounds_must_increase():
    with pytest.raises(PluginError, match="must increase"):
        ContextStatistics(PLAN, (5, 5))


def engine_with(processor: Any, log_stats: bool = True) -> Any:
    return SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=settings({}), output_processor=processor, log_stats=log_stats)
    )


def test_an_unknown_front_end_is_refused():
    llm = engine_with(SimpleNamespace(_other=1))
    with pytest.raises(PluginError, match="OutputProcessor has no process_outputs"), collect(llm):
        pass


def test_an_engine_that_keeps_no_statistics_is_refused():
    with pytest.raises(PluginError, match="pass disable_log_stats=False to LLM"), collect(engine_with(None, False)):
        pass


def test_collecting_leaves_nothing_behind():
    calls: list[Any] = []
    request = Request(400)

    class Processor:
        request_states = {"a": request}  # noqa: RUF012

        def process_outputs(self, *args: Any) -> None:
            calls.append(args)

        def update_scheduler_stats(self, stats: Any) -> None:
            calls.append(stats)

    processor = Processor()
    llm = engine_with(processor)
    counted = SimpleNamespace(num_drafts=1, num_draft_tokens_per_pos=[1, 1, 1], num_accepted_tokens_per_pos=[1, 0, 0])
    with collect(llm), collect(llm) as statistics:
        for tokens, stats in ((1, None), (2, counted)):
            processor.process_outputs([output(tokens, computed=400 if stats is None else None)], 0.0)
            processor.update_scheduler_stats(SimpleNamespace(spec_decoding_stats=stats))
            request.out, request.is_prefilling = request.out + tokens, False
    assert not vars(processor)
    assert len(calls) == 4
    assert statistics.total.drafts == 1 and statistics.total.accepted_per_position == [1, 0, 0]
