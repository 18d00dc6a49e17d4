"""Statistics of a server: counters beside vLLM's own, and a line in its log."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from windowed_mtp.engines.acceptance import by_position
from windowed_mtp.engines.vllm.config import PluginConfig, PluginError
from windowed_mtp.engines.vllm.statistics import (
    DraftPlan,
    DraftStatistics,
    Report,
    Step,
    keys_of,
    sees_all,
    shares,
)
from windowed_mtp.engines.vllm.steps import install, steps_of

logger = init_logger("vllm.windowed_mtp")

PREFIX = "vllm:spec_decode_window_num_"
_WINDOWED = {True: "true", False: "false", None: "unknown"}


class WindowStatLogger(AggregateStatLoggerBase):
    """Counts what drafts read and what came of them; the entry point in ``vllm.stat_logger_plugins``.

    Counters, labelled ``model_name`` and ``engine`` as vLLM's own:

    - ``vllm:spec_decode_window_num_drafts{windowed}``: drafts verified; ``windowed`` is ``"true"`` where a draft read
      less than everything, ``"false"`` where it did not, ``"unknown"`` where the front end cannot tell. The three add
      up to vLLM's ``vllm:spec_decode_num_drafts``, and so on.
    - ``vllm:spec_decode_window_num_draft_tokens{windowed}``: tokens of these drafts.
    - ``vllm:spec_decode_window_num_accepted_tokens{windowed}``: 1 + this / drafts is the mean acceptance length.
    - ``vllm:spec_decode_window_num_accepted_tokens_per_pos{windowed, position}``: by drafts, the unconditional
      acceptance.
    - ``vllm:spec_decode_window_num_tested_tokens_per_pos{windowed, position}``: drafts with a token there, all before
      it being accepted; accepted by tested is the conditional acceptance.
    - ``vllm:spec_decode_window_num_draft_keys_read`` and ``..._full``: keys that one windowed draft layer read, and
      would have read without the window; prefill excluded. They are counted in blocks of the engine's attention: a
      kernel that splits these blocks reads less. ``..._drafts``: the drafts over which they are counted.

    Where keys cannot be counted, their counters are missing, the log says why, and ``windowed`` is ``"unknown"``. An
    engine without the plugin's settings is left alone.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.engine_indexes = engine_indexes
        self.labels = {"model_name": getattr(vllm_config.model_config, "served_model_name", None)}
        self.plan: DraftPlan | None = None
        self.complete = sees_all(vllm_config)
        self.counters: dict[str, Counter] = {}
        self.since_log = DraftStatistics()
        if PluginConfig.read(vllm_config.additional_config) is None:
            return
        try:
            self.plan = DraftPlan.read(vllm_config)
            install()
        except PluginError as reason:
            self.plan = None
            logger.warning_once("Windowed MTP: %s", reason)
            return
        if self.plan.not_counted:
            logger.warning_once("Windowed MTP: draft keys are not counted: %s.", self.plan.not_counted)

    def log_engine_initialized(self) -> None:
        """Register the counters: not before, as vLLM's Prometheus logger first takes off all that begin with vllm:."""
        if self.plan is None:
            return
        common, windowed = ["model_name", "engine"], ["model_name", "engine", "windowed"]
        by_window = "by whether the window left something out."
        described = [
            ("drafts", windowed, f"Number of drafts verified, {by_window}"),
            ("draft_tokens", windowed, f"Number of draft tokens, {by_window}"),
            ("accepted_tokens", windowed, f"Number of accepted tokens, {by_window}"),
            ("accepted_tokens_per_pos", [*windowed, "position"], "Accepted tokens per draft position."),
            ("tested_tokens_per_pos", [*windowed, "position"], "Tokens behind none but accepted ones, per position."),
        ]
        if self.plan.not_counted is None:
            described += [
                ("draft_keys_read", common, "Number of keys that a windowed draft layer read, prefill excluded."),
                ("draft_keys_full", common, "Number of keys that it would have read without the window."),
                ("draft_keys_drafts", common, "Number of drafts whose keys were counted."),
            ]
        for name, labels, text in described:
            self.counters[name] = Counter(PREFIX + name, text, labels)
        nothing = DraftStatistics()
        nothing.add(Report.of(0, [], self.plan.num_speculative_tokens))
        for engine in self.engine_indexes:
            for windowed_value in _WINDOWED.values():
                self._count(engine, windowed_value, nothing)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count one iteration of one engine."""
        if self.plan is None or not self.counters:
            return
        steps = steps_of(iteration_stats)
        report = Report.read(getattr(scheduler_stats, "spec_decoding_stats", None))
        counts = {value: DraftStatistics() for value in _WINDOWED.values()}
        windowed: dict[int, bool] = {}
        for step, read, full in keys_of(self.plan, steps, report, self.complete):
            windowed[id(step)] = read < full
            for made in (counts[_WINDOWED[read < full]], self.since_log):
                made.add_keys(read, full)

        def part(step: Step) -> str:
            return _WINDOWED[windowed.get(id(step))]

        for value, share in shares(steps, report, part, self.complete):
            for made in (counts[value or _WINDOWED[None]], self.since_log):
                made.add(share)
        for value, made in counts.items():
            if made.drafts or made.keyed_drafts:
                self._count(engine_idx, value, made)

    def log(self) -> None:
        """Say what the drafts since the last call read and what came of them, if there were any."""
        made, self.since_log = self.since_log, DraftStatistics()
        if not made.drafts:
            return
        logger.info(
            "Windowed MTP metrics: Mean acceptance length: %.2f, Per-position acceptance rate, unconditional: %s, "
            "conditional: %s, Drafted: %d tokens in %d drafts",
            made.acceptance_length,
            by_position(made.unconditional_acceptance, 3),
            by_position(made.conditional_acceptance, 3),
            made.draft_tokens,
            made.drafts,
        )
        if made.keyed_drafts:
            logger.info(
                "Windowed MTP metrics: Windowed drafts: %d of %d, Draft keys read: %d of %d (%.1f%%)",
                made.windowed_drafts,
                made.keyed_drafts,
                made.keys_read,
                made.keys_full,
                100 * made.share_read,
            )

    def _count(self, engine: int, windowed: str, made: DraftStatistics) -> None:
        common = {**self.labels, "engine": str(engine)}
        labels = {**common, "windowed": windowed}
        self.counters["drafts"].labels(**labels).inc(made.drafts)
        self.counters["draft_tokens"].labels(**labels).inc(made.draft_tokens)
        self.counters["accepted_tokens"].labels(**labels).inc(made.accepted_tokens)
        for name, counts in (
            ("accepted_tokens_per_pos", made.accepted_per_position),
            ("tested_tokens_per_pos", made.tested_per_position),
        ):
            for position, count in enumerate(counts):
                self.counters[name].labels(**labels, position=str(position)).inc(count)
        if "draft_keys_read" in self.counters:
            self.counters["draft_keys_read"].labels(**common).inc(made.keys_read)
            self.counters["draft_keys_full"].labels(**common).inc(made.keys_full)
            self.counters["draft_keys_drafts"].labels(**common).inc(made.keyed_drafts)
