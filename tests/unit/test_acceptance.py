"""The two acceptances: one definition, from the counts of either engine, and one name for each in files and tables."""

import json
from math import isnan

import pytest

from windowed_mtp.cli.output import decode_table, output
from windowed_mtp.engines.acceptance import by_position, conditional, unconditional
from windowed_mtp.engines.protocol import StepEvent
from windowed_mtp.engines.stats import DecodeStats
from windowed_mtp.engines.vllm.statistics import DraftStatistics, Report
from windowed_mtp.probes.decode import DecodeRow, summarise

DRAFTS = [(3, 3), (3, 1), (1, 1), (3, 0), (2, 2)]
"""Tokens of drafts, and how many of them were accepted."""


def test_closed_forms():
    # Three drafts had a second token behind an accepted first one; the draft of one token had none.
    accepted, tested = [4, 2, 1], [5, 3, 1]
    assert unconditional(accepted, 5) == [0.8, 0.4, 0.2]
    assert conditional(accepted, tested) == [0.8, pytest.approx(2 / 3), 1]
    assert 1 + sum(unconditional(accepted, 5)) == pytest.approx(1 + sum(a for _, a in DRAFTS) / len(DRAFTS))
    assert isnan(unconditional([0], 0)[0]) and isnan(conditional([0], [0])[0])
    assert by_position([0.8, float("nan")]) == "0.80 -"


def decoded() -> DecodeStats:
    stats = DecodeStats()
    for step, (tokens, accepted) in enumerate(DRAFTS):
        stats.add(event(step, tokens, accepted))
    stats.add(event(len(DRAFTS), 0, 0))  # a step without a draft is no draft
    return stats


def event(step: int, tokens: int, accepted: int) -> StepEvent:
    given = dict.fromkeys(StepEvent.__dataclass_fields__, 0)
    made = {"step": step, "proposed": list(range(tokens)), "accepted": accepted, "emitted": [0] * (accepted + 1)}
    return StepEvent(**{**given, **made})


def test_both_engines_mean_the_same():
    stats, counts = decoded(), DraftStatistics()
    for tokens, accepted in DRAFTS:
        counts.add(Report.of(tokens, [accepted], 3))
    assert stats.unconditional_acceptance == counts.unconditional_acceptance == [0.8, 0.4, 0.2]
    assert stats.conditional_acceptance == counts.conditional_acceptance == [0.8, pytest.approx(2 / 3), 1]


def test_a_table_names_both():
    row = summarise("windowed MTP", [decoded()], drafted=True)
    with output.capture() as captured:
        output.show(decode_table([row]))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["unconditional", "acceptance", "0.80", "0.40", "0.20"] in lines
    assert ["conditional", "acceptance", "0.80", "0.67", "1.00"] in lines


def test_a_row_of_an_older_file_has_the_conditional_one_only():
    row = summarise("windowed MTP", [decoded()], drafted=True)
    older = json.loads(row.model_dump_json())
    assert older.pop("unconditional_acceptance") == [0.8, 0.4, 0.2]
    read = DecodeRow.model_validate_json(json.dumps(older))
    assert (read.unconditional_acceptance, read.conditional_acceptance) == ((), row.conditional_acceptance)
