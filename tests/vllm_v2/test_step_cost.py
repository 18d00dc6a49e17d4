"""Decode steps measured in a running engine that is given one arm after the other."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vllm is not installed; run make test-vllm")

from windowed_mtp.cost.record import StepRecord
from windowed_mtp.engines.vllm import step_cost
from windowed_mtp.engines.vllm.step_cost import Arm, Engine, measure
from windowed_mtp.reference import checkpoint_path
from windowed_mtp.vocab import HotVocabulary, TokenizerIdentity

CONTEXTS = [300, 1500]
OPTIONS = {"enforce_eager": True, "num_gpu_blocks_override": 40}


def test_arms_alternate_in_one_engine_and_a_record_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, few in (("PARTS", 2), ("STEPS", 2), ("WARM_UP", 1), ("PROFILED", 1)):
        monkeypatch.setattr(step_cost, name, few)
    identity = TokenizerIdentity(name="random weights", size=2048, sha256="0" * 64)
    HotVocabulary(tokenizer=identity, special=(), ranked=(), counts=()).save(tmp_path / "hot.json")
    hot = {"sink": 4, "window": 300, "hot_vocabulary": {"size": 128, "file": str(tmp_path / "hot.json")}}
    arms = [
        Arm("native"),
        Arm("windowed", {"sink": 4, "window": 300}),
        Arm("wide", {"sink": 4, "window": 700}),
        Arm("hot", hot),
    ]
    seen: list[dict[str, Any]] = []
    measure_one = step_cost._measure

    def spied(llm: Any, engine: Engine, point: Any, context: int, repeat: int) -> Any:
        core = llm.llm_engine
        runner = core.model_executor.driver_worker.worker.model_runner
        before = sum(each.windowed for each in windowings(runner))
        step, emitted, waited = core.step, {}, []

        def counted() -> Any:
            made = step()
            emitted.update({output.request_id: len(output.outputs[0].token_ids) for output in made})
            if len(emitted) == engine.batch:
                waited.append(max(emitted.values()))
            return made

        core.step = counted
        row = measure_one(llm, engine, point, context, repeat)
        del core.step
        after = windowings(runner)
        seen.append(
            {
                "arm": point.arm,
                "context": context,
                "windows": [each.window.window for each in after],
                "windowed": sum(each.windowed for each in after) - before,
                "hot": bool(getattr(runner, "windowed_mtp_hot_logits", [])),
                "waited": waited[0],
            }
        )
        return row

    monkeypatch.setattr(step_cost, "_measure", spied)
    engine = Engine(
        str(checkpoint_path()), "bundled", gamma=3, batch=2, max_context=1500, prompt_chunk=512, options=OPTIONS
    )
    assert engine.arguments(arms[0])["max_model_len"] == 1500 + (2 * 2 + 4 * 1) * 4 + 2 * 3 + 64
    said: list[str] = []
    path = tmp_path / "record.json"
    assert measure(engine, arms, CONTEXTS, [0, 1], path, machine="a CPU", say=said.append, profiles=tmp_path) == 16
    record = StepRecord.load(path)
    order = [(row.repeat, row.point.arm, row.point.context) for row in record.rows]
    assert order == [(r, arm.name, context) for r in (0, 1) for arm in arms for context in CONTEXTS]
    assert record.runs[0].software["runner"] == "vllm.v1.worker.cpu.model_runner"
    for row, facts in zip(record.rows, seen, strict=True):
        assert row.point.batch == 2 and row.steps == 4 and len(row.step_ms_parts) == 2
        assert row.draft_ms is not None and row.verify_ms is not None
        assert 0 < row.draft_ms < row.step_ms * 3 and row.acceptance_length is None
        assert facts["waited"] <= {300: 2, 1500: 4}[row.point.context]  # a token a step for the other's prompt
        assert facts["hot"] == (row.point.arm == "hot")
        assert facts["windows"] == ([] if row.point.arm == "native" else [row.point.window] * 2)
        assert (facts["windowed"] > 0) == (row.point.arm != "native" and row.point.context == 1500)
    profile = json.loads((tmp_path / "bundled-windowed-1500.json").read_text())
    assert profile["settings"]["arm"] == "windowed"
    assert any("changed to wide" in line for line in said)


def windowings(runner: Any) -> list[Any]:
    return [
        builder.windowing
        for owner in (runner, runner.speculator)
        for groups in owner.attn_groups
        for group in groups
        for builder in group.metadata_builders
        if hasattr(builder, "windowing")
    ]
